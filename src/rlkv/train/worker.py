"""Worker: a frozen model that runs units of work.

Everything a call returns follows from its arguments; what a worker keeps between calls (the full
model's outputs) is only there to save time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlkv.core.engine import Engine, GatedEngine, SamplingParams
from rlkv.errors import ConfigError
from rlkv.gates import Gates
from rlkv.hf.attach import Session, attach_gates
from rlkv.hf.engine import HFEngine
from rlkv.hf.loading import LoadedModel
from rlkv.hf.teacher_forcing import TeacherForcing, Trace
from rlkv.tasks.base import Task
from rlkv.train.advantage import group_advantages
from rlkv.train.config import TrainConfig
from rlkv.train.loss import kl_loss, policy_loss
from rlkv.train.problems import Problem
from rlkv.train.rollout import (
    Group,
    Rollout,
    forced_groups,
    forced_rewards,
    generated_groups,
)
from rlkv.train.self_reward import agreement_groups, likelihood_groups
from rlkv.train.unit import (
    Alpha,
    Evaluation,
    GradientSum,
    Solution,
    TokenLogProbs,
    UnitResult,
)


@dataclass
class Worker:
    """A frozen model that runs units, one at a time."""

    loaded: LoadedModel
    """Model, tokenizer, shape."""
    task: Task
    """What is asked and how it is scored."""
    config: TrainConfig
    """How."""
    engine: GatedEngine | None = None
    """Who writes completions where ``rollout.engine`` is not ``hf``."""
    scorer: TeacherForcing = field(init=False)
    _gates: Gates = field(init=False)
    _teacher: dict[str, Tensor] = field(init=False, default_factory=dict)
    _teacher_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        wanted = self.config.rollout.engine
        if (self.engine is None) != (wanted == "hf"):
            found = "none" if self.engine is None else type(self.engine).__name__
            raise ConfigError(
                f"rollout.engine is {wanted} but the engine passed is {found}; pass one exactly "
                "where another engine than hf writes the rollouts, as `rlkv train` does"
            )
        reward = self.config.rollout.reward
        if self.task.mode == "forced" and reward != "task":
            raise ConfigError(
                f"rollout.reward is {reward}, but task {self.task.name} compares with gold spans; "
                "use reward 'task', or a task whose completions are generated"
            )
        loss = self.config.loss
        self.scorer = TeacherForcing(
            self.loaded, head_chunk=loss.head_chunk, checkpointing=loss.gradient_checkpointing
        )
        self._gates = Gates(self.loaded.spec.shape).to(self.loaded.model.device)

    def start(self, problems: Sequence[Problem]) -> None:
        """Gets a rollout engine of its own, where there is one, ready for ``problems``.

        Raises:
            RLKVError: It cannot be started.
        """
        if self.engine is not None and self.config.objective != "warm":
            longest = max(len(problem.prompt_ids) for problem in problems)
            self.engine.start(longest + self._limit)

    def unit(self, problems: Sequence[Problem], alpha: Alpha, seed: int) -> UnitResult:
        """Rollouts and their policy gradient in one go, advantages within groups."""
        groups = self.sample(problems, alpha, seed)
        rollouts = [rollout for group in groups for rollout in group]
        advantages = [a for group in groups for a in group_advantages([r.reward for r in group])]
        return UnitResult(
            self.policy_gradient(rollouts, advantages, alpha),
            tuple(tuple(rollout.reward for rollout in group) for group in groups),
            sum(rollout.generated for rollout in rollouts),
        )

    def sample(self, problems: Sequence[Problem], alpha: Alpha, seed: int) -> list[Group]:
        """Rollouts of the model gated by ``alpha``, verified, group by group."""
        rollout = self.config.rollout
        params = sampling_params(self.config, self.task, seed)
        self._set(alpha)
        with self._attached() as session:
            if self.task.mode == "forced":
                return forced_groups(
                    self.scorer, problems, params, micro_rows=self.config.loss.micro_rows
                )
            engine = self._engine(session, alpha)
            groups = generated_groups(engine, self.task, problems, params)
            return groups if rollout.reward == "task" else self._judged(groups, problems, session)

    def _judged(
        self, groups: list[Group], problems: Sequence[Problem], session: Session
    ) -> list[Group]:
        """Groups rewarded by the full model instead of the task's verifier."""
        self._gates.alpha.data.fill_(1.0)
        if self.config.rollout.reward == "likelihood":
            rows = self.config.loss.micro_rows
            return likelihood_groups(groups, self.scorer, micro_rows=rows)
        engine = self._engine(session, np.ones(self.loaded.spec.shape, np.float32))
        limit = SamplingParams(self._limit)
        found = engine.generate([problem.prompt for problem in problems], limit)
        texts = [[self._text(rollout) for rollout in group] for group in groups]
        return agreement_groups(groups, texts, problems, [one[0] for one in found], self.task)

    def _text(self, rollout: Rollout) -> str:
        decode = self.loaded.tokenizer.decode
        return str(decode(list(rollout.targets), skip_special_tokens=True))

    def policy_gradient(
        self,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float],
        alpha: Alpha,
        old_log_probs: Sequence[TokenLogProbs] | None = None,
        return_log_probs: bool = False,
    ) -> GradientSum:
        """Gradient sum of the clipped loss; rollouts of advantage 0 cost nothing.

        Args:
            rollouts: Of any groups.
            advantages: One per rollout.
            alpha: Gates to differentiate at.
            old_log_probs: Per rollout, under the gates before this batch's first update; None: the
                gates are those.
            return_log_probs: Also return this call's log-probabilities, for later updates.
        """
        loss, trained = 0.0, 0
        kept = dict.fromkeys(range(len(rollouts)), TokenLogProbs())
        indices = [i for i, a in enumerate(advantages) if a != 0.0]
        self._set(alpha)
        with self._attached():
            for rows in _micro_batches(rollouts, indices, self.config.loss.micro_rows):
                old = None if old_log_probs is None else [old_log_probs[i] for i in rows]
                batch = [rollouts[i] for i in rows]
                value, log_probs = self._backward(batch, [advantages[i] for i in rows], old)
                loss += value
                trained += sum(len(t) for t in {rollout.tokens for rollout in batch})
                if return_log_probs:
                    kept.update(zip(rows, log_probs, strict=True))
        return GradientSum(
            self._gradient(),
            loss,
            sum(len(rollout.targets) for rollout in rollouts),
            sum(len(rollouts[i].targets) for i in indices),
            trained,
            tuple(kept.values()) if return_log_probs else (),
        )

    def distill(self, solutions: Sequence[Solution], alpha: Alpha) -> GradientSum:
        """Gradient sum of KL(full ‖ gated) at the tokens of ``solutions``."""
        self._set(alpha)
        loss, tokens, trained = 0.0, 0, 0
        rows = self.config.loss.micro_rows
        with self._attached():
            for start in range(0, len(solutions), rows):
                batch = solutions[start : start + rows]
                teacher = torch.cat([self._teacher_hidden(solution) for solution in batch])
                hidden = self.scorer.hidden([solution.trace for solution in batch])
                value = self.scorer.compare(kl_loss, teacher, hidden)
                value.backward()
                loss += float(value.detach())
                tokens += len(hidden)
                trained += sum(len(solution.tokens) for solution in batch)
        return GradientSum(self._gradient(), loss, tokens, tokens, trained)

    def kl(self, solutions: Sequence[Solution], alpha: Alpha) -> float:
        """Mean KL(full ‖ gated) in nats per token; no gradient."""
        self._set(alpha)
        total, tokens, rows = 0.0, 0, self.config.loss.micro_rows
        with self._attached(), torch.no_grad():
            for start in range(0, len(solutions), rows):
                batch = solutions[start : start + rows]
                teacher = torch.cat([self._teacher_hidden(solution) for solution in batch])
                hidden = self.scorer.hidden([solution.trace for solution in batch])
                total += float(self.scorer.compare(kl_loss, teacher, hidden))
                tokens += len(hidden)
        return total / tokens

    def evaluate(self, problems: Sequence[Problem], alpha: Alpha) -> Evaluation:
        """Greedy reward of the model gated by ``alpha``; forced tasks: share of right spans."""
        self._set(alpha)
        with self._attached() as session:
            if self.task.mode == "forced":
                rows = self.config.loss.micro_rows
                rewards = forced_rewards(self.scorer, problems, micro_rows=rows)
                return Evaluation(tuple(rewards), 0)
            engine = self._engine(session, alpha)
            found = engine.generate([p.prompt for p in problems], SamplingParams(self._limit))
        rewards = [
            self.task.verifier(completions[0].text, problem.answer).reward
            for problem, completions in zip(problems, found, strict=True)
        ]
        return Evaluation(tuple(rewards), sum(len(c[0].token_ids) for c in found))

    @property
    def _limit(self) -> int:
        """Completion limit in tokens."""
        return self.config.rollout.max_new_tokens or self.task.max_new_tokens

    def _engine(self, session: Session, alpha: Alpha) -> Engine:
        """Whoever writes completions of the model gated by ``alpha``, which it is set to already.

        An engine of its own is set anew for every unit, even to the same gates: it then forgets
        what it has cached, which might show in the last bits of its logits.
        """
        if self.engine is None:
            rows = self.config.rollout.decode_rows
            return HFEngine(self.loaded, session, batch_size=rows, refill=True)
        self.engine.set_gates(alpha)
        return self.engine

    def _attached(self):  # noqa: ANN202 - the context manager of attach_gates
        config = self.config
        return attach_gates(
            self.loaded.model,
            self._gates,
            sink=config.sink,
            recent=config.recent,
            spec=self.loaded.spec,
        )

    def _set(self, alpha: Alpha) -> None:
        self._gates.alpha.data.copy_(torch.from_numpy(np.asarray(alpha, dtype=np.float32)))
        self._gates.alpha.grad = None

    def _gradient(self) -> NDArray[np.float64]:
        grad = self._gates.alpha.grad
        if grad is None:
            return np.zeros(self.loaded.spec.shape)
        return grad.double().cpu().numpy()

    def _backward(
        self,
        batch: Sequence[Rollout],
        advantages: Sequence[float],
        old: Sequence[TokenLogProbs] | None,
    ) -> tuple[float, list[TokenLogProbs]]:
        """Adds the batch's gradient; returns its loss and log-probabilities."""
        traces, places = _shared_traces(batch)
        device = self.loaded.model.device
        hidden = self.scorer.hidden(traces)[torch.tensor(places)]
        targets = torch.tensor([t for rollout in batch for t in rollout.targets], device=device)
        targets = targets[:, None]
        temperature = self.config.rollout.temperature
        log_probs = self.scorer.log_probs(hidden, targets, temperature)[:, 0]
        lengths = [len(rollout.targets) for rollout in batch]
        per_token = torch.tensor(advantages, dtype=torch.float32).repeat_interleave(
            torch.tensor(lengths)
        )
        before, drawn = self._at_the_draw(log_probs.detach(), hidden.detach(), targets, old)
        loss = policy_loss(
            log_probs,
            before,
            per_token.to(device),
            clip=self.config.loss.clip,
            sampling_log_probs=drawn,
            max_weight=self.config.loss.max_weight,
        )
        loss.backward()
        policy = [tuple(part.tolist()) for part in before.split(lengths)]
        if drawn is None:
            return float(loss.detach()), [TokenLogProbs(part) for part in policy]
        sampling = [tuple(part.tolist()) for part in drawn.split(lengths)]
        return float(loss.detach()), list(map(TokenLogProbs, policy, sampling))

    def _at_the_draw(
        self,
        log_probs: Tensor,
        hidden: Tensor,
        targets: Tensor,
        old: Sequence[TokenLogProbs] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities (tokens,) of policy and, where decoupled, sampling when tokens fell."""
        decoupled = self.config.loss.decoupled
        if old is not None:  # the gates have moved since
            device = log_probs.device
            drawn = _flat([one.sampling for one in old], device) if decoupled else None
            return _flat([one.policy for one in old], device), drawn
        if not decoupled:
            return log_probs, None
        params = sampling_params(self.config, self.task, 0)
        return log_probs, self.scorer.sampling_log_probs(hidden, targets, params)[:, 0]

    def _teacher_hidden(self, solution: Solution) -> Tensor:
        """Outputs of the full model, computed alone, so that no batch leaves a trace in them."""
        found = self._teacher.get(solution.key)
        if found is not None:
            return found
        alpha = self._gates.alpha.data.clone()
        self._gates.alpha.data.fill_(1.0)
        with torch.no_grad():
            hidden = self.scorer.hidden([solution.trace])
        self._gates.alpha.data.copy_(alpha)
        size = hidden.numel() * hidden.element_size()
        if self._teacher_bytes + size <= self.config.warm.teacher_bytes:
            self._teacher[solution.key] = hidden
            self._teacher_bytes += size
        return hidden


def _flat(rows: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float32, device=device)


def sampling_params(config: TrainConfig, task: Task, seed: int) -> SamplingParams:
    """How rollouts of ``task`` are drawn."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens or task.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        num_samples=rollout.group_size,
        seed=seed,
    )


