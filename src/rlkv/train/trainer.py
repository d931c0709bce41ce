"""Trainer: from a frozen model and a task to a head profile.

Phases by objective: ``default`` is a dense warm start followed by on-policy GRPO, ``warm`` the
former alone, ``paper`` the latter alone. ``ablation`` measures heads one by one and trains nothing.

Each step: units of work give a gradient sum, Adam moves the gates, and the gates are put back into
[0, 1]. Files in the output folder: ``metrics.jsonl``, ``checkpoint.safetensors``, ``config.json``,
``profile.json`` and, where the model solved problems itself, ``solutions.jsonl``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlkv import __version__
from rlkv.core.engine import GatedEngine
from rlkv.core.files import locked_folder, require_writable_folder, to_json, write_atomic
from rlkv.core.head_profile import HeadProfile
from rlkv.errors import CheckpointError, ConfigError
from rlkv.gates import Gates
from rlkv.hf.loading import LoadedModel
from rlkv.tasks.base import Task
from rlkv.train import checkpoint as ckpt
from rlkv.train.ablation import leave_one_out
from rlkv.train.backends.base import Backend
from rlkv.train.backends.local import LocalBackend
from rlkv.train.checkpoint import Checkpoint, Progress
from rlkv.train.config import PHASES, TrainConfig
from rlkv.train.metrics import MetricsFile, step_row
from rlkv.train.monitor import collapse_alarm, is_stable, method_rewards
from rlkv.train.problems import Problem, SeededStream, training_problems
from rlkv.train.self_distillation import collect
from rlkv.train.steps import (
    StepGradient,
    batch_of,
    distill_step,
    policy_step,
    sampled_groups,
    update_step,
)
from rlkv.train.unit import Alpha, Solution
from rlkv.train.watch import NO_WATCH, Watch
from rlkv.train.worker import Worker

PROFILE_NAME = "profile.json"
CONFIG_NAME = "config.json"
SOLUTIONS_NAME = "solutions.jsonl"


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves."""

    profile: HeadProfile
    """The learned scores."""
    progress: Progress
    """Steps, tokens and time."""
    metrics: list[dict[str, Any]]
    """One row a step."""


