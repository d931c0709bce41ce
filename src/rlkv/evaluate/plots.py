"""Figures as PNG bytes: the only module that imports matplotlib.

Drawn with the Figure object alone, so no window system and no global state is involved.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlkv.evaluate.figure_style import SeriesStyle, series_styles
from rlkv.evaluate.sections import Cell, Chart, Section, facets

if TYPE_CHECKING:
    from rlkv.evaluate.report import HeadMap

_MARKERS = {
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "diamond": "D",
    "cross": "X",
    "plus": "P",
    "none": "",
}
_DPI = 150


def plot_section(section: Section) -> bytes:
    """The chart of a section: one panel a facet, one line a series, intervals as bars.

    Args:
        section: A section with a chart and at least one row.

    Returns:
        PNG bytes.
    """
    panels = facets(section)
    chart = section.chart
    if chart is None or not panels:
        raise ValueError(f"section {section.key} has no chart to draw")
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.6 * columns + 1.8, 4.2 * lines), layout="constrained")
    names = dict.fromkeys(str(row[chart.series]) for _, rows in panels for row in rows)
    styles = series_styles(names)
    for place, (title, rows) in enumerate(panels, start=1):
        axes = figure.add_subplot(lines, columns, place)
        _draw_lines(axes, chart, rows, styles)
        axes.set_title(title or section.title, fontsize=11)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    for axes in figure.axes[1:]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    return _png(figure)


def _draw_lines(
    axes: Axes, chart: Chart, rows: Sequence[dict[str, Cell]], styles: dict[str, SeriesStyle]
) -> None:
    groups: dict[str, list[dict[str, Cell]]] = {}
    for row in rows:
        groups.setdefault(str(row[chart.series]), []).append(row)
    shifts = _shifts(chart, groups)
    for name, group in groups.items():
        style = styles[name]
        dash = (0, tuple(float(part) for part in style.dash.split())) if style.dash else "-"
        y = [_number(row[chart.y]) for row in group]
        if name in chart.flat:
            axes.axhline(y[0], color=style.light, linestyle=dash, linewidth=1.5, label=name)
            if chart.low and chart.high:
                low, high = _number(group[0][chart.low]), _number(group[0][chart.high])
                axes.axhspan(low, high, color=style.light, alpha=0.12, linewidth=0)
            continue
        order = np.argsort([_number(row[chart.x]) for row in group], kind="stable")
        group = [group[int(i)] for i in order]
        x = [_number(row[chart.x]) + shifts[name] for row in group]
        y = np.array([_number(row[chart.y]) for row in group])
        errors = None
        if chart.low and chart.high:
            low = np.array([_number(row[chart.low]) for row in group])
            high = np.array([_number(row[chart.high]) for row in group])
            errors = np.clip(np.stack([y - low, high - y]), 0, None)
        axes.errorbar(
            x,
            y,
            yerr=errors,
            label=name,
            color=style.light,
            linestyle=dash,
            marker=_MARKERS[style.marker] if chart.marks else "",
            markersize=5.5,
            linewidth=1.6,
            capsize=2.5,
            elinewidth=1.0,
        )
    axes.set_xlabel(chart.x_label or chart.x)
    axes.set_ylabel(chart.y_label or chart.y)
    axes.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if chart.y == "accuracy":
        axes.set_ylim(-0.03, 1.03)


def _shifts(chart: Chart, groups: dict[str, list[dict[str, Cell]]]) -> dict[str, float]:
    """A small horizontal shift per line, so that intervals at one x stay apart."""
    names = [name for name in groups if name not in chart.flat]
    values = [_number(row[chart.x]) for name in names for row in groups[name]]
    step = 0.004 * (max(values) - min(values)) if values else 0.0
    return {name: (place - (len(names) - 1) / 2) * step for place, name in enumerate(names)}


def plot_heads(maps: Sequence[HeadMap]) -> bytes:
    """Gate maps side by side: layers downwards, KV heads across, score as shade.

    Args:
        maps: At least one.

    Returns:
        PNG bytes.
    """
    tallest = max(len(one.scores) for one in maps)
    width = sum(0.42 * len(one.scores[0]) + 1.9 for one in maps) + 0.8
    figure = Figure(figsize=(max(3.6, width), 0.24 * tallest + 1.6), layout="constrained")
    panels = figure.subplots(1, len(maps), squeeze=False)[0]
    image = None
    for axes, one in zip(panels, maps, strict=True):
        scores = np.array(one.scores)
        image = axes.imshow(scores, cmap="cividis", vmin=0.0, vmax=1.0, aspect="auto")
        axes.set_title(f"{one.label}\n{one.model}", fontsize=9)
        axes.set_xlabel("KV head")
        axes.set_ylabel("layer")
        axes.set_xticks(range(scores.shape[1]))
        every = max(1, scores.shape[0] // 12)
        axes.set_yticks(range(0, scores.shape[0], every))
        axes.tick_params(labelsize=8)
    if image is not None:
        bar = figure.colorbar(image, ax=list(panels), shrink=0.8)
        bar.set_label("score", fontsize=9)
    return _png(figure)


def plot_training(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Reward, gates and loss of a training run over its steps.

    Args:
        rows: At least one row of ``metrics.jsonl``.

    Returns:
        PNG bytes.
    """
    figure = Figure(figsize=(13.5, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    steps = [row["step"] for row in rows]
    for axes, names in (
        (left, ("reward", "binary_reward")),
        (middle, ("mean_gate", "under_half", "undecided")),
    ):
        for name, style in series_styles(names).items():
            points = [(row["step"], row[name]) for row in rows if row[name] is not None]
            mark = _MARKERS[style.marker] if name == "binary_reward" else ""
            label = name.replace("_", " ")
            x, y = [p[0] for p in points], [p[1] for p in points]
            axes.plot(x, y, label=label, color=style.light, marker=mark)
        axes.set_ylim(-0.03, 1.03)
        axes.legend(fontsize=8, frameon=False)
    gates = np.array([row["gates"] for row in rows])
    for trajectory in gates.T:
        kept = trajectory[-1] >= 0.5
        shade = series_styles(("rlkv", "random_heads"))["rlkv" if kept else "random_heads"]
        right.plot(steps, trajectory, color=shade.light, linewidth=0.8, alpha=0.6)
    right.set_ylim(-0.03, 1.03)
    for axes, title in ((left, "reward"), (middle, "all gates"), (right, "each gate")):
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25, linewidth=0.6)
    return _png(figure)


def _number(cell: Cell) -> float:
    return float(cell) if isinstance(cell, (int, float)) else float("nan")


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    # no date in the file: the same results give the same bytes
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()
