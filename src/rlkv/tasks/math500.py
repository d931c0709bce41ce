r"""MATH-500: 500 competition problems with LaTeX answers (Lightman et al., 2023).

A row: ``{"problem": "Convert the point …", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
"subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/807.json"}``.
"""

from __future__ import annotations

from typing import ClassVar

from rlkv.tasks._prompts import boxed_completion, math_prompt
from rlkv.tasks._published import PublishedTask, Row, text_field
from rlkv.tasks.base import DatasetRef, Example
from rlkv.verifiers.math import MathVerifier


class Math500(PublishedTask):
    """Competition problems with LaTeX answers."""

    name: ClassVar[str] = "math500"
    dataset: ClassVar[DatasetRef] = DatasetRef("HuggingFaceH4/MATH-500", "main", "test")
    max_new_tokens: ClassVar[int] = 8192
    max_total_tokens: ClassVar[int | None] = 8192

    def __init__(self, data: str | None = None) -> None:
        super().__init__(data)
        self.verifier = MathVerifier()

    def example(self, row: Row, number: int) -> Example:
        """See :class:`PublishedTask`."""
        meta = {"subject": text_field(row, "subject", default="")}
        meta["level"] = text_field(row, "level", default="")
        return Example(
            id=text_field(row, "unique_id", default=f"math500-{number}"),
            prompt=math_prompt(text_field(row, "problem", "prompt")),
            answer=text_field(row, "answer"),
            meta=meta,
        )

    def gold_completion(self, example: Example) -> str:
        """See :class:`rlkv.tasks.base.Task`."""
        return boxed_completion(example.answer)
