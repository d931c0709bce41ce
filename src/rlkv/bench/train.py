"""Objectives side by side: what each costs to learn, and how well its heads serve.

Every variant trains from scratch for every seed; the best heads of its profile stay full, all
others keep sink + recent, and the binary model answers test problems greedily. Variants that keep
the same heads share one measurement. Studies replace the objectives by variants of one setting, as
the paper's ablations do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from rlkv.core.budget import Budget
from rlkv.core.head_profile import HeadProfile
from rlkv.errors import ConfigError
from rlkv.evaluate.metrics import Estimate, bootstrap_interval, wilson_interval
from rlkv.hf.loading import LoadedModel
from rlkv.methods.base import MethodOptions
from rlkv.methods.random_heads import RandomHeads
from rlkv.registry import unknown_name
from rlkv.tasks.base import Task
from rlkv.train.monitor import method_rewards
from rlkv.train.problems import Problem, load_problems
from rlkv.train.recipe import build_config, merge
from rlkv.train.trainer import Trainer
from rlkv.train.watch import NO_WATCH, Watch

_ON_POLICY = {
    "objective": "paper",
    "optimizer": {"learning_rate": 2e-2, "weight_decay": 0.0},
    "distill": {"enabled": False},
    "rollout": {"prompts_per_step": 24, "prompts_per_unit": 24},
}
"""GRPO alone at a rate at which a gate can cross [0, 1] in 50 steps."""

STUDIES: dict[str, dict[str, dict[str, Any]]] = {
    "objectives": {
        "full": {},
        "random": {},
        "ablation": {"objective": "ablation"},
        "warm": {"objective": "warm"},
        "default": {"objective": "default"},
        "paper": {"objective": "paper"},
    },
    "penalty": {
        f"{kind} beta={beta}": merge(_ON_POLICY, {"penalty": {"kind": kind, "beta": beta}})
        for beta in (0.03, 0.1, 0.3)
        for kind in ("adaptive", "fixed")
    },
    "advantage": {
        f"advantage={scope}": merge(_ON_POLICY, {"loss": {"advantage": scope}})
        for scope in ("group", "batch")
    },
    "windows": {
        f"window={sink}+{recent}": merge(_ON_POLICY, {"sink": sink, "recent": recent})
        for sink, recent in ((16, 64), (32, 96))
    },
    "sampling": {
        f"self_distillation={on}": merge(_ON_POLICY, {"distill": {"enabled": on}})
        for on in (True, False)
    },
}
"""Variants of each study: settings on top of the objective's preset."""


class TrainRow(TypedDict):
    """One variant, seed and sparsity."""

    objective: str
    """Variant; ``full`` is the uncompressed model, ``random`` draws heads by the seed."""
    seed: int
    """Seed of training."""
    generated_tokens: int
    """Tokens decoded while learning."""
    trained_tokens: int
    """Tokens that went forward and backward while learning."""
    cpu_seconds: float
    """CPU time of learning."""
    sparsity: float
    """Share of KV heads compressed; 0 for ``full``."""
    n: int
    """Test problems."""
    accuracy: float
    """Mean greedy reward in [0, 1]."""
    ci_low: float
    """Lower end of its 95 % interval."""
    ci_high: float
    """Upper end."""


@dataclass(frozen=True)
class TrainBench:
    """What to run."""

    study: str = "objectives"
    """Name of a study."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of training."""
    sparsities: tuple[float, ...] = (0.25, 0.5, 0.6, 0.75)
    """Where the binary model is measured."""
    examples: int = 500
    """Test problems."""
    variants: tuple[str, ...] = ()
    """Some variants of the study; empty: all."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings on top of every variant's."""
    sink: int = 16
    """Sink tokens, in training (unless a variant says otherwise) and in use."""
    recent: int = 64
    """Recent tokens, likewise."""

    def __post_init__(self) -> None:
        if self.study not in STUDIES:
            raise unknown_name("study", self.study, sorted(STUDIES))
        for name in self.variants:
            if name not in STUDIES[self.study]:
                raise unknown_name("variant", name, list(STUDIES[self.study]))
        for sparsity in self.sparsities:
            Budget(sparsity, self.sink, self.recent)
        if self.examples < 1 or not self.seeds:
            raise ConfigError("bench train needs at least one example and one seed")


@dataclass(frozen=True)
class _Cost:
    generated_tokens: int = 0
    trained_tokens: int = 0
    cpu_seconds: float = 0.0


