"""StreamingLLM: every head keeps the first sink and the last recent tokens only.

Deviation: positions stay absolute, as in RLKV's local branch; the original re-rotates keys by cache
slot. The sparsity of the budget plays no part: all heads are local.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlkv.methods.base import HeadSplitMethod


class StreamingLLM(HeadSplitMethod):
    """All heads local: the floor that head selection must beat."""

    name = "streaming_llm"
    paper = "arXiv:2309.17453"
    fixed_sparsity = 1.0

    def full_heads(self) -> NDArray[np.bool_]:
        """No head."""
        return np.zeros(self.spec.shape, dtype=np.bool_)
