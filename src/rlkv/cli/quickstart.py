"""``rlkv quickstart``: the whole story on the embedded model, in minutes and offline.

Learn which heads matter, keep those, and compare with the full cache, with as many random heads,
and with no full head at all: accuracy with intervals, measured KV bytes, a gate map, one report.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlkv.cli.interrupts import on_interrupt
from rlkv.cli.output import print_rows

if TYPE_CHECKING:
    from rlkv.core.head_profile import HeadProfile
    from rlkv.evaluate.config import EvalConfig
    from rlkv.hf.loading import LoadedModel
    from rlkv.train.config import TrainConfig

MODEL, TASK = "embedded", "chain"


@dataclass(frozen=True)
class Quickstart:
    """Learn, compress and compare on the embedded model: a table, plots and a report.

    Run it again with the same --output to go on after an interruption.
    """

    output: Path = Path("quickstart")
    """Folder for the profile, the records and the report."""
    sparsity: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Shares of KV heads to compress, each in [0, 1)."""
    n: int = 500
    """Unseen problems for every accuracy."""
    steps: int = 20
    """On-policy steps after the warm start."""
    seed: int = 0
    """Seed of learning, of the problems and of the random heads."""
    batch_size: int = 125
    """Problems solved together."""
    json: bool = False
    """Print one JSON list of rows on stdout instead of a table."""

    def run(self) -> int:
        """Learns, evaluates, reports; returns the exit status."""
        from rlkv.core.files import require_writable_folder
        from rlkv.evaluate.records import as_rows
        from rlkv.evaluate.report import build_report, head_map
        from rlkv.evaluate.run_info import run_info

        train_config = self._train_config()
        configs = self._eval_configs()  # checked before anything runs
        folder = require_writable_folder(self.output)

        from rlkv.evaluate.evaluation import evaluate
        from rlkv.hf.loading import load_model

        run = run_info()  # at the start: the commit that runs, not one made meanwhile
        kept = f"what was learned and answered is kept in {folder}; go on with the same command"
        with on_interrupt(lambda: kept):
            loaded = load_model(MODEL)
            profile = self._learn(train_config, loaded, folder / "learning")
            results = evaluate(configs, out=folder / "records", models={MODEL: loaded})
        rows = [result.row for result in results]
        title = "RLKV quickstart: which KV heads does a reasoning model need?"
        heads = [head_map("rlkv", profile)]
        report = build_report(results, title=title, run=run, heads=heads)
        written = report.write(folder)
        print_rows(as_rows(rows), as_json=self.json, title="accuracy and measured KV bytes")
        print("\n".join(f"wrote {path}" for path in written), file=sys.stderr)
        return 0

    def _train_config(self) -> TrainConfig:
        from rlkv.train.config import MonitorConfig, TrainConfig

        monitor = MonitorConfig(sparsity=0.5, every=6, problems=48)
        return TrainConfig(
            MODEL, TASK, steps=self.steps, seed=self.seed, monitor=monitor, checkpoint_every=5
        )

    def _eval_configs(self) -> list[EvalConfig]:
        from rlkv.evaluate.config import EvalConfig

        def config(method: str, sparsity: float) -> EvalConfig:
            return EvalConfig(
                model=MODEL,
                task=TASK,
                method=method,
                sparsity=sparsity,
                profile=str(self._profile_path) if method == "rlkv" else None,
                head_seed=self.seed,
                n=self.n,
                seed=self.seed,
                batch_size=self.batch_size,
            )

        grid = [config(m, s) for s in self.sparsity for m in ("rlkv", "random_heads")]
        return [config("full", 0.0), *grid, config("streaming_llm", 0.0)]

    @property
    def _profile_path(self) -> Path:
        return self.output / "learning" / "profile.json"

    def _learn(self, config: TrainConfig, loaded: LoadedModel, folder: Path) -> HeadProfile:
        """The learned profile; an interrupted run goes on, a finished one is read."""
        from rlkv.registry import TASKS
        from rlkv.train.checkpoint import FILE_NAME
        from rlkv.train.trainer import Trainer
        from rlkv.train.watch import LiveWatch

        watch = LiveWatch()
        try:
            task = TASKS.load(TASK)()
            trainer = Trainer(config, loaded, task, output=folder, watch=watch)
            return trainer.run(resume=(folder / FILE_NAME).exists()).profile
        finally:
            watch.finished()
