"""What every generating task promises: gold scores 1, wrong and empty 0, ids unique and stable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkv.core.files import read_jsonl
from rlkv.registry import TASKS
from rlkv.tasks.base import Example, Task
from rlkv.verifiers.sandbox import sandbox_problem

# a few rows a task, in the published form; real rows are tested below, where they are to hand
ROWS: dict[str, list[dict[str, object]]] = {
    "gsm8k": [{"question": f"{i} + 1?", "answer": f"Add.\n#### {i + 1}"} for i in range(3)],
    "math500": [
        {"problem": "Halve one.", "answer": "\\frac{1}{2}", "unique_id": "a", "level": 1},
        {"problem": "Which interval?", "answer": "(-\\infty, 2]", "unique_id": "b", "level": 2},
        {"problem": "Who?", "answer": "\\text{Evelyn}", "unique_id": "c", "level": 3},
    ],
    "aime24": [{"problem": "Thirty-three?", "answer": "033"}, {"problem": "x", "answer": "204"}],
    "deepscaler": [{"problem": "Six times seven?", "answer": "42"}],
    "mmlu_pro": [
        {"question_id": i, "question": "Which?", "options": ["x", "y", "z"], "answer": letter,
         "category": "law"}
        for i, letter in enumerate("ABC")
    ],
    "longreason": [{"prompt": "Long text. Which? A) x B) y", "answer": "B", "example_idx": 4}],
    "mbpp": [
        {"task_id": 2, "text": "Add one.", "test_list": ["assert f(1) == 2", "assert f(2) == 3"],
         "test_setup_code": "", "code": "def f(x):\r\n    return x + 1"},
    ],
}  # fmt: skip
REAL = {
    "gsm8k": ("gsm8k_test.jsonl", "gsm8k_train.jsonl"),
    "math500": ("math500.jsonl",),
    "aime24": ("aime24.jsonl",),
    "deepscaler": ("deepscaler_part_math_train.jsonl", "deepscaler_part_aime_train.jsonl"),
    "mmlu_pro": ("mmlu_pro_4cat.jsonl",),
    "mbpp": ("mbpp_test.jsonl",),
}
NEEDS_SANDBOX = ("mbpp",)
WRONG = "<answer>zz</answer> $\\boxed{zz}$ ```python\nf = 1\n```\nAnswer: Z"


def generating() -> list[str]:
    names = [name for name in TASKS.names() if TASKS.load(name).mode == "generate"]
    return [f"{name}:chain_sum" if name == "gym" else name for name in names]


def make(name: str, folder: Path) -> Task:
    if name not in ROWS:  # it makes its own examples
        return TASKS.load(name)()
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]), "utf-8")
    return TASKS.load(name)(str(path))


@pytest.fixture(params=generating())
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    if request.param in NEEDS_SANDBOX and sandbox_problem() is not None:
        pytest.skip(f"no sandbox here: {sandbox_problem()}")
    return make(request.param, tmp_path)


def some(task: Task) -> list[Example]:
    return list(task.examples(4))


def test_gold_scores_one(task: Task) -> None:
    for example in some(task):
        score = task.verifier(task.gold_completion(example), example.answer)
        assert (score.reward, score.reason) == (1.0, "correct"), example.id


@pytest.mark.parametrize("completion", ["", "\n", "I do not know.", WRONG])
def test_wrong_and_empty_score_zero(task: Task, completion: str) -> None:
    for example in some(task):
        assert task.verifier(completion, example.answer).reward == 0.0, example.id


def test_empty_is_no_answer(task: Task) -> None:
    for example in some(task):
        score = task.verifier("", example.answer)
        assert (score.extracted, score.reason) == (None, "no_answer")


def test_ids_are_unique_and_stable(task: Task) -> None:
    first = some(task)
    assert first == some(task)
    assert len({example.id for example in first}) == len(first) > 0


def test_prompt_is_posed_once(task: Task) -> None:
    for example in some(task):
        assert task.messages(example) == [{"role": "user", "content": example.prompt}]
        assert example.prompt.strip()


def test_name_and_limits_are_set(task: Task) -> None:
    assert task.max_new_tokens > 0
    assert task.name in generating()
    if task.dataset is not None:
        assert task.dataset.repo
        assert task.dataset.revision


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REAL))
def test_every_real_gold_answer_scores_one(name: str, shared_data: Path) -> None:
    if name in NEEDS_SANDBOX and sandbox_problem() is not None:
        pytest.skip(f"no sandbox here: {sandbox_problem()}")
    for file in REAL[name]:
        task = TASKS.load(name)()
        rows = enumerate(read_jsonl(shared_data / file))  # every row, quotas aside
        examples = [made for number, row in rows if (made := task.example(row, number))]
        assert len({example.id for example in examples}) == len(examples)
        wrong = [
            example.id
            for example in examples
            if task.verifier(task.gold_completion(example), example.answer).reward != 1.0
        ]
        assert wrong == []
