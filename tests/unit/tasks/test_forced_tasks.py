"""price_lookup and copy_question: gold spans, stable ids, disjoint splits, data files."""

from __future__ import annotations

import json
import re

import pytest

from rlkv.errors import DataError, MissingExtraError
from rlkv.registry import TASKS
from rlkv.tasks import copy_question
from rlkv.tasks.copy_question import CopyQuestion
from rlkv.tasks.price_lookup import PriceLookup

NAMES = ("price_lookup", "copy_question")


@pytest.fixture(params=NAMES)
def task(request):
    return TASKS.load(request.param)()


def test_gold_scores_one_and_anything_else_zero(task):
    for example in task.examples(5):
        assert task.verifier(example.answer, example.answer).reward == 1.0
        assert task.verifier(example.answer[:-9], example.answer).reward == 0.0
        assert task.verifier("", example.answer).reward == 0.0


def test_same_seed_same_examples_and_a_limit_only_cuts(task):
    assert list(task.examples(6, seed=3)) == list(task.examples(9, seed=3))[:6]


def test_another_seed_gives_other_examples(task):
    assert list(task.examples(6, seed=3)) != list(task.examples(6, seed=4))


def test_ids_are_unique_and_splits_share_no_prompt(task):
    test = list(task.examples(200, split="test"))
    train = list(task.examples(200, split="train"))
    ids = [example.id for example in test + train]
    assert len(set(ids)) == len(ids)
    assert not {e.prompt for e in test} & {e.prompt for e in train}


def test_a_small_model_is_the_default_and_examples_are_forced(task):
    assert (task.default_model, task.mode) == ("smollm2", "forced")


def test_first_price_lookup_example_never_changes():
    # Raise the task's version if this must change: every reported figure depends on it.
    example = next(PriceLookup().examples(1))
    assert example.id == "test-0-0"
    assert example.prompt.splitlines()[:3] == [
        "Price list:",
        "book costs 48 dollars.",
        "soap costs 75 dollars.",
    ]
    assert len(example.prompt.splitlines()) == 17


def test_price_spans_are_the_listed_prices_of_their_lines():
    for example in PriceLookup().examples(20, split="train"):
        listed = dict(re.findall(r"(\w+) costs (\d+) dollars\.", example.prompt))
        asked = re.findall(r"(\w+) costs (\d+) dollars\.", example.answer)
        assert len(listed) == 16
        assert len(asked) == len(example.spans) == 12
        assert [listed[thing] for thing, _ in asked] == [value for _, value in asked]
        assert [example.answer[a:b] for a, b in example.spans] == [value for _, value in asked]


def test_price_lists_are_even_in_test_and_odd_in_train():
    for split, rest in (("test", 0), ("train", 1)):
        for example in PriceLookup().examples(50, split=split):
            prices = [int(price) for price in re.findall(r"\d+", example.prompt)]
            assert sum(prices) % 2 == rest
            assert all(10 <= price <= 99 for price in prices)


def test_copy_spans_are_the_words_of_a_question_in_the_prompt():
    examples = list(CopyQuestion().examples())
    assert len(examples) == 54
    for example in examples:
        assert [example.answer[a:b] for a, b in example.spans] == example.answer.split()
        assert f"Text: {example.answer}\nCopy:" in example.prompt
        assert 330 <= len(example.answer) <= 460


def test_copy_ids_follow_the_question_not_its_place(tmp_path):
    questions = [e.answer for e in CopyQuestion().examples(8)]
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps({"question": q}) + "\n" for q in reversed(questions)))
    expected = {e.id: e.answer for e in CopyQuestion().examples(8)}
    assert {e.id: e.answer for e in CopyQuestion(str(file)).examples()} == expected


def test_copy_reads_the_real_test_set(shared_data):
    task = CopyQuestion(str(shared_data / "gsm8k_test.jsonl"))
    packaged = {example.id for example in CopyQuestion().examples()}
    assert packaged < {example.id for example in task.examples()}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [([{"question": "Too short?"}], "holds no test question"), ([{"q": "x"}], "'question'")],
)
def test_copy_refuses_files_it_cannot_use(tmp_path, rows, sentence):
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=sentence):
        list(CopyQuestion(str(file)).examples())


def test_copy_from_the_hub_without_the_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(copy_question, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"rlkv\[data\]"):
        list(CopyQuestion("openai/gsm8k").examples())


def test_copy_from_the_hub_without_network_is_one_sentence(monkeypatch, tmp_path):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="pass a JSON-lines file"):
        list(CopyQuestion("openai/gsm8k").examples())
