"""RLKV: the heads with the highest learned gates stay full, all others keep sink + recent."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlkv.methods.base import HeadSplitMethod


class RLKV(HeadSplitMethod):
    """The best round((1-s)·L·H) heads of a learned profile stay full (paper section 3)."""

    name = "rlkv"
    paper = "arXiv:2510.08525"
    needs_profile = True

    def full_heads(self) -> NDArray[np.bool_]:
        """The best heads of the profile."""
        return self.require_profile().full_heads(self.budget.sparsity, self.options.rule)
