"""KVzip (head level): the head split of RLKV, with a profile scored by context reconstruction.

The profile comes from :mod:`rlkv.train.kvzip_profile`. Only the scores differ from RLKV: cache,
window and selection are the same. KVzip's own pair-level eviction chooses tokens of the prompt and
never evicts a generated one, so it saves nothing on a long chain of thought and is not offered.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlkv.methods.base import HeadSplitMethod


class KVzip(HeadSplitMethod):
    """The heads that matter most for repeating a context stay full."""

    name = "kvzip"
    paper = "arXiv:2505.23416"
    needs_profile = True

    def full_heads(self) -> NDArray[np.bool_]:
        """The best heads of the profile."""
        return self.require_profile().full_heads(self.budget.sparsity, self.options.rule)
