"""DuoAttention: the head split of RLKV, with a profile learned by distillation on passkeys.

The profile comes from :mod:`rlkv.train.duo_profile`, or from the authors' published scores through
`rlkv profile import`. Only the scores differ from RLKV: cache, window and selection are the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlkv.methods.base import HeadSplitMethod


class DuoAttention(HeadSplitMethod):
    """The best heads of a distilled profile stay full."""

    name = "duo_attention"
    paper = "arXiv:2410.10819"
    needs_profile = True

    def full_heads(self) -> NDArray[np.bool_]:
        """The best heads of the profile."""
        return self.require_profile().full_heads(self.budget.sparsity, self.options.rule)
