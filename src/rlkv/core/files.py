"""Atomic file writes and JSON lines.

A file is either the old one or the new one, never half of each: content goes to a temporary file in
the same folder, is flushed to disk, and is renamed over the target.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlkv.errors import DataError, OutputError


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Writes ``data`` to ``path`` in one step; creates the parent folder.

    Raises:
        OutputError: The folder or the file cannot be written.
    """
    target = Path(path)
    raw = data.encode("utf-8") if isinstance(data, str) else data
    require_writable(target)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            # mkstemp files are private; give them the mode an ordinary new file would have
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(
            f"cannot write {target}: {error.strerror}; choose another path"
        ) from error


def require_writable(path: str | Path) -> None:
    """Checks, before anything expensive, that ``path`` can be written; creates its folder.

    Raises:
        OutputError: It cannot.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot create folder {target.parent}: {error.strerror}; choose another output path"
        ) from error
    if target.is_dir():
        raise OutputError(f"{target} is a folder, expected a file path; choose another output path")
    if not os.access(target.parent, os.W_OK):
        raise OutputError(f"folder {target.parent} is not writable; choose another output path")


def require_writable_folder(path: str | Path) -> Path:
    """Creates folder ``path`` if needed, checks that files can be made in it, and returns it.

    Raises:
        OutputError: It cannot be created or written, or is a file.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file, expected a folder; choose another output path")
    require_writable(folder / ".probe")
    return folder


@contextmanager
def locked_folder(folder: Path | None) -> Generator[None]:
    """Keeps a second process out of ``folder`` while the block runs; None locks nothing.

    The lock ends with the process, however that ends, and forked children do not inherit it.

    Raises:
        OutputError: Another process holds the lock.
    """
    if folder is None:
        yield
        return
    with (folder / ".lock").open("a", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise OutputError(
                f"{folder} is in use by another run; wait for its end or choose another folder"
            ) from None
        except OSError:  # a file system without locks: go on as before there were any
            pass
        yield


def to_json(value: object, indent: int | None = 2) -> str:
    """JSON text with a final newline; NaN and infinities are refused, since JSON has none."""
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    r"""The objects of a JSON-lines file, split at ``\n`` alone.

    ``str.splitlines`` would also cut at U+2028, which occurs inside real GSM8K rows.

    Raises:
        DataError: The file is missing or a line is not a JSON object.
    """
    target = Path(path)
    if not target.is_file():
        raise DataError(f"{target} not found, expected a JSON-lines file; check the path")
    with target.open("rb") as file:  # binary iteration splits at b"\n" only
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{target} line {number} is not JSON ({error}); fix it") from error
            if not isinstance(row, dict):
                raise DataError(f"{target} line {number} is not a JSON object; fix or remove it")
            yield row


def mend_jsonl(path: Path) -> None:
    """Removes a last line that a kill cut short; a file that is whole or missing is left alone.

    Raises:
        OutputError: The file cannot be repaired.
    """
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        try:
            os.truncate(path, whole)
        except OSError as error:
            raise OutputError(
                f"cannot repair {path}: {error.strerror}; choose another output folder"
            ) from error


def append_jsonl(path: str | Path, row: Mapping[str, object]) -> None:
    """Adds one line and flushes it to disk, so that a kill loses at most the line being written.

    Raises:
        OutputError: The file cannot be written.
    """
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(to_json(row, indent=None))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another path") from error
