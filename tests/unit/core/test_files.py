"""Folder locks: one process at a time, gone with the process, not inherited by its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from rlkv.core.files import locked_folder
from rlkv.errors import OutputError

HOLD = """
import multiprocessing, sys, time
from pathlib import Path
from rlkv.core.files import locked_folder
with locked_folder(Path(sys.argv[1])):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(OutputError, match="in use by another run"), locked_folder(tmp_path):
            pytest.fail("entered a locked folder")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with locked_folder(tmp_path):  # although the child of the killed process still runs
            os.kill(child, 0)
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)


def test_the_lock_ends_with_its_block_and_none_locks_nothing(tmp_path):
    for _ in range(2):
        with locked_folder(tmp_path), locked_folder(None):
            assert (tmp_path / ".lock").exists()
