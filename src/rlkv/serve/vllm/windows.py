"""Sink and recent window as a plain causal sliding window, by reordering blocks.

A compressed head lets query q see key k iff ``k <= q and (k < sink or q - k < recent)``. Attention
kernels offer a causal sliding window over a paged cache, but no sinks. Attention does not depend
on the order of the keys, and positions are inside the keys already (they are cached after
rotation), so a query's blocks may be listed in any order. With the order

    [recent blocks before the query's own]  [sink blocks]  [the query's block ...]

the visible keys are exactly the last ``sink + recent`` slots that end at the query: the keys to
hide lie at the far left, and leave the window one by one as the query moves. A prefill chunk is cut
into tiles short enough that the sinks stay inside the window of every query of the tile; a decode
step is a tile of one query. The stock kernel then needs ``window = sink + recent`` and nothing
else: no gather, no copy of keys, no custom kernel, and blocks stay where prefix caching expects
them.

Each (tile, kv head) is one sequence with a single KV head, so that a block may hold any number of
heads and any multiple of ``UNIT`` tokens: kernels address ``UNIT`` tokens of one head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlkv.serve.geometry import UNIT

_LONGEST_TILE = 128
"""Queries of a tile at most: longer ones read more keys per tile but hide more of them."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """Where one layer's compressed heads lie in the pool, counted in units of ``UNIT`` tokens."""

    heads: int
    """Compressed KV heads of the layer on this rank."""
    units_per_page: int
    """Units of one head in one block: block tokens / UNIT."""
    units_per_block: int
    """Units from one block to the next, other layers' pages included."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """One scheduler step's queries, cut into tiles, as kernel arguments.

    A sequence is one (tile, head); there are ``tiles * heads`` of them.
    """

    block_table: torch.Tensor
    """(sequences, units) int32: unit of the pool at each place of the reordered sequence."""
    seq_lens: torch.Tensor
    """(sequences,) int32: slots up to the tile's last query, hidden ones at the left included."""
    query_start: torch.Tensor
    """(sequences + 1,) int32: first query row of each sequence."""
    rows: torch.Tensor | None
    """(tokens * heads,) int64: row (token * heads + head) of each query row; None if in order."""
    longest_query: int
    """Queries of the longest tile."""


def tile_tokens(recent: int) -> int:
    """Queries per tile: the sinks must stay inside the window of the last one."""
    longest = min(recent - UNIT + 1, _LONGEST_TILE)
    return longest - longest % UNIT if longest > UNIT else longest


@dataclass(frozen=True, slots=True)
class Cut:
    """One scheduler step cut into tiles, before they are spread over a layer's heads."""

    units: torch.Tensor
    """(tiles, width) int64: unit of the pool at each place, for a layer's first head."""
    kernel_lens: torch.Tensor
    """(tiles,) int32: slots up to the tile's last query."""
    tile_lens: torch.Tensor
    """(tiles,) int64 on the CPU: queries of each tile."""
    longest: int
    """Queries of the longest tile."""
    is_decode: bool
    """Every tile is the single query of one request, in the batch's order."""


def cut_step(
    query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    page: PageShape,
    *,
    sink: int,
    recent: int,
) -> Cut:
    """Cuts each request's new tokens into tiles and lists the units that each tile reads.

    Nothing of it depends on ``page.heads``: layers with other head counts can share it.

    Args:
        query_lens: (requests,) int64 on the CPU: new tokens of each request.
        seq_lens: (requests,) int32: all tokens of each request, the new ones included.
        block_table: (requests, blocks) int32: the pool block of each logical block.
        page: Page shape of the layers that share the pool.
        sink: First tokens that stay visible, a multiple of ``UNIT``.
        recent: Last tokens that stay visible, at least ``UNIT``.
    """
    device = seq_lens.device
    first = seq_lens.long() - query_lens.to(device)
    longest, tile_lens = int(query_lens.max()), query_lens
    is_decode = longest == 1
    if not is_decode:
        request, offset, tile_lens = _tile_table(query_lens, tile_tokens(recent))
        request = request.to(device)
        first = first[request] + offset.to(device)
        block_table = block_table[request]
        longest = int(tile_lens.max())
    units, lens = _order_units(first, tile_lens.to(device), longest, sink=sink, recent=recent)
    block = torch.gather(block_table.long(), 1, units // page.units_per_page)
    pool = block * page.units_per_block + units % page.units_per_page
    return Cut(pool, lens.to(torch.int32), tile_lens, longest, is_decode)


def spread_tiles(cut: Cut, page: PageShape) -> Tiles:
    """The tiles of a step for one layer: one sequence for each tile and head.

    Args:
        cut: The step.
        page: Page shape of the layer.
    """
    device, heads = cut.units.device, page.heads
    offsets = torch.arange(heads, device=device) * page.units_per_page
    units = cut.units[:, None, :] + offsets[None, :, None]
    table = units.reshape(-1, units.shape[-1]).to(torch.int32)
    seq_lens = cut.kernel_lens.repeat_interleave(heads)
    if cut.is_decode:
        starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=device)
        return Tiles(table, seq_lens, starts, None, 1)
    starts = torch.zeros(len(seq_lens) + 1, dtype=torch.int32, device=device)
    torch.cumsum(cut.tile_lens.to(device).repeat_interleave(heads), 0, out=starts[1:])
    rows = _rows(cut.tile_lens, heads).to(device)
    return Tiles(table, seq_lens, starts, rows, cut.longest)


