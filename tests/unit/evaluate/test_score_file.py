from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkv.errors import DataError
from rlkv.evaluate.score_file import ScoredExample, ScoreRow, score_file, summarise
from rlkv.registry import TASKS


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_plain_lines_are_scored_and_summed(tmp_path: Path) -> None:
    file = write(
        tmp_path / "g.jsonl",
        [
            {"id": "a", "completion": r"\boxed{4}", "answer": "4"},
            {"id": "b", "completion": r"\boxed{5}", "answer": "4"},
            {"id": "c", "completion": "wait " * 100, "answer": "4"},
            {"id": "d", "completion": "so, hm", "answer": "4", "finish_reason": "length"},
        ],
    )
    scored = list(score_file(file, TASKS.load("gsm8k")()))
    assert scored == [
        ScoredExample("a", "4", True, None),
        ScoredExample("b", "5", False, "incorrect"),
        ScoredExample("c", None, False, "repetition"),
        ScoredExample("d", None, False, "overlength"),
    ]
    assert summarise("gsm8k", scored) == ScoreRow("gsm8k", 4, 0.25, 0.5, 0.25, 0.25, 0.25)


def test_the_authors_lines_are_read_as_they_are(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": "p", "pred": r"\boxed{2}", "answers": r"So \boxed{2}.", "input_length": 9,
         "output_length": 8192, "is_early_stop": False},
        {"prompt": "p", "pred": "on and on", "answers": "2", "input_length": 9,
         "output_length": 8183, "is_early_stop": False},
    ]  # fmt: skip
    scored = list(score_file(write(tmp_path / "g.jsonl", rows), TASKS.load("math500")()))
    assert [(one.id, one.correct, one.error) for one in scored] == [
        ("0", True, None),
        ("1", False, "overlength"),
    ]


def test_mmlu_pros_lines_are_read_as_they_are(tmp_path: Path) -> None:
    row = {"question_id": 7, "answer": "E", "pred": "G", "generated_text": "The answer is (E)."}
    scored = list(score_file(write(tmp_path / "g.jsonl", [row]), TASKS.load("mmlu_pro")()))
    assert scored == [ScoredExample("7", "E", True, None)]


def test_a_task_without_end_is_searched_for_a_while(tmp_path: Path) -> None:
    task = TASKS.load("chain")(num_variables=4)
    example = list(task.examples(3))[2]
    row = {"id": example.id, "completion": f"#{example.answer}"}
    assert [one.correct for one in score_file(write(tmp_path / "g.jsonl", [row]), task)] == [True]
    unknown = write(tmp_path / "u.jsonl", [{"id": "chain-4-0", "completion": "#1"}])
    with pytest.raises(DataError, match="no example"):
        list(score_file(unknown, task))


def test_a_missing_answer_comes_from_the_task(tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", [{"question": "1+1?", "answer": "2"}])
    file = write(tmp_path / "g.jsonl", [{"id": "gsm8k-0", "completion": r"\boxed{2}"}])
    assert next(score_file(file, TASKS.load("gsm8k")(str(data)))).correct


def test_samples_of_one_problem_keep_ids_of_their_own(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"id": "a", "completion": "x", "answer": "2"}] * 2
    scored = score_file(write(tmp_path / "g.jsonl", rows), TASKS.load("gsm8k")())
    assert [one.id for one in scored] == ["a", "a#1"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "z", "completion": "x"}, "has no answer"),
        ({"id": "z", "answer": "2"}, "expected the text under"),
    ],
)
def test_lines_that_cannot_be_graded_say_why(
    tmp_path: Path, row: dict[str, object], message: str
) -> None:
    data = write(tmp_path / "d.jsonl", [{"question": "1+1?", "answer": "2"}])
    file = write(tmp_path / "g.jsonl", [row])
    with pytest.raises(DataError, match=message):
        list(score_file(file, TASKS.load("gsm8k")(str(data))))


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty"):
        summarise("gsm8k", score_file(write(tmp_path / "g.jsonl", []), TASKS.load("gsm8k")()))
