from __future__ import annotations

import json

import pytest

from rlkv.errors import DataError
from rlkv.verifiers.assertions import split_assert
from rlkv.verifiers.code import CodeVerifier, code_blocks, extract_code, parse_tests
from rlkv.verifiers.sandbox import RunResult, sandbox_problem

needs_sandbox = pytest.mark.skipif(
    sandbox_problem() is not None, reason=f"no sandbox here: {sandbox_problem()}"
)


@pytest.mark.parametrize(
    ("source", "expressions", "values", "holds"),
    [
        ("assert f(1) == 2", ["f(1)"], [2], True),
        ("assert f(1) == 2", ["f(1)"], [3], False),
        ("assert (f(1)) == 2", ["f(1)"], [2], True),
        ("assert f(g(1), [2]) == (1, 'a')", ["f(g(1), [2])"], [(1, "a")], True),
        ("assert set(f(1)) == set([1, 2])", ["f(1)"], [[2, 1, 2]], True),
        ("assert math.isclose(f(1), 3.14, rel_tol=0.01)", ["f(1)"], [3.15], True),
        ("assert math.isclose(f(1), 3.14, rel_tol=0.001)", ["f(1)"], [3.15], False),
        ("assert f(1) is None", ["f(1)"], [None], True),
        ("assert not f(1)", ["f(1)"], [0], True),
        ("assert f(1)", ["f(1)"], [True], True),
        ("assert f(1) == f(2)", ["f(1)", "f(2)"], [4, 4], True),
        ("assert sorted(f(1)) == [1, 2] and len(f(1)) == 2", ["f(1)", "f(1)"], [[2, 1]] * 2, True),
        ("assert abs(f(1) - 0.5) <= 1e-6", ["f(1)"], [0.5], True),
        ("assert f(1)[0] == 3", ["f(1)[0]"], [3], True),
        ("assert f([P(1, 2)], 2) == {'a': -1}", ["f([P(1, 2)], 2)"], [{"a": -1}], True),
        ("assert sum(10, 15) == 6", ["sum(10, 15)"], [6], True),  # a real row: the program is `sum`
        ("assert sorted(f(1)) == [1]", ["f(1)"], [7], False),  # a TypeError is a wrong answer
        ("assert f(1) ** 2 == 4", ["f(1)"], [2], True),
    ],
)
def test_asserts_are_split_and_judged(
    source: str, expressions: list[str], values: list[object], holds: bool
) -> None:
    split = split_assert(source)
    assert list(split.expressions) == expressions
    assert split.holds(values) is holds


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        "assert",
        "assert 1 == 1",
        "assert all(y for y in f(1))",
        "import os",
        "assert [f(1)",
    ],
)
def test_tests_that_cannot_be_judged_are_refused(source: str) -> None:
    with pytest.raises(DataError):
        split_assert(source)


def test_a_test_runs_nothing_in_this_process() -> None:
    split = split_assert("assert __import__('os').getpid() == 1")
    assert split.expressions == ("__import__('os').getpid()",)  # goes to the sandbox


def test_huge_values_do_not_explode_here() -> None:
    assert not split_assert("assert f(1) ** f(1) == 4").holds([10**9, 10**9])
    assert not split_assert("assert len(list(range(f(1)))) == 4").holds([10**12])
    assert not split_assert("assert f(1) * 3 == 4").holds(["x" * 10])


def test_code_is_the_last_block_that_defines_the_function() -> None:
    text = "```python\ndef f(): return 1\n```\nUse:\n```python\nprint(f())\n```\n```text\nx\n```"
    assert code_blocks(text) == ["def f(): return 1", "print(f())"]
    assert extract_code(text, {"f"}) == "def f(): return 1"
    assert extract_code(text, {"g"}) == "print(f())"
    assert extract_code("<think>```python\nold\n```</think>```py\nnew\n```", {"f"}) == "new"
    assert extract_code("```python\ndef f(): return 2", {"f"}) == "def f(): return 2"
    assert extract_code("def f(): return 3", {"f"}) == "def f(): return 3"
    assert extract_code("I would use a loop.", {"f"}) is None


def test_answers_are_json_or_lines() -> None:
    assert parse_tests('["assert f(1) == 2"]') == ("", ["assert f(1) == 2"])
    assert parse_tests('{"setup": "a = 1", "tests": ["assert f(a) == 2"]}')[0] == "a = 1"
    assert parse_tests("assert f(1) == 2\nassert f(2) == 3\n")[1][1] == "assert f(2) == 3"
    with pytest.raises(DataError, match="not a JSON list of asserts"):
        parse_tests("[]")


def test_setup_follows_the_code() -> None:
    def runner(code: str, expressions: list[str]) -> RunResult:
        namespace: dict[str, object] = {}
        exec(code, namespace)
        return RunResult("done", tuple(eval(text, namespace) for text in expressions))

    answer = json.dumps({"setup": "tree = Node(3)", "tests": ["assert f(tree) == 3"]})
    code = "class Node:\n    def __init__(self, v): self.v = v\ndef f(n): return n.v"
    assert CodeVerifier(runner)(f"```python\n{code}\n```", answer).reward == 1.0


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(x): return x + 1", "correct"),
        ("import math, collections, re, heapq, itertools\ndef f(x): return x + 1", "correct"),
        ("def f(x):\n    print('working')\n    return x + 1", "correct"),
        ("def f(x): return x", "wrong"),
        ("def f(x): return 1 / 0", "wrong"),
        ("def f(x) return x", "invalid"),
        ("def g(x): return x + 1", "wrong"),
    ],
)
def test_scores(code: str, reason: str) -> None:
    score = CodeVerifier()(f"```python\n{code}\n```", '["assert f(1) == 2", "assert f(2) == 3"]')
    assert (score.reason, score.reward) == (reason, float(reason == "correct"))
