"""Runs untrusted Python and returns plain values: the parent side of the sandbox.

Each run is a fresh interpreter (no site packages, empty environment, own session, no standard
streams) that locks itself in before it sees the code: see ``sandbox_child.py``. It needs no root,
and root does not weaken it. Linux with Landlock (5.13) and seccomp on x86_64, aarch64 or riscv64;
elsewhere it refuses rather than run code unguarded.

The child is not trusted. It is told which expressions to evaluate, never what they should give, and
its reply is parsed as data: no pickle, no eval, bounded in size, depth and time. So code that
patches builtins, overloads ``__eq__``, exits early or writes to the channel itself can only send
values, and wrong values do not pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rlkv.errors import SandboxError

MAX_REPLY_BYTES = 256 * 1024
"""More than any honest reply; small enough that hostile hash collisions stay cheap."""
_MACHINES = ("x86_64", "aarch64", "riscv64")
_LANDLOCK_CREATE_RULESET = 444


@dataclass(frozen=True, slots=True)
class Unplain:
    """Stands for a value that is not plain data; equal to nothing, itself included."""

    type_name: str
    """Type of the value, as the child named it."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came back from one run."""

    outcome: Literal["done", "timeout", "died"]
    """``done`` when every expression was answered, with a value or an error."""
    values: tuple[object, ...]
    """One plain value for each expression that has one, in order, up to the first failure."""
    error: str | None = None
    """Name of the exception that stopped the run, or how the process ended."""


class CodeRunner(Protocol):
    """Evaluates expressions after running code; a user may supply one of their own."""

    def __call__(self, code: str, expressions: Sequence[str]) -> RunResult:
        """Runs ``code``, then evaluates each of ``expressions`` in its namespace."""
        ...


def sandbox_problem() -> str | None:
    """Why untrusted code cannot be run here, or None when it can."""
    advice = "code is not run unguarded; use Linux 5.13 or newer, or pass a runner of your own"
    if sys.platform != "linux":
        return f"the sandbox needs Linux, found {sys.platform}; {advice}"
    if platform.machine() not in _MACHINES:
        return f"the sandbox knows {', '.join(_MACHINES)}, found {platform.machine()}; {advice}"
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(ctypes.c_long(_LANDLOCK_CREATE_RULESET), None, ctypes.c_long(0), 1)
    if abi < 1:
        return f"this kernel ({platform.release()}) has no Landlock; {advice}"
    return None


@dataclass(frozen=True)
class Sandbox:
    """The built-in runner.

    Example:
        >>> if sandbox_problem() is None:
        ...     Sandbox()("def f(x): return [x]", ["f(3)"]).values
        ... else:
        ...     ([3],)
        ([3],)
    """

    timeout_s: float = 10.0
    """Wall-clock seconds for one run, interpreter start included."""
    memory_bytes: int = 2**30
    """Address space of the child."""
    python: str | None = None
    """Interpreter, 3.11 or newer; None is the one that runs this."""

    def __call__(self, code: str, expressions: Sequence[str]) -> RunResult:
        """See :class:`CodeRunner`.

        Raises:
            SandboxError: The system cannot confine the code; nothing was run.
        """
        problem = sandbox_problem()
        if problem is not None:
            raise SandboxError(problem)
        request = {
            "code": code,
            "expressions": list(expressions),
            "memory_bytes": self.memory_bytes,
            "cpu_s": int(self.timeout_s) + 1,
        }
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            # a file, not a pipe: the child cannot make the parent block on it
            stdin.write(json.dumps(request).encode())
            stdin.seek(0)
            process = self._start(stdin.fileno(), stderr.fileno())
            try:
                reply, timed_out = self._read(process)
            finally:
                _end(process)
            if not timed_out and not reply.startswith(b'["ready"]\n'):
                stderr.seek(0)
                raise SandboxError(self._start_failure(reply, stderr.read(2000)))
        return _parse(reply, len(expressions), timed_out)

    def _start(self, stdin: int, stderr: int) -> subprocess.Popen[bytes]:
        source = Path(__file__).with_name("sandbox_child.py").read_text("utf-8")
        base = getattr(sys, "_base_executable", None) or sys.executable
        return subprocess.Popen(
            # like -I -S, except that the hash seed is read: set order must not change a score
            [self.python or base, "-S", "-s", "-P", "-B", "-c", source],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd="/",
            env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
            start_new_session=True,
            close_fds=True,
        )

    def _read(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bool]:
        """Reads until the child closes its end, says too much, or time is up."""
        deadline = time.monotonic() + self.timeout_s
        reply = bytearray()
        if process.stdout is None:
            return b"", False
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while len(reply) <= MAX_REPLY_BYTES:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return bytes(reply), True
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    return bytes(reply), False
                reply += chunk
        return bytes(reply), False

    def _start_failure(self, reply: bytes, stderr: bytes) -> str:
        detail = (reply + stderr).decode("utf-8", "replace").strip()[-300:] or "no message"
        return (
            f"the sandbox could not confine its process ({detail}); no code was run; check that "
            f"this user can read {self.python or sys.executable}, or pass a runner of your own"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the child's session; it cannot have created a process, so this is all there is."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    if process.stdout is not None:
        process.stdout.close()
    process.wait()


def _parse(reply: bytes, expected: int, timed_out: bool) -> RunResult:
    values: list[object] = []
    if len(reply) > MAX_REPLY_BYTES:
        return RunResult("died", (), "reply too long")
    for line in reply.split(b"\n")[1 : expected + 1]:
        try:
            kind, content = json.loads(line)
            if kind != "value":
                return RunResult("done", tuple(values), str(content)[:80])
            values.append(decode(content))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            break
    if len(values) == expected:
        return RunResult("done", tuple(values))
    return RunResult("timeout" if timed_out else "died", tuple(values), "no answer")


def decode(tagged: list, depth: int = 0) -> object:
    """The plain value of a tagged JSON list.

    Raises:
        ValueError: The list does not follow the encoding.
    """
    if depth > 50 or not isinstance(tagged, list) or not tagged:
        raise ValueError("not an encoded value")
    tag, *rest = tagged
    if tag == "c" and len(rest) == 2:
        return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
    if len(rest) != 1:
        raise ValueError(f"unknown tag {tag!r}")
    (content,) = rest
    if tag in ("l", "t", "z"):
        items = [decode(item, depth + 1) for item in content]
        return {"l": list, "t": tuple, "z": frozenset}[tag](items)
    if tag == "d":
        return {decode(key, depth + 1): decode(value, depth + 1) for key, value in content}
    if tag == "p" and (content is None or isinstance(content, bool)):
        return content
    if tag == "s" and isinstance(content, str):
        return content
    if tag == "i":
        return int(content, 16)
    if tag == "f":
        return float.fromhex(content)
    if tag == "y":
        return bytes.fromhex(content)
    if tag == "?":
        return Unplain(str(content)[:80])
    raise ValueError(f"unknown tag {tag!r}")
