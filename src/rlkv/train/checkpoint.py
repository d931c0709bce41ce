"""Checkpoints: gates, Adam's moments and counters in one safetensors file, written atomically.

All randomness of a run follows from its seed and the step's number, so these are the whole state:
a run killed at any moment and resumed gives the gates of an undisturbed run, bit for bit. Reading a
checkpoint executes nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rlkv.core.files import write_atomic
from rlkv.errors import CheckpointError
from rlkv.train.config import TrainConfig, unused_sections

FILE_NAME = "checkpoint.safetensors"
_FORMAT = "rlkv-checkpoint/1"
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands; everything in it is a number."""

    phase: int = 0
    """Index of the phase."""
    step: int = 0
    """Steps done in the phase."""
    total_steps: int = 0
    """Steps done in all; also rows of the metrics file that belong to the checkpoint."""
    drawn: int = 0
    """Problems taken from the stream so far."""
    generated_tokens: int = 0
    """Tokens decoded so far."""
    trained_tokens: int = 0
    """Tokens that went forward and backward so far."""
    cpu_seconds: float = 0.0
    """CPU time spent so far."""
    seconds: float = 0.0
    """Wall time spent so far."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a step."""

    alpha: Tensor
    """(layers, kv_heads) float32."""
    optimizer: dict[str, Tensor]
    """Adam's ``step``, ``exp_avg`` and ``exp_avg_sq``; empty before a phase's first step."""
    progress: Progress
    """Counters."""
    history: dict[str, Any]
    """Recent rewards and gates that alarms and early stopping look back on."""
    config: dict[str, Any]
    """The run's settings, to recognise another run's checkpoint."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes ``folder/checkpoint.safetensors`` in one step.

    Raises:
        OutputError: It cannot be written.
    """
    tensors = {"alpha": checkpoint.alpha.detach().cpu().contiguous()}
    for name, value in checkpoint.optimizer.items():
        tensors[f"adam.{name}"] = value.detach().cpu().contiguous()
    metadata = {
        "format": _FORMAT,
        "progress": json.dumps(asdict(checkpoint.progress)),
        "history": json.dumps(checkpoint.history),
        "config": json.dumps(checkpoint.config),
    }
    write_atomic(folder / FILE_NAME, save(tensors, metadata))


def load_checkpoint(folder: Path, config: dict[str, Any]) -> Checkpoint:
    """The checkpoint of a run with the same settings.

    Args:
        folder: Output folder of the run.
        config: Settings of the run that wants to go on.

    Raises:
        CheckpointError: There is none, it is corrupt, or it belongs to a run with other settings.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no {FILE_NAME} to resume from; start the run without --resume"
        )
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path} has format {metadata.get('format')!r}, expected {_FORMAT}; resume with "
                "the RLKV version that wrote it"
            )
        stored = json.loads(metadata["config"])
        known = {f.name for f in fields(Progress)}
        counters = json.loads(metadata["progress"])
        progress = Progress(**{k: v for k, v in counters.items() if k in known})
        history = json.loads(metadata["history"])
        alpha = tensors.pop("alpha")
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} cannot be read ({error}), perhaps damaged; start the run again in another "
            "folder"
        ) from error
    changed = sorted(_changes(stored, config))
    if changed:
        raise CheckpointError(
            f"{path} belongs to a run with other settings ({', '.join(changed)}), expected the "
            "same ones; resume with those, or choose another output folder"
        )
    adam = {name.removeprefix("adam."): value for name, value in tensors.items()}
    return Checkpoint(alpha, adam, progress, history, stored)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Adam's state of its only parameter."""
    state = next(iter(optimizer.state.values()), {})
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parameter: Tensor, tensors: dict[str, Tensor]
) -> None:
    """Puts a checkpoint's Adam state back."""
    if tensors:
        optimizer.state[parameter] = {
            name: value.clone() if name == "step" else value.to(parameter.device)
            for name, value in tensors.items()
        }


def _changes(stored: dict[str, Any], given: dict[str, Any]) -> set[str]:
    """Names of settings that decide otherwise; one that is younger than the run had its default.

    Tables that the objective does not use decide nothing.
    """
    unused = unused_sections(given["objective"])
    stored, given = (
        {name: settings[name] for name in settings if name not in unused}
        for settings in (stored, given)
    )
    defaults = json.loads(json.dumps(asdict(TrainConfig("", ""))))

    def is_unset(name: str) -> bool:
        value = _look_up(given, name)
        return _look_up(stored, name) is _ABSENT and value == _look_up(defaults, name)

    return {name for name in _differences(stored, given) if not is_unset(name)}


def _look_up(settings: object, name: str) -> object:
    """The setting of a dotted name, or ``_ABSENT``."""
    for part in name.split("."):
        if not isinstance(settings, dict) or part not in settings:
            return _ABSENT
        settings = settings[part]
    return settings


def _differences(stored: dict[str, Any], given: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted names of settings that differ."""
    found: set[str] = set()
    for name in stored.keys() | given.keys():
        old, new = stored.get(name), given.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.add(prefix + name)
    return found
