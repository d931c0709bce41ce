"""A cache method in one file: every other layer keeps the full cache, the rest is local.

To ship it inside RLKV, put the class in ``src/rlkv/methods/<name>.py``. To ship it in a package of
your own, name it in your pyproject.toml:

    [project.entry-points."rlkv.methods"]
    every_other_layer = "your_package.your_module:EveryOtherLayer"
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

import rlkv
from rlkv.core.budget import Budget
from rlkv.hf.attach import attach_method
from rlkv.hf.compat import with_cache
from rlkv.methods.base import HeadSplitMethod


class EveryOtherLayer(HeadSplitMethod):
    """Layers 0, 2, 4, … keep the full cache."""

    name = "every_other_layer"

    def full_heads(self) -> NDArray[np.bool_]:
        """(layers, kv_heads) bool: True for heads that keep the full cache."""
        full = np.zeros(self.spec.shape, dtype=np.bool_)
        full[::2] = True
        return full


def main() -> None:
    """Compresses the embedded model with it and prints what the cache holds."""
    loaded = rlkv.load_model("embedded")
    method = EveryOtherLayer(loaded.spec, Budget(sparsity=0.5))
    with attach_method(loaded.model, method) as session, torch.inference_mode():
        cache = session.new_cache()
        loaded.model(torch.ones(1, 200, dtype=torch.int64), **with_cache(loaded.model, {}, cache))
        full = loaded.spec.kv_bytes(200)
        print(f"{cache.nbytes():,} of {full:,} bytes ({cache.nbytes() / full:.0%})")


if __name__ == "__main__":
    main()
