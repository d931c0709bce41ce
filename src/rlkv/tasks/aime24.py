"""AIME 2024: 30 problems of two exams, answers from 0 to 999.

A row: ``{"problem": "Every morning Aya goes for a …", "answer": "204"}``; some files pad the answer
with zeros (``"033"``), which the verifier reads as the number.
"""

from __future__ import annotations

from typing import ClassVar

from rlkv.tasks._prompts import boxed_completion, math_prompt
from rlkv.tasks._published import PublishedTask, Row, text_field
from rlkv.tasks.base import DatasetRef, Example
from rlkv.verifiers.math import MathVerifier


class Aime24(PublishedTask):
    """The two AIME exams of 2024."""

    name: ClassVar[str] = "aime24"
    dataset: ClassVar[DatasetRef] = DatasetRef("HuggingFaceH4/aime_2024", "main", "train")
    max_new_tokens: ClassVar[int] = 16384
    max_total_tokens: ClassVar[int | None] = 16384

    def __init__(self, data: str | None = None) -> None:
        super().__init__(data)
        self.verifier = MathVerifier()

    def example(self, row: Row, number: int) -> Example:
        """See :class:`PublishedTask`."""
        prompt = math_prompt(text_field(row, "problem", "prompt"))
        return Example(f"aime24-{number}", prompt, text_field(row, "answer"))

    def gold_completion(self, example: Example) -> str:
        """See :class:`rlkv.tasks.base.Task`."""
        return boxed_completion(example.answer)
