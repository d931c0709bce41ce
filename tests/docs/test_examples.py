"""The examples that the documents point to run and do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from rlkv.tasks.base import Task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_new_method_holds_the_stated_share_of_bytes(capsys):
    pytest.importorskip("torch")
    runpy.run_path(str(EXAMPLES / "new_method.py"), run_name="__main__")
    # half of the layers hold all 200 tokens, the others 80: (200 + 80) / 400
    assert capsys.readouterr().out.strip().endswith("(70%)")


def test_new_task_keeps_the_task_contract():
    task: Task = runpy.run_path(str(EXAMPLES / "new_task.py"))["ReverseWord"]()
    examples = list(task.examples(20))
    assert examples == list(task.examples(20))
    assert len({example.id for example in examples}) == 20
    example = examples[0]
    assert task.verifier(f"Answer: {example.answer}", example.answer).reward == 1.0
    assert task.verifier("Answer: zzz", example.answer).reward == 0.0
    assert task.verifier("", example.answer).reward == 0.0
    train = {e.prompt for e in task.examples(20, split="train")}
    assert not train & {e.prompt for e in examples}