class Trainer:
    """One training run.

    Args:
        config: Everything that decides the result.
        loaded: The frozen model.
        task: What is asked.
        output: Folder for results; None writes nothing.
        backend: Who runs units of work; None: this process.
        watch: Told about progress.
        engine: Who writes rollouts where ``rollout.engine`` is not ``hf``.
    """

    def __init__(
        self,
        config: TrainConfig,
        loaded: LoadedModel,
        task: Task,
        *,
        output: Path | None = None,
        backend: Backend | None = None,
        watch: Watch = NO_WATCH,
        engine: GatedEngine | None = None,
    ) -> None:
        self.config, self.loaded, self.task = config, loaded, task
        self.output = require_writable_folder(output) if output else None
        self.watch = watch
        self.worker = Worker(loaded, task, config, engine)
        self.backend = backend or LocalBackend(self.worker)
        self.metrics = MetricsFile(self.output)
        phases = PHASES[config.objective]
        init = config.warm.init if phases[:1] == ("warm",) and config.warm.steps else 1.0
        self.gates = Gates(loaded.spec.shape, init)
        self.progress = Progress()
        self.rewards: list[float] = []
        self.mean_gates: list[float] = []
        self.recent: list[Alpha] = []
        self._adam: dict[str, torch.Tensor] = {}
        self._started = self._clock()

    def run(self, *, resume: bool = False) -> TrainResult:
        """Trains to the end, from the start or from the last checkpoint.

        Raises:
            CheckpointError: There is nothing to resume, or it belongs to another run.
            ConfigError: The output folder holds a run already and ``resume`` is False.
            OutputError: Another run is using the output folder.
        """
        with locked_folder(self.output):
            self._open(resume)
            return self._run()

    def _run(self) -> TrainResult:
        held_out, problems = training_problems(self.loaded, self.task, self.config)
        self.worker.start(problems)
        if self.config.objective == "ablation":
            return self._ablate(problems)
        phases = PHASES[self.config.objective]
        solutions: list[Solution] = []
        if self.config.distill.enabled:
            solutions = self._solutions(problems, self.config.rollout.problems)
            solved = {solution.key for solution in solutions}
            problems = [problem for problem in problems if problem.key in solved]
        elif "warm" in phases and self.config.warm.steps:
            solutions = self._solutions(problems, self.config.warm.solutions)
        seed = self.config.seed
        stream = SeededStream(problems, f"{seed}/order")
        imitated = SeededStream(solutions, f"{seed}/warm") if solutions else None
        self.watch.started(sum(self._phase_steps(phase) for phase in phases))
        for number in range(self.progress.phase, len(phases)):
            if number > self.progress.phase:
                self.progress = replace(self.progress, phase=number, step=0)
                self.recent, self._adam = [], {}
            self._phase(phases[number], imitated, stream, held_out)
        return self._finish()

    def _phase(
        self,
        phase: str,
        solutions: SeededStream[Solution] | None,
        stream: SeededStream[Problem],
        held_out: Sequence[Problem],
    ) -> None:
        """Steps of one phase, until its end or until the kept heads are stable."""
        optimizer = self._optimizer(phase)
        every, steps = self.config.monitor.every, self._phase_steps(phase)
        while self.progress.step < steps and not self._is_stable():
            if phase == "warm" and solutions is not None:
                number = self.progress.step
                step = distill_step(self.backend, solutions, self.alpha, self.config, number)
                self._apply(optimizer, step)
            else:
                step = self._policy_step(optimizer, stream)
            row = self._record(phase, step)
            last = self.progress.step == steps or self._is_stable()
            if every and (last or self.progress.step % every == 0):
                row["binary_reward"] = self._binary_reward(held_out)
            self.metrics.add(row)
            self.watch.step(row)
            if last or self.progress.total_steps % self.config.checkpoint_every == 0:
                self._save(optimizer)

    def _policy_step(
        self, optimizer: torch.optim.Optimizer, stream: SeededStream[Problem]
    ) -> StepGradient:
        """One batch of rollouts and the update, or updates, made with it."""
        config, drawn = self.config, self.progress.drawn
        seed = config.seed * 1_000_000 + self.progress.step
        if config.loss.updates == 1 and config.loss.advantage == "group":
            step = policy_step(self.backend, stream, self.alpha, config, drawn=drawn, seed=seed)
            self._apply(optimizer, step)
            return step
        units = sampled_groups(self.backend, stream, self.alpha, config, drawn=drawn, seed=seed)
        batch, old = batch_of(units, config), None
        steps: list[StepGradient] = []
        for _ in range(config.loss.updates):
            step, old = update_step(self.backend, batch, self.alpha, config, old)
            self._apply(optimizer, step)
            steps.append(step)
        # rollouts were drawn once, for the first update
        return replace(steps[0], trained_tokens=sum(step.trained_tokens for step in steps))

    def _apply(self, optimizer: torch.optim.Optimizer, step: StepGradient) -> None:
        """One Adam step, then back into [0, 1]."""
        gradient = torch.from_numpy(step.gradient)
        limit = self.config.optimizer.max_grad_norm
        if limit is not None:
            norm = float(gradient.norm())
            gradient = gradient * min(1.0, limit / (norm + 1e-6))
        self.gates.alpha.grad = gradient.float()
        optimizer.step()
        self.gates.clamp_()

    def _record(self, phase: str, step: StepGradient) -> dict[str, Any]:
        """Counts the step and makes its row of metrics."""
        alpha, old = self.alpha, self.progress
        started, cpu_started = self._started
        self._started = self._clock()
        seconds, cpu = self._started[0] - started, self._started[1] - cpu_started
        self.progress = replace(
            old,
            step=old.step + 1,
            total_steps=old.total_steps + 1,
            drawn=old.drawn + step.drawn,
            generated_tokens=old.generated_tokens + step.generated_tokens,
            trained_tokens=old.trained_tokens + step.trained_tokens,
            cpu_seconds=old.cpu_seconds + cpu,
            seconds=old.seconds + seconds,
        )
        self.mean_gates.append(float(alpha.mean()))
        if step.mean_reward is not None:
            self.rewards.append(step.mean_reward)
        self.recent = [*self.recent, alpha][-self.config.monitor.stable_steps - 1 :]
        alarm = None
        if phase == "grpo":
            gates = self.mean_gates[-len(self.rewards) :]
            alarm = collapse_alarm(self.rewards, gates, self.config.penalty)
        return step_row(phase, step, self.progress, alpha, alarm)

    def _clock(self) -> tuple[float, float]:
        """Wall seconds, and CPU seconds of this process and of the workers' calls."""
        return time.monotonic(), time.process_time() + self.backend.cpu_seconds

    @property
    def alpha(self) -> Alpha:
        """A copy of the gates, (layers, kv_heads) float32."""
        return self.gates.alpha.detach().cpu().numpy().copy()

    def profile(self) -> HeadProfile:
        """The gates as they are now."""
        return self._profile_of(self.alpha, "rlkv")

    def _profile_of(self, scores: Alpha, source: str) -> HeadProfile:
        config, progress = self.config, self.progress
        return HeadProfile(
            self.loaded.spec,
            np.clip(scores, 0.0, 1.0),
            source,
            config.sink,
            config.recent,
            {
                "objective": config.objective,
                "task": self.task.name,
                "seed": config.seed,
                "steps": progress.total_steps,
                "generated_tokens": progress.generated_tokens,
                "trained_tokens": progress.trained_tokens,
                "rlkv_version": __version__,
            },
        )

    def _phase_steps(self, phase: str) -> int:
        return self.config.warm.steps if phase == "warm" else self.config.steps

    def _is_stable(self) -> bool:
        monitor = self.config.monitor
        return is_stable(
            self.recent,
            sparsity=monitor.sparsity,
            steps=monitor.stable_steps,
            least=monitor.stable_overlap,
        )

    def _binary_reward(self, held_out: Sequence[Problem]) -> float | None:
        """Mean greedy reward of the model as it would be deployed."""
        if not held_out:
            return None
        config = self.config
        rewards = method_rewards(
            self.loaded,
            self.task,
            held_out,
            method="rlkv",
            sparsity=config.monitor.sparsity,
            profile=self.profile(),
            sink=config.sink,
            recent=config.recent,
            max_new_tokens=config.rollout.max_new_tokens,
            rows=config.rollout.decode_rows,
            scorer=self.worker.scorer,
        )
        return sum(rewards) / len(rewards)

    def _solutions(self, problems: Sequence[Problem], count: int) -> list[Solution]:
        """What the full model solves, generated once and kept in the output folder."""
        found = collect(
            self.worker,
            problems,
            count=count,
            path=self.output / SOLUTIONS_NAME if self.output else None,
            on_batch=self.watch.solved,
        )
        if not self.progress.total_steps:
            self.progress = replace(self.progress, generated_tokens=found.generated_tokens)
        return found.solutions

    def _optimizer(self, phase: str) -> torch.optim.Optimizer:
        """Adam of one phase, with the checkpoint's moments where there are some."""
        config = self.config
        rate = config.warm.learning_rate if phase == "warm" else config.optimizer.learning_rate
        decay = 0.0 if phase == "warm" else config.optimizer.weight_decay
        optimizer = torch.optim.AdamW([self.gates.alpha], lr=rate, weight_decay=decay)
        ckpt.restore_optimizer(optimizer, self.gates.alpha, self._adam)
        return optimizer

    def _open(self, resume: bool) -> None:
        """Takes up a checkpoint, or starts the output folder afresh."""
        if self.output is None:
            if resume:
                raise CheckpointError("there is no output folder to resume from; name the run's")
            return
        settings = self._settings()
        if resume:
            found = ckpt.load_checkpoint(self.output, settings)
            self.gates.alpha.data.copy_(found.alpha)
            self.progress, self._adam = found.progress, found.optimizer
            self.rewards = found.history["rewards"]
            self.mean_gates = found.history["mean_gates"]
            shape = self.loaded.spec.shape
            self.recent = [
                np.array(flat, dtype=np.float32).reshape(shape) for flat in found.history["recent"]
            ]
        elif (self.output / ckpt.FILE_NAME).exists():
            raise ConfigError(
                f"{self.output} holds a training run already, expected an empty folder; pass "
                "--resume to go on with it, or choose another --output"
            )
        else:
            write_atomic(self.output / CONFIG_NAME, to_json(settings))
            self._save_state({})
        self.metrics.start(self.progress.total_steps)

    def _settings(self) -> dict[str, Any]:
        """The config as JSON reads it back, tuples as lists."""
        return json.loads(json.dumps(asdict(self.config)))

    def _save(self, optimizer: torch.optim.Optimizer) -> None:
        """Checkpoint and profile, each in one step."""
        self._save_state(ckpt.optimizer_tensors(optimizer))
        if self.output is not None:
            self.profile().save(self.output / PROFILE_NAME)

    def _save_state(self, adam: dict[str, torch.Tensor]) -> None:
        if self.output is None:
            return
        history: dict[str, Any] = {
            "rewards": self.rewards,
            "mean_gates": self.mean_gates,
            "recent": [alpha.reshape(-1).tolist() for alpha in self.recent],
        }
        state = Checkpoint(self.gates.alpha.data, adam, self.progress, history, self._settings())
        ckpt.save_checkpoint(self.output, state)

    def _ablate(self, problems: Sequence[Problem]) -> TrainResult:
        """The objective without training."""
        if not self.progress.phase:  # not measured yet
            self._measure_heads(problems)
        return self._finish(self._profile_of(self.alpha, "ablation"))

    def _measure_heads(self, problems: Sequence[Problem]) -> None:
        """Puts every head's cost into the gates, and keeps them."""
        config = self.config.ablation
        self.watch.started(self.loaded.spec.num_heads)
        by_reward = config.signal == "reward"
        solutions = [] if by_reward else self._solutions(problems, config.problems)
        found = leave_one_out(
            self.backend,
            self.loaded.spec.shape,
            problems=problems[: config.problems] if by_reward else (),
            solutions=solutions,
            on_head=self.watch.head,
        )
        now, started = self._clock(), self._started
        self.progress = replace(
            self.progress,
            phase=1,
            generated_tokens=self.progress.generated_tokens + found.generated_tokens,
            seconds=now[0] - started[0],
            cpu_seconds=now[1] - started[1],
        )
        self.gates.alpha.data.copy_(torch.from_numpy(found.scores))
        self._save_state({})

    def _finish(self, profile: HeadProfile | None = None) -> TrainResult:
        profile = profile or self.profile()
        if self.output is not None:
            profile.save(self.output / PROFILE_NAME)
        self.watch.finished()
        return TrainResult(profile, self.progress, self.metrics.rows)
