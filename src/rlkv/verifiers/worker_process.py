"""Parent side of the math worker: one request, one answer, and a hard kill on timeout.

Works from any thread and after a fork: the process is started on first use, belongs to the process
that started it, and is replaced after a kill. A plain ``Popen`` and pipes are used because
``multiprocessing`` would import the user's main module again.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

START_TIMEOUT_S = 120.0
"""Seconds for the worker to import sympy; minutes on a cold, busy disk."""


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


class SymbolicComparer:
    """Asks a worker process whether two LaTeX answers are equal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._finalizer: weakref.finalize | None = None

    def __reduce__(self) -> tuple[type[SymbolicComparer], tuple[()]]:
        return SymbolicComparer, ()  # a copy in another process starts a worker of its own

    def equal(self, gold: str, answer: str, *, timeout_s: float) -> bool | None:
        """Whether they are equal, or None when the worker took longer than ``timeout_s`` or died.

        The gold side comes first: math-verify's comparison is not symmetric.
        """
        request = json.dumps({"gold": gold, "answer": answer}).encode() + b"\n"
        with self._lock:
            process = self._running()
            if process is None:
                return None
            reply = self._ask(process, request, timeout_s)
            if reply is None:
                self.close()
            return reply

    def close(self) -> None:
        """Kills the worker, if one runs in this process."""
        if self._finalizer is not None and self._owner == os.getpid():
            self._finalizer()
        self._process = None

    def _running(self) -> subprocess.Popen[bytes] | None:
        if self._process is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return self._process
            self.close()
        script = Path(__file__).with_name("math_worker.py")
        # -P: the script's folder holds a math.py, which must not shadow the standard one
        process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._process, self._owner = process, os.getpid()
        self._finalizer = weakref.finalize(self, _stop, process)
        if self._ask(process, b"", START_TIMEOUT_S) is None:
            self.close()
            return None
        return process

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], request: bytes, timeout_s: float) -> bool | None:
        """Writes the request and reads one JSON line; None on timeout or a dead worker."""
        if process.stdin is None or process.stdout is None:
            return None
        deadline = time.monotonic() + timeout_s
        try:
            process.stdin.write(request)  # below the pipe's capacity, so it cannot block
            process.stdin.flush()
        except OSError:
            return None
        reply = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(process.stdout.fileno(), 4096)
                if not chunk:
                    return None
                reply += chunk
        return json.loads(reply) is True
