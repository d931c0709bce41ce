"""Runs RLKV and kvpress side by side on a tiny random model and prints where they agree and differ.

kvpress 0.5.5 needs transformers < 5.3, so it lives in an environment of its own:

    python -m venv kvpress-env
    kvpress-env/bin/pip install kvpress==0.5.5 transformers==5.2.0
    PYTHONPATH=src kvpress-env/bin/python scripts/compare_kvpress.py

RLKV is installed for newer transformers; what this script uses of it runs on 5.2 too.

SnapKV must choose the same prompt tokens in both. The other rows show what kvpress does in decode
that a fair comparison cannot build on, each with RLKV's behaviour beside it. Exit status 1 where a
row did not come out as stated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import kvpress
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

import rlkv
from rlkv.hf.compat import cache_argument
from rlkv.methods.base import MethodOptions


@dataclass(frozen=True)
class Row:
    """One line of the comparison."""

    what: str
    kvpress: str
    rlkv: str
    is_as_stated: bool


def tiny_llama(layers: int) -> PreTrainedModel:
    """A random float32 Llama with 4 KV heads and 8 query heads."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=4096,
        name_or_path="tiny-llama",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter.mul_(6.0)  # attention of a random model is flat otherwise
    return model.eval().requires_grad_(False)


def random_tokens(rows: int, columns: int) -> Tensor:
    """(rows, columns) token ids."""
    return torch.randint(1, 96, (rows, columns), generator=torch.Generator().manual_seed(1))


