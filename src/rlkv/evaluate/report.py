"""Report: rows, gate maps, analyses and surroundings as Markdown, JSON, PNG and one HTML page.

Built from results alone: nothing here needs a model, an accelerator or torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlkv.core.files import to_json, write_atomic
from rlkv.errors import DataError
from rlkv.evaluate.html_report import render_html
from rlkv.evaluate.metrics import example_means, paired_difference
from rlkv.evaluate.records import Record, Row, as_rows, read_records
from rlkv.evaluate.report_files import to_markdown, write_report
from rlkv.evaluate.results import RESULT_FORMAT, EvalResult, profile_summary
from rlkv.evaluate.run_info import RunInfo
from rlkv.evaluate.sections import Chart, Section, section_from_json

RANKED_BY = "rlkv"
"""The method that all others are compared with, where it was run."""


@dataclass(frozen=True, slots=True)
class HeadMap:
    """Scores of all KV heads of one model under one name."""

    label: str
    """Method or file that made them."""
    model: str
    """Model they belong to."""
    scores: tuple[tuple[float, ...], ...]
    """(layers, kv_heads) in [0, 1]."""


@dataclass(frozen=True)
class CellData:
    """What a report needs of one finished cell, from memory or from disk."""

    row: Row
    """Its figures."""
    records: tuple[Record, ...]
    """Its completions; may be empty where only figures are known."""


@dataclass(frozen=True)
class Report:
    """Everything a report shows."""

    title: str
    """Heading."""
    rows: tuple[Row, ...]
    """One per cell."""
    run: RunInfo | None
    """Where it ran; None where unknown."""
    heads: tuple[HeadMap, ...] = ()
    """Gate maps."""
    sections: tuple[Section, ...] = ()
    """Tables after the accuracy table."""

    def all_sections(self) -> list[Section]:
        """The accuracy section and all others."""
        return [accuracy_section(self.rows), *self.sections]

    def to_markdown(self) -> str:
        """The report as Markdown; figures are linked by file name."""
        return to_markdown(self.title, self.all_sections(), self.heads, self.run)

    def to_json(self) -> str:
        """The rows, as ``rlkv eval --json`` prints them."""
        return to_json(as_rows(self.rows))

    def to_html(self) -> str:
        """One page that needs no network and no other file."""
        return render_html(self.title, self.all_sections(), self.heads, self.run)

    def write(self, folder: str | Path, *, figures: bool = True) -> list[Path]:
        """Writes report.md, report.json, report.html, run.json and, if asked, the figures.

        Returns:
            The files written.

        Raises:
            OutputError: The folder cannot be written.
        """
        return write_report(
            folder,
            self.title,
            self.all_sections(),
            heads=self.heads,
            run=self.run,
            rows_json=self.to_json(),
            figures=figures,
        )


def build_report(
    results: Sequence[EvalResult],
    *,
    title: str,
    run: RunInfo,
    heads: Iterable[HeadMap] = (),
    sections: Iterable[Section] = (),
) -> Report:
    """The report of results just made.

    Args:
        results: Finished cells.
        title: Heading.
        run: Where they ran.
        heads: Gate maps to show.
        sections: Further tables.
    """
    cells = [CellData(result.row, result.records) for result in results]
    return Report(
        title,
        tuple(cell.row for cell in cells),
        run,
        tuple(heads),
        (*difference_sections(cells), *sections),
    )


def accuracy_section(rows: Sequence[Row]) -> Section:
    """The main table: one row a cell."""
    fixed = [row.method for row in rows if row.sparsity in (0.0, 1.0)]
    chart = Chart(
        x="sparsity",
        y="accuracy",
        series="method",
        low="ci_low",
        high="ci_high",
        facet=("model", "task"),
        x_label="sparsity (share of KV heads compressed)",
        flat=tuple(dict.fromkeys(fixed)),
    )
    columns = tuple(field.name for field in fields(Row))
    return Section(
        "accuracy",
        "Accuracy over sparsity",
        "Intervals are 95 %: Wilson where every score is 0 or 1, otherwise a bootstrap over "
        "examples. KV bytes are measured when a sequence ends.",
        columns,
        tuple(tuple(asdict(row).values()) for row in rows),
        chart,
    )


def difference_sections(cells: Sequence[CellData]) -> list[Section]:
    """Paired differences of the reference method from every other; none without it."""
    rows = [
        _difference(ours, theirs)
        for ours in cells
        if ours.row.method == RANKED_BY and ours.records
        for theirs in cells
        if _is_comparable(ours.row, theirs.row) and _share_examples(ours, theirs)
    ]
    if not rows:
        return []
    names = ("model", "task", "sparsity", "method", "difference", "low", "high", "verdict")
    note = (
        f"Accuracy of {RANKED_BY} minus that of each method on the same examples, with 95 % "
        "intervals of the paired difference (Newcombe for 0/1 scores, otherwise bootstrap)."
    )
    title = f"{RANKED_BY} against each method"
    return [Section("differences", title, note, names, tuple(rows))]


def _is_comparable(ours: Row, theirs: Row) -> bool:
    """Whether another method ran the same task on the same model with the same budget."""
    same = (theirs.model, theirs.task) == (ours.model, ours.task)
    same_window = (theirs.sink, theirs.recent) == (ours.sink, ours.recent)
    # a full cache has no window; where every head is local, the window is all of the budget
    same_budget = same_window and theirs.sparsity in (ours.sparsity, 1.0)
    return same and theirs.method != RANKED_BY and (theirs.sparsity == 0.0 or same_budget)


def _share_examples(ours: CellData, theirs: CellData) -> bool:
    """Whether some example is in both: runs of two seeds may lie in one folder."""
    return not {r.id for r in ours.records}.isdisjoint(r.id for r in theirs.records)


def _difference(ours: CellData, theirs: CellData) -> tuple[str | float, ...]:
    found = paired_difference(example_means(ours.records), example_means(theirs.records))
    verdict = "no difference shown"
    if found.excludes_zero:
        verdict = f"{RANKED_BY if found.value > 0 else theirs.row.method} better"
    row = ours.row
    numbers = (found.value, found.low, found.high)
    return (row.model, row.task, row.sparsity, theirs.row.method, *numbers, verdict)


def head_map(label: str, profile: Any) -> HeadMap:  # noqa: ANN401 - a HeadProfile or its summary
    """The gate map of a profile, or of the summary that a result carries."""
    summary = profile if isinstance(profile, Mapping) else profile_summary(profile)
    scores = tuple(tuple(float(score) for score in row) for row in summary["scores"])
    return HeadMap(label, str(summary["model"]), scores)


def write_sections(path: Path, sections: Sequence[Section]) -> None:
    """Keeps the analyses of a study, for ``rlkv report``."""
    write_atomic(path, to_json([asdict(section) for section in sections]))


def read_sections(path: Path) -> list[Section]:
    """What :func:`write_sections` wrote; none where there is no such file.

    Raises:
        DataError: The file is damaged.
    """
    if not path.is_file():
        return []
    try:
        return [section_from_json(content) for content in json.loads(path.read_text("utf-8"))]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"cannot read analyses {path} ({error}); run the study again") from error


def report_from_folder(folder: str | Path, title: str | None = None) -> Report:
    """The report of all results below a folder, as ``rlkv eval`` and ``rlkv study`` left them.

    In a study's folder, only the grid makes rows; its analyses are read as they were written.

    Raises:
        DataError: The folder is missing, holds no result, or one cannot be read.
    """
    target = Path(folder)
    if not target.is_dir():
        raise DataError(f"{target} is not a folder, expected one written by `rlkv eval`")
    cells, heads, run = [], {}, None
    grid = target / "cells"
    for path in sorted((grid if grid.is_dir() else target).rglob("*.json")):
        content = read_result(path, required=False)
        if content is None:
            continue
        records = path.with_name(content["records"])
        kept = tuple(read_records(records)) if records.is_file() else ()
        row = Row.from_row(content["row"], str(path))
        cells.append(CellData(row, kept))
        try:
            run = RunInfo(**content["run"])
            if content["profile"]:
                found = head_map(row.method, content["profile"])
                heads[found.model, found.label, found.scores] = found
        except (TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"{path} has a damaged run or profile ({error}), expected what `rlkv eval` writes; "
                "remove the file and run the cell again"
            ) from error
    if not cells:
        raise DataError(f"{target} holds no result of `rlkv eval`; run one with --out {target}")
    cells.sort(key=lambda cell: _place(cell.row))
    maps = sorted(heads.values(), key=lambda one: (one.model, one.label != RANKED_BY, one.label))
    rows = tuple(cell.row for cell in cells)
    sections = (*difference_sections(cells), *read_sections(target / "analyses.json"))
    return Report(title or target.resolve().name, rows, run, tuple(maps), sections)


def _place(row: Row) -> tuple[object, ...]:
    """Sort key: the full cache first, then the reference method, then the others by name."""
    first = (row.method != "full", row.method != RANKED_BY)
    return (row.model, row.task, *first, row.method, row.sparsity, row.sink, row.recent)


_RESULT_KEYS = ("row", "config", "records", "profile", "run")


def read_result(path: str | Path, *, required: bool = True) -> dict[str, Any] | None:
    """The content of a result file.

    Args:
        path: The file.
        required: False returns None where the file is JSON of another kind.

    Raises:
        DataError: The file cannot be read, or is no result.
    """
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"cannot read result {path} ({error}); pass a file written by `rlkv eval`"
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found == RESULT_FORMAT:
        missing = [name for name in _RESULT_KEYS if name not in content]
        if missing:
            raise DataError(
                f"{path} lacks {', '.join(missing)}, expected a whole result; run `rlkv eval` again"
            )
        return content
    if required:
        raise DataError(
            f"{path} has format {found!r}, expected {RESULT_FORMAT}; pass a result file"
        )
    return None
