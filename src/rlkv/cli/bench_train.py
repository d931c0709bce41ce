"""``rlkv bench train``: what each objective costs to learn, and how well its heads serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from rlkv.cli.interrupts import on_interrupt
from rlkv.cli.output import print_rows

if TYPE_CHECKING:
    from rlkv.bench.train_config import TrainBench


@dataclass(frozen=True)
class BenchTrain:
    """Objectives side by side: tokens, CPU time, and accuracy of the binary model."""

    recipe: tyro.conf.Positional[Path | None] = None
    """TOML file with settings below every variant's; its objective is not used."""
    model: str | None = None
    """Model to learn on: embedded (the default), smollm2, a local folder, or a hub id."""
    task: str | None = None
    """Task to learn and to measure; default: chain."""
    study: tuple[str, ...] = ("objectives",)
    """objectives, and the paper's ablations: penalty, advantage, windows, sampling."""
    variants: tuple[str, ...] = ()
    """Some of the studies' variants, such as default; empty: all."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of training."""
    sparsity: tuple[float, ...] = (0.25, 0.5, 0.6, 0.75)
    """Sparsities at which the binary model is measured."""
    examples: int = 500
    """Test problems."""
    sink: int = 16
    """First tokens a compressed head keeps."""
    recent: int = 64
    """Last tokens a compressed head keeps."""
    set: tuple[str, ...] = ()
    """Settings on top of every variant's, such as steps=40."""
    data: str | None = None
    """Local JSON-lines file that replaces the task's data."""
    dtype: str | None = None
    """Type of the weights: auto (the default), float32, bfloat16 or float16."""
    output: Path | None = None
    """Folder for every run and for the report; a finished run found there is not trained again."""
    json: bool = False
    """Print one JSON list instead of a table."""

    def run(self) -> int:
        """Trains, measures, prints, and returns the exit status."""
        from rlkv.core.files import require_writable_folder
        from rlkv.evaluate.run_info import run_info
        from rlkv.hf.sources import resolve_model
        from rlkv.registry import TASKS
        from rlkv.train.recipe import build_config, merge, parse_settings

        recipe, settings = self._recipe(), parse_settings(self.set)
        config = build_config(merge(recipe, settings))
        resolve_model(config.model)
        TASKS.require(config.task)
        bench = self._bench(recipe, settings)

        from rlkv.bench.train import TrainBenchmark
        from rlkv.bench.train_report import TrainRow, write_train_report
        from rlkv.hf.loading import load_model
        from rlkv.train.watch import LiveWatch

        task = TASKS.load(config.task)(config.data)
        if self.output:
            require_writable_folder(self.output)
        loaded = load_model(config.model, dtype=config.dtype)  # type: ignore[arg-type]
        watch, rows = LiveWatch(), list[TrainRow]()
        benchmark = TrainBenchmark(loaded, task, bench, output=self.output, watch=watch)
        with on_interrupt(self._kept):
            for row in benchmark.rows():
                rows.append(row)
                run = f"{row['objective']} seed {row['seed']}"
                watch.message(f"{run} s={row['sparsity']}: {row['accuracy']:.3f}")
        if self.output:
            title = f"Learning on {config.model}, {config.task}"
            write_train_report(
                self.output, title, rows, benchmark.curves, run_info(str(loaded.model.device))
            )
        print_rows(rows, as_json=self.json, title=f"learning on {config.model}, {config.task}")
        return 0

    def _bench(self, recipe: dict[str, Any], settings: dict[str, Any]) -> TrainBench:
        from rlkv.bench.train_config import TrainBench

        return TrainBench(
            self.study,
            self.seeds,
            self.sparsity,
            self.examples,
            self.variants,
            recipe,
            settings,
            self.sink,
            self.recent,
        )

    def _kept(self) -> str:
        if self.output is None:
            return "nothing is kept without --output; run the same command again"
        return f"finished runs are kept in {self.output}; go on with the same command"

    def _recipe(self) -> dict[str, Any]:
        """The recipe with the options on top."""
        from rlkv.train.recipe import merge, read_recipe

        recipe = read_recipe(self.recipe) if self.recipe else {}
        named = {"model": self.model, "task": self.task, "dtype": self.dtype, "data": self.data}
        given = {name: value for name, value in named.items() if value is not None}
        return merge({"model": "embedded", "task": "chain"}, merge(recipe, given))
