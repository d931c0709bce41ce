"""Colours and marks of methods, the same in every figure and in the HTML report.

Eight hues that stay apart for the colour-blind (after Okabe and Ito), one shade for white paper and
one for a dark page; marks differ too, so that no figure depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus")

_ORDER = (
    "rlkv",
    "random_heads",
    "duo_attention",
    "kvzip",
    "r_kv",
    "h2o",
    "snapkv",
)
_SHADES = (
    ("#0b62b8", "#5fb0ff"),
    ("#c2410c", "#ff9a5c"),
    ("#0a7d5a", "#3fd0a0"),
    ("#a21caf", "#ec8cf5"),
    ("#8a6d00", "#e8c54a"),
    ("#0e7490", "#5cd6ee"),
    ("#be123c", "#ff8aa0"),
    ("#4d5b00", "#b9cf45"),
)
_REFERENCE = ("#555b66", "#a9b0bd")


@dataclass(frozen=True, slots=True)
class SeriesStyle:
    """How one series is drawn."""

    light: str
    """Colour on a light page."""
    dark: str
    """Colour on a dark page."""
    marker: str
    """One of :data:`MARKERS`."""
    dash: str
    """SVG dash pattern; "" for a solid line."""


def series_styles(names: Iterable[str]) -> dict[str, SeriesStyle]:
    """A style for each series name; known methods always look the same.

    Example:
        >>> series_styles(["full", "rlkv"])["full"].dash
        '6 4'
    """
    styles: dict[str, SeriesStyle] = {}
    others = iter(range(len(_ORDER), 1000))
    for name in names:
        if name == "full":
            styles[name] = SeriesStyle(*_REFERENCE, "none", "6 4")
        elif name == "streaming_llm":
            styles[name] = SeriesStyle(*_REFERENCE, "none", "2 3")
        else:
            place = _ORDER.index(name) if name in _ORDER else next(others)
            light, dark = _SHADES[place % len(_SHADES)]
            styles[name] = SeriesStyle(light, dark, MARKERS[place % len(MARKERS)], "")
    return styles
