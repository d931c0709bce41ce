"""Full cache: every head keeps every token; the reference of every comparison."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlkv.methods.base import HeadSplitMethod


class Full(HeadSplitMethod):
    """Full cache, whatever the budget says."""

    name = "full"

    @property
    def fixed_sparsity(self) -> float:
        """0: nothing is compressed."""
        return 0.0

    def full_heads(self) -> NDArray[np.bool_]:
        """All heads."""
        return np.ones(self.spec.shape, dtype=np.bool_)
