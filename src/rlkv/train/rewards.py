"""Rewards in TRL's signature: ours for TRL, and users' for us.

``f(prompts, completions, completion_ids, **columns) -> list[float | None]``: columns of the dataset
arrive as lists of the same length, None means that the reward does not apply. Completions are text,
or a list of messages whose last content counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from rlkv.errors import ConfigError
from rlkv.registry import TASKS
from rlkv.tasks.base import Task
from rlkv.train.config import TrainConfig
from rlkv.verifiers.base import Score, Verifier

Text = str | Sequence[dict[str, str]]
"""A prompt or completion: plain, or chat messages."""


class RewardFunction(Protocol):
    """TRL's signature."""

    def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """One reward per completion."""
        ...


def text_of(completion: Text) -> str:
    """The text of a plain or conversational completion."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def verifier_reward(verifier: Verifier, column: str = "answer") -> RewardFunction:
    """A verifier as a reward function; the expected answers come from a dataset column.

    Example:
        >>> from rlkv.verifiers.base import ExactVerifier
        >>> reward = verifier_reward(ExactVerifier("="))
        >>> reward(["1+1"], ["1+1=2"], [[0]], answer=["2"])
        [1.0]
    """

    def reward(
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        **columns: Sequence[Any],
    ) -> list[float | None]:
        if column not in columns:
            raise ConfigError(
                f"the dataset has no column {column!r}, found {', '.join(sorted(columns))}; "
                "name the column that holds the expected answers"
            )
        return [
            verifier(text_of(completion), str(answer)).reward
            for completion, answer in zip(completions, columns[column], strict=True)
        ]

    reward.__name__ = f"{type(verifier).__name__}_reward"
    return reward


@dataclass(frozen=True, slots=True)
class FunctionVerifier:
    """A reward function as a verifier, so that it can serve as a task's reward here.

    The answer is passed as column ``answer``; a reward of None counts 0.
    """

    function: Callable[..., list[float | None]]
    """In TRL's signature."""
    threshold: float | None = None
    """Rewards under it count 0 and others 1; None keeps them. Partial credit inflates the mean
    reward that drives the penalty."""

    def __call__(self, completion: str, answer: str) -> Score:
        """See :class:`~rlkv.verifiers.base.Verifier`."""
        found = self.function([""], [completion], [[]], answer=[answer])[0]
        if found is None:
            return Score(0.0, None, "no_answer")
        value = min(1.0, max(0.0, float(found)))
        if self.threshold is not None:
            value = float(value >= self.threshold)
        return Score(value, completion, "correct" if value == 1.0 else "wrong")


def load_function(spec: str) -> RewardFunction:
    """The reward function that ``package.module:name`` names.

    Raises:
        ConfigError: There is no such function.
    """
    module_name, _, name = spec.partition(":")
    try:
        function = getattr(import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"reward function {spec!r} cannot be imported ({error}), expected package.module:name; "
            "check that the module is on the Python path"
        ) from error
    if not callable(function):
        raise ConfigError(
            f"reward function {spec!r} is a {type(function).__name__}, not a function"
        )
    return cast("RewardFunction", function)


def task_of(config: TrainConfig) -> Task:
    """The task of a run, rewarded by the run's own function where it names one.

    Raises:
        UnknownNameError: The task is unknown.
        ConfigError: The reward function cannot be imported.
    """
    task: Task = TASKS.load(config.task)(config.data)
    if config.reward_function is not None:
        function = load_function(config.reward_function)
        task.verifier = FunctionVerifier(function)  # type: ignore[assignment]
    return task
