"""Rollouts: completions of the gated model, with their reward.

Generated tasks: the engine writes a group of completions per prompt through mixed attention, the
task's verifier scores the text. Forced tasks: the gold completion is fed in once, every scored
token is drawn from the gated model given the gold tokens before it, and each span is a rollout of
its own whose reward is 1 where all of its tokens are gold. Spans are independent given the gold
context, so comparing draws of one span, not of a whole answer, is the same gradient with less
noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlkv.core.engine import Completion, SamplingParams
from rlkv.hf.attach import Session
from rlkv.hf.engine import HFEngine
from rlkv.hf.loading import LoadedModel
from rlkv.hf.sampling import next_tokens, row_generator
from rlkv.hf.teacher_forcing import TeacherForcing, Trace
from rlkv.tasks.base import Task
from rlkv.train.problems import Problem


@dataclass(frozen=True, slots=True)
class Rollout:
    """Tokens that the gated model chose, where it chose them, and what they earned."""

    key: str
    """Problem."""
    group: int
    """Rollouts of a problem are compared within a group: its spans, or one for all."""
    tokens: tuple[int, ...]
    """What the model reads: prompt and completion, or prompt and gold completion."""
    positions: tuple[int, ...]
    """Positions in ``tokens`` of the chosen tokens."""
    targets: tuple[int, ...]
    """The token chosen at each position."""
    reward: float
    """In [0, 1]."""
    generated: int
    """Tokens that decoding cost; 0 in forced tasks."""

    @property
    def trace(self) -> Trace:
        """What teacher forcing needs."""
        return Trace(self.tokens, self.positions)


Group = list[Rollout]
"""Rollouts that are compared with each other."""


def generated_groups(
    loaded: LoadedModel,
    session: Session,
    task: Task,
    problems: Sequence[Problem],
    params: SamplingParams,
    *,
    decode_rows: int,
) -> list[Group]:
    """A group of ``params.num_samples`` completions for each problem, verified."""
    engine = HFEngine(loaded, session, batch_size=decode_rows, refill=True)
    found = engine.generate([problem.prompt for problem in problems], params)
    return [
        [_verified(task, problem, completion) for completion in completions]
        for problem, completions in zip(problems, found, strict=True)
    ]


def _verified(task: Task, problem: Problem, completion: Completion) -> Rollout:
    start = len(problem.prompt_ids)
    ids = completion.token_ids
    return Rollout(
        problem.key,
        0,
        problem.prompt_ids + ids,
        tuple(range(start, start + len(ids))),
        ids,
        task.verifier(completion.text, problem.answer).reward,
        len(ids),
    )


def forced_groups(
    scorer: TeacherForcing,
    problems: Sequence[Problem],
    params: SamplingParams,
    *,
    micro_rows: int,
) -> list[Group]:
    """A group of ``params.num_samples`` draws for each span of each problem."""
    groups: list[Group] = []
    for start in range(0, len(problems), micro_rows):
        chunk = problems[start : start + micro_rows]
        traces = [Trace(p.prompt_ids + p.gold_ids, p.scored) for p in chunk]
        with torch.no_grad():
            logits = scorer.logits(scorer.hidden(traces))
        offset = 0
        for problem, trace in zip(chunk, traces, strict=True):
            own = logits[offset : offset + len(trace.positions)]
            offset += len(trace.positions)
            groups.extend(_drawn(problem, trace, own, params))
    return groups


def _drawn(
    problem: Problem, trace: Trace, logits: torch.Tensor, params: SamplingParams
) -> list[Group]:
    """One group per span; ``logits`` (scored tokens of the problem, vocab)."""
    draws = [
        next_tokens(
            logits, params, [row_generator(params.seed, problem.key, sample)] * len(logits)
        ).tolist()
        for sample in range(params.num_samples)
    ]
    groups: list[Group] = []
    place = 0
    for span, (first, last) in enumerate(problem.spans):
        inside = slice(place, place + last - first)
        place += last - first
        gold = list(problem.gold_ids[first:last])
        groups.append(
            [
                Rollout(
                    problem.key,
                    span,
                    trace.tokens,
                    trace.positions[inside],
                    tuple(draw[inside]),
                    float(draw[inside] == gold),
                    0,
                )
                for draw in draws
            ]
        )
    return groups


def forced_rewards(
    scorer: TeacherForcing, problems: Sequence[Problem], *, micro_rows: int
) -> list[float]:
    """Share of each problem's spans whose every token the attached model would write greedily."""
    rewards: list[float] = []
    for start in range(0, len(problems), micro_rows):
        chunk = problems[start : start + micro_rows]
        traces = [Trace(p.prompt_ids + p.gold_ids, p.scored) for p in chunk]
        with torch.inference_mode():
            chosen = scorer.choices(scorer.hidden(traces)).tolist()
        for problem, trace in zip(chunk, traces, strict=True):
            own, chosen = chosen[: len(trace.positions)], chosen[len(trace.positions) :]
            rewards.append(_share_right(problem, own))
    return rewards


def _share_right(problem: Problem, chosen: Sequence[int]) -> float:
    right, place = 0, 0
    for first, last in problem.spans:
        found = list(chosen[place : place + last - first])
        right += found == list(problem.gold_ids[first:last])
        place += last - first
    return right / len(problem.spans)
