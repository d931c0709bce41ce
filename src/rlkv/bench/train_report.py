"""Report of ``rlkv bench train``: cost, accuracy and the course of learning, as sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from rlkv.core.files import to_json
from rlkv.evaluate.report_files import write_report
from rlkv.evaluate.run_info import RunInfo
from rlkv.evaluate.sections import Cell, Chart, Section


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


Curves = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
"""Rows of ``metrics.jsonl`` of each variant and seed that was trained."""


def write_train_report(
    folder: Path, title: str, rows: Sequence[TrainRow], curves: Curves, run: RunInfo
) -> list[Path]:
    """Markdown, JSON, figures and one HTML page; returns the files."""
    found = [cost_section(rows), accuracy_section(rows), *curve_sections(curves)]
    sections = [section for section in found if section.rows]
    return write_report(folder, title, sections, run=run, rows_json=to_json(list(rows)))


def cost_section(rows: Sequence[TrainRow]) -> Section:
    """What learning took, one row a variant: means over its seeds."""
    names = ("generated_tokens", "trained_tokens", "cpu_seconds")
    by_variant: dict[str, dict[int, TrainRow]] = {}
    for row in rows:
        if row["cpu_seconds"]:
            by_variant.setdefault(row["objective"], {})[row["seed"]] = row
    means = [
        (
            variant,
            len(seeds),
            *(_mean([float(row[name]) for row in seeds.values()]) for name in names),
        )
        for variant, seeds in by_variant.items()
    ]
    note = "Means over seeds. Tokens decoded, tokens trained on, and CPU time of learning."
    return Section("cost", "Cost of learning", note, ("objective", "seeds", *names), tuple(means))


def accuracy_section(rows: Sequence[TrainRow]) -> Section:
    """Accuracy of the binary model over sparsity: mean, worst and best seed."""
    by_cell: dict[tuple[str, float], list[TrainRow]] = {}
    for row in rows:
        by_cell.setdefault((row["objective"], row["sparsity"]), []).append(row)
    cells: list[tuple[Cell, ...]] = []
    for (variant, sparsity), found in by_cell.items():
        values = [row["accuracy"] for row in found]
        low = min(row["ci_low"] for row in found)
        high = max(row["ci_high"] for row in found)
        cells.append(
            (variant, sparsity, len(found), _mean(values), min(values), max(values), low, high)
        )
    columns = ("objective", "sparsity", "seeds", "accuracy", "worst", "best", "low", "high")
    chart = Chart(
        x="sparsity",
        y="accuracy",
        series="objective",
        low="low",
        high="high",
        x_label="sparsity (share of KV heads compressed)",
        flat=tuple(dict.fromkeys(row["objective"] for row in rows if not row["sparsity"])),
    )
    note = (
        "The best heads of each profile stay full, greedy answers. Mean, worst and best seed; low "
        "and high are the outer ends of the seeds' 95 % intervals."
    )
    return Section("accuracy", "Accuracy of the binary model", note, columns, tuple(cells), chart)


def curve_sections(curves: Curves) -> list[Section]:
    """Reward and mean gate over the steps of learning, means over seeds."""
    labels = {"reward": "mean reward of the rollouts", "mean_gate": "mean gate"}
    return [_curve_section(name, label, curves) for name, label in labels.items()]


def _curve_section(name: str, label: str, curves: Curves) -> Section:
    points: dict[tuple[str, int], list[float]] = {}
    for (variant, _), rows in curves.items():
        for row in rows:
            if row[name] is not None:
                points.setdefault((variant, int(row["step"])), []).append(float(row[name]))
    cells = tuple((variant, step, _mean(values)) for (variant, step), values in points.items())
    chart = Chart(x="step", y=name, series="objective", y_label=label, marks=False)
    note = "Mean over the seeds that reached the step."
    columns = ("objective", "step", name)
    title = f"{label[0].upper()}{label[1:]} over steps"
    return Section(name, title, note, columns, cells, chart, in_markdown=False)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
