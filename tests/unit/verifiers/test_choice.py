from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkv.verifiers.choice import ChoiceVerifier


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer: C", "C"),
        ("**Answer:** $C$", "C"),
        ("Answer: $\\text{C}$", "C"),
        ("answer: (c)", "C"),
        ("Answer: C. Because", "C"),
        ("So $\\boxed{C}$", "C"),
        ("\\boxed{\\text{(C)}}", "C"),
        ("\\boxed{C) 12 cm}", "C"),
        ("Answer: A\nWait.\nAnswer: C", "C"),
        ("The answer is (C). The answer is (D).", "C"),
        ("the answer is C, I think", "C"),
        ("\\boxed{12}\nAnswer: C", "C"),
        ("Answer: Copper", None),
        ("Answer: J", None),
        ("the answer is a matter of taste", None),
        ("However, the answer is $C_{2}H_{6}$", None),
        ("B", None),
        ("", None),
    ],
)
def test_stated_letters(text: str, expected: str | None) -> None:
    assert ChoiceVerifier(num_options=5).extract(text) == expected


def test_score_compares_letters() -> None:
    verify = ChoiceVerifier(num_options=4)
    assert verify("Answer: B", "B").reason == "correct"
    assert verify("Answer: B", "C").reason == "wrong"
    assert verify("I give up", "C").reason == "no_answer"


def test_last_letter_is_read_only_when_asked() -> None:
    assert ChoiceVerifier(last_letter=True).extract("Option A or B it is") == "B"
    assert ChoiceVerifier().extract("Option A or B it is") is None


@pytest.mark.slow
def test_published_mmlu_pro_letters(shared_data: Path) -> None:
    lines = (shared_data / "mmlu_pro_outputs_llama31_8b.jsonl").read_bytes().split(b"\n")
    rows = [json.loads(line) for line in lines if line]
    published = ChoiceVerifier(last_letter=True)
    found = [(published.extract(row["generated_text"]), row["pred"]) for row in rows]
    # where the text holds no letter at all, the published file has a G, whatever the question
    assert all(pred == (letter or "G") for letter, pred in found)
    assert sum(letter is None for letter, _ in found) == 409
    # by default only stated answers count: 159 stray capitals are no answers
    strict = [(ChoiceVerifier().extract(row["generated_text"]), row["pred"]) for row in rows]
    stated = [(letter, pred) for letter, pred in strict if letter is not None]
    assert len(stated) == 5432
    assert all(letter == pred for letter, pred in stated)
