from __future__ import annotations

import json
from pathlib import Path

import pytest
import tyro

from rlkv.cli.score import Score


@pytest.fixture
def generations(tmp_path: Path) -> Path:
    file = tmp_path / "g.jsonl"
    rows = [
        {"id": "a", "completion": "\\boxed{4}", "answer": "4"},
        {"id": "b", "completion": "a line\u2028here", "answer": "4"},
    ]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return file


def test_json_is_one_row(generations: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Score(generations, task="gsm8k", json=True).run() == 0
    assert json.loads(capsys.readouterr().out) == {
        "task": "gsm8k",
        "n": 2,
        "accuracy": 0.5,
        "no_answer": 0.5,
        "repetition": 0.0,
        "overlength": 0.0,
        "incorrect": 0.5,
    }


def test_records_add_a_line_an_example(
    generations: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Score(generations, task="gsm8k", json=True, records=True).run() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
    assert lines[:2] == [
        {"id": "a", "extracted": "4", "correct": True, "error": None},
        {"id": "b", "extracted": None, "correct": False, "error": "incorrect"},
    ]
    assert lines[2]["n"] == 2


def test_without_json_it_is_a_table(generations: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Score(generations, task="gsm8k").run() == 0
    assert "accuracy    50.00 %" in capsys.readouterr().out


def test_the_command_line_parses(generations: Path) -> None:
    command = tyro.cli(Score, args=[str(generations), "--task", "gsm8k", "--json", "--records"])
    assert command == Score(generations, "gsm8k", json=True, records=True)
