"""Grades generations that exist already, of any engine, with a task's verifier.

A line of the file is one generation. Read as they are: ``{"id", "completion", "answer"}``; the
authors' ``{"prompt", "pred", "answers", "input_length", "output_length"}``; MMLU-Pro's
``{"question_id", "answer", "pred", "generated_text"}``, whose ``pred`` is a letter, not the text.
A line without an answer takes it from the task's example of the same id.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from rlkv.core.files import read_jsonl
from rlkv.errors import DataError
from rlkv.evaluate.error_types import ErrorType, diagnose
from rlkv.tasks.base import Task

COMPLETION_FIELDS = ("completion", "generated_text", "pred", "text", "response", "output")
ANSWER_FIELDS = ("answer", "answers", "gold", "test_list", "test")
ID_FIELDS = ("id", "question_id", "unique_id", "task_id")

_MADE_EXAMPLES = 500


@dataclass(frozen=True, slots=True)
class ScoredExample:
    """How one generation was judged."""

    id: str
    """The line's id, or its number in the file from 0."""
    extracted: str | None
    """The answer found in the text, or None."""
    correct: bool
    """Whether the verifier gave the full reward."""
    error: ErrorType | None
    """What went wrong; None for a correct one."""


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """What ``rlkv score`` reports of a file: shares of n in [0, 1], but for ``task`` and ``n``."""

    task: str
    """Name of the task."""
    n: int
    """Generations in the file."""
    accuracy: float
    """Correct ones."""
    no_answer: float
    """Those in which no answer was found; they are also in one of the next three."""
    repetition: float
    """Wrong ones that end in a loop."""
    overlength: float
    """Wrong ones that reached the length limit without a loop."""
    incorrect: float
    """All other wrong ones."""


def score_file(path: str | Path, task: Task) -> Iterator[ScoredExample]:
    """Judges each line of a JSON-lines file, in order.

    Raises:
        DataError: A line has no completion, or no answer can be found for it.
    """
    answers: dict[str, str] | None = None
    seen: set[str] = set()
    for number, line in enumerate(read_jsonl(path)):
        identity = _first(line, ID_FIELDS)
        example_id = str(number) if identity is None else str(identity)
        if example_id in seen:
            example_id = f"{example_id}#{number}"  # k samples of one problem share its id
        seen.add(example_id)
        answer = _first(line, ANSWER_FIELDS)
        if answer is None:
            answers = _answers(task) if answers is None else answers
            answer = answers.get(str(identity))
        if answer is None:
            raise DataError(
                f"{path} line {number + 1} has no answer and task {task.name} has no example "
                f"{identity!r}; add a field 'answer', or pass the task's data with --data"
            )
        yield _score(task, example_id, line, answer)


def summarise(task_name: str, scored: Iterable[ScoredExample]) -> ScoreRow:
    """The shares over all ``scored``.

    Raises:
        DataError: There are none.
    """
    errors: Counter[ErrorType | None] = Counter()
    silent = 0
    for example in scored:
        errors[example.error] += 1
        silent += example.extracted is None
    n = errors.total()
    if not n:
        raise DataError(f"no generations to score for task {task_name}; the file is empty")
    return ScoreRow(
        task=task_name,
        n=n,
        accuracy=errors[None] / n,
        no_answer=silent / n,
        repetition=errors["repetition"] / n,
        overlength=errors["overlength"] / n,
        incorrect=errors["incorrect"] / n,
    )


def as_record(value: ScoredExample | ScoreRow) -> dict[str, object]:
    """The JSON object of the output contract."""
    return asdict(value)


def _score(
    task: Task, example_id: str, line: Mapping[str, object], answer: object
) -> ScoredExample:
    completion = _first(line, COMPLETION_FIELDS)
    if not isinstance(completion, str):
        raise DataError(
            f"generation {example_id} has the fields {', '.join(line)}, expected the text under "
            f"one of {', '.join(COMPLETION_FIELDS)}"
        )
    text = answer if isinstance(answer, str) else json.dumps(answer)
    score = task.verifier(completion, text)
    if score.reward >= 1.0:
        return ScoredExample(example_id, score.extracted, True, None)
    finish = line.get("finish_reason")
    diagnosis = diagnose(
        completion,
        output_length=_length(line, "output_length", "completion_tokens"),
        input_length=_length(line, "input_length", "prompt_tokens"),
        finish_reason=finish if isinstance(finish, str) else None,
        max_new_tokens=task.max_new_tokens,
        max_total_tokens=task.max_total_tokens,
    )
    return ScoredExample(example_id, score.extracted, False, diagnosis.error)


def _answers(task: Task) -> dict[str, str]:
    """Answers by id: of all examples, but of a task that makes its own without end of the first."""
    makes_its_own = task.dataset is None and task.data is None
    examples = islice(task.examples(), _MADE_EXAMPLES if makes_its_own else None)
    return {example.id: example.answer for example in examples}


def _first(line: Mapping[str, object], names: Iterable[str]) -> object:
    return next((line[name] for name in names if line.get(name) is not None), None)


def _length(line: Mapping[str, object], *names: str) -> int | None:
    value = _first(line, names)
    return int(value) if isinstance(value, (int, float)) else None
