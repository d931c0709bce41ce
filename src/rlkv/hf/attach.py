"""Compress a model, or attach gates to it, for the length of a ``with`` block.

Entering selects RLKV's attention function and hangs a slot on each full-attention module; a forward
hook swaps the model's empty cache for RLKV's. Leaving undoes all of it: the model is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from rlkv.cache.layer import CacheLayer
from rlkv.cache.split import SplitKVLayer
from rlkv.core.budget import Budget
from rlkv.core.head_profile import HeadProfile
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import (
    ConfigError,
    UnsupportedFeatureError,
    UnsupportedModelError,
)
from rlkv.gates import Gates
from rlkv.hf.attention import (
    IMPLEMENTATION,
    AttentionSlot,
    clear_slot,
    is_attached,
    register,
    set_slot,
)
from rlkv.hf.cache_adapter import Origin, RLKVCache
from rlkv.hf.compat import given_cache, with_cache
from rlkv.hf.loading import spec_from_config
from rlkv.hf.support import require_supported
from rlkv.methods.base import CacheMethod, MethodOptions
from rlkv.registry import METHODS

_TRAINING_SPARE = 2
"""Spare room of caches in training, where speed counts and no bytes are reported."""


class Session:
    """A model while RLKV is attached to it.

    Attributes:
        spec: Shape of the model's KV cache.
        method: The method in use; None while gates are attached.
        origin: What caches of this session carry, so that they are not read elsewhere.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        make_layer: Callable[[int], CacheLayer],
        method: CacheMethod | None,
        origin: Origin,
    ) -> None:
        self.spec, self.method, self.origin = spec, method, origin
        self._model, self._make_layer = model, make_layer
        self._last: RLKVCache | None = None
        self._replaced: WeakSet[DynamicCache] = WeakSet()
        self._last_bytes = 0

    def new_cache(self) -> RLKVCache:
        """An empty cache, for one batch; keep it to go on with the same conversations."""
        text = self._model.config.get_text_config(decoder=True)
        rows = {index: row for row, index in enumerate(self.spec.layer_indices)}
        if len(rows) == text.num_hidden_layers:
            layers: list[Any] = [self._make_layer(row) for row in range(self.spec.num_layers)]
        else:  # a hybrid model: the other layers keep the stock cache
            layers = list(DynamicCache(config=text).layers)
            for index, row in rows.items():
                layers[index] = self._make_layer(row)
        cache = RLKVCache(layers, self.origin)
        self._last = cache  # the one before is released here, before the new one fills
        return cache

    def replace(self, empty: DynamicCache) -> RLKVCache:
        """A cache in place of the model's own, which stays empty and cannot be passed again.

        Raises:
            UnsupportedFeatureError: It was passed before: its tokens are in the cache that replaced
                it.
        """
        if empty in self._replaced:
            raise UnsupportedFeatureError(
                "an empty DynamicCache was passed a second time, but RLKV's cache took its place "
                "in the first pass; pass on the cache of the model's output, or make one with "
                "session.new_cache()"
            )
        self._replaced.add(empty)
        return self.new_cache()

    def kv_bytes(self) -> int:
        """Bytes held by the cache made last; after the ``with`` block, what it held at its end."""
        return self._last_bytes if self._last is None else self._last.nbytes()

    def close(self) -> None:
        """Releases the last cache; called on leaving the ``with`` block."""
        self._last_bytes = self.kv_bytes()
        self._last = None


def spec_of(model: PreTrainedModel) -> ModelSpec:
    """The KV cache shape of a loaded model.

    Raises:
        UnsupportedModelError: Its attention cannot be split.
    """
    model_id = model.config.name_or_path or type(model).__name__
    require_supported(model.config, model_id)
    return spec_from_config(model.config, model_id, dtype=model.dtype)


