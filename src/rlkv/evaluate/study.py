"""Runs a study: the grid, the analyses that need more cells, and the report of both.

Everything is resumable: cells keep their records below the output folder, and a cell that is
complete costs nothing when the study runs again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlkv.core.files import require_writable_folder, write_atomic
from rlkv.core.head_profile import HeadProfile
from rlkv.evaluate.analyses import (
    bytes_section,
    error_section,
    length_section,
    overlap_section,
)
from rlkv.evaluate.cell import prepare
from rlkv.evaluate.config import EvalConfig
from rlkv.evaluate.evaluation import evaluate
from rlkv.evaluate.metrics import accuracy
from rlkv.evaluate.records import Row
from rlkv.evaluate.report import CellData, HeadMap, Report, build_report, head_map, write_sections
from rlkv.evaluate.results import EvalResult
from rlkv.evaluate.run_info import run_info
from rlkv.evaluate.sections import Chart, Section
from rlkv.evaluate.study_config import StudyConfig, require_usable
from rlkv.hf.loading import LoadedModel

CELLS, ANALYSES, DERIVED = "cells", "analyses", "derived"


@dataclass(frozen=True, slots=True)
class _Ranked:
    """Cells of one ranking and share; several where random rankings are averaged."""

    model: str
    task: str
    ranking: str
    share: float
    configs: tuple[EvalConfig, ...]


def run_study(
    study: StudyConfig,
    out: str | Path,
    *,
    models: Mapping[str, LoadedModel] | None = None,
    progress: bool = True,
) -> Report:
    """Runs what is missing, writes ``study.json`` and the report into ``out``, and returns it.

    Args:
        study: What to run.
        out: Output folder.
        models: Models that are loaded already, by name.
        progress: Show progress on stderr.

    Raises:
        RLKVError: Whatever is wrong with the study; raised before any weights load.
    """
    require_usable(study)
    folder = require_writable_folder(out)
    profiles = _load_profiles(study)
    ranked = _sensitivity_cells(study, profiles, folder / DERIVED)
    extra = [*study.window_cells(), *(config for one in ranked for config in one.configs)]
    for config in (*study.cells(), *extra):
        loaded = (models or {}).get(config.model)
        prepare(config, None if loaded is None else loaded.spec)
    # before the first cell: the commit that runs, not one made meanwhile
    run = run_info(str(study.eval.get("device", "cpu")))
    results = evaluate(study.cells(), out=folder / CELLS, models=models, progress=progress)
    swept = evaluate(study.window_cells(), out=folder / ANALYSES, models=models, progress=progress)
    cells = [CellData(result.row, result.records) for result in results]
    sections = [
        section
        for section in (
            bytes_section(cells),
            length_section(cells),
            error_section(cells),
            _sensitivity_section(ranked, folder, models, progress),
            _window_section(swept),
            _overlap(study, profiles),
        )
        if section is not None
    ]
    report = build_report(
        results,
        title=study.title,
        run=run,
        heads=_head_maps(profiles),
        sections=sections,
    )
    write_sections(folder / "analyses.json", sections)
    report.write(folder)
    write_atomic(folder / "study.json", report.to_json())
    return report


def _load_profiles(study: StudyConfig) -> dict[tuple[str, str], HeadProfile]:
    """Profiles by (model, method)."""
    return {
        (model, method): HeadProfile.load(path)
        for model, by_method in study.profiles.items()
        for method, path in by_method.items()
    }


def _head_maps(profiles: Mapping[tuple[str, str], HeadProfile]) -> list[HeadMap]:
    return [head_map(method, profile) for (_, method), profile in profiles.items()]


def _overlap(study: StudyConfig, profiles: Mapping[tuple[str, str], HeadProfile]) -> Section | None:
    if study.overlap is None or len(profiles) < 2:
        return None
    several = len(study.models) > 1
    named = {
        f"{model} {method}" if several else method: profile
        for (model, method), profile in profiles.items()
    }
    return overlap_section(named, study.overlap.shares)


# ---- head sensitivity ---------------------------------------------------------------------------


def reversed_profile(profile: HeadProfile) -> HeadProfile:
    """The profile whose ranking is the other way round, so that the best heads go first.

    Scores are ranks, which have no ties: compressing a share of this profile's heads compresses
    exactly the first of the original ranking.
    """
    scores = np.zeros(profile.spec.shape, dtype=np.float32)
    ranking = profile.ranking()
    for rank, (layer, kv_head) in enumerate(ranking):
        scores[layer, kv_head] = rank / max(1, len(ranking) - 1)
    return replace(profile, scores=scores, source=f"{profile.source}, reversed")


def _sensitivity_cells(
    study: StudyConfig, profiles: Mapping[tuple[str, str], HeadProfile], derived: Path
) -> list[_Ranked]:
    wanted = study.sensitivity
    if wanted is None:
        return []
    groups: list[_Ranked] = []
    for model in study.models:
        known = [method for owner, method in profiles if owner == model]
        for task in study.tasks:
            base = study.cell(model, task, "random_heads", 0.5)
            for ranking in wanted.rankings or known:
                path = derived / f"{_plain(model)}-{ranking}-reversed.json"
                reversed_profile(profiles[model, ranking]).save(path)
                cell = replace(base, method="rlkv", profile=str(path))
                for share in wanted.shares:
                    configs = (cell.with_sparsity(share),)
                    groups.append(_Ranked(model, task, ranking, share, configs))
            for share in wanted.shares if wanted.draws else ():
                drawn = [replace(base, sparsity=share, head_seed=i) for i in range(wanted.draws)]
                groups.append(_Ranked(model, task, "random_heads", share, tuple(drawn)))
    return groups


def _plain(model: str) -> str:
    return Path(model).name or "model"


def _sensitivity_section(
    groups: Sequence[_Ranked],
    folder: Path,
    models: Mapping[str, LoadedModel] | None,
    progress: bool,
) -> Section | None:
    if not groups:
        return None
    configs = [config for one in groups for config in one.configs]
    results = iter(
        evaluate(configs, out=folder / ANALYSES, models=models, progress=progress, one_each=True)
    )
    rows: list[tuple[str | float | int, ...]] = []
    for one in groups:
        found = list(itertools.islice(results, len(one.configs)))
        estimate = accuracy([record for result in found for record in result.records])
        row = found[0].row
        numbers = (row.n, estimate.value, estimate.low, estimate.high)
        rows.append((row.model, row.task, one.ranking, one.share, *numbers))
    chart = Chart(
        x="share",
        y="accuracy",
        series="ranking",
        low="low",
        high="high",
        facet=("model", "task"),
        x_label="share of KV heads compressed, best of the ranking first",
    )
    note = (
        "The best heads of each ranking are compressed and the rest stay full: the lower the line, "
        "the more the heads that the ranking puts first matter. The control compresses heads at "
        "random, averaged over several draws."
    )
    names = ("model", "task", "ranking", "share", "n", "accuracy", "low", "high")
    return Section("sensitivity", "Head sensitivity", note, names, tuple(rows), chart)


# ---- windows ------------------------------------------------------------------------------------


def _window_section(results: Sequence[EvalResult]) -> Section | None:
    if not results:
        return None
    rows = [_window_row(result.row) for result in results]
    chart = Chart(
        x="window",
        y="accuracy",
        series="setting",
        low="low",
        high="high",
        facet=("model", "task"),
        x_label="sink + recent tokens of a compressed head",
    )
    names = ("model", "task", "setting", "sink", "recent", "window", "n", "accuracy", "low", "high")
    return Section(
        "windows",
        "Sink and recent tokens",
        "Accuracy of one method when compressed heads keep more or fewer tokens.",
        (*names, "kv_bytes_mean"),
        tuple(rows),
        chart,
    )


def _window_row(row: Row) -> tuple[str | int | float, ...]:
    setting = f"{row.method} s={row.sparsity:g}"
    window = (row.sink, row.recent, row.sink + row.recent)
    numbers = (row.n, row.accuracy, row.ci_low, row.ci_high, row.kv_bytes_mean)
    return (row.model, row.task, setting, *window, *numbers)
