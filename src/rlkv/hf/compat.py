"""Every difference between transformers versions that RLKV meets, nowhere else.

Supported: transformers 5.19 to 5.24, tested at both ends. A function's docstring names the versions
it bridges.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedModel

_CACHE_ARGUMENTS = ("cache", "past_key_values")


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


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the forward argument that takes the cache.

    transformers calls it ``past_key_values`` up to 5.2x and ``cache`` from 5.24 on, where the old
    name still works but warns.
    """
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def given_cache(kwargs: dict[str, object]) -> object:
    """The cache in a forward call's keyword arguments, under whichever name; None if absent."""
    return next((kwargs[name] for name in _CACHE_ARGUMENTS if kwargs.get(name) is not None), None)


def with_cache(
    model: PreTrainedModel, kwargs: dict[str, object], cache: object
) -> dict[str, object]:
    """``kwargs`` with ``cache`` under the name that this model's forward expects."""
    kept = {name: value for name, value in kwargs.items() if name not in _CACHE_ARGUMENTS}
    return {**kept, cache_argument(model): cache}


def columns_after_crop(argument: int, length: int) -> int:
    """Columns left after transformers' ``crop(argument)`` on ``length`` columns.

    A negative argument removes that many; a positive one (up to 5.2x) is the length to keep.
    """
    return max(0, length + argument) if argument <= 0 else min(argument, length)


def set_layer_checkpointing(model: PreTrainedModel, enabled: bool) -> None:
    """Turns checkpointing of decoder layers on or off.

    transformers calls it gradient checkpointing up to 5.2x and activation checkpointing later,
    where the old name still works but warns.
    """
    name = "activation" if "activation_checkpointing_enable" in dir(model) else "gradient"
    if enabled:
        getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(model, f"{name}_checkpointing_disable")()
