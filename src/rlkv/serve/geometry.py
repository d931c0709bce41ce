"""How full and compressed KV heads share one pool of equal blocks.

vLLM hands out blocks of one size in bytes. A block belongs to one group at a time: to the full
heads, where it holds ``full_block`` tokens of every full head, or to the compressed heads, where it
holds ``window_block`` tokens of every compressed head. This module decides which heads go where on
each tensor-parallel rank, picks the two token counts so that little of a block is wasted, and says
how many blocks a request needs. It imports neither torch nor vLLM, so that `rlkv plan` can answer
before anything loads.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlkv.errors import ConfigError, UnsupportedFeatureError

UNIT = 16
"""Tokens of the smallest block that attention kernels accept; windows are cut at this grain."""
_TYPICAL_CONTEXT = 4096
"""Tokens of a typical request, for which block sizes are tuned when the limit is higher."""
_LARGEST_HIT_STEP = 256
"""Prefix-cache hits come in steps of the least common multiple of both block sizes, in tokens."""


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Which KV heads are full, as one tensor-parallel rank sees it."""

    order: tuple[tuple[int, ...], ...]
    """Per layer: model KV heads in the order of the ranks, full heads first within each rank."""
    full_counts: tuple[int, ...]
    """Per layer: full KV heads on one rank; the same on every rank."""
    heads_per_rank: int
    """KV heads of one layer on one rank."""
    added_full_heads: int
    """Heads of the whole model that became full so that every rank has as many."""
    is_mixed: bool = False
    """Whether every head is both: it keeps the whole past, and its sink and window once more."""

    @property
    def full_heads(self) -> int:
        """Full heads of all layers on one rank."""
        return sum(self.full_counts)

    @property
    def compressed_heads(self) -> int:
        """Compressed heads of all layers on one rank."""
        return sum(self.compressed_in(layer) for layer in range(len(self.full_counts)))

    def compressed_in(self, layer: int) -> int:
        """Compressed heads of one layer on one rank."""
        return self.heads_per_rank - (0 if self.is_mixed else self.full_counts[layer])


