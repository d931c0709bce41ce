"""Random heads: as many full heads as RLKV keeps, drawn by seed; shows what choosing is worth."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from rlkv.methods.base import HeadSplitMethod


class RandomHeads(HeadSplitMethod):
    """round((1-s)·L·H) full heads drawn uniformly; the same seed gives nested choices over s."""

    name = "random_heads"

    def full_heads(self) -> NDArray[np.bool_]:
        """The first heads of a seeded shuffle."""
        order = list(range(self.spec.num_heads))
        random.Random(self.options.seed).shuffle(order)
        full = np.zeros(self.spec.num_heads, dtype=np.bool_)
        full[order[: self.budget.num_full_heads(self.spec.num_heads)]] = True
        return full.reshape(self.spec.shape)
