"""``rlkv bench memory``: measured KV bytes against the budget's formula.

A random prompt of each length is really prefilled and decoded a few tokens further; the bytes are
those of the tensors that the cache then holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rlkv.core.budget import Budget
from rlkv.hf.attach import compress
from rlkv.hf.compat import with_cache
from rlkv.hf.loading import LoadedModel

_DECODED = 8


def memory_rows(
    loaded: LoadedModel,
    sparsities: Sequence[float],
    prompts: Sequence[int],
    *,
    sink: int,
    recent: int,
    seed: int = 0,
) -> Iterator[dict[str, object]]:
    """Rows ``{model, sparsity, tokens, kv_bytes, formula_bytes, difference}``.

    ``difference`` is measured over formula, minus 1. Heads are drawn at random: which ones stay
    full does not change how many bytes they take.

    Args:
        loaded: Model to measure on.
        sparsities: Shares of KV heads to compress.
        prompts: Prompt lengths in tokens.
        sink: First tokens a compressed head keeps.
        recent: Last tokens a compressed head keeps.
        seed: Seed of the heads and the prompts.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = loaded.model.config.get_text_config(decoder=True).vocab_size
    for length in prompts:
        tokens = torch.randint(0, vocabulary, (1, length), generator=generator)
        for sparsity in sparsities:
            kv_bytes = _measure(loaded, tokens, sparsity, sink, recent)
            held = length + _DECODED
            formula = Budget(sparsity, sink, recent).kv_bytes(loaded.spec, held)
            yield {
                "model": loaded.spec.model_id,
                "sparsity": sparsity,
                "tokens": held,
                "kv_bytes": kv_bytes,
                "formula_bytes": formula,
                "difference": kv_bytes / formula - 1.0,
            }


@torch.inference_mode()
def _measure(
    loaded: LoadedModel, tokens: torch.Tensor, sparsity: float, sink: int, recent: int
) -> int:
    with compress(
        loaded.model,
        method="random_heads",
        sparsity=sparsity,
        sink=sink,
        recent=recent,
        spec=loaded.spec,
    ) as session:
        cache = session.new_cache()
        arguments = with_cache(loaded.model, {"use_cache": True, "logits_to_keep": 1}, cache)
        loaded.model(tokens.to(loaded.model.device), **arguments)
        for _ in range(_DECODED):
            loaded.model(tokens[:, -1:].to(loaded.model.device), **arguments)
        return cache.nbytes()
