"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real benchmark data that some tests check against."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("RLKV_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"benchmark data not found at {folder}; set RLKV_SHARED_DATA to run this test")
    return folder
