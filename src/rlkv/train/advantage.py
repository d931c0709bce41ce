"""Advantages: how much better a rollout is than its like (paper eq. 3).

``group`` is the paper: rewards are compared among the completions of one prompt. ``batch`` is what
the authors' code does: rewards are centred and scaled over all tokens of the batch, so that a group
only decides how often a prompt is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_GROUP_EPS = 1e-4
_BATCH_EPS = 1e-5
_REWARD_BIAS, _REWARD_SCALE, _REWARD_CLIP = 0.5, 10.0, 20.0


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-4) within one group, std unbiased; all 0 where rewards are equal.

    Example:
        >>> [round(a, 3) for a in group_advantages([1.0, 0.0, 0.0, 1.0])]
        [0.866, -0.866, -0.866, 0.866]
    """
    if not is_live(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + _GROUP_EPS) for reward in rewards]


def batch_advantages(rewards: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Rewards scaled to ±5, then centred and scaled over all tokens of the batch.

    Each token carries its rollout's reward R = clip(10 · (r - 0.5), ±20); mean and unbiased std are
    taken over tokens, as advantages of tokens they then are.

    Args:
        rewards: In [0, 1], one a rollout.
        tokens: Scored tokens of each rollout.
    """
    scaled = [
        max(-_REWARD_CLIP, min(_REWARD_CLIP, (reward - _REWARD_BIAS) * _REWARD_SCALE))
        for reward in rewards
    ]
    total = sum(tokens)
    if total < 2 or not is_live(rewards):
        return [0.0] * len(scaled)
    mean = sum(r * n for r, n in zip(scaled, tokens, strict=True)) / total
    squares = sum(n * (r - mean) ** 2 for r, n in zip(scaled, tokens, strict=True))
    return [(r - mean) / (math.sqrt(squares / (total - 1)) + _BATCH_EPS) for r in scaled]


def is_live(rewards: Sequence[float]) -> bool:
    """Whether rewards differ, so that they carry a signal."""
    return max(rewards) > min(rewards)
