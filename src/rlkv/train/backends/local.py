"""In-process backend: one worker, one call after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlkv.train.backends.base import Call
from rlkv.train.worker import Worker


class LocalBackend:
    """Runs every call in this process.

    Args:
        worker: The model.
    """

    workers = 1
    cpu_seconds = 0.0

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def map(self, call: Call, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See :class:`~rlkv.train.backends.base.Backend`."""
        method = getattr(self.worker, call)
        return [method(*each) for each in arguments]

    def close(self) -> None:
        """Nothing to let go of."""
