"""Trackers: the metrics of a run, sent on to tensorboard, wandb or trackio."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Literal

from rlkv.errors import MissingExtraError
from rlkv.train.watch import Watch

TrackerName = Literal["tensorboard", "wandb", "trackio"]


class TrackedWatch:
    """Passes everything to another watch, and each step's numbers to a tracker.

    Args:
        inner: The other watch.
        name: Tracker.
        folder: Output folder of the run; its name is the run's name.
        config: The run's settings, for the tracker's records.

    Raises:
        MissingExtraError: The tracker is not installed.
    """

    def __init__(
        self, inner: Watch, name: TrackerName, folder: Path, config: dict[str, Any]
    ) -> None:
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(
                f"tracking with {name} needs the package {name}, which is not installed; run `pip "
                f"install {name}`, or leave out --track"
            )
        self.inner = inner
        self._writer: Any = None
        self._module: Any = None
        if name == "tensorboard":
            module = importlib.import_module("torch.utils.tensorboard")
            self._writer = module.SummaryWriter(str(folder / "tensorboard"))
        else:
            self._module = importlib.import_module(name)
            self._module.init(project="rlkv", name=folder.name, config=config)

    def step(self, row: dict[str, Any]) -> None:
        """See :class:`~rlkv.train.watch.Watch`."""
        numbers = {
            name: value
            for name, value in row.items()
            if isinstance(value, (int, float)) and name != "step"
        }
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, row["step"])
        else:
            self._module.log(numbers, step=row["step"])
        self.inner.step(row)

    def started(self, steps: int) -> None:
        """See :class:`~rlkv.train.watch.Watch`."""
        self.inner.started(steps)

    def message(self, text: str) -> None:
        """See :class:`~rlkv.train.watch.Watch`."""
        self.inner.message(text)

    def solved(self, kept: int, asked: int) -> None:
        """See :class:`~rlkv.train.watch.Watch`."""
        self.inner.solved(kept, asked)

    def head(self, done: int, heads: int) -> None:
        """See :class:`~rlkv.train.watch.Watch`."""
        self.inner.head(done, heads)

    def finished(self) -> None:
        """See :class:`~rlkv.train.watch.Watch`."""
        if self._writer is not None:
            self._writer.close()
        elif self._module is not None:
            self._module.finish()
            self._module = None
        self.inner.finished()
