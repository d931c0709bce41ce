"""LongReason: multiple choice whose premises are spread over a long text (Ling et al., 2025).

``longreason`` is the 64k split, of which the paper uses the first 400 of 794; ``longreason:8k`` and
the other lengths are the splits of that name. A row: ``{"prompt": "<text and question>", "answer":
"B", "example_idx": …}``; the prompt holds the options already. Unlike the other tasks its published
length limit covers the prompt: 71,680 tokens together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rlkv.registry import unknown_name
from rlkv.tasks._prompts import choice_prompt_of
from rlkv.tasks._published import PublishedTask, Row, text_field
from rlkv.tasks.base import DatasetRef, Example
from rlkv.verifiers.choice import ChoiceVerifier

SPLITS = ("original", "expanded", "8k", "16k", "32k", "64k", "128k")
NUM_OPTIONS = 5


class LongReason(PublishedTask):
    """Multiple choice over a long text."""

    name: ClassVar[str] = "longreason"
    dataset: ClassVar[DatasetRef] = DatasetRef("lz1bytedance/LongReason", "main", "64k")
    max_new_tokens: ClassVar[int] = 8192
    max_total_tokens: ClassVar[int | None] = 71680
    max_examples: ClassVar[int | None] = 400

    def __init__(self, data: str | None = None) -> None:
        super().__init__(data)
        self.verifier = ChoiceVerifier(num_options=NUM_OPTIONS)

    @classmethod
    def variant(cls, name: str) -> type[LongReason]:
        """The split of that context length."""
        if name not in SPLITS:
            raise unknown_name("longreason split", name, list(SPLITS))
        fields = {
            "name": f"longreason:{name}",
            "__module__": cls.__module__,
            "dataset": replace(cls.dataset, split=name),
        }
        return type(cls.__name__, (cls,), fields)

    def example(self, row: Row, number: int) -> Example:
        """See :class:`PublishedTask`."""
        return Example(
            id=f"longreason-{text_field(row, 'example_idx', 'idx', 'id', default=str(number))}",
            prompt=choice_prompt_of(text_field(row, "prompt", "input", "question"), NUM_OPTIONS),
            answer=text_field(row, "answer", "answers").strip().strip("().").upper(),
        )

    def gold_completion(self, example: Example) -> str:
        """See :class:`rlkv.tasks.base.Task`."""
        return f"Answer: {example.answer}"
