"""Rewards without a checkable answer: the full model judges its own compressed self.

``agreement``: 1 where the completion's answer is that of the model's greedy full-cache completion,
as the task's verifier extracts it. ``likelihood``: the geometric mean probability that the full
model gives to the completion's tokens. Both measure faithfulness to the full model, not truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from rlkv.core.engine import Completion
from rlkv.hf.teacher_forcing import TeacherForcing
from rlkv.tasks.base import Task
from rlkv.train.problems import Problem
from rlkv.train.rollout import Group


def agreement_groups(
    groups: Sequence[Group],
    texts: Sequence[Sequence[str]],
    problems: Sequence[Problem],
    reference: Sequence[Completion],
    task: Task,
) -> list[Group]:
    """Groups with agreement as the reward.

    Args:
        groups: One per problem.
        texts: Text of each rollout.
        problems: What was asked.
        reference: The full model's greedy completion of each problem.
        task: Its verifier extracts answers.
    """
    judged: list[Group] = []
    for group, own, problem, full in zip(groups, texts, problems, reference, strict=True):
        wanted = task.verifier(full.text, problem.answer).extracted
        found = [task.verifier(text, problem.answer).extracted for text in own]
        judged.append(
            [
                replace(rollout, reward=float(answer is not None and answer == wanted))
                for rollout, answer in zip(group, found, strict=True)
            ]
        )
    return judged


def likelihood_groups(
    groups: Sequence[Group], scorer: TeacherForcing, *, micro_rows: int
) -> list[Group]:
    """Groups with the full model's mean token probability as the reward.

    Call while every gate is 1. Sequences are scored ``micro_rows`` at a time.
    """
    rollouts = [rollout for group in groups for rollout in group]
    rewards: list[float] = []
    for start in range(0, len(rollouts), micro_rows):
        batch = rollouts[start : start + micro_rows]
        targets = torch.tensor([t for r in batch for t in r.targets])
        with torch.no_grad():
            hidden = scorer.hidden([rollout.trace for rollout in batch])
            scores = scorer.log_probs(hidden, targets.to(hidden.device)[:, None])[:, 0]
        for part in scores.split([len(rollout.targets) for rollout in batch]):
            rewards.append(math.exp(float(part.mean())))
    values = iter(rewards)
    return [[replace(rollout, reward=next(values)) for rollout in group] for group in groups]
