"""DeepScaleR: about 40,000 competition problems, the training set of the paper's gates.

A row: ``{"problem": "Let $x$, $y$ and $z$ all exceed $1$ …", "answer": "60", "solution": "…"}``.
Rows without an answer are skipped. All rows are training rows; ``split="test"`` gives the same.
"""

from __future__ import annotations

from typing import ClassVar

from rlkv.tasks._prompts import boxed_completion, math_prompt
from rlkv.tasks._published import PublishedTask, Row, text_field
from rlkv.tasks.base import DatasetRef, Example
from rlkv.verifiers.math import MathVerifier


class DeepScaler(PublishedTask):
    """Competition problems to train gates on."""

    name: ClassVar[str] = "deepscaler"
    dataset: ClassVar[DatasetRef] = DatasetRef(
        "agentica-org/DeepScaleR-Preview-Dataset", "main", "train"
    )
    train_split: ClassVar[str | None] = "train"
    max_new_tokens: ClassVar[int] = 7168
    max_total_tokens: ClassVar[int | None] = 7680

    def __init__(self, data: str | None = None) -> None:
        super().__init__(data)
        self.verifier = MathVerifier()

    def example(self, row: Row, number: int) -> Example | None:
        """See :class:`PublishedTask`."""
        answer = text_field(row, "answer", default="").strip()
        if not answer:
            return None
        prompt = math_prompt(text_field(row, "problem"))
        return Example(f"deepscaler-{number}", prompt, answer)

    def gold_completion(self, example: Example) -> str:
        """See :class:`rlkv.tasks.base.Task`."""
        return boxed_completion(example.answer)
