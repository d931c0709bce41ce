"""One optimizer step's gradient: on-policy (GRPO) or dense (warm start).

Each function scatters units of work over a backend and adds up what comes back, in the units' own
order, so that the sum has the same bits whoever worked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rlkv.train.advantage import batch_advantages, group_advantages, is_live
from rlkv.train.backends.base import Backend
from rlkv.train.config import TrainConfig
from rlkv.train.penalty import penalty_weight
from rlkv.train.problems import Problem, SeededStream
from rlkv.train.rollout import Group
from rlkv.train.unit import Alpha, GradientSum, Solution, TokenLogProbs, UnitResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepGradient:
    """What the optimizer needs, and what is worth logging."""

    gradient: NDArray[np.float64]
    """(layers, kv_heads): of the whole loss, penalty included."""
    loss: float
    """Policy loss or KL, a token mean."""
    rewards: tuple[tuple[float, ...], ...]
    """Of each group; empty in the dense phase."""
    penalty: float
    """Weight of mean |alpha| in the loss."""
    drawn: int
    """Problems taken from the stream."""
    generated_tokens: int
    """Tokens decoded."""
    trained_tokens: int
    """Tokens that went forward and backward."""

    @property
    def mean_reward(self) -> float | None:
        """Mean over all rollouts; None in the dense phase."""
        flat = [reward for group in self.rewards for reward in group]
        return sum(flat) / len(flat) if flat else None

    @property
    def live_groups(self) -> int:
        """Groups whose rewards differ."""
        return sum(is_live(group) for group in self.rewards)


def chunks(items: Sequence[T], size: int) -> list[list[T]]:
    """Consecutive pieces of at most ``size`` items."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def _told_apart(problems: Sequence[Problem], seen: Counter[str]) -> list[Problem]:
    """Another key for a problem that comes again within a step: draws follow from the key.

    Args:
        problems: The next ones.
        seen: How often each key came before in this step; counted on.
    """
    found: list[Problem] = []
    for problem in problems:
        times, seen[problem.key] = seen[problem.key], seen[problem.key] + 1
        found.append(replace(problem, key=f"{problem.key}#{times}") if times else problem)
    return found


def penalty_gradient(alpha: Alpha, weight: float) -> NDArray[np.float64]:
    """Gradient of weight · mean|alpha|: weight / (L·H) on every gate above 0."""
    return weight / alpha.size * np.sign(alpha.astype(np.float64))


def policy_step(
    backend: Backend,
    stream: SeededStream[Problem],
    alpha: Alpha,
    config: TrainConfig,
    *,
    drawn: int,
    seed: int,
) -> StepGradient:
    """One GRPO step with advantages within groups, drawing again where few groups are live.

    Args:
        backend: Runs the units.
        stream: Problems.
        alpha: Current gates.
        config: Everything else.
        drawn: Problems taken so far.
        seed: Of this step's draws.
    """
    rollout = config.rollout
    results: list[UnitResult] = []
    taken = 0
    seen: Counter[str] = Counter()
    for _ in range(rollout.redraws + 1):
        problems = stream.take(drawn + taken, rollout.prompts_per_step)
        taken += len(problems)
        problems = _told_apart(problems, seen)
        units = chunks(problems, rollout.prompts_per_unit)
        results.extend(backend.map("unit", [(unit, alpha, seed) for unit in units]))
        # a problem of a forced task makes several groups, so the share is of groups, not prompts
        groups = sum(len(result.rewards) for result in results[-len(units) :])
        if sum(result.live_groups for result in results) >= rollout.live_share * groups:
            break
    rewards = tuple(group for result in results for group in result.rewards)
    return _combined(
        [result.gradient for result in results],
        rewards,
        alpha,
        config,
        drawn=taken,
        generated=sum(result.generated_tokens for result in results),
    )


def sampled_groups(
    backend: Backend,
    stream: SeededStream[Problem],
    alpha: Alpha,
    config: TrainConfig,
    *,
    drawn: int,
    seed: int,
) -> list[list[Group]]:
    """Rollouts alone, unit by unit, for steps whose advantages need the whole batch."""
    problems = stream.take(drawn, config.rollout.prompts_per_step)
    units = chunks(_told_apart(problems, Counter()), config.rollout.prompts_per_unit)
    return backend.map("sample", [(unit, alpha, seed) for unit in units])


