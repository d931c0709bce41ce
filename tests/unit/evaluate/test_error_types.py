from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rlkv.evaluate.error_types import Loop, diagnose, find_loop
from rlkv.verifiers.math import MathVerifier


def words(n: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(n))


def test_a_loop_of_words_has_its_period_and_start() -> None:
    start = words(50) + " "
    assert find_loop(start + "the time to " * 30) == Loop("words", 3, 30, len(start))


def test_a_loop_of_lines_has_its_period_and_start() -> None:
    start = words(50) + "\n"
    assert find_loop(start + "Wait, no.\n" * 30) == Loop("line", 5, 30, len(start))


def test_a_loop_of_paragraphs_may_stop_inside_a_copy() -> None:
    start = words(50) + "\n\n"
    unit = "So x is seven, I think.\n\nBut is it?\n\n"
    loop = find_loop(start + unit * 6 + unit[:9])
    assert loop == Loop("paragraph", 14, 6, len(start))


def test_a_loop_that_varies_is_found_by_its_few_words() -> None:
    rng = random.Random(1)
    start = words(300) + "\n"
    loop = find_loop(start + " ".join(rng.choice(["the", "time", "to", "\n"]) for _ in range(900)))
    assert loop is not None
    assert (loop.unit, loop.period, loop.copies) == ("varied", 0, 0)
    # the first window that is poor reaches back over at most MIN_DISTINCT ordinary words
    assert len(start) - 400 < loop.start <= len(start)


@pytest.mark.parametrize("blank", ["\t", "\xa0", "\n", " " * 8])
def test_loops_of_white_space_count(blank: str) -> None:
    assert find_loop(words(50) + blank * 800) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        words(2000),
        "no no no",
        "1. a\n2. b\n3. c\n4. d\n5. e",
        "Wait. " * 200 + words(500),  # the model left the loop again
    ],
)
def test_ordinary_text_is_no_loop(text: str) -> None:
    assert find_loop(text) is None


def test_repetition_comes_before_overlength() -> None:
    text = words(30) + "wait " * 100
    assert diagnose(text, output_length=100, max_new_tokens=100).error == "repetition"


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        ({}, "incorrect"),
        ({"output_length": 100, "max_new_tokens": 100}, "overlength"),
        ({"output_length": 99, "max_new_tokens": 100}, "incorrect"),
        ({"output_length": 90, "input_length": 10, "max_total_tokens": 100}, "overlength"),
        ({"output_length": 90, "max_total_tokens": 100}, "incorrect"),
        ({"input_length": 200, "max_total_tokens": 100}, "incorrect"),  # no output length known
        ({"finish_reason": "length"}, "overlength"),
        ({"finish_reason": "stop", "output_length": 100, "max_new_tokens": 100}, "incorrect"),
    ],
)
def test_overlength_follows_the_limits(facts: dict[str, int], error: str) -> None:
    assert diagnose(words(50), **facts).error == error


@pytest.mark.parametrize(
    ("text", "loops"),
    [("a b " * 15_000, True), ("a " * 29_000 + "b", True), (words(10_000), False)],
)
def test_long_texts_are_judged_like_short_ones(text: str, loops: bool) -> None:
    # anything worse than linear would not come back from these
    assert (find_loop(text) is not None) == loops


def generations(folder: Path, name: str) -> list[dict[str, str]]:
    lines = (folder / "generations" / name).read_bytes().split(b"\n")
    return [json.loads(line) for line in lines if line]


def test_published_r_kv_loops_are_repetitions(shared_data: Path) -> None:
    rows = generations(shared_data, "llama-3.1-8b-r1.longreason.r-kv-0.6.jsonl")
    found = [diagnose(row["pred"]).error for row in rows]
    assert found.count("repetition") >= 0.95 * len(rows)


@pytest.mark.slow
def test_correct_generations_are_hardly_ever_called_loops(shared_data: Path) -> None:
    rows = generations(shared_data, "qwen-2.5-7b-r1.math500.full.jsonl")
    verify = MathVerifier()
    right = [row["pred"] for row in rows if verify(row["pred"], row["answers"]).reward]
    assert sum(find_loop(text) is not None for text in right) <= 0.01 * len(right)
