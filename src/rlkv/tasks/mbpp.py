r"""MBPP: short Python functions judged by three asserts (Austin et al., 2021; 500 test rows).

A row: ``{"task_id": 11, "text": "Write a python function to remove …", "test_list": ["assert
remove_Occ('hello','l') == 'heo'", …], "test_setup_code": "", "code": "<gold>"}``; a local file may
name the fields ``prompt`` and ``test``. The prompt shows the asserts, as the published one does,
since they alone tell the function's name. Code runs in the sandbox of ``verifiers/sandbox.py``.
"""

from __future__ import annotations

import json
from typing import ClassVar

from rlkv.errors import DataError
from rlkv.tasks._published import PublishedTask, Row, text_field
from rlkv.tasks.base import DatasetRef, Example
from rlkv.verifiers.code import CodeVerifier

PROMPT = (
    "{text}\n\nYour code has to pass these tests:\n\n```python\n{tests}\n```\n\n"
    "Think step by step, then give the complete solution as the last thing of your response, in "
    "one ```python block, without the tests."
)
TREES = {"root": "2 3 4 5 . . 8", "root1": "2 3 4 5 6 . 7", "root2": "2 3 4 5 . . 7"}
"""Children of the trees that row 367 of MBPP (CC BY 4.0) builds in its setup code, level by level;
some copies of the data have lost the field, and without it no program passes."""
_PLACES = ("left", "right", "left.left", "left.right", "right.left", "right.right")


def _setup_of_367() -> str:
    lines = []
    for name, children in TREES.items():
        lines.append(f"{name} = Node(1)")
        places = (*_PLACES, "left.left.left")
        for place, value in zip(places, children.split(), strict=True):
            if value != ".":
                lines.append(f"{name}.{place} = Node({value})")
    return "\n".join(lines)


class Mbpp(PublishedTask):
    """Short Python functions, run against asserts in a sandbox."""

    name: ClassVar[str] = "mbpp"
    dataset: ClassVar[DatasetRef] = DatasetRef(
        "google-research-datasets/mbpp", "main", "test", config="full"
    )
    train_split: ClassVar[str | None] = "train"
    max_new_tokens: ClassVar[int] = 8192
    max_total_tokens: ClassVar[int | None] = 8192

    def __init__(self, data: str | None = None) -> None:
        super().__init__(data)
        self.verifier = CodeVerifier()

    def example(self, row: Row, number: int) -> Example:
        """See :class:`PublishedTask`."""
        number_in_mbpp = text_field(row, "task_id", default=str(number))
        tests = row.get("test_list", row.get("test"))
        if not isinstance(tests, list) or not tests:
            raise DataError(f"mbpp row {number_in_mbpp} has tests {tests!r}, expected a list")
        setup = text_field(row, "test_setup_code", default="")
        if number_in_mbpp == "367" and not setup:
            setup = _setup_of_367()
        tests = [str(test) for test in tests]
        return Example(
            id=f"mbpp-{number_in_mbpp}",
            prompt=PROMPT.format(
                text=text_field(row, "text", "prompt").strip(), tests="\n".join(tests)
            ),
            answer=json.dumps({"setup": setup, "tests": tests} if setup else tests),
            meta={"code": text_field(row, "code", default="")},
        )

    def gold_completion(self, example: Example) -> str:
        """See :class:`rlkv.tasks.base.Task`."""
        return f"```python\n{example.meta['code']}\n```"
