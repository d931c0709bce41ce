"""Registers the toy tasks for evaluation tests."""

from __future__ import annotations

import pytest

from rlkv.registry import Registry
from tests.toy_tasks import ToyForced, ToyGenerate, tiny_loaded


class _Point:
    def __init__(self, task):
        self.task = task

    def load(self):
        return self.task


@pytest.fixture
def toy_tasks(monkeypatch):
    """The toy tasks, registered as a third party's entry points would be."""
    points = {task.name: _Point(task) for task in (ToyGenerate, ToyForced)}

    def third_party(self):
        return points if self.kind == "task" else {}

    monkeypatch.setattr(Registry, "_third_party", third_party)
    return points


@pytest.fixture(scope="session")
def tiny():
    return tiny_loaded()
