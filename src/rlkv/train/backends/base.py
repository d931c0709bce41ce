"""Backend: runs calls of a :class:`~rlkv.train.worker.Worker` and hands results back in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

Call = Literal["unit", "sample", "policy_gradient", "distill", "kl", "evaluate"]
"""Methods of a worker that a backend may call."""


class Backend(Protocol):
    """Runs units of work; which worker runs which one never shows in a result."""

    workers: int
    """Calls that can run at the same time."""
    cpu_seconds: float
    """CPU time that calls have spent so far outside this process."""

    def map(self, call: Call, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Results of ``worker.call(*a)`` for each ``a``, in order.

        Raises:
            RLKVError: A worker failed for good.
        """
        ...

    def close(self) -> None:
        """Lets workers go."""
        ...
