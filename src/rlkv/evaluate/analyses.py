"""Analyses of finished cells and of profiles: tables that need no model.

Overlap of head rankings, shift of response length, kinds of error, and bytes held against the
budget. Each returns a :class:`Section`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlkv.core.budget import round_half_up
from rlkv.core.head_profile import HeadProfile
from rlkv.errors import DataError
from rlkv.evaluate.error_types import diagnose
from rlkv.evaluate.metrics import bootstrap_interval
from rlkv.evaluate.records import Record
from rlkv.evaluate.report import CellData
from rlkv.evaluate.sections import Section

OVERLAP_SHARES = (0.25, 0.5)
_GENERATED = ("stop", "length")


def spearman(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Spearman's rank correlation of two score tables of one shape; ties share their mean rank.

    Raises:
        DataError: The shapes differ, or a table has one value only.
    """
    if a.shape != b.shape:
        raise DataError(f"scores of shapes {a.shape} and {b.shape} cannot be compared")
    ranks_a, ranks_b = _mean_ranks(a), _mean_ranks(b)
    spread = ranks_a.std() * ranks_b.std()
    if spread == 0:
        raise DataError("all heads have the same score, so there is no ranking to compare")
    centered = (ranks_a - ranks_a.mean()) * (ranks_b - ranks_b.mean())
    return float(centered.mean() / spread)


def top_overlap(a: HeadProfile, b: HeadProfile, share: float) -> float:
    """Share of the best round(share · L·H) heads of ``a`` that are also among the best of ``b``.

    Args:
        a: One profile.
        b: Another of the same shape.
        share: Share of heads taken, in (0, 1].
    """
    count = round_half_up(share * a.spec.num_heads)
    if count < 1:
        raise DataError(f"a share of {share} of {a.spec.num_heads} heads is less than one head")
    return len(set(a.ranking()[:count]) & set(b.ranking()[:count])) / count


def overlap_section(
    profiles: Mapping[str, HeadProfile], shares: Sequence[float] = OVERLAP_SHARES
) -> Section:
    """How much rankings agree, for each pair of profiles of one shape.

    Args:
        profiles: Profiles by name: of several methods, tasks, or models of one shape.
        shares: Shares of best heads whose overlap is given; by chance it equals the share.
    """
    rows: list[tuple[str | float | None, ...]] = []
    for (name_a, a), (name_b, b) in itertools.combinations(profiles.items(), 2):
        if a.spec.shape != b.spec.shape:
            continue
        overlaps = [top_overlap(a, b, share) for share in shares]
        try:
            correlation: float | None = spearman(a.scores, b.scores)
        except DataError:
            correlation = None
        rows.append((name_a, name_b, correlation, *overlaps))
    names = tuple(f"top {share:.0%} overlap" for share in shares)
    chance = ", ".join(f"{share:.2f}" for share in shares)
    note = (
        "Spearman's rank correlation of head scores, and the share of best heads that two rankings "
        f"have in common (by chance: {chance})."
    )
    return Section(
        "overlap", "Overlap of head rankings", note, ("a", "b", "spearman", *names), tuple(rows)
    )


def length_section(cells: Sequence[CellData]) -> Section | None:
    """Completion length against the full cache, on examples that both solve; None without any.

    Comparing all examples would flatter methods that only solve short ones.
    """
    rows: list[tuple[str | float | int | None, ...]] = []
    for full, cell in _with_full(cells):
        lengths_full, lengths = _solved_lengths(full.records), _solved_lengths(cell.records)
        shared = [key for key in lengths if key in lengths_full]
        head = (*_name(cell), cell.row.tokens_mean, len(shared))
        if not shared:
            rows.append((*head, None, None, None))
            continue
        ratios = [lengths[key] / lengths_full[key] for key in shared]
        found = bootstrap_interval(ratios)
        rows.append((*head, found.value, found.low, found.high))
    if not rows:
        return None
    columns = ("model", "task", "method", "sparsity", "tokens_mean", "solved by both")
    note = (
        "Mean ratio of completion length to that of the full cache, over the examples that both "
        "solve, with 95 % bootstrap intervals; over 1 means longer answers."
    )
    return Section(
        "length", "Response length", note, (*columns, "ratio", "low", "high"), tuple(rows)
    )


def error_section(cells: Sequence[CellData]) -> Section | None:
    """What went wrong, as shares of all completions of generated tasks; None without any."""
    rows: list[tuple[str | float | int, ...]] = []
    for cell in cells:
        generated = [r for r in cell.records if r.finish_reason in _GENERATED]
        if not generated:
            continue
        kinds = Counter(_error_of(record) for record in generated)
        n = len(generated)
        silent = sum(record.reason == "no_answer" for record in generated) / n
        names = ("correct", "repetition", "overlength", "incorrect")
        rows.append((*_name(cell), n, *(kinds[name] / n for name in names), silent))
    if not rows:
        return None
    columns = ("model", "task", "method", "sparsity", "completions")
    note = (
        "Shares of completions. A wrong one is repetition if its text ends in a loop, else "
        "overlength if it reached the limit, else incorrect; no_answer overlaps with these."
    )
    names = (*columns, "correct", "repetition", "overlength", "incorrect", "no_answer")
    return Section("errors", "What went wrong", note, names, tuple(rows))


def bytes_section(cells: Sequence[CellData]) -> Section | None:
    """Measured KV bytes over the full cache's and over the budget's; None without records."""
    rows: list[tuple[str | float | int | None, ...]] = []
    for cell in cells:
        held = [r.kv_bytes / r.full_bytes for r in cell.records if r.full_bytes]
        if not held:
            continue
        allowed = [r.kv_bytes / r.budget_bytes for r in cell.records if r.budget_bytes]
        of_budget = (sum(allowed) / len(allowed), max(allowed)) if allowed else (None, None)
        rows.append((*_name(cell), sum(held) / len(held), max(held), *of_budget))
    if not rows:
        return None
    note = (
        "KV bytes that a sequence held when it ended, over those of a full cache of its length, "
        "and over what the budget allows at its length. Short sequences hold a larger share, so "
        "methods whose answers differ in length are compared by the share of the budget."
    )
    shares = ("share_mean", "share_max", "of_budget_mean", "of_budget_max")
    names = ("model", "task", "method", "sparsity", *shares)
    return Section("bytes", "Measured memory", note, names, tuple(rows))


def _with_full(cells: Sequence[CellData]) -> list[tuple[CellData, CellData]]:
    """Each cell of a generated task beside the full cache's on the same examples."""
    full = {
        (cell.row.model, cell.row.task): cell
        for cell in cells
        if cell.row.method == "full" and any(r.finish_reason in _GENERATED for r in cell.records)
    }
    return [
        (full[cell.row.model, cell.row.task], cell)
        for cell in cells
        if cell.row.method != "full" and (cell.row.model, cell.row.task) in full
    ]


def _solved_lengths(records: Sequence[Record]) -> dict[tuple[str, int], int]:
    return {(r.id, r.sample): r.tokens for r in records if r.reward == 1.0 and r.tokens}


def _name(cell: CellData) -> tuple[str, str, str, float]:
    return (cell.row.model, cell.row.task, cell.row.method, cell.row.sparsity)


def _error_of(record: Record) -> str:
    if record.reward == 1.0:
        return "correct"
    return diagnose(record.completion, finish_reason=record.finish_reason).error


def _mean_ranks(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rank of each value from 0; equal values share the mean of their ranks."""
    flat = scores.reshape(-1)
    _, inverse, counts = np.unique(flat, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means = ends - (counts + 1) / 2
    return means[inverse.reshape(-1)]
