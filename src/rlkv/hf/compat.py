"""Every difference between transformers versions that RLKV meets, nowhere else.

Supported: transformers 5.2 to 5.24. A function's docstring names the versions it bridges.
"""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version


def installed_version() -> Version:
    """Version of the installed transformers."""
    return Version(transformers.__version__)


def gguf_dense_options() -> dict[str, Any]:
    """Arguments for ``from_pretrained`` that unpack a GGUF file into ordinary dense weights.

    Versions before ``GgufConfig`` (5.2 among them) always unpack and take no argument; later ones
    keep the packed blocks wherever a kernel for them is installed.
    """
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