@dataclass(frozen=True, slots=True)
class Batch:
    """Rollouts of a step with their advantages, for one or more updates."""

    units: list[list[Group]]
    """Groups of each unit."""
    advantages: list[list[float]]
    """One per rollout of each unit."""

    @property
    def rewards(self) -> tuple[tuple[float, ...], ...]:
        """Of each group."""
        return tuple(tuple(r.reward for r in group) for unit in self.units for group in unit)


def batch_of(units: list[list[Group]], config: TrainConfig) -> Batch:
    """Advantages of all rollouts, within groups or over the batch as configured."""
    flat = [[rollout for group in unit for rollout in group] for unit in units]
    if config.loss.advantage == "group":
        return Batch(
            units,
            [
                [a for group in unit for a in group_advantages([r.reward for r in group])]
                for unit in units
            ],
        )
    rollouts = [rollout for unit in flat for rollout in unit]
    values = iter(
        batch_advantages([r.reward for r in rollouts], [len(r.targets) for r in rollouts])
    )
    return Batch(units, [[next(values) for _ in unit] for unit in flat])


def update_step(
    backend: Backend,
    batch: Batch,
    alpha: Alpha,
    config: TrainConfig,
    old_log_probs: list[tuple[TokenLogProbs, ...]] | None,
) -> tuple[StepGradient, list[tuple[TokenLogProbs, ...]]]:
    """The gradient of one update on ``batch``; also the log-probabilities that later ones need."""
    keep = old_log_probs is None and config.loss.updates > 1
    calls = []
    for i, (unit, advantages) in enumerate(zip(batch.units, batch.advantages, strict=True)):
        rollouts = [rollout for group in unit for rollout in group]
        old = None if old_log_probs is None else old_log_probs[i]
        calls.append((rollouts, advantages, alpha, old, keep))
    results: list[GradientSum] = backend.map("policy_gradient", calls)
    first = old_log_probs is None
    generated = sum(r.generated for unit in batch.units for group in unit for r in group)
    step = _combined(
        results,
        batch.rewards,
        alpha,
        config,
        drawn=config.rollout.prompts_per_step if first else 0,
        generated=generated if first else 0,
    )
    return step, [result.log_probs for result in results] if keep else old_log_probs or []


def distill_step(
    backend: Backend,
    stream: SeededStream[Solution],
    alpha: Alpha,
    config: TrainConfig,
    step: int,
) -> StepGradient:
    """One dense step: KL(full ‖ gated) on some solutions, plus the L1 pressure."""
    rows = config.warm.rows
    chosen = stream.take(step * rows, rows)
    units = chunks(chosen, config.loss.micro_rows)
    sums: list[GradientSum] = backend.map("distill", [(unit, alpha) for unit in units])
    tokens = sum(part.tokens for part in sums)
    gradient = np.sum([part.gradient for part in sums], axis=0) / tokens
    return StepGradient(
        gradient + penalty_gradient(alpha, config.warm.l1),
        sum(part.loss for part in sums) / tokens,
        (),
        config.warm.l1,
        0,
        0,
        sum(part.trained_tokens for part in sums),
    )


def _combined(
    parts: Sequence[GradientSum],
    rewards: tuple[tuple[float, ...], ...],
    alpha: Alpha,
    config: TrainConfig,
    *,
    drawn: int,
    generated: int,
) -> StepGradient:
    """Token mean of the units' sums, plus the penalty from all rewards."""
    weight = config.penalty.beta * penalty_weight(rewards, config.penalty)
    live = config.loss.token_mean == "live"
    tokens = max(1, sum(part.live_tokens if live else part.tokens for part in parts))
    gradient = np.sum([part.gradient for part in parts], axis=0) / tokens
    return StepGradient(
        gradient + penalty_gradient(alpha, weight),
        sum(part.loss for part in parts) / tokens,
        rewards,
        weight,
        drawn,
        generated,
        sum(part.trained_tokens for part in parts),
    )
