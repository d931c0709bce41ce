"""The chain task: problems are consistent, reproducible and never shared between the splits."""

from __future__ import annotations

import json
import random
import re
import statistics

import pytest

from rlkv.errors import ConfigError, DataError
from rlkv.tasks.base import Example
from rlkv.tasks.chain import DEFAULT_VARIABLES, Chain, draw_problem

STEP = re.compile(r"([a-z])=([a-z])(\d)([+-])([a-z])(\d)>([a-z])(\d)")
GIVEN = re.compile(r"([a-z])=(\d)>([a-z])(\d)")


def take(n: int, seed: int = 0, split: str = "test", **options: int) -> list[Example]:
    return list(Chain(**options).examples(n, seed=seed, split=split))


def solve(prompt: str) -> dict[str, int]:
    """An independent solver of the prompt: substitutes until everything is a digit."""
    *definitions, question = prompt.split(" ")
    values: dict[str, int] = {}
    for definition in definitions:
        name, formula = definition.split("=")
        if formula.isdigit():
            values[name] = int(formula)
        else:
            sign = 1 if formula[1] == "+" else -1
            values[name] = (values[formula[0]] + sign * values[formula[2]]) % 10
    assert question == f"?{name}"
    return values


def test_hand_computed_problem_scores_one() -> None:
    verifier = Chain().verifier
    chain = "k=3>k3 t=7>t7 c=k3+t7>c0 d=c0-k3>d7 #7"
    assert solve("k=3 t=7 c=k+t d=c-k ?d") == {"k": 3, "t": 7, "c": 0, "d": 7}
    assert verifier(chain, "7").reward == 1.0
    assert verifier(chain, "3").reason == "wrong"


def test_gold_chain_scores_one_and_others_score_zero() -> None:
    verifier = Chain().verifier
    for example in take(50):
        chain = str(example.meta["chain"])
        assert verifier(chain, example.answer).reward == 1.0
        other = str((int(example.answer) + 1) % 10)
        assert verifier(chain[:-1] + other, example.answer).reward == 0.0
        assert verifier("", example.answer).reason == "no_answer"
        assert verifier(chain[:-2], example.answer).reason == "no_answer"


def test_gold_answer_agrees_with_an_independent_solver() -> None:
    for example in take(50):
        assert str(solve(example.prompt)[example.prompt[-1]]) == example.answer


def test_every_step_cites_the_values_that_earlier_steps_found() -> None:
    for example in take(50):
        *steps, last = str(example.meta["chain"]).split(" ")
        found: dict[str, int] = {}
        for step in steps[:2]:
            name, digit, again, value = GIVEN.fullmatch(step).groups()
            assert (name, digit) == (again, value)
            found[name] = int(value)
        for step in steps[2:]:
            name, left, a, sign, right, b, again, value = STEP.fullmatch(step).groups()
            assert name == again
            assert name not in found
            assert (found[left], found[right]) == (int(a), int(b))
            found[name] = (int(a) + int(b) if sign == "+" else int(a) - int(b)) % 10
            assert found[name] == int(value)
        assert found == solve(example.prompt)
        assert last == f"#{example.answer}"


def test_default_chains_are_long_and_reach_beyond_sink_and_recent() -> None:
    examples = take(200)
    assert statistics.median(len(str(e.meta["chain"])) for e in examples) >= 150
    # a step at `at` copies its definition from `where`; count those out of a local head's sight
    far = steps = 0
    for example in examples:
        head = len(example.prompt) + 2  # two role tokens
        for step in STEP.finditer(str(example.meta["chain"])):
            where = 1 + example.prompt.index(f"{step[1]}=")
            at = head + step.start()
            steps += 1
            far += where >= 16 and at - where >= 64
    # the first two steps of fourteen copy from within the sink, all others do not
    assert far / steps == 12 / 14


def test_same_seed_gives_the_same_examples_and_another_seed_others() -> None:
    assert take(20, seed=3) == take(20, seed=3)
    assert take(5, seed=3) == take(20, seed=3)[:5]
    assert {e.id for e in take(20, seed=3)}.isdisjoint(e.id for e in take(20, seed=4))


def test_first_example_is_the_one_released() -> None:
    example = take(1)[0]
    assert example.id == "chain-16-8b25da081ad10024"
    assert example.prompt.startswith("d=3 y=6 e=d+y i=e-d t=e+i ")
    assert example.answer == "6"


def test_ids_are_unique_and_follow_from_the_prompt() -> None:
    examples = take(1000)
    assert len({e.id for e in examples}) == 1000
    # a thousand of the smallest problems must repeat prompts inside the generator, never outside
    small = take(1000, num_variables=3)
    assert len({e.id for e in small}) == len({e.prompt for e in small}) == 1000


def test_no_problem_is_in_both_splits_whatever_the_seed() -> None:
    test = {e.prompt for e in take(2000, seed=0, num_variables=3)}
    train = {e.prompt for s in range(3) for e in take(2000, s, "train", num_variables=3)}
    assert test.isdisjoint(train)


def test_names_and_operands_are_distinct() -> None:
    rng = random.Random(1)
    for count in (3, 10, 26):
        *definitions, _ = draw_problem(rng, count)[0].split(" ")
        assert len({d[0] for d in definitions}) == count
        assert all(d[2] != d[4] for d in definitions if len(d) > 3)


@pytest.mark.parametrize("count", [2, 27])
def test_impossible_difficulty_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="3 to 26"):
        Chain(num_variables=count)


def test_default_difficulty_is_recorded() -> None:
    assert take(1)[0].meta["variables"] == DEFAULT_VARIABLES


def test_a_data_file_replaces_the_generated_problems(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "x", "prompt": "a=1 ?a", "answer": "1"}) + "\n")
    assert list(Chain(data=str(path)).examples(5)) == [Example("x", "a=1 ?a", "1")]
    path.write_text(json.dumps({"id": "x", "prompt": "a=1 ?a"}) + "\n")
    with pytest.raises(DataError, match="row 1"):
        list(Chain(data=str(path)).examples())
