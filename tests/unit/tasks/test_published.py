from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest

from rlkv.errors import ConfigError, DataError, MissingExtraError, UnknownNameError
from rlkv.registry import METHODS, TASKS


def write(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def test_gsm8k_cuts_the_answer_from_the_published_solution(tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", {"question": "How many?", "answer": "Many.\n#### 1,234"})
    (example,) = TASKS.load("gsm8k")(data).examples()
    assert (example.id, example.answer) == ("gsm8k-0", "1234")
    assert example.prompt.endswith("\n\nHow many?")
    assert "$\\boxed{ANSWER}$" in example.prompt


def test_rows_split_at_line_feeds_alone(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "one\u2028two", "answer": "3"}\n', "utf-8")
    (example,) = TASKS.load("gsm8k")(str(path)).examples()
    assert "one\u2028two" in example.prompt


def test_mbpp_reads_published_and_local_field_names(tmp_path: Path) -> None:
    data = write(
        tmp_path / "d.jsonl",
        {"task_id": 1, "text": "Write f.", "test_list": ["assert f(a) == 1"], "code": "x",
         "test_setup_code": "a = 1"},
        {"task_id": 2, "prompt": "Write g.", "test": ["assert g(1) == 1"], "code": "x"},
    )  # fmt: skip
    first, second = TASKS.load("mbpp")(data).examples()
    assert json.loads(first.answer) == {"setup": "a = 1", "tests": ["assert f(a) == 1"]}
    assert json.loads(second.answer) == ["assert g(1) == 1"]
    assert "assert g(1) == 1" in second.prompt


def mmlu_rows(path: Path) -> str:
    rows = [
        {"question_id": i, "question": "Which?", "options": ["x", "y"], "answer": "B",
         "category": category}
        for i, category in enumerate(["law", "history", "physics", "law"])
    ]  # fmt: skip
    return write(path, *rows)


def test_mmlu_pro_keeps_its_four_categories(tmp_path: Path) -> None:
    examples = list(TASKS.load("mmlu_pro")(mmlu_rows(tmp_path / "d.jsonl")).examples())
    assert [example.id for example in examples] == ["mmlu_pro-0", "mmlu_pro-2", "mmlu_pro-3"]
    assert "A) x\nB) y" in examples[0].prompt


def test_mmlu_pro_category_is_selectable(tmp_path: Path) -> None:
    task = TASKS.load("mmlu_pro:law")(mmlu_rows(tmp_path / "d.jsonl"))
    assert task.name == "mmlu_pro:law"
    assert [example.id for example in task.examples()] == ["mmlu_pro-0", "mmlu_pro-3"]
    assert TASKS.load("mmlu_pro:computer_science").categories == ("computer science",)


def test_limit_stops_early(tmp_path: Path) -> None:
    assert len(list(TASKS.load("mmlu_pro")(mmlu_rows(tmp_path / "d.jsonl")).examples(2))) == 2


def test_longreason_split_is_selectable() -> None:
    assert TASKS.load("longreason").dataset.split == "64k"
    assert TASKS.load("longreason:8k").dataset.split == "8k"


def test_deepscaler_skips_rows_without_an_answer(tmp_path: Path) -> None:
    data = write(
        tmp_path / "d.jsonl", {"problem": "a", "answer": None}, {"problem": "b", "answer": "2"}
    )
    examples = list(TASKS.load("deepscaler")(data).examples(split="train"))
    assert [example.id for example in examples] == ["deepscaler-1"]


def test_training_rows_are_shuffled_by_the_seed_and_test_rows_are_not(tmp_path: Path) -> None:
    rows = [{"problem": f"p{number}", "answer": "2"} for number in range(50)]
    task = TASKS.load("deepscaler")(write(tmp_path / "d.jsonl", *rows))
    order = [f"deepscaler-{number}" for number in range(50)]
    assert [example.id for example in task.examples(seed=3)] == order
    drawn = {s: [e.id for e in task.examples(seed=s, split="train")] for s in (3, 4)}
    assert sorted(drawn[3]) == sorted(drawn[4]) == sorted(order)
    assert drawn[3] != drawn[4] != order
    few = [example.id for example in task.examples(5, seed=3, split="train")]
    assert few == drawn[3][:5]  # a limit draws from all rows, not from the first ones


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gms8k", "Did you mean gsm8k"),
        ("gsm8k:hard", "no variants"),
        ("mmlu_pro:lw", "Did you mean law"),
        ("longreason:1k", "unknown longreason split"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        TASKS.load(name)


def test_a_family_is_known_without_importing_it() -> None:
    TASKS.require("gym:anything")
    with pytest.raises(UnknownNameError):
        TASKS.require("jym:anything")
    with pytest.raises(UnknownNameError):
        METHODS.require("no_method")


def test_a_row_without_the_fields_says_which(tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", {"text": "x"})
    with pytest.raises(DataError, match="has the fields text, expected one of answer"):
        list(TASKS.load("gsm8k")(data).examples())


def test_a_task_without_training_rows_says_so() -> None:
    with pytest.raises(ConfigError, match="no training examples"):
        list(TASKS.load("aime24")().examples(split="train"))


def test_without_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: object) -> object:
        if name == "datasets":
            raise ImportError("no module named datasets")
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r"rlkv\[data\]"):
        list(TASKS.load("gsm8k")().examples(1))


def test_published_rows_come_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    calls = []

    def load(repo: str, config: str | None, *, split: str, revision: str) -> list[dict[str, str]]:
        calls.append((repo, config, split, revision))
        return [{"question": "q", "answer": "#### 5"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = TASKS.load("gsm8k")()
    assert [example.answer for example in task.examples()] == ["5"]
    list(task.examples(split="train"))
    assert [call[2] for call in calls] == ["test", "train"]
    assert calls[0][:2] == ("openai/gsm8k", "main")
