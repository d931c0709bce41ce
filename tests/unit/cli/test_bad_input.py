"""Command lines that cannot work: one sentence on stderr, no traceback, nothing on stdout."""

from __future__ import annotations

import io
import json

import pytest

from rlkv.cli.main import main

RESULT = {"format": "rlkv-result/1", "row": {}}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("plan", "--model", "embedded", "--tensor-parallel", "0"), 2, "at least 1 GPU"),
        (("plan", "--model", "embedded", "--utilization", "nan"), 2, "a share in (0, 1]"),
        (("train", "--task", "chain", "--sparsity", "1", "--dry-run"), 2, "outside [0, 1)"),
        (("generate", "hi", "--sink", "9" * 30), 2, "no sequence is that long"),
        (("generate", "hi\udcff"), 2, "not UTF-8"),
        (("score", "deep.json", "--task", "gsm8k"), 1, "line 1 is not JSON"),
        (("reproduce", "deep.json"), 1, "cannot read result"),
        (("reproduce", "part.json"), 1, "lacks config, records, profile, run"),
        (("report", "."), 1, "lacks config, records, profile, run"),
    ],
)
def test_bad_input_is_one_sentence(capsys, tmp_path, monkeypatch, arguments, status, message):
    monkeypatch.chdir(tmp_path)
    text = json.dumps(RESULT)
    (tmp_path / "part.json").write_text(text)
    if "deep.json" in arguments:
        (tmp_path / "deep.json").write_text("[" * 100_000)
    found = main(list(arguments))
    captured = capsys.readouterr()
    assert (found, captured.out) == (status, "")
    assert message in captured.err
    assert captured.err.startswith("rlkv: ")
    assert captured.err.count("\n") == 1


def test_a_closed_stdin_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", "-"]) == 2
    assert "stdin is closed" in capsys.readouterr().err


def test_a_prompt_from_stdin_must_be_text(capsys, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["generate", "-"]) == 2
    assert "not UTF-8" in capsys.readouterr().err
