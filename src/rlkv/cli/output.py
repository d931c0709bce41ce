"""Printing rows: one JSON list for programs, a table for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from rlkv.core.files import to_json

Row = Mapping[str, object]


def print_rows(rows: Sequence[Row], *, as_json: bool, title: str = "") -> None:
    """Writes flat rows to stdout.

    Args:
        rows: Rows with the same keys in the same order.
        as_json: One JSON list instead of a table.
        title: Heading of the table.
    """
    if as_json:
        print(to_json([dict(row) for row in rows]), end="")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for name in rows[0] if rows else ():
        table.add_column(name, justify="right" if _is_number(rows[0][name]) else "left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    # rich leaves bold and italics in place under NO_COLOR, which are escape codes as well
    plain = bool(os.environ.get("NO_COLOR"))
    console = Console(color_system=None if plain else "auto")
    if not console.is_terminal:  # a pipe has no width of its own: leave cells whole there
        console.width = 200
    console.print(table)


def print_progress(line: str) -> None:
    """Writes one line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
