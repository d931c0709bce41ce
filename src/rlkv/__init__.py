"""RLKV: learn which KV heads a reasoning model needs, compress the others.

Public names are imported on first use, so ``import rlkv`` has no side effect and stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkv.core.budget import Budget
    from rlkv.core.head_profile import HeadProfile
    from rlkv.core.model_spec import ModelSpec
    from rlkv.gates import Gates
    from rlkv.hf.attach import attach_gates, compress
    from rlkv.hf.loading import load_model

__version__ = "0.1.0"
__all__ = [
    "Budget",
    "Gates",
    "HeadProfile",
    "ModelSpec",
    "attach_gates",
    "compress",
    "load_model",
]

_HOME = {
    "Budget": "rlkv.core.budget",
    "Gates": "rlkv.gates",
    "HeadProfile": "rlkv.core.head_profile",
    "ModelSpec": "rlkv.core.model_spec",
    "attach_gates": "rlkv.hf.attach",
    "compress": "rlkv.hf.attach",
    "load_model": "rlkv.hf.loading",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'rlkv' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
