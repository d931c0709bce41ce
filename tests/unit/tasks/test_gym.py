from __future__ import annotations

import json

import pytest

from rlkv.errors import ConfigError, UnknownNameError
from rlkv.registry import TASKS


def test_examples_follow_name_seed_and_index_alone() -> None:
    task = TASKS.load("gym:chain_sum")
    first = list(task().examples(5, seed=3))
    assert first == list(task().examples(5, seed=3))
    assert first[:2] == list(task().examples(2, seed=3))
    assert first[0].prompt != next(task().examples(1, seed=4)).prompt
    assert first[0].prompt != next(task().examples(1, seed=3, split="train")).prompt
    assert first[0].id == "gym:chain_sum-3-0"


def test_only_a_full_score_counts() -> None:
    task = TASKS.load("gym:chain_sum")()
    example = next(task.examples(1))
    gold = json.loads(example.answer)["answer"]
    assert task.verifier(f"<answer>{gold}</answer>", example.answer).reward == 1.0
    # reasoning-gym itself gives this partial credit
    assert task.verifier(f"<answer>it is {gold}</answer>", example.answer).reward == 0.0
    assert (
        task.verifier(f"<answer>1</answer> <answer>{gold}</answer>", example.answer).reward == 1.0
    )
    assert task.verifier(f"\\boxed{{{gold}}}", example.answer).reward == 1.0
    assert task.verifier(f"It is {gold}", example.answer).reason == "no_answer"
    assert task.verifier("<answer>", example.answer).reason == "no_answer"


def test_plain_answers_are_compared_exactly() -> None:
    verify = TASKS.load("gym:chain_sum")().verifier
    assert verify("<answer>10</answer>", "10").reward == 1.0
    assert verify("<answer>10</answer>", "11").reward == 0.0


def test_the_family_needs_a_dataset() -> None:
    with pytest.raises(ConfigError, match="gym:chain_sum"):
        TASKS.load("gym")()


def test_unknown_datasets_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="chain_sum"):
        list(TASKS.load("gym:chain_sums")().examples(1))
