"""Leave-one-head-out: what each KV head's far memory is worth, measured, without training.

One head at a time is made local (gate 0) while all others stay full. The loss of reward, or the KL
from the full model on stored solutions, is that head's score. Interactions between heads are
missed; as a baseline it is hard to beat and every report shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlkv.train.backends.base import Backend
from rlkv.train.problems import Problem
from rlkv.train.unit import Alpha, Evaluation, Solution


@dataclass(frozen=True, slots=True)
class AblationResult:
    """Scores of all heads, and what measuring them cost."""

    scores: Alpha
    """(layers, kv_heads) in [0, 1]: cost of losing the head, over the largest cost."""
    costs: Alpha
    """(layers, kv_heads): reward lost, or KL in nats per token, before scaling."""
    generated_tokens: int
    """Tokens decoded."""


def leave_one_out(
    backend: Backend,
    shape: tuple[int, int],
    *,
    problems: Sequence[Problem] = (),
    solutions: Sequence[Solution] = (),
    on_head: Callable[[int, int], None] | None = None,
) -> AblationResult:
    """Scores every head by what its absence costs.

    Args:
        backend: Runs the measurements, one head a call.
        shape: (layers, kv_heads).
        problems: Measure reward on these, greedily.
        solutions: Without problems: measure KL on these.
        on_head: Called with (heads done, heads).
    """
    heads = shape[0] * shape[1]
    full = np.ones(shape, dtype=np.float32)
    base = 0.0
    generated = 0
    if problems:
        first: Evaluation = backend.map("evaluate", [(list(problems), full)])[0]
        base, generated = first.mean_reward, first.generated_tokens
    costs = np.zeros(heads, dtype=np.float32)
    for start in range(0, heads, backend.workers):
        wanted = range(start, min(start + backend.workers, heads))
        alphas = [_without(full, head) for head in wanted]
        if problems:
            found: list[Evaluation] = backend.map(
                "evaluate", [(list(problems), alpha) for alpha in alphas]
            )
            generated += sum(result.generated_tokens for result in found)
            costs[list(wanted)] = [base - result.mean_reward for result in found]
        else:
            costs[list(wanted)] = backend.map("kl", [(list(solutions), a) for a in alphas])
        if on_head is not None:
            on_head(wanted.stop, heads)
    top = float(costs.max())
    scores = np.clip(costs / top, 0.0, 1.0) if top > 0 else np.zeros_like(costs)
    return AblationResult(scores.reshape(shape).astype(np.float32), costs.reshape(shape), generated)


def _without(full: Alpha, head: int) -> Alpha:
    alpha = full.copy()
    alpha.reshape(-1)[head] = 0.0
    return alpha
