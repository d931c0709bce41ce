"""Cell: an EvalConfig that passed every check that needs no weights.

Between config and runner: the model's shape is read from its config, the profile is matched with
it, the task is made, and all that decides a score goes into a fingerprint, so that records of an
earlier run are reused only where they would come out the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from rlkv import __version__
from rlkv.core.budget import Budget
from rlkv.core.head_profile import HeadProfile
from rlkv.core.model_spec import ModelSpec
from rlkv.evaluate.config import EvalConfig, require_data
from rlkv.hf.loading import model_spec
from rlkv.hf.sources import MODEL_NAMES, ModelSource, resolve_model
from rlkv.methods.base import MethodOptions
from rlkv.registry import METHODS, TASKS
from rlkv.tasks.base import Task


@dataclass(frozen=True)
class Cell:
    """One model on one task under one method and budget, checked."""

    config: EvalConfig
    """What was asked for."""
    model: str
    """How rows call the model."""
    task: Task
    """The task."""
    profile: HeadProfile | None
    """Head profile; None where the method needs none."""
    sparsity: float
    """Share of KV heads compressed: the config's, or what the method fixes it to."""
    fingerprint: str
    """12 hex digits that stand for everything that decides a score, but not for n."""

    @property
    def budget_sparsity(self) -> float:
        """Sparsity of the budget, in [0, 1): 0 where the method fixes its own."""
        return self.sparsity if self.sparsity < 1.0 else 0.0

    @property
    def label(self) -> str:
        """For progress and messages, such as ``chain rlkv s=0.5``."""
        return f"{self.config.task} {self.config.method} s={self.sparsity:g}"

    def records_path(self, out: Path) -> Path:
        """Where the records go below an output folder."""
        name = f"{self.config.method}-s{self.sparsity:g}-{self.fingerprint}.jsonl"
        return out / _file_part(self.model) / _file_part(self.config.task) / name


def prepare(config: EvalConfig, spec: ModelSpec | None = None) -> Cell:
    """The cell of a config; no weights are read.

    Args:
        config: What is asked for.
        spec: Shape of the model, where it is loaded already.

    Raises:
        UnknownNameError: The model is unknown.
        ModelError: The model cannot be read.
        ConfigError: The method lacks a profile.
        UnsupportedModelError: The model's attention cannot be split.
        ProfileError: The profile cannot be read, or belongs to another model.
        DataError: The task's data file is missing.
    """
    method = METHODS.load(config.method)
    if config.data is not None:
        require_data(config.data)
    task: Task = TASKS.load(config.task)(config.data)
    source = None if spec is not None else resolve_model(config.model)
    spec = spec or model_spec(config.model)
    profile = None
    if method.needs_profile and config.profile is not None:
        profile = HeadProfile.load(config.profile)
    # a wrong or missing profile is refused here
    budget = Budget(config.sparsity, config.sink, config.recent)
    fixed = method(spec, budget, profile, method_options(config)).fixed_sparsity
    sparsity = config.sparsity if fixed is None else fixed
    name = config.model
    if source is not None and config.model not in MODEL_NAMES:
        name = source.model_id
    identity = _identity(config, task, spec, source, profile, sparsity)
    return Cell(config, name, task, profile, sparsity, _digest(identity))


def method_options(config: EvalConfig) -> MethodOptions:
    """The method's choices beside the budget."""
    return MethodOptions(
        prefill=config.prefill,
        seed=config.head_seed,
        rule=config.rule,
        any_model=config.any_model,
        budget_mode=config.budget_mode,
        budget_tokens=config.budget_tokens,
        streaming_recent=config.streaming_recent,
    )


def _identity(
    config: EvalConfig,
    task: Task,
    spec: ModelSpec,
    source: ModelSource | None,
    profile: HeadProfile | None,
    sparsity: float,
) -> dict[str, object]:
    """Everything that decides a score; batch size and n do not."""
    return {
        "rlkv": __version__,
        "model": [spec.model_id, spec.revision, *_weights(source), config.dtype],
        "task": [config.task, task.version, config.split, config.seed, _file_hash(config.data)],
        "method": [config.method, sparsity, config.sink, config.recent, config.prefill],
        "heads": [config.rule, config.head_seed, _profile_hash(profile)],
        "budget": [config.budget_mode, config.budget_tokens, config.streaming_recent],
        "limit": config.max_new_tokens,
        "sampling": [config.temperature, config.top_p, config.top_k, config.samples],
    }


def _weights(source: ModelSource | None) -> list[object]:
    """Name, size and date of each weight file of a local model: a retrained model is another."""
    if source is None or not source.is_local:
        return []
    files = sorted(Path(source.location).glob("*.safetensors"))
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _profile_hash(profile: HeadProfile | None) -> str:
    return hashlib.sha256(profile.scores.tobytes()).hexdigest() if profile is not None else ""


def _file_hash(path: str | None) -> str:
    if path is None or not Path(path).is_file():
        return path or ""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _digest(identity: dict[str, object]) -> str:
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


def _file_part(name: str) -> str:
    """A model or task name as one safe path component."""
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name.strip("/"))
    return safe.lstrip(".") or "model"
