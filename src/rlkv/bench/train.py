"""Objectives side by side: what each costs to learn, and how well its heads serve.

Every variant trains from scratch for every seed; the best heads of its profile stay full, all
others keep sink + recent, and the binary model answers test problems greedily. Variants that keep
the same heads share one measurement. Studies replace the objectives by variants of one setting, as
the paper's ablations do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlkv.bench.train_config import TrainBench
from rlkv.bench.train_report import TrainRow
from rlkv.core.budget import Budget
from rlkv.core.files import append_jsonl, mend_jsonl, read_jsonl
from rlkv.core.head_profile import HeadProfile
from rlkv.evaluate.metrics import Estimate, bootstrap_interval, wilson_interval
from rlkv.hf.loading import LoadedModel
from rlkv.methods.base import MethodOptions
from rlkv.methods.random_heads import RandomHeads
from rlkv.tasks.base import Task
from rlkv.train.checkpoint import FILE_NAME as CHECKPOINT
from rlkv.train.config import TrainConfig
from rlkv.train.monitor import method_rewards
from rlkv.train.problems import Problem, load_problems
from rlkv.train.recipe import build_config, merge
from rlkv.train.trainer import Trainer, TrainResult
from rlkv.train.watch import NO_WATCH, Watch


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
        if (found := len(self._problems)) < bench.examples:
            watch.message(
                f"{task.name} has {found} test problems, not {bench.examples}: n = {found}"
            )
        self._measured = _Measured(output, self._conditions())
        self._learned: dict[TrainConfig, TrainResult] = {}
        self.curves: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def rows(self) -> Iterator[TrainRow]:
        """Rows as they are measured."""
        for name in self.bench.variants or self.bench.settings_of_variants():
            seeds = self.bench.seeds[:1] if name == "full" else self.bench.seeds
            for seed in seeds:
                yield from self._variant_rows(name, seed)

    def _variant_rows(self, name: str, seed: int) -> Iterator[TrainRow]:
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
        profile, cost = self._learn(name, seed)
        for sparsity in self.bench.sparsities:
            yield self._row(name, seed, sparsity, profile.full_heads(sparsity), cost)

    def config(self, name: str, seed: int) -> TrainConfig:
        """What a variant trains with."""
        recipe, bench = self.bench.recipe, self.bench
        values: dict[str, Any] = {key: recipe[key] for key in recipe if key != "objective"}
        base = {
            "model": self.loaded.spec.model_id,
            "task": self.task.name,
            "sink": bench.sink,
            "recent": bench.recent,
            "monitor": {"every": 0},
        }
        for above in (base, bench.settings_of_variants()[name], bench.settings, {"seed": seed}):
            values = merge(values, above)
        return build_config(values)

    def _learn(self, name: str, seed: int) -> tuple[HeadProfile, _Cost]:
        config = self.config(name, seed)
        # variants of different studies may be the same run under two names
        if config not in self._learned:
            self._learned[config] = self._train(config, f"{name.replace(' ', '-')}-{seed}")
        result = self._learned[config]
        self.curves[name, seed] = result.metrics
        return result.profile, _Cost(
            result.progress.generated_tokens,
            result.progress.trained_tokens,
            round(result.progress.cpu_seconds, 2),
        )

    def _train(self, config: TrainConfig, name: str) -> TrainResult:
        """Trains, goes on with a run that was stopped, or reads one that is done."""
        folder = self.output / name if self.output else None
        begun = folder is not None and (folder / CHECKPOINT).exists()
        self.watch.message(f"learning: {name}")
        trainer = Trainer(config, self.loaded, self.task, output=folder, watch=self.watch)
        return trainer.run(resume=begun)

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
        heads = "".join("1" if kept else "0" for kept in full.reshape(-1))
        found = self._measured.get(heads)
        if found is None:
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
            found = self._measured.put(heads, _interval(rewards))
        return found

    def _conditions(self) -> dict[str, Any]:
        """What an accuracy depends on, besides the heads."""
        bench, spec = self.bench, self.loaded.spec
        return {
            "model": spec.model_id,
            "dtype": str(self.loaded.model.dtype),
            "task": self.task.name,
            "data": self.task.data,
            "n": len(self._problems),
            "sink": bench.sink,
            "recent": bench.recent,
        }


class _Measured:
    """Accuracies by set of full heads, kept in the output folder as soon as they are known."""

    def __init__(self, folder: Path | None, conditions: Mapping[str, Any]) -> None:
        self._path = folder / "accuracies.jsonl" if folder else None
        self._conditions = conditions
        self._found: dict[str, Estimate] = {}
        if self._path is not None and self._path.is_file():
            mend_jsonl(self._path)
            for row in read_jsonl(self._path):
                if row["conditions"] == conditions:
                    self._found[row["heads"]] = Estimate(**row["accuracy"])

    def get(self, heads: str) -> Estimate | None:
        return self._found.get(heads)

    def put(self, heads: str, accuracy: Estimate) -> Estimate:
        self._found[heads] = accuracy
        if self._path is not None:
            row = {"heads": heads, "accuracy": asdict(accuracy), "conditions": self._conditions}
            append_jsonl(self._path, row)
        return accuracy


def _interval(rewards: Sequence[float]) -> Estimate:
    if all(reward in (0.0, 1.0) for reward in rewards):
        return wilson_interval(sum(rewards), len(rewards))
    return bootstrap_interval(rewards)
