"""Adaptive penalty weighting (paper section 3.3): compress only while the model still answers.

c(r) = exp(r) - 1 if r > tau else 0, with r the mean of raw rewards in [0, 1]. The cut is strict: at
r = tau there is no pressure. The authors' code takes r over the batch, the paper's equation over
each group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlkv.train.config import PenaltyConfig


def adaptive_weight(mean_reward: float, tau: float) -> float:
    """c(r) of one mean reward.

    Example:
        >>> round(adaptive_weight(math.log(2), 0.5), 6), adaptive_weight(0.5, 0.5)
        (1.0, 0.0)
    """
    return math.expm1(mean_reward) if mean_reward > tau else 0.0


def penalty_weight(groups: Sequence[Sequence[float]], config: PenaltyConfig) -> float:
    """C of a step, from the rewards of all its groups, those without a signal included.

    Args:
        groups: Rewards in [0, 1], one sequence a group.
        config: Kind, scope and tau.
    """
    if config.kind == "fixed":
        return config.fixed_weight
    if config.scope == "group":
        weights = [adaptive_weight(sum(group) / len(group), config.tau) for group in groups]
        return sum(weights) / len(weights)
    rewards = [reward for group in groups for reward in group]
    return adaptive_weight(sum(rewards) / len(rewards), config.tau)