@contextmanager
def compress(
    model: PreTrainedModel,
    *,
    method: str = "rlkv",
    profile: HeadProfile | str | Path | None = None,
    sparsity: float = 0.5,
    sink: int = 16,
    recent: int = 64,
    options: MethodOptions | None = None,
    spec: ModelSpec | None = None,
) -> Iterator[Session]:
    """Compresses the KV cache of ``model`` inside a ``with`` block.

    Inside, ``model.generate(**inputs)`` and plain forward calls use the compressed cache. Batches
    must be padded on the left. Leaving restores the model bit for bit.

    Args:
        model: Any decoder whose attention can be split by KV head.
        method: Name of a method, see ``rlkv list methods``.
        profile: Head profile or the path of one, for methods that need it.
        sparsity: Share of KV heads to compress, in [0, 1).
        sink: First tokens a compressed head keeps.
        recent: Last tokens a compressed head keeps.
        options: Prefill mode, drafted tokens and other choices.
        spec: Shape and id of the model; default: read from its config.

    Yields:
        The session, which makes caches and tells their bytes.

    Raises:
        ConfigError: A setting is out of range, the model is attached already, or its weights are
            on the meta device.
        UnknownNameError: The method is unknown.
        ProfileError: The profile cannot be read, or belongs to another model.
        UnsupportedModelError: The model's attention cannot be split.

    Example:
        >>> import rlkv
        >>> loaded = rlkv.load_model("embedded")
        >>> with rlkv.compress(loaded.model, method="streaming_llm") as session:
        ...     session.new_cache().nbytes()
        0
    """
    method_class = METHODS.load(method)
    budget = Budget(sparsity, sink, recent)
    if isinstance(profile, (str, Path)):
        profile = HeadProfile.load(profile)
    chosen = method_class(spec or spec_of(model), budget, profile, options)
    with attach_method(model, chosen) as session:
        yield session


@contextmanager
def attach_method(model: PreTrainedModel, method: CacheMethod) -> Iterator[Session]:
    """Like :func:`compress`, with a method that is made already.

    Args:
        model: The model that ``method.spec`` describes.
        method: Any method, registered or not.

    Yields:
        The session, which makes caches and tells their bytes.

    Raises:
        ConfigError: The model is attached already, or its weights are on the meta device.
        UnsupportedModelError: The model's attention modules cannot be found.
    """
    with _attached(model, method.spec, method.make_layer, "compress", method=method) as session:
        yield session


@contextmanager
def attach_gates(
    model: PreTrainedModel,
    gates: Gates,
    *,
    sink: int = 16,
    recent: int = 64,
    spec: ModelSpec | None = None,
) -> Iterator[Session]:
    """Mixes full and local attention by ``gates`` inside a ``with`` block (paper eq. 1).

    Every head keeps the full cache, so that both branches can be computed; gradients reach
    ``gates.alpha`` and nothing else if the model is frozen.

    Args:
        model: Any decoder whose attention can be split by KV head.
        gates: alpha (layers, kv_heads), or a parameter with one more leading row axis.
        sink: First tokens the local branch sees.
        recent: Last tokens the local branch sees.
        spec: Shape and id of the model; default: read from its config.

    Raises:
        ConfigError: The gates' shape is not the model's, the window is empty, or the model's
            weights are on the meta device.
        UnsupportedModelError: The model's attention cannot be split.
    """
    spec = spec or spec_of(model)
    Budget(0.0, sink, recent)
    if tuple(gates.alpha.shape[-2:]) != spec.shape:
        raise ConfigError(
            f"gates have shape {tuple(gates.alpha.shape)}, model {spec.model_id} has {spec.shape} "
            "kv heads; make them with Gates(spec.shape)"
        )

    def make_layer(layer: int) -> CacheLayer:
        everything = [True] * spec.num_kv_heads
        return SplitKVLayer(
            everything, spec.group_size, sink=sink, recent=recent, spare_share=_TRAINING_SPARE
        )

    name = "attach_gates"
    with _attached(model, spec, make_layer, name, gates=gates, sink=sink, recent=recent) as session:
        yield session


@contextmanager
def attach_layers(
    model: PreTrainedModel,
    make_layer: Callable[[int], CacheLayer],
    *,
    spec: ModelSpec | None = None,
) -> Iterator[Session]:
    """Runs ``model`` over cache layers of your own inside a ``with`` block.

    Args:
        model: Any decoder whose attention can be split by KV head.
        make_layer: An empty cache for full-attention layer 0 to ``spec.num_layers`` - 1.
        spec: Shape and id of the model; default: read from its config.

    Raises:
        ConfigError: The model is attached already, or its weights are on the meta device.
        UnsupportedModelError: Its attention cannot be split.
    """
    with _attached(model, spec or spec_of(model), make_layer, "attach_layers") as session:
        yield session


