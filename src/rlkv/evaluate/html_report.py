"""The HTML report: data, style and script put into one page that needs no network.

Template, style sheet and script lie in ``template/``; the page carries its data as JSON and draws
itself.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkv.evaluate.figure_style import series_styles
from rlkv.evaluate.run_info import RunInfo
from rlkv.evaluate.sections import Section

if TYPE_CHECKING:
    from rlkv.evaluate.report import HeadMap

_TEMPLATE = Path(__file__).parent / "template"


def render_html(
    title: str, sections: Sequence[Section], heads: Sequence[HeadMap], run: RunInfo | None
) -> str:
    """The whole page.

    Args:
        title: Heading.
        sections: Tables and charts, in order.
        heads: Gate maps.
        run: Where the results were made.
    """
    data = {
        "title": title,
        "sections": [_section(section) for section in sections],
        "heads": [asdict(one) for one in heads],
        "run": None if run is None else asdict(run),
        "styles": {name: asdict(style) for name, style in _styles(sections).items()},
    }
    # "</" would end the script element, wherever it comes from
    payload = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("</", "<\\/")
    page = _read("report.html")
    for mark, content in (
        ("{{title}}", html.escape(title)),
        ("{{style}}", _read("report.css")),
        ("{{script}}", _read("charts.js") + _read("report.js")),
        ("{{data}}", payload),
    ):
        page = page.replace(mark, content)
    return page


def _section(section: Section) -> dict[str, Any]:
    content = asdict(section)
    content["records"] = section.records()
    del content["rows"]
    return content


def _styles(sections: Sequence[Section]) -> dict[str, Any]:
    names: dict[str, None] = {}
    for section in sections:
        if section.chart is not None:
            for row in section.records():
                names.setdefault(str(row[section.chart.series]))
    return series_styles(names)


def _read(name: str) -> str:
    return (_TEMPLATE / name).read_text("utf-8")
