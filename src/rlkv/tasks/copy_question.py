"""Copying: repeat a real GSM8K question word for word; needs heads that reach back.

The user message shows one demonstration and then a question of 330 to 460 characters (80 to 120
tokens), whose copy is the gold completion. Every word of it is scored. By the time a word is
written, its original is farther back than a recent window of 64 tokens reaches.

Source: GSM8K test questions (openai/grade-school-math, MIT). A fixed excerpt ships with the package
so that the task runs offline; ``data`` may be a JSON-lines file with a ``question`` field, or the
hub id of the published set, which needs the ``datasets`` package and the network.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from random import Random
from typing import ClassVar

from rlkv.core.files import read_jsonl
from rlkv.errors import DataError, MissingExtraError
from rlkv.tasks.base import DatasetRef, Example, Split, Task
from rlkv.tasks.forced import VerbatimVerifier

MIN_CHARS, MAX_CHARS = 330, 460

_PUBLISHED = DatasetRef("openai/gsm8k", "main", "test", "main")
_EXCERPT = Path(__file__).parent / "data" / "gsm8k_questions.jsonl"
_DEMO = "Tom has 3 red pens and 5 blue pens. How many pens does Tom have?"


class CopyQuestion(Task):
    """A GSM8K question, copied word for word after one demonstration; every word is scored."""

    name: ClassVar[str] = "copy_question"
    mode = "forced"
    dataset = _PUBLISHED
    max_new_tokens = 192
    default_model = "smollm2"

    verifier = VerbatimVerifier()

    def examples(
        self, limit: int | None = None, *, seed: int = 0, split: Split = "test"
    ) -> Iterator[Example]:
        """See :class:`~rlkv.tasks.base.Task`; the questions of the source, shuffled by ``seed``.

        A quarter of the questions, chosen by their hash, is ``train``; the rest is ``test``.

        Raises:
            DataError: The source has no question of fitting length, or cannot be read.
            MissingExtraError: The hub set is asked for without the package ``datasets``.
        """
        chosen = {
            _key(question): question
            for question in self._questions()
            if MIN_CHARS <= len(question) <= MAX_CHARS and _split_of(question) == split
        }
        if not chosen:
            raise DataError(
                f"{self.data or _EXCERPT} holds no {split} question of {MIN_CHARS} to {MAX_CHARS} "
                "characters; pass a file with more questions"
            )
        keys = sorted(chosen)
        Random(f"copy_question/{seed}/{split}").shuffle(keys)
        for key in islice(keys, limit):
            yield _example(key, chosen[key])

    def _questions(self) -> Iterable[str]:
        if self.data == _PUBLISHED.repo and not Path(_PUBLISHED.repo).exists():
            return _published_questions(_PUBLISHED)
        return _file_questions(self.data or _EXCERPT)


def _example(key: str, question: str) -> Example:
    prompt = f"Text: {_DEMO}\nCopy: {_DEMO}\n\nText: {question}\nCopy:"
    spans = tuple(match.span() for match in re.finditer(r"\S+", question))
    return Example(key, prompt, question, spans)


def _file_questions(path: str | Path) -> Iterator[str]:
    for number, row in enumerate(read_jsonl(path), start=1):
        question = row.get("question")
        if not isinstance(question, str):
            raise DataError(
                f"{path} row {number} has no text field 'question'; expected GSM8K's format"
            )
        yield _one_line(question)


def _published_questions(source: DatasetRef) -> list[str]:
    if find_spec("datasets") is None:
        raise MissingExtraError(
            "reading a published set needs the package datasets, which is not installed; run `pip "
            "install 'rlkv[data]'`, or pass a JSON-lines file"
        )
    from datasets import load_dataset

    try:
        rows = load_dataset(
            source.repo, source.config, split=source.split, revision=source.revision
        )
        questions = [_one_line(text) for text in rows["question"]]
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"cannot load {source.repo} from the hub ({reason}); check the network and "
            "HF_HUB_OFFLINE, or pass a JSON-lines file"
        ) from error
    return questions


def _one_line(text: str) -> str:
    """The text with every run of white space as one space: what is asked for is its words."""
    return " ".join(text.split())


def _key(question: str) -> str:
    return hashlib.sha256(question.encode("utf-8")).hexdigest()[:12]


def _split_of(question: str) -> Split:
    return "train" if int(_key(question)[0], 16) < 4 else "test"
