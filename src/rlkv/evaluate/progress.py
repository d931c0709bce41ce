"""Live progress on stderr: completions done, accuracy so far, time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from rlkv.evaluate.records import Record


class EvalProgress:
    """One line a cell; a context manager.

    Args:
        enabled: False shows nothing.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("accuracy {task.fields[accuracy]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
            disable=not enabled,
        )
        self._task = self._progress.add_task("", total=None, accuracy="", visible=False)
        self._sum, self._count = 0.0, 0

    def __enter__(self) -> EvalProgress:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start_cell(self, label: str, total: int, done: int) -> None:
        """Opens the line of a cell of ``total`` completions, ``done`` of them found on disk."""
        self._sum, self._count = 0.0, 0
        self._task = self._progress.add_task(label, total=total, completed=done, accuracy="")

    def note(self, record: Record) -> None:
        """Counts one more record of the current cell."""
        self._sum += record.reward
        self._count += 1
        mean = f"{self._sum / self._count:.3f}"
        self._progress.update(self._task, advance=1, accuracy=mean)