def split_heads(full: NDArray[np.bool_], scores: NDArray[np.float32], ranks: int = 1) -> HeadSplit:
    """Spreads the full heads of each layer evenly over tensor-parallel ranks.

    vLLM demands the same layout on every rank, so a layer's count of full heads is rounded up to a
    multiple of ``ranks``; the best-scored compressed heads fill the gap. With fewer heads than
    ranks, heads are replicated and a layer is full or compressed as a whole.

    Args:
        full: (layers, kv_heads) bool, True for a full head.
        scores: (layers, kv_heads) float32, higher means keep.
        ranks: Tensor-parallel size.

    Raises:
        UnsupportedFeatureError: The heads do not divide over the ranks.
    """
    layers, heads = full.shape
    per_rank = len(rank_heads(heads, 0, ranks))
    step = heads // per_rank
    order: list[tuple[int, ...]] = []
    counts: list[int] = []
    added = 0
    for layer in range(layers):
        wanted = int(full[layer].sum())
        rounded = math.ceil(wanted / step) * step
        # full heads first, then compressed ones by score: the next best are promoted
        ranked = sorted(
            range(heads), key=lambda h: (not full[layer, h], -float(scores[layer, h]), h)
        )
        kept, rest = sorted(ranked[:rounded]), sorted(ranked[rounded:])
        order.append(_interleave(kept, rest, step))
        counts.append(rounded // step)
        added += rounded - wanted
    return HeadSplit(tuple(order), tuple(counts), per_rank, added)


def mixed_split(layers: int, heads: int, ranks: int = 1) -> HeadSplit:
    """All heads full and compressed at once, in the model's own order.

    Args:
        layers: Layers of the model.
        heads: KV heads of one layer.
        ranks: Tensor-parallel size.

    Raises:
        UnsupportedFeatureError: The heads do not divide over the ranks.
    """
    per_rank = len(rank_heads(heads, 0, ranks))
    order = (tuple(range(heads)),) * layers
    return HeadSplit(order, (per_rank,) * layers, per_rank, 0, is_mixed=True)


def rank_heads(heads: int, rank: int, ranks: int) -> range:
    """KV heads of a layer that one tensor-parallel rank holds, in the model's own order.

    Args:
        heads: KV heads of the layer.
        rank: Which rank, in [0, ranks).
        ranks: Tensor-parallel size; with more ranks than heads, neighbours hold the same head.

    Raises:
        UnsupportedFeatureError: The heads do not divide over the ranks.
    """
    if max(heads, ranks) % min(heads, ranks):
        raise UnsupportedFeatureError(
            f"{heads} kv heads do not divide over {ranks} tensor-parallel ranks; use a size that "
            f"divides {heads}"
        )
    count = max(1, heads // ranks)
    first = rank * heads // ranks
    return range(first, first + count)


def _interleave(full: list[int], compressed: list[int], ranks: int) -> tuple[int, ...]:
    """Head order in which each rank's slice holds its full heads, then its compressed ones."""
    full_step, rest_step = len(full) // ranks, len(compressed) // ranks
    order: list[int] = []
    for rank in range(ranks):
        order += full[rank * full_step : (rank + 1) * full_step]
        order += compressed[rank * rest_step : (rank + 1) * rest_step]
    return tuple(order)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Block sizes of the two groups, and what a request takes from the shared pool."""

    full_block: int
    """Tokens in a block of the full heads."""
    window_block: int
    """Tokens in a block of the compressed heads."""
    block_rows: int
    """Size of a block, counted in keys and values of one head and token."""
    sink: int
    """First tokens that a compressed head keeps."""
    recent: int
    """Last tokens that a compressed head keeps, the current one included."""
    full_heads: int
    """Full heads of all layers on one rank."""
    compressed_heads: int
    """Compressed heads of all layers on one rank."""
    padded: tuple[tuple[str, int], ...] = ()
    """("full" or "window", layer) whose page is padded by one head, see ``_choose_padding``."""

    def full_blocks(self, tokens: int) -> int:
        """Blocks that the full heads of a request of ``tokens`` tokens hold."""
        return math.ceil(tokens / self.full_block) if self.full_heads else 0

    def window_blocks(self, tokens: int, in_flight: int = 0) -> int:
        """Most blocks that the compressed heads of one request hold.

        Args:
            tokens: Length of the request.
            in_flight: Tokens of a prefill chunk being computed beside the window; 0 in decode.
        """
        if not self.compressed_heads:
            return 0
        steady = math.ceil(self.sink / self.window_block)
        steady += math.ceil((self.recent - 1 + in_flight) / self.window_block) + 1
        return min(math.ceil(tokens / self.window_block), steady)

    def blocks(self, tokens: int) -> int:
        """Blocks of one decoding request of ``tokens`` tokens."""
        return self.full_blocks(tokens) + self.window_blocks(tokens)

    @property
    def waste(self) -> float:
        """Share of a full heads' block that no token uses, in [0, 1)."""
        if not self.full_heads:
            return 0.0
        return 1.0 - self.full_heads * self.full_block / self.block_rows


def choose_geometry(
    split: HeadSplit, *, sink: int, recent: int, context: int, unit: int = UNIT
) -> Geometry:
    """The block sizes with which a request of ``context`` tokens takes the fewest bytes.

    Args:
        split: Head counts of one rank.
        sink: First tokens kept; a multiple of ``UNIT``.
        recent: Last tokens kept, the current one included; at least ``UNIT``.
        context: Longest request, in tokens.
        unit: Full heads' block sizes are multiples of this many tokens.

    Raises:
        ConfigError: The window does not fit the kernels' grain.
    """
    require_window(sink, recent)
    typical = max(1, min(context, _TYPICAL_CONTEXT))
    full, compressed = split.full_heads, split.compressed_heads

    def cost(sizes: tuple[int, int]) -> tuple[float, int, int]:
        full_block, window_block = sizes
        rows = max(full * full_block, compressed * window_block)
        geometry = Geometry(full_block, window_block, rows, sink, recent, full, compressed)
        # the last block of the full heads is half empty on average
        held = typical / full_block + 0.5 if full else 0.0
        held += geometry.window_blocks(typical)
        return rows * held, math.lcm(full_block, window_block), full_block

    steps = range(1, 17)
    pairs = [(unit * i, UNIT * j) for i in steps for j in steps]
    allowed = [pair for pair in pairs if math.lcm(*pair) <= _LARGEST_HIT_STEP]
    full_block, window_block = min(allowed, key=cost)
    padded = _choose_padding(split, full_block, window_block)
    return Geometry(
        full_block,
        window_block,
        _block_rows(split, full_block, window_block, padded),
        sink,
        recent,
        full,
        compressed,
        padded,
    )


def require_window(sink: int, recent: int) -> None:
    """Checks that the kernels' grain allows a window.

    Raises:
        ConfigError: It does not.
    """
    if sink % UNIT or recent < UNIT:
        raise ConfigError(
            f"sink {sink} and recent {recent} cannot be served: attention kernels read blocks of "
            f"{UNIT} tokens, so sink must be a multiple of {UNIT} and recent at least {UNIT}"
        )


def _pages(
    split: HeadSplit, full_block: int, window_block: int, padded: tuple[tuple[str, int], ...]
) -> tuple[dict[int, int], dict[int, int]]:
    """Rows of each layer's page in the full and in the window group; absent when it has none."""
    full: dict[int, int] = {}
    window: dict[int, int] = {}
    for layer, count in enumerate(split.full_counts):
        rest = split.compressed_in(layer)
        if count:
            full[layer] = (count + (("full", layer) in padded)) * full_block
        if rest:
            window[layer] = (rest + (("window", layer) in padded)) * window_block
    return full, window


def _block_rows(
    split: HeadSplit, full_block: int, window_block: int, padded: tuple[tuple[str, int], ...]
) -> int:
    full, window = _pages(split, full_block, window_block, padded)
    return max(sum(full.values()), sum(window.values()))


def _choose_padding(
    split: HeadSplit, full_block: int, window_block: int
) -> tuple[tuple[str, int], ...]:
    """Pages to pad by one head so that vLLM forms exactly one group of each kind.

    vLLM takes layers whose page sizes occur equally often for a repeating pattern and cuts their
    group into several; a single odd page breaks the pattern. Regular profiles (every layer half
    full) need this, trained ones hardly ever.
    """
    candidates: list[tuple[tuple[str, int], ...]] = [()]
    singles = [
        (kind, layer)
        for kind, pages in zip(
            ("full", "window"), _pages(split, full_block, window_block, ()), strict=True
        )
        for layer in pages
    ]
    candidates += [(single,) for single in singles]
    candidates += [(a, b) for a in singles for b in singles if a[0] < b[0]]
    for padded in candidates:
        full, window = _pages(split, full_block, window_block, padded)
        if _forms_two_groups(list(full.values()), list(window.values())):
            return padded
    return ()


def _forms_two_groups(full: list[int], window: list[int]) -> bool:
    """Whether vLLM's packing keeps each list of pages in one group (a single kind always is)."""
    if not full or not window:
        return True
    if len({*full, *window}) == 1:
        return False
    repeats: list[tuple[int, bool, bool]] = []
    for pages in (full, window):
        counts = Counter(pages)
        repeats.append((max(counts.values()), len(set(counts.values())) == 1, len(counts) > 1))
    floor = max((most for most, balanced, mixed in repeats if balanced and mixed), default=0)
    # groups are cut only when some balanced list mixes page sizes, and then down to its count
    return not floor or all(most <= floor for most, balanced, _ in repeats if balanced)
