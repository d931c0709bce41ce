"""HeadProfile: how much each KV head of one model needs the whole history.

A profile is one JSON file that names its model, carries its scores, says how it was made, and
guards itself with a checksum. It is written atomically and read without executing anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from rlkv.core.budget import Budget
from rlkv.core.files import to_json, write_atomic
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError, ProfileError, ProfileMismatchError, RLKVError

FORMAT_NAME = "rlkv-profile"
FORMAT_VERSION = 1

SelectionRule = Literal["exact", "quantile"]
MetaValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True, eq=False)
class HeadProfile:
    """Scores of all KV heads of one model, with their origin.

    Raises:
        ProfileError: The scores have the wrong shape, are not finite, or lie outside [0, 1].
    """

    spec: ModelSpec
    """The model that the scores belong to."""
    scores: NDArray[np.float32]
    """(layers, kv_heads) float32 in [0, 1]; high means: needs the full cache."""
    source: str
    """How the scores were made, such as ``"rlkv"`` or the name of an imported file."""
    sink: int = 16
    """Sink tokens that the scores were learned with."""
    recent: int = 64
    """Recent tokens that the scores were learned with."""
    meta: Mapping[str, MetaValue] = field(default_factory=lambda: MappingProxyType({}))
    """Anything else worth recording: seed, steps, task, versions."""

    def __post_init__(self) -> None:
        scores = np.array(self.scores, dtype=np.float32)
        if scores.shape != self.spec.shape:
            raise ProfileError(
                f"scores have shape {_shape(scores.shape)}, expected {_shape(self.spec.shape)} "
                f"(layers x kv heads) of {self.spec.model_id}; use the profile of that model"
            )
        if not np.isfinite(scores).all():
            raise ProfileError(
                "scores contain NaN or infinity, expected numbers in [0, 1]; retrain"
            )
        if scores.min() < 0.0 or scores.max() > 1.0:
            raise ProfileError(
                f"scores range from {scores.min():.4g} to {scores.max():.4g}, expected [0, 1]; "
                "clip them with `rlkv profile import`"
            )
        scores.setflags(write=False)
        object.__setattr__(self, "scores", scores)

    def ranking(self) -> list[tuple[int, int]]:
        """(layer, kv_head) pairs, best first; ties go to the lower layer, then the lower head."""
        order = np.argsort(-self.scores.reshape(-1), kind="stable")
        return [divmod(int(index), self.spec.num_kv_heads) for index in order]

    def full_heads(self, sparsity: float, rule: SelectionRule = "exact") -> NDArray[np.bool_]:
        """Which KV heads keep the full cache at ``sparsity``.

        Args:
            sparsity: Share of KV heads to compress, in [0, 1).
            rule: ``"exact"`` keeps exactly round((1-s)·L·H) heads. ``"quantile"`` keeps every head
                whose score is at least the s-quantile, as the authors' code does; ties then keep
                more heads. (Their code breaks ties by random noise; this one does not.)

        Returns:
            (layers, kv_heads) bool, True for a full head.
        """
        budget = Budget(sparsity=sparsity)
        if rule == "quantile":
            threshold = np.quantile(self.scores.astype(np.float64), sparsity)
            return self.scores.astype(np.float64) >= threshold
        if rule != "exact":
            raise ConfigError(f"selection rule {rule!r} is unknown; use 'exact' or 'quantile'")
        full = np.zeros(self.spec.shape, dtype=np.bool_)
        for layer, kv_head in self.ranking()[: budget.num_full_heads(self.spec.num_heads)]:
            full[layer, kv_head] = True
        return full

    def require_match(self, spec: ModelSpec, *, any_model: bool = False) -> None:
        """Checks that this profile was made for the model of ``spec``.

        Args:
            spec: The model about to be compressed.
            any_model: Accept another model's profile if its shape fits (transfer studies).

        Raises:
            ProfileMismatchError: The model or its shape differs.
        """
        if self.spec.shape != spec.shape:
            raise ProfileMismatchError(
                f"profile is for {self.spec.model_id} ({_shape(self.spec.shape)} kv heads), model "
                f"{spec.model_id} has {_shape(spec.shape)}; train one with `rlkv train`, or pass "
                "the matching profile"
            )
        if not any_model and self.spec.short_name != spec.short_name:
            raise ProfileMismatchError(
                f"profile is for {self.spec.model_id}, model is {spec.model_id} (same shape); pass "
                "the matching profile, or allow another model's with --any-model"
            )

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON, atomically.

        Raises:
            OutputError: The path cannot be written.
        """
        body = self._body()
        write_atomic(path, to_json({**body, "checksum": _checksum(body)}))

    @classmethod
    def load(cls, path: str | Path) -> HeadProfile:
        """Reads a profile and checks everything about it that can be checked without a model.

        Raises:
            ProfileError: The file is missing, truncated, altered, of a newer format, or its content
                is not valid.
        """
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(
                f"cannot read profile {path} ({error}); expected a JSON file written by `rlkv "
                "train` or `rlkv profile import`"
            ) from error
        try:
            # json accepts the words NaN and Infinity; a score must be a number
            body = json.loads(text, parse_constant=lambda word: float(word))
        except (ValueError, RecursionError) as error:
            raise ProfileError(
                f"profile {path} is not JSON ({error}), perhaps truncated; copy or train it again"
            ) from error
        return cls._from_body(body, str(path))

    def _body(self) -> dict[str, Any]:
        model = asdict(self.spec)
        model["layer_indices"] = list(self.spec.layer_indices)
        return {
            "format": f"{FORMAT_NAME}/{FORMAT_VERSION}",
            "model": model,
            "source": self.source,
            "sink": self.sink,
            "recent": self.recent,
            # nine digits identify a float32 exactly, so that a saved profile loads bit for bit
            "scores": [[float(f"{score:.9g}") for score in row] for row in self.scores.tolist()],
            "meta": dict(self.meta),
        }

    @classmethod
    def _from_body(cls, body: object, path: str) -> HeadProfile:
        if not isinstance(body, dict):
            raise ProfileError(f"profile {path} is not a JSON object; pass a head profile")
        content = cast("dict[str, Any]", body)
        _require_format(content.get("format"), path)
        try:
            stored = content.pop("checksum")
            model = dict(content["model"])
            model["layer_indices"] = tuple(model["layer_indices"])
            scores = _as_scores(content["scores"])
            profile = cls(
                ModelSpec(**model),
                scores,
                str(content["source"]),
                int(content["sink"]),
                int(content["recent"]),
                dict(content["meta"]),
            )
        except RLKVError as error:
            raise ProfileError(f"profile {path}: {error}") from error
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProfileError(
                f"profile {path} lacks or garbles {error}; expected a file written by `rlkv train` "
                "or `rlkv profile import`"
            ) from error
        if stored != _checksum(content):
            raise ProfileError(
                f"profile {path} was altered: its checksum does not fit its content; train it "
                "again, or import edited scores with `rlkv profile import`"
            )
        return profile


def _require_format(found: object, path: str) -> None:
    name, _, version = str(found).partition("/")
    if name != FORMAT_NAME or not version.isdecimal():
        raise ProfileError(
            f"{path} has format {found!r}, expected {FORMAT_NAME}/{FORMAT_VERSION}; import score "
            "tables with `rlkv profile import`"
        )
    if int(version) > FORMAT_VERSION:
        raise ProfileError(
            f"profile {path} has format version {version}, this RLKV reads up to {FORMAT_VERSION}; "
            "upgrade with `pip install -U rlkv`"
        )


def _as_scores(rows: Sequence[Sequence[float]]) -> NDArray[np.float32]:
    try:
        return np.array(rows, dtype=np.float32)
    except ValueError as error:
        raise ProfileError("scores are not a table of numbers with rows of one length") from error


def _checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # lone surrogates, which JSON can spell, have no UTF-8: they pass as they are
    return "sha256:" + hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)
