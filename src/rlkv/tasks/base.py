"""Task and Example: what is asked, and how a completion is scored.

A new task is one module in this package that defines one subclass of :class:`Task`; its file name
is its name on the command line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal

from rlkv.errors import UnknownNameError
from rlkv.verifiers.base import Verifier

Message = dict[str, str]
"""A chat message: ``{"role": "user", "content": "…"}``."""

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Example:
    """One problem of a task."""

    id: str
    """Unique within the task and stable across runs and machines."""
    prompt: str
    """What the user says, before the chat template."""
    answer: str
    """What the verifier compares with; for a forced task, the whole gold completion."""
    spans: tuple[tuple[int, int], ...] = ()
    """Forced tasks: [start, end) character ranges of ``answer`` that are scored."""
    meta: Mapping[str, str | int | float] = field(default_factory=lambda: MappingProxyType({}))
    """Anything else worth recording, such as a level or a category."""


@dataclass(frozen=True, slots=True)
class DatasetRef:
    """A published dataset, pinned."""

    repo: str
    """Hub id."""
    revision: str
    """Commit, tag or branch; a commit where one is known."""
    split: str
    """Split of the dataset that the test examples come from."""
    config: str | None = None
    """Configuration name, where the dataset has several."""


class Task(ABC):
    """A set of examples with a prompt format and a verifier.

    ``mode`` is ``"generate"`` (the model writes, the verifier scores what it wrote) or ``"forced"``
    (the gold completion is fed in, and the reward is the share of ``Example.spans`` whose every
    token the model would have written greedily).
    """

    name: ClassVar[str]
    """The module's file name."""
    version: ClassVar[str] = "1"
    """Raised whenever a score could change for the same completion."""
    mode: ClassVar[Literal["generate", "forced"]] = "generate"
    dataset: ClassVar[DatasetRef | None] = None
    """Published source, or None where the task makes its own examples."""
    max_new_tokens: ClassVar[int]
    """Completion limit in tokens."""
    max_total_tokens: ClassVar[int | None] = None
    """Limit of prompt and completion together in tokens, where the published protocol has one."""
    default_model: ClassVar[str | None] = None
    """Model a command uses when none is named."""

    verifier: Verifier

    def __init__(self, data: str | None = None) -> None:
        """``data`` is a local JSON-lines file that replaces the published dataset."""
        self.data = data

    @abstractmethod
    def examples(
        self, limit: int | None = None, *, seed: int = 0, split: Split = "test"
    ) -> Iterator[Example]:
        """The first ``limit`` examples of ``split``; the same seed gives the same examples."""

    def messages(self, example: Example) -> Sequence[Message]:
        """The chat messages that pose ``example``."""
        return [{"role": "user", "content": example.prompt}]

    def gold_completion(self, example: Example) -> str:
        """A completion that the verifier must score 1; tests of every task use it."""
        return example.answer

    @classmethod
    def variant(cls, name: str) -> type[Task]:
        """The class for ``<this task>:<name>``, where a task is a family of several.

        Raises:
            UnknownNameError: There is no such variant.
        """
        raise UnknownNameError(
            f"task {cls.name!r} has no variants, found {name!r}; use {cls.name!r} alone"
        )
