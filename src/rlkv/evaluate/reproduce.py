"""Runs a stored result again and compares the two."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlkv.core.head_profile import HeadProfile
from rlkv.errors import ConfigError, DataError
from rlkv.evaluate.config import EvalConfig
from rlkv.evaluate.evaluation import evaluate
from rlkv.evaluate.records import Row
from rlkv.evaluate.report import read_result
from rlkv.evaluate.results import EvalResult
from rlkv.evaluate.run_info import run_info
from rlkv.hf.loading import LoadedModel, model_spec


@dataclass(frozen=True)
class Reproduction:
    """A stored result and the same cell run again."""

    stored: Row
    """Row of the result file."""
    again: Row
    """Row of the new run."""
    changes: tuple[str, ...]
    """What differs between the two runs' surroundings, such as a version."""

    @property
    def difference(self) -> float:
        """Accuracy of the new run minus that of the stored one."""
        return self.again.accuracy - self.stored.accuracy


def reproduce(
    path: str | Path,
    *,
    models: Mapping[str, LoadedModel] | None = None,
    progress: bool = True,
) -> Reproduction:
    """Runs the cell of a result file again, from the file alone.

    Head scores are taken from the file, so the profile that made it need not exist any more.

    Args:
        path: Result file of ``rlkv eval`` or ``rlkv study``.
        models: Models that are loaded already, by name.
        progress: Show progress on stderr.

    Raises:
        DataError: The file is no result, or was written by a version with other options.
        RLKVError: The cell cannot be run here.
    """
    content = read_result(path)
    assert content is not None
    config = _config(content, str(path))
    with tempfile.TemporaryDirectory(prefix="rlkv-reproduce-") as scratch:
        if content["profile"]:
            config = _with_stored_scores(config, content["profile"], Path(scratch), models or {})
        result: EvalResult = evaluate([config], models=models, progress=progress)[0]
    stored = Row.from_row(content["row"], str(path))
    return Reproduction(stored, result.row, _changes(content["run"], config.device))


def _config(content: Mapping[str, Any], path: str) -> EvalConfig:
    try:
        return EvalConfig(**content["config"])
    except (TypeError, KeyError) as error:
        raise DataError(
            f"{path} has options that this RLKV does not know ({error}); reproduce it with version "
            f"{content.get('run', {}).get('versions', {}).get('rlkv', 'unknown')}"
        ) from error


def _with_stored_scores(
    config: EvalConfig,
    summary: Mapping[str, Any],
    folder: Path,
    models: Mapping[str, LoadedModel],
) -> EvalConfig:
    spec = models[config.model].spec if config.model in models else model_spec(config.model)
    scores = np.array(summary["scores"], dtype=np.float32)
    if scores.shape != spec.shape:
        raise ConfigError(
            f"the stored scores have shape {scores.shape}, model {config.model} has {spec.shape}; "
            "pass the model that the result was made with"
        )
    profile = HeadProfile(
        spec, scores, str(summary["source"]), int(summary["sink"]), int(summary["recent"])
    )
    profile.save(folder / "profile.json")
    return replace(config, profile=str(folder / "profile.json"))


def _changes(run: Mapping[str, Any], device: str) -> tuple[str, ...]:
    now = run_info(device)
    found = [
        f"{name} {old} then, {now.versions.get(name, 'absent')} now"
        for name, old in run["versions"].items()
        if now.versions.get(name) != old
    ]
    for name in ("git_hash", "cpu", "device", "threads"):
        old, new = run[name], getattr(now, name)
        if old != new:
            found.append(f"{name} {old or 'unknown'} then, {new or 'unknown'} now")
    return tuple(found)
