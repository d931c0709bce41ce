"""EvalResult: one finished cell, and what its result file holds.

Made by :mod:`rlkv.evaluate.evaluation`, read by :mod:`rlkv.evaluate.report`. Apart from both, so
that a report of stored results needs neither torch nor a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkv.core.head_profile import HeadProfile
from rlkv.evaluate.config import EvalConfig
from rlkv.evaluate.records import Record, Row

RESULT_FORMAT = "rlkv-result/1"


@dataclass(frozen=True)
class EvalResult:
    """One finished cell."""

    config: EvalConfig
    """What was asked for."""
    row: Row
    """Its figures."""
    records: tuple[Record, ...]
    """Its completions, in the order of the examples."""
    path: Path | None
    """Result file; None where nothing is stored."""


def profile_summary(profile: HeadProfile) -> dict[str, Any]:
    """What a result says of its profile, scores included, so that a report needs no other file."""
    return {
        "model": profile.spec.model_id,
        "source": profile.source,
        "sink": profile.sink,
        "recent": profile.recent,
        "meta": dict(profile.meta),
        # nine digits identify a float32 exactly, so that the result can be made again from this
        "scores": [[float(f"{score:.9g}") for score in row] for row in profile.scores.tolist()],
    }
