"""Forced decoding: feed a gold completion through the cache and see what the model would write.

The prompt is prefilled and the gold tokens follow as in decoding, so every method compresses as it
would while generating. Layers that give a query the same keys however the tokens are cut take the
gold tokens in chunks; all others (those that evict) take them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlkv.cache.split import SplitKVLayer
from rlkv.core.engine import Prompt
from rlkv.errors import ConfigError, DataError
from rlkv.hf.attach import Session
from rlkv.hf.cache_adapter import LayerAdapter, RLKVCache
from rlkv.hf.engine import left_padded, next_logits, pad_token_id
from rlkv.hf.loading import LoadedModel

_CHUNK = 64
"""Gold tokens per pass: bounds the logits held at once."""


@dataclass(frozen=True, slots=True)
class Gold:
    """A tokenized gold completion."""

    token_ids: tuple[int, ...]
    """Its tokens, without special ones."""
    offsets: tuple[tuple[int, int], ...]
    """[start, end) characters of each token."""


@dataclass(slots=True)
class ForcedCompletion:
    """What the model would have written in place of each gold token."""

    predicted: list[int] = field(default_factory=list)
    """Most likely token before each gold token, given all gold tokens before it."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each gold token, where asked for."""
    kv_bytes: int = 0
    """Bytes of KV cache this sequence held at its end."""


def encode_gold(loaded: LoadedModel, text: str) -> Gold:
    """Tokens and character offsets of a gold completion.

    Raises:
        ConfigError: The tokenizer cannot tell which characters a token covers.
        DataError: The text has no tokens.
    """
    if not loaded.tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer of {loaded.spec.model_id} gives no character offsets, expected a fast "
            "tokenizer (tokenizer.json); choose another model for forced tasks"
        )
    encoded = loaded.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if not encoded["input_ids"]:
        raise DataError("the gold completion has no tokens; expected some text")
    offsets = tuple((int(a), int(b)) for a, b in encoded["offset_mapping"])
    return Gold(tuple(int(i) for i in encoded["input_ids"]), offsets)


@torch.inference_mode()
def force(
    loaded: LoadedModel,
    session: Session,
    prompts: Sequence[Prompt],
    golds: Sequence[Gold],
    *,
    with_logprobs: bool = False,
) -> list[ForcedCompletion]:
    """Feeds one batch of gold completions; rows may differ in length.

    Args:
        loaded: Model and tokenizer.
        session: What ``compress`` yielded for the model.
        prompts: One per row.
        golds: One per row.
        with_logprobs: Also tell the log-probability of each gold token.

    Returns:
        One per row, each as long as its gold completion.
    """
    device = loaded.model.device
    tokens, mask = left_padded([p.token_ids for p in prompts], pad_token_id(loaded), device)
    cache = session.new_cache()
    done = [ForcedCompletion() for _ in prompts]
    active = list(range(len(prompts)))
    logits = next_logits(loaded.model, tokens, mask, cache)
    widest = _CHUNK if _is_exact_in_chunks(cache) else 1
    fed = 0
    while True:
        _note(logits, [done[i] for i in active])
        if with_logprobs:
            _note_logprobs(logits, [done[i] for i in active], [golds[i] for i in active])
        active, mask = _drop_ended(active, golds, done, fed, mask, cache)
        if not active:
            return done
        # a row ends where only its last token is unread: that token need not be cached
        stop = min(fed + widest, min(len(golds[i].token_ids) for i in active) - 1)
        chunk = torch.tensor([golds[i].token_ids[fed:stop] for i in active], device=device)
        mask = torch.cat([mask, mask.new_ones(chunk.shape)], dim=1)
        logits = next_logits(loaded.model, chunk, mask, cache, keep=stop - fed)
        fed = stop


def _is_exact_in_chunks(cache: RLKVCache) -> bool:
    return all(
        isinstance(layer.layer, SplitKVLayer)
        for layer in cache.layers
        if isinstance(layer, LayerAdapter)
    )


def _note(logits: Tensor, rows: Sequence[ForcedCompletion]) -> None:
    """Adds the most likely token of each new column; logits (batch, new, vocab)."""
    for row, best in zip(rows, logits.argmax(dim=-1).tolist(), strict=True):
        row.predicted.extend(best)


def _note_logprobs(logits: Tensor, rows: Sequence[ForcedCompletion], golds: Sequence[Gold]) -> None:
    """Adds the log-probability of the gold token at each new column; logits (batch, new, vocab)."""
    for row, gold, own in zip(rows, golds, logits, strict=True):
        start = len(row.logprobs)
        tokens = gold.token_ids[start : start + own.shape[0]]
        index = torch.tensor(tokens, device=own.device)[:, None]
        row.logprobs.extend(own.float().log_softmax(-1).gather(1, index)[:, 0].tolist())


def _drop_ended(
    active: list[int],
    golds: Sequence[Gold],
    done: Sequence[ForcedCompletion],
    fed: int,
    mask: Tensor,
    cache: RLKVCache,
) -> tuple[list[int], Tensor]:
    """Takes rows whose every token is predicted out of the batch, and measures them."""
    kept = [place for place, i in enumerate(active) if len(golds[i].token_ids) > fed + 1]
    if len(kept) == len(active):
        return active, mask
    share = cache.nbytes() // len(active)
    for place, i in enumerate(active):
        if place not in kept:
            done[i].kv_bytes = share
    if kept:
        index = torch.tensor(kept, device=mask.device)
        cache.select_rows(index)
        mask = mask[index]
    return [active[place] for place in kept], mask
