"""MMLU-Pro: ten-option questions in four of its subjects (Wang et al., 2024).

``mmlu_pro`` is chemistry, computer science, law and physics; ``mmlu_pro:law`` is one of them, with
spaces as ``_``. A row: ``{"question_id": 866, "question": "…", "options": ["…", …], "answer": "D",
"category": "law"}``.

Deviation: the published protocol draws up to 500 questions a category with a shuffle of its own;
here it is the first 500 of each in the published order.

``mmlu_pro:published`` reads answers as MMLU-Pro's own extraction does, the last stray capital
included: for checks against published scores, not for new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from string import ascii_uppercase
from typing import ClassVar

from rlkv.errors import DataError
from rlkv.registry import unknown_name
from rlkv.tasks._prompts import choice_prompt
from rlkv.tasks._published import PublishedTask, Row, text_field
from rlkv.tasks.base import DatasetRef, Example, Split
from rlkv.verifiers.choice import ChoiceVerifier

CATEGORIES = ("chemistry", "computer science", "law", "physics")
PER_CATEGORY = 500
"""Questions of one category in the published protocol (computer science has 410)."""


class MmluPro(PublishedTask):
    """Ten-option questions in four subjects."""

    name: ClassVar[str] = "mmlu_pro"
    dataset: ClassVar[DatasetRef] = DatasetRef("TIGER-Lab/MMLU-Pro", "main", "test")
    categories: ClassVar[tuple[str, ...]] = CATEGORIES
    """The categories asked."""
    published_extraction: ClassVar[bool] = False
    """Whether answers are read as MMLU-Pro's own extraction reads them."""
    max_new_tokens: ClassVar[int] = 8192
    max_total_tokens: ClassVar[int | None] = 8192

    def __init__(self, data: str | None = None) -> None:
        super().__init__(data)
        self.verifier = ChoiceVerifier(num_options=10, last_letter=self.published_extraction)

    @classmethod
    def variant(cls, name: str) -> type[MmluPro]:
        """One category, its spaces written as ``_``, or ``published``."""
        wanted = name.replace("_", " ")
        fields: dict[str, object] = {"name": f"mmlu_pro:{name}", "__module__": cls.__module__}
        if name == "published":
            fields["published_extraction"] = True
        elif wanted in CATEGORIES:
            fields["categories"] = (wanted,)
        else:
            known = [*(category.replace(" ", "_") for category in CATEGORIES), "published"]
            raise unknown_name("mmlu_pro variant", name, known)
        return type(cls.__name__, (cls,), fields)

    def examples(
        self, limit: int | None = None, *, seed: int = 0, split: Split = "test"
    ) -> Iterator[Example]:
        """See :class:`rlkv.tasks.base.Task`; at most 500 of each category."""
        seen: Counter[object] = Counter()

        def within_quota() -> Iterator[Example]:
            for example in PublishedTask.examples(self, seed=seed, split=split):
                seen[example.meta["category"]] += 1
                if seen[example.meta["category"]] <= PER_CATEGORY:
                    yield example

        yield from islice(within_quota(), limit)

    def example(self, row: Row, number: int) -> Example | None:
        """See :class:`PublishedTask`."""
        category = text_field(row, "category")
        if category not in self.categories:
            return None
        options = row.get("options")
        if not isinstance(options, list) or not 1 < len(options) <= len(ascii_uppercase):
            raise DataError(f"mmlu_pro row {number} has options {options!r}, expected a list")
        return Example(
            id=f"mmlu_pro-{text_field(row, 'question_id', default=str(number))}",
            prompt=choice_prompt(text_field(row, "question"), [str(option) for option in options]),
            answer=text_field(row, "answer"),
            meta={"category": category},
        )

    def gold_completion(self, example: Example) -> str:
        """See :class:`rlkv.tasks.base.Task`."""
        return f"Answer: {example.answer}"
