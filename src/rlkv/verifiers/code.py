"""Code verifier: runs a completion's Python against MBPP's asserts in a sandbox.

The code is the last fenced Python block that defines what the asserts call, else the last block,
else the completion itself where it is plain Python. The sandbox evaluates the asserts' calls and
the parent judges the values (``assertions.py``), so a program cannot pass by exiting early or by
tampering with the comparison; it has to return the expected values.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlkv.errors import DataError
from rlkv.verifiers.assertions import SplitAssert, split_assert
from rlkv.verifiers.base import Score
from rlkv.verifiers.sandbox import CodeRunner, Sandbox

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*$", re.MULTILINE)
_PYTHON = ("", "py", "python", "python3")


def code_blocks(text: str) -> list[str]:
    """Contents of the fenced Python blocks of ``text``; an unclosed last one runs to the end."""
    fences = list(_FENCE.finditer(text))
    blocks, i = [], 0
    while i < len(fences):
        language = fences[i].group(1).lower()
        # a fence with a language opens; only a bare one closes
        end = next((j for j in range(i + 1, len(fences)) if not fences[j].group(1)), len(fences))
        stop = fences[end].start() if end < len(fences) else len(text)
        if language in _PYTHON:
            blocks.append(text[fences[i].end() : stop].strip("\n"))
        i = end + 1
    return [block for block in blocks if block.strip()]


def extract_code(completion: str, names: set[str]) -> str | None:
    """The Python that a completion offers, preferring a block that defines one of ``names``."""
    answer = completion.rpartition("</think>")[2]
    blocks = code_blocks(answer) or code_blocks(completion)
    for block in reversed(blocks):
        if any(re.search(rf"\b(?:def|class)\s+{re.escape(name)}\b", block) for name in names):
            return block
    if blocks:
        return blocks[-1]
    if "def " in answer and _is_python(answer):
        return answer.strip()
    return None


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def parse_tests(answer: str) -> tuple[str, list[str]]:
    """Setup code and asserts of an answer.

    The answer is JSON, a list of asserts or ``{"setup": …, "tests": […]}``, or one assert a line.

    Raises:
        DataError: It holds no asserts.
    """
    try:
        content = json.loads(answer)
    except ValueError:
        content = [line for line in answer.split("\n") if line.strip()]
    found = content if isinstance(content, dict) else {"tests": content}
    setup, tests = found.get("setup") or "", found.get("tests")
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise DataError(
            f"code tests {answer[:80]!r} are not a JSON list of asserts, nor asserts a line; "
            "fix the data"
        )
    return str(setup), tests


@dataclass(frozen=True)
class CodeVerifier:
    """Passes a completion whose code meets every assert of the answer.

    What an answer looks like: see :func:`parse_tests`. Setup code runs after the completion's.
    """

    runner: CodeRunner = field(default_factory=Sandbox)
    """Where code is run; a user's own runner replaces the sandbox where that cannot work."""

    def __call__(self, completion: str, answer: str) -> Score:
        """See :class:`rlkv.verifiers.base.Verifier`.

        Raises:
            SandboxError: The built-in sandbox cannot confine code on this system.
            DataError: The answer's tests cannot be read.
        """
        setup, tests = parse_tests(answer)
        splits = [split_assert(test) for test in tests]
        code = extract_code(completion, set().union(*(split.names() for split in splits)))
        if code is None:
            return Score(0.0, None, "no_answer")
        return self._judge(code, setup, splits)

    def _judge(self, code: str, setup: str, splits: Sequence[SplitAssert]) -> Score:
        expressions = [text for split in splits for text in split.expressions]
        result = self.runner(f"{code}\n{setup}" if setup else code, expressions)
        if len(result.values) < len(expressions):
            reason = "timeout" if result.outcome == "timeout" else "wrong"
            return Score(0.0, code, "invalid" if result.error == "SyntaxError" else reason)
        rest = list(result.values)
        for split in splits:
            mine, rest = rest[: len(split.expressions)], rest[len(split.expressions) :]
            if not split.holds(mine):
                return Score(0.0, code, "wrong")
        return Score(1.0, code, "correct")
