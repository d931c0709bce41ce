"""The attention and mask functions that RLKV registers with transformers.

transformers hands the cache's answer untouched to the attention function, and its mask function's
answer untouched to every layer. So the cache answers with a :class:`PendingKV`, the mask function
with a :class:`Step`, and all of RLKV happens in :func:`rlkv_attention`. No model is patched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from rlkv.attention.grouped import grouped_attention
from rlkv.attention.masks import additive
from rlkv.attention.mixed import mixed_attention, query_block
from rlkv.attention.step import Step, has_inner_padding, step_from_mask
from rlkv.cache.layer import CacheLayer
from rlkv.errors import UnsupportedFeatureError, UnsupportedModelError
from rlkv.gates import Gates

IMPLEMENTATION = "rlkv"
_SLOT = "rlkv_slot"
_REFUSED_ARGUMENTS = ("sliding_window", "s_aux", "softcap", "position_bias")


@dataclass(slots=True)
class AttentionSlot:
    """What RLKV hangs on one attention module while it is attached."""

    model_id: str
    """For messages."""
    make_layer: Callable[[], CacheLayer]
    """An empty cache layer, for passes without a cache."""
    gates: Gates | None = None
    """Gates to mix by; None: attend as the cache layer says."""
    row: int = 0
    """Row of the gates, that is the layer counted over full-attention layers."""
    sink: int = 0
    """Sink tokens of the mixed attention's local branch."""
    recent: int = 0
    """Recent tokens of the mixed attention's local branch."""

    def __reduce__(self) -> NoReturn:
        """Refused: leaving the block restores the model itself, never a copy of it."""
        raise UnsupportedFeatureError(
            f"{self.model_id} was copied inside the `with` block, where the copy would stay "
            "compressed for good; copy it before or after"
        )


