"""Self-distillation sampling (paper appendix B): what the full model itself can solve.

Each training problem is answered once, greedily, with the full cache; the correct answers are kept,
optionally a fixed number in each stratum of response length. They serve the warm start as what to
imitate and the on-policy phase as prompts. Progress is a JSON-lines file, one line a batch, so that
an interrupted run continues. Forced tasks need no generation: their gold completions are taken.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlkv.core.engine import Completion, SamplingParams
from rlkv.core.files import append_jsonl, mend_jsonl, read_jsonl, write_atomic
from rlkv.errors import DataError
from rlkv.hf.attach import compress
from rlkv.hf.engine import HFEngine
from rlkv.hf.loading import LoadedModel
from rlkv.tasks.base import Task
from rlkv.train.config import DistillConfig
from rlkv.train.problems import Problem
from rlkv.train.unit import Solution
from rlkv.train.worker import Worker


@dataclass(frozen=True, slots=True)
class DistillResult:
    """Solutions in the order of their problems, and what they cost."""

    solutions: list[Solution]
    """Correct ones."""
    asked: int
    """Problems answered."""
    generated_tokens: int
    """Tokens decoded, wrong answers included."""


def collect(
    worker: Worker,
    problems: Sequence[Problem],
    *,
    count: int,
    path: Path | None,
    on_batch: Callable[[int, int], None],
) -> DistillResult:
    """Solutions of a worker's task: gold ones where it is forced, else the full model's own."""
    if worker.task.mode == "forced":
        return gold_solutions(problems, count)
    rollout = worker.config.rollout
    return solve(
        worker.loaded,
        worker.task,
        problems,
        count=count,
        config=worker.config.distill,
        max_new_tokens=rollout.max_new_tokens or worker.task.max_new_tokens,
        rows=rollout.decode_rows,
        path=path,
        on_batch=on_batch,
    )


def gold_solutions(problems: Sequence[Problem], count: int) -> DistillResult:
    """Forced tasks: the gold completions of the first ``count`` problems."""
    solutions = [
        Solution(p.key, p.prompt_ids + p.gold_ids, p.scored, len(p.gold_ids))
        for p in problems[:count]
    ]
    return DistillResult(solutions, len(solutions), 0)


def solve(
    loaded: LoadedModel,
    task: Task,
    problems: Sequence[Problem],
    *,
    count: int,
    config: DistillConfig,
    max_new_tokens: int,
    rows: int,
    path: Path | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> DistillResult:
    """Answers ``problems`` in order until enough are solved.

    Args:
        loaded: The model, used with its full cache.
        task: What is asked; its verifier decides.
        problems: In the order they are tried.
        count: Solutions wanted where ``config`` has no quotas.
        config: Strata and quotas.
        max_new_tokens: Completion limit.
        rows: Problems decoded together.
        path: JSON-lines file to continue from and add to; None keeps nothing.
        on_batch: Called with (solutions so far, problems tried so far).

    Raises:
        DataError: The file belongs to other problems, or nothing was solved.
    """
    wanted = sum(config.quotas) or count
    header = {
        "model": loaded.spec.model_id,
        "revision": loaded.spec.revision,
        "task": task.name,
        "version": task.version,
        "max_new_tokens": max_new_tokens,
        "rows": rows,
    }
    batches = _stored_batches(path, header) if path else []
    params = SamplingParams(max_new_tokens=max_new_tokens)
    kept: list[Solution] = []
    room = list(config.quotas)
    tokens = asked = 0
    with compress(loaded.model, method="full", spec=loaded.spec) as session:
        engine = HFEngine(loaded, session, batch_size=rows)
        for number, start in enumerate(range(0, len(problems), rows)):
            if len(kept) >= wanted:
                break
            chunk = problems[start : start + rows]
            if number < len(batches):
                batch = batches[number]
            else:
                found = engine.generate([problem.prompt for problem in chunk], params)
                batch = [
                    _row(task, problem, completions[0])
                    for problem, completions in zip(chunk, found, strict=True)
                ]
                if path:
                    append_jsonl(path, {"batch": [asdict(row) for row in batch]})
            _require_same(path, chunk, batch)
            asked += len(chunk)
            tokens += sum(len(row.token_ids) for row in batch)
            kept.extend(_chosen(chunk, batch, config, room, wanted - len(kept)))
            if on_batch is not None:
                on_batch(len(kept), asked)
    if not kept:
        raise DataError(
            f"{loaded.spec.model_id} solved none of {asked} {task.name} problems with its full "
            "cache, expected some; choose an easier task or a stronger model"
        )
    return DistillResult(kept, asked, tokens)


@dataclass(frozen=True, slots=True)
class _Answer:
    key: str
    token_ids: tuple[int, ...]
    reward: float


def _row(task: Task, problem: Problem, completion: Completion) -> _Answer:
    reward = task.verifier(completion.text, problem.answer).reward
    return _Answer(problem.key, completion.token_ids, reward)


def _chosen(
    chunk: Sequence[Problem],
    batch: Sequence[_Answer],
    config: DistillConfig,
    room: list[int],
    most: int,
) -> list[Solution]:
    """Correct answers of a batch that their stratum has room for; ``room`` is used up."""
    chosen: list[Solution] = []
    for problem, answer in zip(chunk, batch, strict=True):
        length = len(answer.token_ids)
        if answer.reward < 1.0 or len(chosen) >= most:
            continue
        if room:
            stratum = bisect_left(config.edges, length)
            if stratum == len(room) or not room[stratum]:
                continue
            room[stratum] -= 1
        start = len(problem.prompt_ids)
        chosen.append(
            Solution(
                problem.key,
                problem.prompt_ids + answer.token_ids,
                tuple(range(start, start + length)),
                length,
            )
        )
    return chosen


def _stored_batches(path: Path, header: dict[str, object]) -> list[list[_Answer]]:
    """Batches of an earlier run; starts the file where there is none.

    Raises:
        DataError: The file was made with other settings.
    """
    if not path.is_file():
        write_atomic(path, json.dumps(header) + "\n")
        return []
    mend_jsonl(path)
    rows = list(read_jsonl(path))
    if not rows or rows[0] != header:
        raise DataError(
            f"{path} holds solutions made with {rows[0] if rows else 'nothing'}, expected "
            f"{header}; remove the file or choose another output folder"
        )
    return [
        [_Answer(row["key"], tuple(row["token_ids"]), row["reward"]) for row in line["batch"]]
        for line in rows[1:]
    ]


def _require_same(path: Path | None, chunk: Sequence[Problem], batch: Sequence[_Answer]) -> None:
    if [problem.key for problem in chunk] != [answer.key for answer in batch]:
        raise DataError(
            f"{path} holds answers to other problems, expected this task's in this order; remove "
            "the file or choose another output folder"
        )
