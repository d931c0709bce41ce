"""Section: one table of a report, with a chart where it has one.

The accuracy table, the differences and every analysis are sections, so Markdown, HTML and figures
treat all of them alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Chart:
    """How a section's rows become lines: column names."""

    x: str
    """Column of the horizontal axis, numeric."""
    y: str
    """Column of the vertical axis, numeric."""
    series: str
    """Column that tells lines apart."""
    low: str | None = None
    """Column with the lower end of y's interval."""
    high: str | None = None
    """Column with the upper end."""
    facet: tuple[str, ...] = ()
    """Columns of which each combination gets a chart of its own."""
    x_label: str = ""
    """Axis title; default: the column."""
    y_label: str = ""
    """Axis title; default: the column."""
    flat: tuple[str, ...] = ()
    """Series drawn as level lines because x does not apply to them."""
    marks: bool = True
    """Whether points have marks; curves of many points have none."""


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table."""

    key: str
    """Short name, for file names."""
    title: str
    """Heading."""
    note: str
    """What the table says and how it was made, in a sentence or two."""
    columns: tuple[str, ...]
    """Column names."""
    rows: tuple[tuple[Cell, ...], ...]
    """Cells, one tuple a row."""
    chart: Chart | None = None
    """Chart of the rows."""
    in_markdown: bool = True
    """Whether the Markdown report prints the table; long curves are shown as charts alone."""

    def records(self) -> list[dict[str, Cell]]:
        """Rows as dictionaries."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def section_from_json(content: Mapping[str, Any]) -> Section:
    """The section that ``asdict`` turned into JSON."""
    chart = content["chart"]
    if chart is not None:
        chart = Chart(**{**chart, "facet": tuple(chart["facet"]), "flat": tuple(chart["flat"])})
    rows = tuple(tuple(row) for row in content["rows"])
    return Section(
        **{**content, "columns": tuple(content["columns"]), "rows": rows, "chart": chart}
    )


def facets(section: Section) -> list[tuple[str, list[dict[str, Cell]]]]:
    """(title, rows) of each chart of a section, in order of first appearance."""
    chart = section.chart
    if chart is None:
        return []
    found: dict[str, list[dict[str, Cell]]] = {}
    for row in section.records():
        title = " · ".join(str(row[name]) for name in chart.facet)
        found.setdefault(title, []).append(row)
    return list(found.items())


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A Markdown table; numbers are rounded for reading.

    Example:
        >>> print(markdown_table(["a", "b"], [[1, 0.25]]))
        | a | b |
        | --- | ---: |
        | 1 | 0.250 |
    """
    numeric = [any(isinstance(row[i], float) for row in rows) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join("---:" if flag else "---" for flag in numeric) + " |",
    ]
    lines += ["| " + " | ".join(format_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def format_cell(cell: Cell) -> str:
    """A cell for reading: three decimals under 100, whole numbers above."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        if cell != cell:
            return ""
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3f}"
    # a bar would end the cell
    return str(cell).replace("|", "\\|").replace("\n", " ")