class PendingKV:
    """New keys and values of one layer, on their way from the cache to the attention function.

    A model that touches them in between cannot be split by head; it meets a sentence that says so.
    """

    def __init__(self, layer: CacheLayer, keys: Tensor, values: Tensor) -> None:
        self.layer, self.new_keys, self.new_values = layer, keys, values

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedModelError(
            f"this model reads `{name}` of its cached keys before attending, expected it to hand "
            "them straight to the attention function; its KV heads cannot be compressed"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise UnsupportedModelError(
            f"this model applies {getattr(func, '__name__', func)} to its cached keys before "
            "attending; its KV heads cannot be compressed"
        )


@dataclass(slots=True)
class StepMask(Step):
    """A Step that can also build the ordinary mask for layers that are left alone."""

    build_dense: Callable[[], Tensor | None] = lambda: None
    """The mask of stock sdpa attention: (batch, 1, new, total) bool."""
    is_causal: bool = True
    """False where the model asks for more or less than causal attention over real tokens."""

    def dense(self) -> Tensor | None:
        """The stock mask, built once."""
        return self.memoize("dense", self.build_dense)


def register() -> None:
    """Makes ``attn_implementation="rlkv"`` known to transformers; called on first attach."""
    AttentionInterface.register(IMPLEMENTATION, rlkv_attention)
    # without a mask function of the same name transformers would drop the padding mask silently
    AttentionMaskInterface.register(IMPLEMENTATION, rlkv_mask)


def set_slot(module: nn.Module, slot: AttentionSlot) -> None:
    """Hangs ``slot`` on an attention module."""
    vars(module)[_SLOT] = slot


def clear_slot(module: nn.Module) -> None:
    """Takes the slot off again; the module is as it was."""
    vars(module).pop(_SLOT, None)


def is_attached(module: nn.Module) -> bool:
    """True while a slot hangs on the module."""
    return _SLOT in vars(module)


def rlkv_mask(
    batch_size: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> StepMask:
    """Transformers' mask function: describes the pass instead of building a mask.

    Args:
        batch_size: Rows.
        kv_length: Columns that the layer holds after this pass.
        attention_mask: (batch, columns so far) bool, False on padding; None when there is none.
        **kwargs: Whatever this version of transformers passes along.

    Raises:
        UnsupportedFeatureError: The padding mask is too short, or pads after real tokens.
    """
    # transformers up to 5.2 passes cache_position, later ones q_length
    position = kwargs.get("cache_position")
    new = int(kwargs["q_length"]) if position is None else int(position.shape[0])
    # a sliding layer's cache leaves out its first kv_offset columns; the padding mask has them all
    total = kv_length + int(kwargs.get("kv_offset", 0))
    past = total - new
    device = torch.device(kwargs.get("device") or _device_of(attention_mask, position))
    if attention_mask is not None:
        if attention_mask.shape[1] < total:
            raise UnsupportedFeatureError(
                f"the attention mask covers {attention_mask.shape[1]} tokens, expected all "
                f"{total}, cached ones included; append a column for each new token"
            )
        attention_mask = attention_mask[:, :total]
        if past and has_inner_padding(attention_mask):
            raise UnsupportedFeatureError(
                "the attention mask has padding after real tokens, expected left padding; set "
                "tokenizer.padding_side = 'left'"
            )
    step = step_from_mask(attention_mask, batch=batch_size, past=past, new=new, device=device)

    def build_dense() -> Tensor | None:
        return sdpa_mask(
            batch_size=batch_size, kv_length=kv_length, attention_mask=attention_mask, **kwargs
        )

    is_causal = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    return StepMask(
        batch_size, past, new, step.first_real, device, build_dense=build_dense, is_causal=is_causal
    )


def _device_of(*tensors: Tensor | None) -> torch.device:
    return next((t.device for t in tensors if t is not None), torch.device("cpu"))


def rlkv_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | PendingKV,
    value: Tensor | PendingKV,
    attention_mask: StepMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function.

    Args:
        module: The attention module; an attached one carries an :class:`AttentionSlot`.
        query: (batch, query_heads, new, head_dim).
        key: (batch, kv_heads, tokens, head_dim), or what RLKV's cache returned.
        value: Same.
        attention_mask: What :func:`rlkv_mask` returned.
        scaling: Factor on the scores; default head_dim ** -0.5.
        dropout: Must be 0.
        **kwargs: Further arguments of the model; those that change attention are refused.

    Returns:
        (batch, new, query_heads, head_dim) and None in place of the probabilities.

    Raises:
        UnsupportedModelError: The layer uses a sliding window, learned sinks, a soft cap or a bias.
        UnsupportedFeatureError: Attention probabilities or dropout are asked for, or a ready-made
            4-D mask was passed.
    """
    slot: AttentionSlot | None = vars(module).get(_SLOT)
    if slot is None:  # a layer that RLKV leaves alone, such as a hybrid model's sliding layer
        assert isinstance(key, Tensor)
        assert isinstance(value, Tensor)
        mask = attention_mask.dense() if isinstance(attention_mask, StepMask) else attention_mask
        mask = None if mask is None else mask.to(query.device)
        return sdpa_attention_forward(
            module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
        )
    _require_plain(slot, attention_mask, dropout, kwargs)
    assert isinstance(attention_mask, StepMask)
    step: Step = attention_mask.on(query.device)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(key, PendingKV):
        layer, keys, values = key.layer, key.new_keys, key.new_values
    else:
        assert isinstance(value, Tensor)
        layer, keys, values = slot.make_layer(), key, value
        # a stock cache may be in use: then keys hold all columns, and so do we
        step = Step(step.batch, 0, keys.shape[2], step.first_real, step.device, step._memo)
        if step.new != query.shape[2]:
            raise UnsupportedFeatureError(
                "the model's own cache holds earlier tokens, expected RLKV's; start generation "
                "inside the `with` block, or pass cache=session.new_cache()"
            )
    if slot.gates is not None:
        out = _mixed(slot, query, keys, values, layer, step, scale)
    else:
        observe = layer.observe if layer.needs_probs else None
        groups = layer.append(keys, values, step)
        out = grouped_attention(query, groups, scale=scale, observe=observe)
        layer.finish(query, scale)
    return out.transpose(1, 2).contiguous(), None


def _mixed(
    slot: AttentionSlot,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: CacheLayer,
    step: Step,
    scale: float,
) -> Tensor:
    """Mixed attention over a full cache, block by block of queries."""
    assert slot.gates is not None
    alpha = slot.gates.alpha[..., slot.row, :]
    parts = []
    window = {"sink": slot.sink, "recent": slot.recent}
    for group in layer.append(keys, values, step):
        last = step.new if group.stop is None else group.stop
        rows = query_block(query.shape[1], step.past + last, query.device)
        for start in range(group.start, last, rows):
            stop = min(start + rows, last)
            # a causal query sees no key after its block: those are left out
            upto = step.past + stop
            parts.append(
                mixed_attention(
                    query[:, :, start:stop],
                    group.keys[:, :, :upto],
                    group.values[:, :, :upto],
                    alpha.to(query.device),
                    full_bias=_bias(step, start, stop),
                    local_bias=_bias(step, start, stop, **window),
                    scale=scale,
                )
            )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _bias(step: Step, start: int, stop: int, **window: int) -> Tensor:
    key = ("bias", start, stop, *window.values())
    return step.memoize(key, lambda: additive(step.mask(start, stop, **window)))


def _require_plain(
    slot: AttentionSlot, mask: object, dropout: float, kwargs: dict[str, Any]
) -> None:
    for name in _REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{slot.model_id} passes `{name}` to a full-attention layer, expected plain "
                "causal attention; its KV heads cannot be compressed"
            )
    if kwargs.get("output_attentions"):
        raise UnsupportedFeatureError(
            "output_attentions=True was asked for, but a compressed cache keeps no attention "
            "probabilities; leave it out"
        )
    if dropout:
        raise UnsupportedFeatureError(
            f"attention dropout is {dropout}, expected 0; call model.eval() first"
        )
    if not isinstance(mask, StepMask):
        raise UnsupportedFeatureError(
            "a ready-made attention mask was passed, expected a 2-D padding mask (batch, tokens) "
            "or none; RLKV builds each head's mask itself"
        )
    if not mask.is_causal:
        raise UnsupportedFeatureError(
            "the model asks for a mask other than plain causal attention, as for sequences packed "
            "into one row, image tokens or is_causal=False; pass one sequence a row, with padding "
            "on the left and its attention mask"
        )
