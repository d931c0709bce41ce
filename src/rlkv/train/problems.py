"""Problem: a tokenized example, all that a unit of work needs to know; small and picklable."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlkv.core.engine import Prompt
from rlkv.errors import ConfigError, DataError
from rlkv.hf.engine import encode_chat
from rlkv.hf.forced import encode_gold
from rlkv.hf.loading import LoadedModel
from rlkv.tasks.base import Example, Split, Task
from rlkv.tasks.forced import span_token_ranges
from rlkv.train.config import TrainConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """One example of a task, tokenized for one model."""

    key: str
    """Id of the example; draws are seeded by it."""
    prompt_ids: tuple[int, ...]
    """Tokens of the prompt, chat template applied."""
    answer: str
    """What the verifier compares with."""
    gold_ids: tuple[int, ...] = ()
    """Forced tasks: tokens of the gold completion."""
    spans: tuple[tuple[int, int], ...] = ()
    """Forced tasks: [start, end) tokens of ``gold_ids`` that are scored."""

    @property
    def prompt(self) -> Prompt:
        """The prompt, for an engine."""
        return Prompt(self.key, self.prompt_ids)

    @property
    def scored(self) -> tuple[int, ...]:
        """Forced tasks: scored positions within prompt and gold completion."""
        start = len(self.prompt_ids)
        return tuple(start + i for first, last in self.spans for i in range(first, last))


def tokenize(loaded: LoadedModel, task: Task, examples: Iterable[Example]) -> list[Problem]:
    """Problems of ``examples``, in order."""
    problems = []
    for example in examples:
        prompt = encode_chat(loaded, example.id, task.messages(example))
        gold: tuple[int, ...] = ()
        spans: tuple[tuple[int, int], ...] = ()
        if task.mode == "forced":
            encoded = encode_gold(loaded, example.answer)
            ranges = span_token_ranges(encoded.offsets, example.spans)
            gold = encoded.token_ids
            spans = tuple((r.start, r.stop) for r in ranges)
        problems.append(Problem(example.id, prompt.token_ids, example.answer, gold, spans))
    return problems


def load_problems(
    loaded: LoadedModel, task: Task, limit: int, *, seed: int, split: Split = "train"
) -> list[Problem]:
    """Up to ``limit`` problems of a split.

    Raises:
        DataError: The split is empty.
    """
    problems = tokenize(loaded, task, task.examples(limit, seed=seed, split=split))
    if not problems:
        raise DataError(f"task {task.name} has no {split} example; pass another --data file")
    return problems


def training_problems(
    loaded: LoadedModel, task: Task, config: TrainConfig
) -> tuple[list[Problem], list[Problem]]:
    """Held-out problems of the train split for the monitor, and the ones to train on."""
    wanted = config.monitor.problems if config.monitor.every else 0
    pool = config.distill.candidates if config.distill.enabled else 0
    limit = (pool or config.rollout.problems) + wanted
    found = load_problems(loaded, task, limit, seed=config.seed)
    held = min(wanted, len(found) // 4)  # a small split keeps most for training
    return found[:held], found[held:]


class SeededStream(Generic[T]):
    """Endless items in seeded order: every item once, then all again in another order.

    Args:
        items: What to draw from.
        seed: Names the order.
    """

    def __init__(self, items: Sequence[T], seed: str) -> None:
        if not items:
            raise ConfigError("there is nothing to train on; raise rollout.problems")
        self.items, self.seed = items, seed
        self._epoch, self._order = -1, list[int]()

    def take(self, start: int, count: int) -> list[T]:
        """Items number ``start`` to ``start + count`` of the stream."""
        return [self._at(index) for index in range(start, start + count)]

    def _at(self, index: int) -> T:
        epoch, place = divmod(index, len(self.items))
        if epoch != self._epoch:
            self._order = list(range(len(self.items)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self.items[self._order[place]]