@contextmanager
def _attached(
    model: PreTrainedModel,
    spec: ModelSpec,
    make_layer: Callable[[int], CacheLayer],
    made_by: str,
    *,
    method: CacheMethod | None = None,
    gates: Gates | None = None,
    sink: int = 0,
    recent: int = 0,
) -> Iterator[Session]:
    modules = attention_modules(model, spec)
    if any(is_attached(module) for module in modules):
        raise ConfigError(
            f"{spec.model_id} is compressed already; leave the other `with` block first"
        )
    _require_weights(model, spec)
    first = modules[0]
    session = Session(model, spec, make_layer, method, Origin(made_by, lambda: is_attached(first)))
    register()
    configs = _configs(model)
    before = [config._attn_implementation for config in configs]
    hook = model.register_forward_pre_hook(_cache_hook(model, session), with_kwargs=True)
    try:
        for row, module in enumerate(modules):
            make = _bind(make_layer, row)
            set_slot(module, AttentionSlot(spec.model_id, make, gates, row, sink, recent))
        for config in configs:
            config._attn_implementation = IMPLEMENTATION
        yield session
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        for module in modules:
            clear_slot(module)
        hook.remove()
        session.close()


def _bind(make_layer: Callable[[int], CacheLayer], row: int) -> Callable[[], CacheLayer]:
    return lambda: make_layer(row)


def attention_modules(model: PreTrainedModel, spec: ModelSpec) -> list[nn.Module]:
    """The attention module of each full-attention layer, in order.

    Raises:
        UnsupportedModelError: They cannot be found.
    """
    found: dict[int, nn.Module] = {}
    for module in model.get_decoder().modules():
        index = vars(module).get("layer_idx")
        if isinstance(index, int) and type(module).__name__.endswith("Attention"):
            found.setdefault(index, module)
    missing = [index for index in spec.layer_indices if index not in found]
    if missing:
        raise UnsupportedModelError(
            f"{spec.model_id} has no attention module for layer {missing[0]}, expected one that "
            "carries `layer_idx`; its KV heads cannot be compressed"
        )
    return [found[index] for index in spec.layer_indices]


def _require_weights(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Refuses a model whose weights have a shape and no values.

    Raises:
        ConfigError: Weights are on the meta device, and no hook of accelerate brings them.
    """
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return  # offloaded: their values come with each layer's pass
    empty = [name for name, weight in model.named_parameters() if weight.is_meta]
    if empty:
        raise ConfigError(
            f"{spec.model_id} has {len(empty)} weights on the meta device, such as {empty[0]}, "
            "which have no values; load it with from_pretrained or rlkv.load_model"
        )


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configs whose attention implementation the text decoder reads."""
    text = model.config.get_text_config(decoder=True)
    return [text] if text is model.config else [model.config, text]


def _cache_hook(model: PreTrainedModel, session: Session) -> Callable[..., Any]:
    """A forward pre-hook that gives the model RLKV's cache where it would make its own."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = _with_positions(args, kwargs)
        given: Any = given_cache(kwargs)
        use_cache = kwargs.get("use_cache")
        if use_cache is None:
            use_cache = model.config.get_text_config(decoder=True).use_cache
        if isinstance(given, RLKVCache):
            given.origin.require_same(session.origin.made_by)
            return args, kwargs
        if given is None and not use_cache:
            return args, kwargs
        if given is None:
            return args, with_cache(model, kwargs, session.new_cache())
        if type(given) is DynamicCache and not given.get_seq_length():
            return args, with_cache(model, kwargs, session.replace(given))
        raise UnsupportedFeatureError(
            f"a {type(given).__name__} with {given.get_seq_length()} tokens was passed, expected "
            "none or RLKV's own; leave out cache_implementation, or pass session.new_cache()"
        )

    return hook


def _with_positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Adds position ids that count real tokens, where padding is given and positions are not."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is not None or not isinstance(mask, Tensor) or mask.dim() != 2:
        return kwargs
    if bool(mask.all()):
        return kwargs
    tokens = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs_embeds"))
    if not isinstance(tokens, Tensor):
        return kwargs  # the model itself says what is missing
    new = tokens.shape[1]
    positions = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -new:]
    return {**kwargs, "position_ids": positions.to(torch.long)}
