"""metrics.jsonl: one row a step, cut back to the checkpoint when a run is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlkv.core.files import append_jsonl, read_jsonl, to_json, write_atomic

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """The metrics of one run.

    Args:
        folder: Output folder; None keeps rows in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / FILE_NAME if folder else None
        self.rows: list[dict[str, Any]] = []

    def start(self, steps: int) -> None:
        """Keeps the rows of the first ``steps`` steps of an earlier run, drops all later ones."""
        if self.path is None:
            return
        if self.path.is_file() and steps:
            content = self.path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]  # a kill may have cut the last line
            write_atomic(self.path, whole)
            self.rows = [row for row in read_jsonl(self.path) if row["step"] <= steps]
        write_atomic(self.path, "".join(to_json(row, indent=None) for row in self.rows))

    def add(self, row: dict[str, Any]) -> None:
        """Appends one step."""
        self.rows.append(row)
        if self.path is not None:
            append_jsonl(self.path, row)
