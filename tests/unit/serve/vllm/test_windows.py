"""Reordered blocks under a causal sliding window show exactly sink and recent keys."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from rlkv.serve.geometry import UNIT  # noqa: E402
from rlkv.serve.vllm.windows import (  # noqa: E402
    PageShape,
    cut_step,
    spread_tiles,
    tile_tokens,
    unit_slots,
)


def visible_keys(tiles, pool, page, sequence, query_row, window):
    """(position) of every key that a kernel with a causal window shows to one query."""
    start, end = tiles.query_start[sequence], tiles.query_start[sequence + 1]
    slot = int(tiles.seq_lens[sequence] - (end - start) + query_row)
    found = []
    for place in range(max(0, slot - window + 1), slot + 1):
        unit = int(tiles.block_table[sequence, place // UNIT])
        found.append(int(pool[unit * UNIT + place % UNIT]))
    return found


@pytest.mark.parametrize(
    ("sink", "recent", "block"),
    [(16, 64, 16), (16, 64, 96), (0, 16, 32), (48, 20, 16), (32, 200, 64)],
)
def test_every_query_sees_exactly_sink_and_recent(sink, recent, block):
    generator = torch.Generator().manual_seed(0)
    heads, stride = 3, 3 * (block // UNIT) + 5
    page = PageShape(heads, block // UNIT, stride)
    lengths = [(1, 1), (300, 1), (81, 1), (5, 5), (400, 400), (900, 130), (250, 17), (97, 96)]
    seq_lens = torch.tensor([total for total, _ in lengths], dtype=torch.int32)
    new = torch.tensor([count for _, count in lengths])
    width = -(-1000 // block)
    table = torch.randperm(len(lengths) * width, generator=generator).view(len(lengths), width)
    # what the pool holds in each slot: request * 10000 + head * 1000... as one number
    pool = torch.full((len(lengths) * width * stride * UNIT,), -1)
    for request, (total, _) in enumerate(lengths):
        for position in range(total):
            slots = unit_slots(
                table[request, position // block][None] * block + position % block, page
            )
            pool[slots] = torch.arange(heads) * 10**6 + request * 10**4 + position
    # layers with other head counts share the cut
    other = PageShape(1, page.units_per_page, page.units_per_block)
    cut = cut_step(new, seq_lens, table.int(), other, sink=sink, recent=recent)
    tiles = spread_tiles(cut, page)
    tokens = [(r, t - n + i) for r, (t, n) in enumerate(lengths) for i in range(n)]
    for sequence in range(len(tiles.seq_lens)):
        for row in range(int(tiles.query_start[sequence]), int(tiles.query_start[sequence + 1])):
            token, head = divmod(int(tiles.rows[row]), heads)
            request, query = tokens[token]
            expected = [k for k in range(query + 1) if k < sink or query - k < recent]
            within = row - int(tiles.query_start[sequence])
            found = visible_keys(tiles, pool, page, sequence, within, sink + recent)
            assert sorted(found) == [head * 10**6 + request * 10**4 + k for k in expected]


def test_decode_needs_no_row_order():
    page = PageShape(2, 1, 4)
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    lens = torch.tensor([300, 17], dtype=torch.int32)
    cut = cut_step(torch.tensor([1, 1]), lens, table, page, sink=16, recent=64)
    tiles = spread_tiles(cut, page)
    assert tiles.rows is None
    assert tiles.query_start.tolist() == [0, 1, 2, 3, 4]
    assert tiles.longest_query == 1


def test_padding_slots_stay_negative():
    slots = unit_slots(torch.tensor([-1, 35]), PageShape(2, 2, 8))
    # token 35 of 32-token blocks: block 1, offset 3; heads 2 units apart
    assert slots.tolist() == [-1, -1, (8 + 0) * 16 + 3, (8 + 2) * 16 + 3]


@pytest.mark.parametrize(("recent", "expected"), [(16, 1), (20, 5), (31, 16), (64, 48), (500, 128)])
def test_tiles_are_as_long_as_the_window_allows(recent, expected):
    assert tile_tokens(recent) == expected
