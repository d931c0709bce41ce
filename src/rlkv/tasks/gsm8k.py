r"""GSM8K: grade-school word problems with an integer answer (Cobbe et al., 2021; 1,319 test rows).

A row: ``{"question": "Janet's ducks lay 16 eggs per day. …", "answer": "…\n#### 18"}``; a local
file may give the bare answer and keep the worked solution under ``solution``.
"""

from __future__ import annotations

from typing import ClassVar

from rlkv.tasks._prompts import boxed_completion, math_prompt
from rlkv.tasks._published import PublishedTask, Row, text_field
from rlkv.tasks.base import DatasetRef, Example
from rlkv.verifiers.math import MathVerifier, gold_answer


class Gsm8k(PublishedTask):
    """Grade-school word problems."""

    name: ClassVar[str] = "gsm8k"
    dataset: ClassVar[DatasetRef] = DatasetRef("openai/gsm8k", "main", "test", config="main")
    train_split: ClassVar[str | None] = "train"
    max_new_tokens: ClassVar[int] = 8192
    max_total_tokens: ClassVar[int | None] = 8192

    def __init__(self, data: str | None = None) -> None:
        super().__init__(data)
        self.verifier = MathVerifier()

    def example(self, row: Row, number: int) -> Example:
        """See :class:`PublishedTask`."""
        answer = gold_answer(text_field(row, "answer")).replace(",", "")
        prompt = math_prompt(text_field(row, "question"))
        return Example(f"gsm8k-{number}", prompt, answer)

    def gold_completion(self, example: Example) -> str:
        """See :class:`rlkv.tasks.base.Task`."""
        return boxed_completion(example.answer)
