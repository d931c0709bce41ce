"""Canary for new vLLM versions: heads of any profile form two groups with little waste."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
SHAPES = ((32, 8), (28, 4), (36, 8))
SPARSITIES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def groups_of(split, geometry):
    """The groups that vLLM forms of all layers' specs, without building a model."""
    import torch
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

    from rlkv.serve.vllm.kv_spec import SinkWindowSpec, register_spec
    from rlkv.serve.vllm.split_attention import _padded

    register_spec()
    shape = {"head_size": 128, "dtype": torch.bfloat16}
    specs = {}
    for layer, full in enumerate(split.full_counts):
        window = split.compressed_in(layer)
        if full:
            spec = FullAttentionSpec(block_size=geometry.full_block, num_kv_heads=full, **shape)
            padded = ("full", layer) in geometry.padded
            specs[f"layers.{layer}.full"] = _padded(spec) if padded else spec
        if window:
            spec = SinkWindowSpec(
                block_size=geometry.window_block, num_kv_heads=window, sink=16, recent=64,
                in_flight=2048, full_block=geometry.full_block, context=4096, pool_block_bytes=1,
                **shape,
            )  # fmt: skip
            padded = ("window", layer) in geometry.padded
            specs[f"layers.{layer}.window"] = _padded(spec) if padded else spec
    layout = KVCacheLayout.BLHNC
    config = SimpleNamespace(
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs))
    return specs, groups, kv_cache_utils._get_kv_cache_bytes_per_block(groups, layout)


def check(full: np.ndarray) -> float:
    """Checks one mask (layers, kv_heads) and returns the unused share of a block."""
    from rlkv.serve.geometry import split_heads

    return check_split(split_heads(full, np.zeros(full.shape, dtype=np.float32)))


def check_split(split) -> float:
    from rlkv.serve.geometry import choose_geometry

    geometry = choose_geometry(split, sink=16, recent=64, context=4096)
    specs, groups, block_bytes = groups_of(split, geometry)
    assert len(groups) == 2
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    assert block_bytes == geometry.block_rows * 128 * 2 * 2
    return geometry.waste


def test_360_random_masks_form_two_groups_with_little_waste():
    draw = np.random.default_rng(0)
    worst = {}
    for layers, heads in SHAPES:
        for sparsity in SPARSITIES:
            for _ in range(15):
                full = np.zeros(layers * heads, dtype=bool)
                kept = round((1 - sparsity) * layers * heads)
                full[draw.permutation(layers * heads)[:kept]] = True
                waste = check(full.reshape(layers, heads))
                worst[sparsity] = max(worst.get(sparsity, 0.0), waste)
    assert len(SHAPES) * len(SPARSITIES) * 15 == 360
    assert max(worst.values()) <= 0.12, worst


@pytest.mark.parametrize(
    "counts",
    [
        [2, 2, 2, 2],  # one page size in both groups
        [1, 1, 3, 3],  # page sizes occur equally often: a pattern to vLLM
        [1, 3],
        [1, 2, 3],
        [4, 4, 0, 0],  # layers with one kind of heads only
        [4, 2, 2, 0],
        [3, 3, 3, 1, 1, 1],
    ],
)
def test_regular_masks_form_two_groups_too(counts):
    full = np.array([[head < count for head in range(4)] for count in counts])
    check(full)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 4), (6, 4), (30, 3)])
def test_mixed_heads_form_two_groups_too(shape):
    from rlkv.serve.geometry import mixed_split

    layers, _ = shape
    # one page is padded by one head, nothing else is unused
    assert check_split(mixed_split(*shape)) <= 1 / layers