def _micro_batches(
    rollouts: Sequence[Rollout], indices: Sequence[int], rows: int
) -> list[list[int]]:
    """Indices in batches of at most ``rows`` different sequences, long sequences first."""
    by_tokens: dict[tuple[int, ...], list[int]] = {}
    for i in indices:
        by_tokens.setdefault(rollouts[i].tokens, []).append(i)
    ordered = sorted(by_tokens.items(), key=lambda item: -len(item[0]))
    return [
        [i for _, members in ordered[start : start + rows] for i in members]
        for start in range(0, len(ordered), rows)
    ]


def _shared_traces(batch: Sequence[Rollout]) -> tuple[list[Trace], list[int]]:
    """One trace per different sequence, and for each chosen token its place among their columns."""
    row_of: dict[tuple[int, ...], int] = {}
    rows = [row_of.setdefault(rollout.tokens, len(row_of)) for rollout in batch]
    wanted: list[set[int]] = [set() for _ in row_of]
    for row, rollout in zip(rows, batch, strict=True):
        wanted[row].update(rollout.positions)
    traces: list[Trace] = []
    place_of: list[dict[int, int]] = []
    start = 0
    for tokens, positions in zip(row_of, wanted, strict=True):
        traces.append(Trace(tokens, tuple(sorted(positions))))
        place_of.append({position: start + i for i, position in enumerate(sorted(positions))})
        start += len(positions)
    places = [place_of[row][p] for row, r in zip(rows, batch, strict=True) for p in r.positions]
    return traces, places
