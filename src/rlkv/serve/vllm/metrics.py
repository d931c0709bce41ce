"""KV bytes of full and of compressed heads in the server's ``/metrics``.

The block manager lives in the engine's process, ``/metrics`` in the API server's. Both were started
from one process, which names a small file in an environment variable that children inherit: the
manager writes three numbers there after every change, the collector reads them when asked. Without
the plugin's settings no file is made and no metric appears.
"""

from __future__ import annotations

import atexit
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_VARIABLE = "RLKV_KV_USAGE_FILE"
_FORMAT = struct.Struct("<3q")


@dataclass(frozen=True, slots=True)
class KVUsage:
    """What requests hold of the KV pool."""

    full_bytes: int
    """Bytes in blocks of full heads, all ranks together."""
    compressed_bytes: int
    """Bytes in blocks of compressed heads, all ranks together."""
    requests: int
    """Requests that hold blocks."""


class UsageWriter:
    """Writes usage into the shared file; does nothing when no server asked for it."""

    def __init__(self) -> None:
        name = os.environ.get(_VARIABLE)
        self._memory: mmap.mmap | None = None
        if name:
            with Path(name).open("w+b") as file:
                file.truncate(_FORMAT.size)
                self._memory = mmap.mmap(file.fileno(), _FORMAT.size)

    def write(self, usage: KVUsage) -> None:
        """Replaces the numbers."""
        if self._memory is not None:
            values = (usage.full_bytes, usage.compressed_bytes, usage.requests)
            _FORMAT.pack_into(self._memory, 0, *values)


class UsageCollector(Collector):
    """Reads the shared file when Prometheus scrapes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def describe(self) -> list[Metric]:
        """Nothing: whether there is a metric is known only at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The current numbers, or nothing when no head is compressed."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return
        if len(data) < _FORMAT.size:
            return
        usage = KVUsage(*_FORMAT.unpack_from(data))
        held = GaugeMetricFamily(
            "rlkv:kv_cache_bytes",
            "Bytes of the KV pool that requests hold, by kind of head.",
            labels=["heads"],
        )
        held.add_metric(["full"], usage.full_bytes)
        held.add_metric(["compressed"], usage.compressed_bytes)
        yield held
        yield GaugeMetricFamily(
            "rlkv:kv_cache_requests", "Requests that hold KV blocks.", value=usage.requests
        )


def publish_usage() -> None:
    """Names the shared file and adds its collector, once in a tree of processes.

    Children inherit the name and leave the collector to the process that serves ``/metrics``.
    """
    if _VARIABLE in os.environ:
        return
    path = Path(tempfile.gettempdir()) / f"rlkv-kv-usage-{os.getpid()}-{os.urandom(4).hex()}"
    os.environ[_VARIABLE] = str(path)
    atexit.register(path.unlink, missing_ok=True)
    REGISTRY.register(UsageCollector(path))