def unit_slots(slots: torch.Tensor, page: PageShape) -> torch.Tensor:
    """Slots of new keys, (tokens,) in block tokens, as (tokens * heads,) slots in unit tokens."""
    block_tokens = page.units_per_page * UNIT
    block, offset = slots // block_tokens, slots % block_tokens
    unit = block * page.units_per_block + offset // UNIT
    heads = torch.arange(page.heads, device=slots.device) * page.units_per_page
    found = (unit[:, None] + heads) * UNIT + (offset % UNIT)[:, None]
    # negative slots mark padding and must stay negative
    return torch.where(slots[:, None] < 0, slots[:, None], found).reshape(-1)


def _tile_table(
    query_lens: torch.Tensor, tile: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Request, first token within the request's new tokens, and length of every tile."""
    counts = (query_lens + tile - 1) // tile
    request = torch.repeat_interleave(torch.arange(len(counts)), counts)
    ends = torch.cumsum(counts, 0)
    offset = (torch.arange(len(request)) - (ends - counts)[request]) * tile
    return request, offset, torch.clamp(query_lens[request] - offset, max=tile)


def _rows(tile_lens: torch.Tensor, heads: int) -> torch.Tensor:
    """Row token * heads + head of every query row when tiles, then heads, then tokens follow."""
    starts = torch.cumsum(tile_lens, 0) - tile_lens
    lens = tile_lens.repeat_interleave(heads)
    head = torch.arange(heads).repeat(len(tile_lens))
    begin = torch.cumsum(lens, 0) - lens
    within = torch.arange(int(lens.sum())) - begin.repeat_interleave(lens)
    token = starts.repeat_interleave(heads).repeat_interleave(lens) + within
    return token * heads + head.repeat_interleave(lens)


def _order_units(
    first: torch.Tensor, lens: torch.Tensor, longest: int, *, sink: int, recent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logical units of each tile in reading order, and its kernel length in slots.

    Args:
        first: (tiles,) int64: position of each tile's first query.
        lens: (tiles,) int64: queries of each tile.
        longest: Queries of the longest tile; a number, so that a GPU need not be waited for.
        sink: First tokens that stay visible.
        recent: Last tokens that stay visible.

    Returns:
        (tiles, width) int64 units, the last one repeated past the end, and (tiles,) int64 lengths.
    """
    sink_units = sink // UNIT
    own = torch.clamp(first // UNIT, min=sink_units)
    lead_first = torch.clamp((first - recent + 1) // UNIT, min=sink_units)
    lead = torch.clamp(own - lead_first, min=0)
    last = first + lens - 1
    width = (recent - 1) // UNIT + 2 + sink_units + (longest + UNIT - 2) // UNIT + 1
    place = torch.arange(width, device=first.device)[None, :]
    lead, own, lead_first = lead[:, None], own[:, None], lead_first[:, None]
    units = torch.where(place < lead, lead_first + place, place - lead)
    units = torch.where(place >= lead + sink_units, own + place - lead - sink_units, units)
    units = torch.minimum(units, (last // UNIT)[:, None])
    return units, (lead[:, 0] * UNIT + sink + last - own[:, 0] * UNIT + 1)
