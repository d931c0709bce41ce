"""Head order over ranks, block sizes, and what a request takes from the pool."""

from __future__ import annotations

import numpy as np
import pytest

from rlkv.errors import ConfigError, UnsupportedFeatureError
from rlkv.serve.geometry import (
    Geometry,
    HeadSplit,
    choose_geometry,
    mixed_split,
    rank_heads,
    split_heads,
)

FULL = np.array([[1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=bool)
SCORES = np.array(
    [[0.9, 0.1, 0.8, 0.2], [0.3, 0.1, 0.2, 0.9], [0.9] * 4, [0.1, 0.4, 0.3, 0.2]], dtype=np.float32
)


def test_full_heads_come_first_on_one_rank():
    split = split_heads(FULL, SCORES)
    assert split.order == ((0, 2, 1, 3), (3, 0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3))
    assert split.full_counts == (2, 1, 4, 0)
    assert (split.full_heads, split.compressed_heads, split.added_full_heads) == (7, 9, 0)


def test_two_ranks_hold_as_many_full_heads_each_and_the_best_compressed_head_is_promoted():
    split = split_heads(FULL, SCORES, ranks=2)
    # layer 1 has one full head, 3; head 0 has the next best score, and each rank takes one of them
    assert split.order[1] == (0, 1, 3, 2)
    assert split.full_counts == (1, 1, 2, 0)
    assert split.added_full_heads == 1
    # layer 0: full heads 0 and 2, one a rank, each followed by a compressed one
    assert split.order[0] == (0, 1, 2, 3)


def test_more_ranks_than_heads_make_a_layer_full_or_compressed_as_a_whole():
    split = split_heads(FULL, SCORES, ranks=8)
    assert split.full_counts == (1, 1, 1, 0)
    assert split.heads_per_rank == 1


def test_heads_that_do_not_divide_over_ranks_are_refused():
    with pytest.raises(UnsupportedFeatureError, match="4 kv heads do not divide over 3"):
        split_heads(FULL, SCORES, ranks=3)


@pytest.mark.parametrize(
    ("ranks", "held"),
    [
        (1, [[0, 1, 2, 3]]),
        (2, [[0, 1], [2, 3]]),
        (4, [[0], [1], [2], [3]]),
        (8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
    ],
)
def test_ranks_hold_consecutive_heads_and_share_them_when_they_are_more(ranks, held):
    assert [list(rank_heads(4, rank, ranks)) for rank in range(ranks)] == held
    split = mixed_split(3, 4, ranks)
    # every head is full and compressed at once
    assert split.full_counts == (len(held[0]),) * 3
    assert split.full_heads == split.compressed_heads == 3 * len(held[0])
    assert split.order == ((0, 1, 2, 3),) * 3


def test_mixed_heads_take_a_full_cache_and_a_window_each():
    split = mixed_split(6, 4)
    geometry = choose_geometry(split, sink=16, recent=64, context=1024)
    assert (geometry.full_heads, geometry.compressed_heads) == (24, 24)
    assert len(geometry.padded) == 1  # equal pages would make vLLM form other groups
    rows = geometry.block_rows * geometry.blocks(1024)
    assert 24 * (1024 + 80) <= rows <= 1.15 * 24 * (1024 + 80)


def even(full: int, compressed: int, layers: int = 8) -> HeadSplit:
    """Layers that alternate full heads so that totals are ``layers * full`` and so on."""
    return HeadSplit(((0,),) * layers, (full,) * layers, full + compressed, 0)


@pytest.mark.parametrize(
    ("full", "compressed", "sizes"), [(1, 1, (16, 16)), (1, 4, (64, 16)), (4, 1, (16, 64))]
)
def test_block_sizes_make_both_groups_fill_a_block(full, compressed, sizes):
    geometry = choose_geometry(even(full, compressed), sink=16, recent=64, context=4096)
    assert (geometry.full_block, geometry.window_block) == sizes
    # a padded page may add one head, nothing else is unused
    assert geometry.waste <= 1 / (8 * full)


def test_request_blocks_are_counted_by_hand():
    geometry = Geometry(32, 16, 100, sink=16, recent=64, full_heads=3, compressed_heads=3)
    # 16 sink tokens: 1 block; 64 tokens touch at most 5 blocks of 16
    assert geometry.window_blocks(1000) == 6
    assert geometry.window_blocks(40) == 3
    assert geometry.window_blocks(1000, in_flight=256) == 1 + (63 + 256 + 15) // 16 + 1
    assert geometry.full_blocks(1000) == 32
    assert geometry.blocks(1000) == 38


@pytest.mark.parametrize(("sink", "recent"), [(4, 64), (17, 64), (16, 15)])
def test_windows_that_kernels_cannot_cut_are_refused(sink, recent):
    with pytest.raises(ConfigError, match="multiple of 16 and recent at least 16"):
        choose_geometry(even(1, 1), sink=sink, recent=recent, context=4096)


@pytest.mark.parametrize("shape", [(32, 8), (28, 4), (36, 8)])
@pytest.mark.parametrize("sparsity", [0.2, 0.4, 0.5, 0.6, 0.8])
def test_concurrency_comes_within_five_percent_of_theory_at_3000_tokens(shape, sparsity):
    layers, heads = shape
    order = np.random.default_rng(0).permutation(layers * heads)
    full = np.zeros(layers * heads, dtype=bool)
    full[order[: round((1 - sparsity) * layers * heads)]] = True
    split = split_heads(full.reshape(shape), np.zeros(shape, dtype=np.float32))
    geometry = choose_geometry(split, sink=16, recent=64, context=3000)
    dense = layers * heads * 3000
    gain = dense / (geometry.block_rows * geometry.blocks(3000))
    assert gain >= 0.95 / ((1 - sparsity) + sparsity * 80 / 3000)