def feed(
    model: PreTrainedModel,
    tokens: Tensor,
    sizes: Sequence[int],
    cache: object,
    mask: Tensor | None = None,
) -> Tensor:
    """Logits of all columns, fed in passes of ``sizes`` with true positions, as generate does."""
    mask = torch.ones_like(tokens) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    parts, start = [], 0
    for size in sizes:
        stop = start + size
        arguments = {cache_argument(model): cache, "position_ids": positions[:, start:stop]}
        if cache_argument(model) == "past_key_values":
            arguments["cache_position"] = torch.arange(start, stop)
        out = model(
            tokens[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **arguments
        )
        parts.append(out.logits)
        start = stop
    return torch.cat(parts, 1)


def positions_in(cache: DynamicCache, whole: DynamicCache, layer: int, head: int) -> list[int]:
    """Positions of the keys in a compressed cache, found among those of an uncompressed one."""
    kept, keys = cache.layers[layer].keys[0, head], whole.layers[layer].keys[0, head]
    distance = torch.cdist(kept, keys, compute_mode="donot_use_mm_for_euclid_dist")
    if float(distance.amin(dim=1).max()) > 1e-3:
        raise ValueError(f"a key of layer {layer} is not among the uncompressed ones")
    return sorted(distance.argmin(dim=1).tolist())


def snapkv_prefill() -> Row:
    """The same prompt positions, in every layer and head."""
    model, tokens = tiny_llama(3), random_tokens(1, 400)
    whole, cache = DynamicCache(), DynamicCache()
    feed(model, tokens, [400], whole)
    with kvpress.SnapKVPress(compression_ratio=0.6)(model):
        feed(model, tokens, [400], cache)
    kept = cache.layers[0].keys.shape[2]
    options = MethodOptions(budget_mode="fixed", budget_tokens=kept)
    with rlkv.compress(model, method="snapkv", options=options) as session:
        own = session.new_cache()
        feed(model, tokens, [400], own)
        layers = own.rlkv_layers()
        heads = [(layer, head) for layer in range(3) for head in range(4)]
        same = sum(
            positions_in(cache, whole, layer, head)
            == sorted(p for p in layers[layer].positions[0, head].tolist() if p >= 0)
            for layer, head in heads
        )
    text = f"{kept} of 400 tokens a head"
    return Row(
        f"SnapKV prefill: heads with the same positions ({same} of {len(heads)})",
        text,
        text,
        same == len(heads),
    )


def streaming_decode() -> Row:
    """Whether the attention sink survives decoding."""
    model, tokens = tiny_llama(1), random_tokens(1, 499)
    sizes = [1] * 499
    whole, cache = DynamicCache(), DynamicCache()
    feed(model, tokens, sizes, whole)
    press = kvpress.DecodingPress(
        kvpress.StreamingLLMPress(n_sink=4), compression_interval=16, target_size=64
    )
    with press(model):
        feed(model, tokens, [3, *[1] * 496], cache)
    held = [positions_in(cache, whole, 0, head) for head in range(4)]
    sinks = [sum(p < 4 for p in head) for head in held]
    with rlkv.compress(model, method="streaming_llm", sink=4, recent=60) as session:
        own = session.new_cache()
        feed(model, tokens, sizes, own)
        ring = own.rlkv_layers()[0].ring
        positions = ring.slot_positions(torch.tensor([498]), ring.slots)[0].tolist()
        ours = sum(p < 4 for p in positions)
    return Row(
        "StreamingLLM in decode: sink tokens left of 4, per head",
        str(sinks),
        str([ours] * 4),
        max(sinks) < 4 and ours == 4,
    )


def freed_memory() -> Row:
    """Whether head-wise compression in decode frees anything."""
    model, tokens = tiny_llama(1), random_tokens(1, 139)
    sizes = [60] + [1] * 79
    cache = DynamicCache()
    press = kvpress.DecodingPress(
        kvpress.AdaKVPress(kvpress.KnormPress()), compression_interval=16, target_size=32
    )
    with press(model):
        feed(model, tokens, sizes, cache)
    held = cache.layers[0].keys.shape[2]
    with rlkv.compress(model, method="r_kv", sparsity=0.8, sink=8, recent=24) as session:
        own = session.new_cache()
        feed(model, tokens, sizes, own)
        share = own.nbytes() / session.spec.kv_bytes(139)
    return Row(
        "Head-wise eviction in decode: share of the full cache's bytes held (target 32 of 139)",
        f"{held / 139:.0%} (AdaKVPress masks)",
        f"{share:.0%} (r_kv, s = 0.8)",
        held == 139 and share < 0.5,
    )


def padded_row() -> Row:
    """Whether a left-padded row decodes as the row alone."""
    model, tokens = tiny_llama(3), random_tokens(2, 120)
    mask = torch.ones_like(tokens)
    mask[1, :15] = 0
    alone, sizes = tokens[1:, 15:], [1] * 70

    def difference(batch: Tensor, single: Tensor, steps: int = 70) -> float:
        return float((batch[1, 50 : 50 + steps] - single[0, 35 : 35 + steps]).abs().max())

    def run_press(tokens: Tensor, first: int, mask: Tensor | None = None) -> Tensor:
        press = kvpress.DecodingPress(kvpress.KnormPress(), compression_interval=9, target_size=40)
        with press(model):
            return feed(model, tokens, [first, *sizes], DynamicCache(), mask)

    pair = run_press(tokens, 50, mask), run_press(alone, 35)
    before, theirs = difference(*pair, steps=9), difference(*pair)
    ours = 0.0
    for method in ("h2o", "r_kv", "snapkv"):
        with rlkv.compress(model, method=method, sink=8, recent=24) as session:
            batch = feed(model, tokens, [50, *sizes], session.new_cache(), mask)
            single = feed(model, alone, [35, *sizes], session.new_cache())
        ours = max(ours, difference(batch, single))
    return Row(
        "Left padding: largest logit difference to the row alone, over 70 decode steps",
        f"{theirs:.2g} (KnormPress; {before:.1g} until it first compresses)",
        f"{ours:.2g} (h2o, r_kv, snapkv)",
        before < 1e-4 and theirs > 0.1 and ours < 1e-4,
    )


def rerotation_in_decode() -> Row:
    """Whether StreamingLLM with re-rotated keys can run in decode."""
    try:
        kvpress.DecodingPress(kvpress.KeyRerotationPress(kvpress.StreamingLLMPress()))
        theirs = "accepted"
    except AssertionError:
        theirs = "AssertionError"
    return Row(
        "StreamingLLM with re-rotation in decode",
        theirs,
        "positions stay absolute",
        theirs == "AssertionError",
    )


def main() -> int:
    """Prints the table."""
    checks = (snapkv_prefill, streaming_decode, freed_memory, padded_row, rerotation_in_decode)
    with torch.no_grad():
        rows = [check() for check in checks]
    print("| what | kvpress | RLKV | as stated |\n|---|---|---|---|")
    for row in rows:
        verdict = "yes" if row.is_as_stated else "NO"
        print(f"| {row.what} | {row.kvpress} | {row.rlkv} | {verdict} |")
    return 0 if all(row.is_as_stated for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
