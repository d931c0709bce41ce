"""Sections as files: Markdown, figures and one HTML page, whatever the report is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlkv.core.files import require_writable_folder, to_json, write_atomic
from rlkv.evaluate.html_report import render_html
from rlkv.evaluate.run_info import RunInfo
from rlkv.evaluate.sections import Section, markdown_table

if TYPE_CHECKING:
    from rlkv.evaluate.report import HeadMap


def to_markdown(
    title: str,
    sections: Sequence[Section],
    heads: Sequence[HeadMap] = (),
    run: RunInfo | None = None,
) -> str:
    """A report as Markdown; figures are linked by file name."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {section.title}", section.note]
        if section.chart is not None:
            parts.append(f"![{section.title}]({section.key}.png)")
        if section.in_markdown:
            parts.append(markdown_table(section.columns, section.rows))
    if heads:
        parts += ["## Gate map", "High scores mean: needs the full cache.", "![](heads.png)"]
    if run is not None:
        parts += ["## Run", run_table(run)]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_report(
    folder: str | Path,
    title: str,
    sections: Sequence[Section],
    *,
    heads: Sequence[HeadMap] = (),
    run: RunInfo | None = None,
    rows_json: str,
    figures: bool = True,
) -> list[Path]:
    """Writes report.md, report.json, report.html, run.json and, if asked, the figures.

    Args:
        folder: Where.
        title: Heading.
        sections: Tables and charts, in order.
        heads: Gate maps.
        run: Where the results were made; None where unknown.
        rows_json: Content of report.json.
        figures: Whether to draw the figures.

    Returns:
        The files written.

    Raises:
        OutputError: The folder cannot be written.
    """
    target = require_writable_folder(folder)
    files = {
        "report.md": to_markdown(title, sections, heads, run),
        "report.json": rows_json,
        "report.html": render_html(title, sections, heads, run),
    }
    if run is not None:
        files["run.json"] = to_json(asdict(run))
    for name, content in files.items():
        write_atomic(target / name, content)
    written = [target / name for name in files]
    if figures:
        from rlkv.evaluate.plots import plot_heads, plot_section

        drawn = {
            f"{section.key}.png": plot_section(section)
            for section in sections
            if section.chart is not None and section.rows
        }
        if heads:
            drawn["heads.png"] = plot_heads(heads)
        for name, image in drawn.items():
            write_atomic(target / name, image)
        written += [target / name for name in drawn]
    return written


def run_table(run: RunInfo) -> str:
    """The surroundings as a Markdown table."""
    return markdown_table(("", ""), [(name, str(value)) for name, value in run_facts(run).items()])


def run_facts(run: RunInfo) -> dict[str, str]:
    """The surroundings, one fact a line."""
    facts = {name: str(value) for name, value in asdict(run).items() if name != "versions"}
    facts["versions"] = ", ".join(f"{name} {value}" for name, value in run.versions.items())
    return {name: value for name, value in facts.items() if value}
