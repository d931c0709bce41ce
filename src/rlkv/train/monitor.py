"""What is watched while gates learn: the binary model, collapse, and the set of kept heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlkv.core.engine import SamplingParams
from rlkv.core.head_profile import HeadProfile
from rlkv.hf.attach import compress
from rlkv.hf.engine import HFEngine
from rlkv.hf.loading import LoadedModel
from rlkv.hf.teacher_forcing import TeacherForcing
from rlkv.methods.base import MethodOptions
from rlkv.tasks.base import Task
from rlkv.train.config import PenaltyConfig
from rlkv.train.problems import Problem
from rlkv.train.rollout import forced_rewards
from rlkv.train.unit import Alpha

_LOOK_BACK = 8
_LOST = 0.5


def method_rewards(
    loaded: LoadedModel,
    task: Task,
    problems: Sequence[Problem],
    *,
    method: str,
    sparsity: float = 0.0,
    profile: HeadProfile | None = None,
    sink: int = 16,
    recent: int = 64,
    max_new_tokens: int | None = None,
    rows: int = 96,
    scorer: TeacherForcing | None = None,
    seed: int = 0,
) -> list[float]:
    """Greedy reward of a compressed model on each problem; forced tasks: share of right spans.

    Args:
        loaded: The model.
        task: What is asked.
        problems: Which ones.
        method: Name of a method.
        sparsity: Share of KV heads compressed.
        profile: For methods that need one.
        sink: First tokens a compressed head keeps.
        recent: Last tokens a compressed head keeps.
        max_new_tokens: Completion limit; None takes the task's.
        rows: Problems decoded together.
        scorer: For forced tasks; None makes one.
        seed: Seed of ``random_heads``.
    """
    scorer = scorer or TeacherForcing(loaded)
    with compress(
        loaded.model,
        method=method,
        profile=profile,
        sparsity=sparsity,
        sink=sink,
        recent=recent,
        options=MethodOptions(seed=seed),
        spec=loaded.spec,
    ) as session:
        if task.mode == "forced":
            return forced_rewards(scorer, problems, micro_rows=8)
        params = SamplingParams(max_new_tokens=max_new_tokens or task.max_new_tokens)
        engine = HFEngine(loaded, session, batch_size=rows)
        found = engine.generate([problem.prompt for problem in problems], params)
    return [
        task.verifier(completions[0].text, problem.answer).reward
        for problem, completions in zip(problems, found, strict=True)
    ]


def kept_heads(alpha: Alpha, sparsity: float) -> frozenset[int]:
    """Flat indices of the heads that stay full at ``sparsity``; ties as in head profiles."""
    flat = np.asarray(alpha).reshape(-1)
    keep = int((1.0 - sparsity) * flat.size + 0.5 + 1e-9)
    return frozenset(int(i) for i in np.argsort(-flat, kind="stable")[:keep])


def overlap(first: frozenset[int], second: frozenset[int]) -> float:
    """Jaccard overlap of two sets, 1 where both are empty."""
    union = first | second
    return len(first & second) / len(union) if union else 1.0


def is_stable(alphas: Sequence[Alpha], *, sparsity: float, steps: int, least: float) -> bool:
    """Whether the kept heads of the last ``steps`` + 1 gates all overlap enough with the last."""
    if not steps or len(alphas) <= steps:
        return False
    last = kept_heads(alphas[-1], sparsity)
    return all(
        overlap(kept_heads(alpha, sparsity), last) >= least for alpha in alphas[-steps - 1 : -1]
    )


def collapse_alarm(
    rewards: Sequence[float], gates: Sequence[float], penalty: PenaltyConfig
) -> str | None:
    """A sentence where reward is being lost while gates fall; else None.

    Args:
        rewards: Mean reward of each on-policy step so far.
        gates: Mean gate after each.
        penalty: Its settings, for the advice.
    """
    if len(rewards) < 2 * _LOOK_BACK:
        return None
    windows = [
        sum(rewards[end - _LOOK_BACK : end]) / _LOOK_BACK
        for end in range(_LOOK_BACK, len(rewards) + 1)
    ]
    best, now = max(windows), windows[-1]
    if best <= 0 or now >= _LOST * best or gates[-1] >= gates[-_LOOK_BACK]:
        return None
    change = (
        "use penalty.kind = 'adaptive'"
        if penalty.kind == "fixed"
        else f"raise penalty.tau above {penalty.tau}"
    )
    return (
        f"collapse: mean reward fell from {best:.2f} to {now:.2f} while gates fall to a mean of "
        f"{gates[-1]:.2f}; {change}, or lower penalty.beta below {penalty.beta}"
    )