class TrainBenchmark:
    """Runs a study on one model and task.

    Args:
        loaded: The model.
        task: What is learned and measured.
        bench: What to run.
        output: Folder with one sub-folder per variant and seed; None keeps nothing.
        watch: Told about training.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        task: Task,
        bench: TrainBench,
        *,
        output: Path | None = None,
        watch: Watch = NO_WATCH,
    ) -> None:
        self.loaded, self.task, self.bench = loaded, task, bench
        self.output, self.watch = output, watch
        self._problems: list[Problem] = load_problems(
            loaded, task, bench.examples, seed=0, split="test"
        )
        self._measured: dict[bytes, Estimate] = {}

    def rows(self) -> Iterator[TrainRow]:
        """Rows as they are measured."""
        variants = STUDIES[self.bench.study]
        for name in self.bench.variants or variants:
            seeds = self.bench.seeds[:1] if name == "full" else self.bench.seeds
            for seed in seeds:
                yield from self._variant_rows(name, variants[name], seed)

    def _variant_rows(
        self, name: str, settings: Mapping[str, Any], seed: int
    ) -> Iterator[TrainRow]:
        shape = self.loaded.spec.shape
        if name == "full":
            yield self._row(name, seed, 0.0, np.ones(shape, dtype=np.bool_), _Cost())
            return
        if name == "random":
            for sparsity in self.bench.sparsities:
                method = RandomHeads(
                    self.loaded.spec, Budget(sparsity), None, MethodOptions(seed=seed)
                )
                yield self._row(name, seed, sparsity, method.full_heads(), _Cost())
            return
        profile, cost = self._learn(name, settings, seed)
        for sparsity in self.bench.sparsities:
            yield self._row(name, seed, sparsity, profile.full_heads(sparsity), cost)

    def _learn(
        self, name: str, settings: Mapping[str, Any], seed: int
    ) -> tuple[HeadProfile, _Cost]:
        base = {
            "model": self.loaded.spec.model_id,
            "task": self.task.name,
            "sink": self.bench.sink,
            "recent": self.bench.recent,
            "monitor": {"every": 0},
        }
        values = merge(merge(base, settings), self.bench.settings)
        config = build_config({**values, "seed": seed})
        folder = self.output / f"{name.replace(' ', '-')}-{seed}" if self.output else None
        done = folder is not None and (folder / "checkpoint.safetensors").exists()
        self.watch.message(f"{name}, seed {seed}")
        started = time.process_time()
        trainer = Trainer(config, self.loaded, self.task, output=folder, watch=self.watch)
        result = trainer.run(resume=done)
        cpu = result.progress.cpu_seconds or time.process_time() - started
        return result.profile, _Cost(
            result.progress.generated_tokens, result.progress.trained_tokens, round(cpu, 1)
        )

    def _row(
        self, name: str, seed: int, sparsity: float, full: np.ndarray, cost: _Cost
    ) -> TrainRow:
        estimate = self._accuracy(full)
        return {
            "objective": name,
            "seed": seed,
            "generated_tokens": cost.generated_tokens,
            "trained_tokens": cost.trained_tokens,
            "cpu_seconds": cost.cpu_seconds,
            "sparsity": sparsity,
            "n": len(self._problems),
            "accuracy": estimate.value,
            "ci_low": estimate.low,
            "ci_high": estimate.high,
        }

    def _accuracy(self, full: np.ndarray) -> Estimate:
        """Accuracy with just these heads full; measured once per set of heads."""
        key = full.tobytes()
        if key not in self._measured:
            spec = self.loaded.spec
            compressed = 1.0 - float(full.mean())
            method = "rlkv" if full.any() else "streaming_llm"
            rewards = method_rewards(
                self.loaded,
                self.task,
                self._problems,
                method=method if compressed else "full",
                # the share that keeps exactly these heads, whatever rounding made of the wanted one
                sparsity=min(compressed, 1.0 - 1.0 / (2 * spec.num_heads)),
                profile=HeadProfile(spec, full.astype(np.float32), "bench"),
                sink=self.bench.sink,
                recent=self.bench.recent,
            )
            self._measured[key] = _interval(rewards)
        return self._measured[key]


def _interval(rewards: Sequence[float]) -> Estimate:
    if all(reward in (0.0, 1.0) for reward in rewards):
        return wilson_interval(sum(rewards), len(rewards))
    return bootstrap_interval(rewards)
