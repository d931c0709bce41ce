"""Watch: who is told about a run's progress; the live table on stderr is one."""

from __future__ import annotations

from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Watch(Protocol):
    """Receives a run's progress."""

    def started(self, steps: int) -> None:
        """A run of at most ``steps`` steps begins."""

    def message(self, text: str) -> None:
        """Something worth a line."""

    def solved(self, kept: int, asked: int) -> None:
        """Solutions found so far, and problems tried."""

    def step(self, row: dict[str, Any]) -> None:
        """A step was made; ``row`` as in metrics.jsonl."""

    def head(self, done: int, heads: int) -> None:
        """``done`` of ``heads`` heads were measured."""

    def finished(self) -> None:
        """The run is over."""


class NoWatch:
    """Tells nobody."""

    def started(self, steps: int) -> None:
        """See :class:`Watch`."""

    def message(self, text: str) -> None:
        """See :class:`Watch`."""

    def solved(self, kept: int, asked: int) -> None:
        """See :class:`Watch`."""

    def step(self, row: dict[str, Any]) -> None:
        """See :class:`Watch`."""

    def head(self, done: int, heads: int) -> None:
        """See :class:`Watch`."""

    def finished(self) -> None:
        """See :class:`Watch`."""


NO_WATCH = NoWatch()


class LiveWatch:
    """A progress line on stderr, with one printed line each time the binary model is measured.

    Args:
        console: Where to print; default: stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
        )
        self._line = self._bar.add_task("starting", total=1)
        self._last = 0, 0.0
        self._alarm: str | None = None

    def started(self, steps: int) -> None:
        """See :class:`Watch`."""
        self._bar.update(self._line, total=steps, description="training")
        self._bar.start()

    def message(self, text: str) -> None:
        """See :class:`Watch`."""
        self.console.print(text, style="dim")

    def solved(self, kept: int, asked: int) -> None:
        """See :class:`Watch`."""
        self.console.print(f"solved {kept} of {asked} training problems", style="dim")

    def step(self, row: dict[str, Any]) -> None:
        """See :class:`Watch`."""
        tokens = row["generated_tokens"] + row["trained_tokens"]
        seconds = max(row["seconds"] - self._last[1], 1e-9)
        speed = (tokens - self._last[0]) / seconds
        self._last = tokens, row["seconds"]
        reward = "" if row["reward"] is None else f" reward {row['reward']:.2f}"
        text = (
            f"{row['phase']}{reward} gate {row['mean_gate']:.2f} "
            f"under half {row['under_half']:.0%} {speed:,.0f} tok/s"
        )
        self._bar.update(self._line, completed=row["step"], description=text)
        if row["binary_reward"] is not None:
            self.console.print(f"step {row['step']}: {text} binary {row['binary_reward']:.2f}")
        if row["alarm"] and row["alarm"] != self._alarm:
            self._alarm = row["alarm"]
            self.console.print(row["alarm"], style="bold red")

    def head(self, done: int, heads: int) -> None:
        """See :class:`Watch`."""
        self._bar.update(self._line, total=heads, completed=done, description="leave one head out")

    def finished(self) -> None:
        """See :class:`Watch`."""
        self._bar.stop()
