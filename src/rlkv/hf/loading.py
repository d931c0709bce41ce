"""Loads a model with its tokenizer and shape, ready to be compressed or trained.

Order: resolve the name, read the config, refuse what cannot be split, and only then load weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError, MissingExtraError, ModelError, UnsupportedModelError
from rlkv.hf.sources import ModelSource, resolve_model
from rlkv.hf.support import config_value, full_attention_layers, require_supported

__all__ = [
    "LoadedModel",
    "ModelSource",
    "load_model",
    "model_config",
    "model_spec",
    "require_supported",
    "resolve_model",
    "spec_from_config",
]

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A frozen model in evaluation mode, with what belongs to it."""

    model: PreTrainedModel
    """Every parameter has ``requires_grad`` False."""
    tokenizer: PreTrainedTokenizerBase
    """Pads on the left; has a pad token."""
    spec: ModelSpec
    """Shape of the KV cache."""


def load_model(
    name: str,
    *,
    dtype: DTypeName | torch.dtype = "auto",
    revision: str | None = None,
    device: str | None = "cpu",
    device_map: str | dict[str, int | str] | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Model, tokenizer and shape behind a name.

    Args:
        name: ``embedded``, ``smollm2``, a local folder, or a hub id.
        dtype: Type of the weights; ``auto`` takes the one they were saved in.
        revision: Commit, tag or branch on the hub.
        device: Where the model goes; None leaves it where it was loaded.
        device_map: Placement over several devices, as in transformers; ``device`` is then unused.
        trust_remote_code: Run model code that comes with the weights.

    Raises:
        UnknownNameError: ``name`` is no model name.
        ModelError: The model cannot be read.
        ConfigError: A setting is unknown.
        UnsupportedModelError: Its attention cannot be split; raised before the weights load.
        MissingExtraError: ``device_map`` is given and accelerate is not installed.
    """
    source = resolve_model(name)
    torch_dtype = _torch_dtype(dtype)
    placement = _placement(device, device_map)
    config = _read_config(source, revision, trust_remote_code)
    require_supported(config, source.model_id)
    spec_from_config(config, source.model_id, revision)  # an unreadable shape fails here
    options = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    with _reading(source):
        tokenizer = AutoTokenizer.from_pretrained(source.location, **options)
        model = AutoModelForCausalLM.from_pretrained(
            source.location, config=config, dtype=torch_dtype, device_map=device_map, **options
        )
    if trust_remote_code and not model._supports_attention_backend:
        raise UnsupportedModelError(
            f"{source.model_id} ({type(model).__name__}) cannot be compressed by kv head: its own "
            "code does not announce the attention interface of transformers "
            "(_supports_attention_backend); use a model whose class does"
        )
    if placement is not None:
        model.to(placement)  # pyright: ignore[reportArgumentType]
    model.eval().requires_grad_(False)
    _prepare_tokenizer(tokenizer, source)
    spec = spec_from_config(config, source.model_id, revision, model.dtype)
    return LoadedModel(model, tokenizer, spec)


def model_config(
    name: str, revision: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """The config of a model; no weights are read.

    Raises:
        UnknownNameError: ``name`` is no model name.
        ModelError: The config cannot be read.
    """
    return _read_config(resolve_model(name), revision, trust_remote_code)


def model_spec(name: str, revision: str | None = None) -> ModelSpec:
    """The KV cache shape of a model that can be compressed; no weights are read.

    Raises:
        UnknownNameError: ``name`` is no model name.
        ModelError: The config cannot be read.
        UnsupportedModelError: The model's attention cannot be split.
    """
    source = resolve_model(name)
    config = _read_config(source, revision, trust_remote_code=False)
    require_supported(config, source.model_id)
    return spec_from_config(config, source.model_id, revision)


def spec_from_config(
    config: PreTrainedConfig,
    model_id: str,
    revision: str | None = None,
    dtype: DTypeName | torch.dtype = "auto",
) -> ModelSpec:
    """The KV cache shape that a config describes.

    Only layers of type ``full_attention`` count; a composite config is read through its text part.

    Args:
        config: Config of the whole model.
        model_id: Hub id or folder name, for reports and profiles.
        revision: Commit of the weights; None takes the one that the config was read from.
        dtype: Type of the numbers in the cache; ``auto`` takes the config's, else float32.

    Raises:
        UnsupportedModelError: No layer has a full-attention cache, or the heads cannot be read.
    """
    text = config.get_text_config(decoder=True)
    layers = full_attention_layers(text)
    if not layers:
        raise UnsupportedModelError(
            f"{model_id} ({config.model_type}) has no full_attention layer, expected at least one; "
            "choose another model"
        )
    query_heads = config_value(text, "num_attention_heads")
    # absent or None: every query head has its own keys
    kv_heads = config_value(text, "num_key_value_heads") or query_heads
    if not isinstance(query_heads, int) or not isinstance(kv_heads, int):
        raise UnsupportedModelError(
            f"{model_id} ({config.model_type}) has a number of heads that differs between layers; "
            "expected one number: choose another model"
        )
    cache_dtype = _torch_dtype(text.dtype or config.dtype if dtype == "auto" else dtype)
    commit = getattr(config, "_commit_hash", None)
    return ModelSpec(
        model_id=model_id,
        revision=revision or commit or "",
        num_layers=len(layers),
        num_kv_heads=kv_heads,
        num_query_heads=query_heads,
        head_dim=config_value(text, "head_dim") or text.hidden_size // query_heads,
        dtype_bytes=4 if cache_dtype == "auto" else cache_dtype.itemsize,
        layer_indices=layers,
    )


def _read_config(
    source: ModelSource, revision: str | None, trust_remote_code: bool
) -> PreTrainedConfig:
    with _reading(source):
        return AutoConfig.from_pretrained(
            source.location, revision=revision or "main", trust_remote_code=trust_remote_code
        )


@contextmanager
def _reading(source: ModelSource) -> Iterator[None]:
    """Turns what transformers and the hub raise while reading a model into one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        if source.is_local:
            advice = "expected a folder written by save_pretrained: copy or fetch it again"
        else:
            advice = (
                "no local folder has that name either; check the id, the network and "
                "HF_HUB_OFFLINE, or pass a local folder"
            )
        raise ModelError(f"cannot read model {source.name} ({reason}); {advice}") from error


def _torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | Literal["auto"]:
    if dtype is None or dtype == "auto":
        return "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _placement(
    device: str | None, device_map: str | dict[str, int | str] | None
) -> torch.device | None:
    if device_map is not None:
        if find_spec("accelerate") is None:
            raise MissingExtraError(
                "device_map needs the package accelerate, which is not installed; run `pip install "
                "accelerate`, or pass device instead"
            )
        return None
    if device is None:
        return None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"device {device!r} cannot be used ({reason}); use cpu") from error
    return torch.device(device)


def _prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, source: ModelSource) -> None:
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                f"the tokenizer of {source.name} has neither a pad nor an end token, expected one "
                "of them; set pad_token in its tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
