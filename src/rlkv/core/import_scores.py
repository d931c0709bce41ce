r"""Importers for published head scores.

The field publishes a bare table, tab-separated, one row a layer, no header: ``adapter_weights.tsv``
(RLKV, KVzip) and ``full_attention_heads.tsv`` (DuoAttention, with a ``config.json`` beside it that
carries ``sink_size`` and ``recent_size``). Trained values stray slightly outside [0, 1] and are
clipped.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlkv.core.head_profile import HeadProfile
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ProfileError, ProfileMismatchError

_STRAY = 0.05
"""How far published values lie outside [0, 1] at most (0.011 seen); more means another quantity."""


def import_scores(path: str | Path, spec: ModelSpec, *, source: str | None = None) -> HeadProfile:
    """The profile of a published score table.

    Args:
        path: Tab-separated table of layers rows x kv_heads columns.
        spec: Shape of the model that the table belongs to.
        source: Name of the method that made the table; default: the file's name.

    Raises:
        ProfileError: The file is missing, not a table of finite numbers, or not gate values.
        ProfileMismatchError: The table's shape is not the model's.
    """
    file = Path(path)
    scores = _read_table(file)
    if scores.shape != spec.shape:
        found = "x".join(str(size) for size in scores.shape)
        raise ProfileMismatchError(
            f"{file} holds {found} scores, model {spec.model_id} has "
            f"{spec.num_layers}x{spec.num_kv_heads} kv heads; pass the table of that model"
        )
    if scores.min() < -_STRAY or scores.max() > 1.0 + _STRAY:
        raise ProfileError(
            f"{file} ranges from {scores.min():.4g} to {scores.max():.4g}, expected gate values in "
            "[0, 1]; scale the scores first"
        )
    sink, recent = _window_beside(file)
    return HeadProfile(
        spec,
        np.clip(scores, 0.0, 1.0).astype(np.float32),
        source=source or file.name,
        sink=sink,
        recent=recent,
        meta={
            "imported_from": file.name,
            "imported_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "clipped": int(((scores < 0.0) | (scores > 1.0)).sum()),
        },
    )


def _read_table(file: Path) -> NDArray[np.float64]:
    try:
        rows = [line.split() for line in file.read_text("utf-8").split("\n") if line.strip()]
        scores = np.array([[float(cell) for cell in row] for row in rows], dtype=np.float64)
    except OSError as error:
        raise ProfileError(f"cannot read {file} ({error.strerror}); check the path") from error
    except ValueError as error:
        raise ProfileError(
            f"{file} is not a table of numbers ({error}); expected tab-separated scores, one row a "
            "layer, no header"
        ) from error
    if scores.ndim != 2 or not scores.size:
        raise ProfileError(f"{file} holds no table; expected one row a layer, one column a kv head")
    if not np.isfinite(scores).all():
        raise ProfileError(f"{file} contains NaN or infinity; expected gate values in [0, 1]")
    return scores


def _window_beside(file: Path) -> tuple[int, int]:
    """Sink and recent from a DuoAttention ``config.json``, else what RLKV trains with."""
    config = file.with_name("config.json")
    if not config.is_file():
        return 128, 256
    try:
        values = json.loads(config.read_text("utf-8"))
        return int(values["sink_size"]), int(values["recent_size"])
    except (ValueError, KeyError, TypeError):
        return 128, 256
