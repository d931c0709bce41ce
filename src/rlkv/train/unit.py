"""The unit of work: prompts, gates and a seed in; a gradient sum and counts out.

A unit is stateless. Groups never straddle units, so advantages within groups are local; gradients
are sums and tokens are counted, so that any number of units adds up to one token mean. What a unit
returns depends on nothing but its arguments: not on who runs it, beside what, or how often.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlkv.hf.teacher_forcing import Trace
from rlkv.train.advantage import is_live

Alpha = NDArray[np.float32]
"""(layers, kv_heads) float32 gates."""


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log-probabilities of one rollout's tokens at the gates that drew them, for later updates."""

    policy: tuple[float, ...] = ()
    """Under the policy; empty where the rollout took no part."""
    sampling: tuple[float, ...] = ()
    """Under the distribution that tokens were drawn from; empty unless ``loss.decoupled``."""


@dataclass(frozen=True, slots=True)
class GradientSum:
    """A sum over tokens, not yet divided by their number."""

    gradient: NDArray[np.float64]
    """(layers, kv_heads): sum over tokens of d loss / d alpha."""
    loss: float
    """Sum of the same tokens' losses."""
    tokens: int
    """Tokens that the sum goes over, those that were skipped as certain zeros included."""
    live_tokens: int
    """Those of rollouts whose advantage is not 0."""
    trained_tokens: int
    """Tokens that went through a forward and backward pass, prompts included."""
    log_probs: tuple[TokenLogProbs, ...] = ()
    """Of each rollout's tokens, where they were asked for."""


@dataclass(frozen=True, slots=True)
class UnitResult:
    """What a unit of rollouts returns."""

    gradient: GradientSum
    """Policy gradient of its rollouts, with advantages within groups."""
    rewards: tuple[tuple[float, ...], ...]
    """Rewards of each group."""
    generated_tokens: int
    """Tokens that were decoded."""

    @property
    def n(self) -> int:
        """Rollouts."""
        return sum(len(group) for group in self.rewards)

    @property
    def live_groups(self) -> int:
        """Groups whose rewards differ."""
        return sum(is_live(group) for group in self.rewards)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Greedy reward at given gates."""

    rewards: tuple[float, ...]
    """One per problem, in [0, 1]."""
    generated_tokens: int
    """Tokens decoded."""

    @property
    def mean_reward(self) -> float:
        """Mean over problems."""
        return sum(self.rewards) / len(self.rewards)


@dataclass(frozen=True, slots=True)
class Solution:
    """A correct completion of the full model, to be imitated."""

    key: str
    """Problem."""
    tokens: tuple[int, ...]
    """Prompt and completion."""
    positions: tuple[int, ...]
    """Positions of the tokens to imitate."""
    length: int
    """Tokens of the completion."""

    @property
    def trace(self) -> Trace:
        """What teacher forcing needs."""
        return Trace(self.tokens, self.positions)
