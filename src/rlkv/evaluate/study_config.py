"""Study: a grid of cells and the analyses of it, as one TOML file.

Example::

    title = "Embedded model, all methods"
    models = ["embedded"]
    tasks = ["chain"]
    methods = ["full", "rlkv", "random_heads"]
    sparsities = [0.2, 0.5, 0.8]

    [eval]                 # options of every cell: any field of EvalConfig
    n = 500

    [profiles.embedded]    # head profile of each method, relative to this file
    rlkv = "../profiles/embedded.rlkv.json"

    [sensitivity]          # compress the best heads of each ranking
    shares = [0.1, 0.2, 0.3, 0.4]

    [windows]              # one method under several windows of sink + recent tokens
    method = "rlkv"
    sparsities = [0.5]
    windows = [[4, 32], [16, 64]]
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from rlkv.core.budget import Budget
from rlkv.errors import ConfigError, DataError
from rlkv.evaluate.config import EvalConfig
from rlkv.registry import METHODS, TASKS

T = TypeVar("T")

_DECIDED_BY_GRID = ("model", "task", "method", "sparsity", "profile")


@dataclass(frozen=True)
class Sensitivity:
    """Compress the best heads of each ranking: the ranking whose heads matter most hurts most."""

    shares: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4)
    """Shares of KV heads compressed, best first."""
    rankings: tuple[str, ...] = ()
    """Methods whose profiles rank the heads; none: all that have a profile."""
    draws: int = 3
    """Random rankings that the control averages over; 0 leaves it out."""


@dataclass(frozen=True)
class Windows:
    """One method under several windows."""

    method: str = "rlkv"
    """The method."""
    sparsities: tuple[float, ...] = (0.5,)
    """Shares of KV heads compressed."""
    windows: tuple[tuple[int, int], ...] = ((4, 32), (8, 32), (16, 64), (32, 128))
    """Pairs of sink and recent tokens."""


@dataclass(frozen=True)
class Overlap:
    """Compare the rankings of all profiles of a study."""

    shares: tuple[float, ...] = (0.25, 0.5)
    """Shares of best heads whose overlap is given."""


@dataclass(frozen=True)
class StudyConfig:
    """A whole study.

    Raises:
        ConfigError: A list is empty, or a value is out of range.
        UnknownNameError: A method or task is unknown.
    """

    title: str
    """Heading of the report."""
    models: tuple[str, ...]
    """Models."""
    tasks: tuple[str, ...]
    """Tasks, each run with every model."""
    methods: tuple[str, ...]
    """Methods, see ``rlkv list methods``."""
    sparsities: tuple[float, ...]
    """Shares of KV heads to compress, each in [0, 1)."""
    eval: Mapping[str, Any] = field(default_factory=dict)
    """Options of every cell: fields of EvalConfig but those that the grid decides."""
    profiles: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Paths of head profiles, by model and method."""
    sensitivity: Sensitivity | None = None
    """Head sensitivity; None leaves it out."""
    windows: Windows | None = None
    """Sweep over windows; None leaves it out."""
    overlap: Overlap | None = None
    """Overlap of rankings; None leaves it out."""

    def __post_init__(self) -> None:
        for name in ("models", "tasks", "methods", "sparsities"):
            if not getattr(self, name):
                raise ConfigError(f"study {self.title!r} has no {name}; list at least one")
        for model, by_method in self.profiles.items():
            if model not in self.models:
                raise ConfigError(
                    f"profiles are given for model {model!r}, which the study does not run; its "
                    f"models are {', '.join(self.models)}"
                )
            for method in by_method:
                METHODS.require(method)
        list(self.cells())  # refuses what no cell accepts

    def cells(self) -> list[EvalConfig]:
        """The grid: every model, task, method and sparsity."""
        return [
            self.cell(model, task, method, sparsity)
            for model in self.models
            for task in self.tasks
            for method in self.methods
            for sparsity in self.sparsities
        ]

    def cell(self, model: str, task: str, method: str, sparsity: float) -> EvalConfig:
        """One cell of the grid."""
        profile = self.profiles.get(model, {}).get(method)
        return EvalConfig(
            model=model, task=task, method=method, sparsity=sparsity, profile=profile, **self.eval
        )

    def window_cells(self) -> list[EvalConfig]:
        """The cells of the window sweep."""
        if self.windows is None:
            return []
        return [
            replace(self.cell(model, task, self.windows.method, sparsity), sink=sink, recent=recent)
            for model in self.models
            for task in self.tasks
            for sparsity in self.windows.sparsities
            for sink, recent in self.windows.windows
        ]

    def scaled(self, n: int) -> StudyConfig:
        """The same study with another number of examples."""
        return replace(self, eval={**self.eval, "n": n})


def load_study(path: str | Path) -> StudyConfig:
    """The study of a TOML file; paths in it are relative to its folder.

    Raises:
        DataError: The file cannot be read or is not TOML.
        ConfigError: A key is unknown or missing, or a value is of the wrong kind or out of range.
        UnknownNameError: A method or task is unknown.
    """
    file = Path(path)
    try:
        content = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"cannot read study {file} ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"study {file} is not TOML ({error}); fix it") from error
    parts = {
        "sensitivity": _part(Sensitivity, content, "sensitivity", file),
        "windows": _part(Windows, content, "windows", file),
        "overlap": _part(Overlap, content, "overlap", file),
    }
    options = content.get("eval", {})
    allowed = [f.name for f in fields(EvalConfig) if f.name not in _DECIDED_BY_GRID]
    _require_known(options, allowed, f"{file} [eval]")
    if isinstance(options.get("data"), str):
        options = {**options, "data": str(file.parent / options["data"])}
    profiles = {
        model: {method: str(file.parent / where) for method, where in by_method.items()}
        for model, by_method in content.get("profiles", {}).items()
    }
    rest = {**content, **parts, "eval": options, "profiles": profiles}
    rest.setdefault("title", file.stem)
    return _build(StudyConfig, rest, str(file))


def _part(kind: type[T], content: Mapping[str, Any], name: str, file: Path) -> T | None:
    return _build(kind, content[name], f"{file} [{name}]") if name in content else None


def _build(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """A dataclass from parsed TOML; lists become tuples, unknown keys are refused."""
    _require_known(values, [f.name for f in fields(kind)], where)  # type: ignore[arg-type]
    try:
        return kind(**{name: _frozen(value) for name, value in values.items()})
    except TypeError as error:
        wanted = [f.name for f in fields(kind) if f.name not in values]  # type: ignore[arg-type]
        raise ConfigError(
            f"{where} lacks some of {', '.join(wanted)}, or has a value of the wrong kind; "
            "studies/embedded.toml is a whole example, docs/evaluation.md tells the format"
        ) from error


def _frozen(value: Any) -> Any:  # noqa: ANN401 - parsed TOML
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value


def _require_known(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"{where} has the unknown key {name!r}.{hint} Known: {', '.join(known)}."
            )


def require_usable(study: StudyConfig) -> None:
    """Checks the parts that :class:`EvalConfig` does not.

    Raises:
        ConfigError: A share or a window is out of range, or a ranking has no profile.
        UnknownNameError: A method or task is unknown.
    """
    for task in study.tasks:
        TASKS.require(task)
    if study.sensitivity is not None:
        for share in study.sensitivity.shares:
            Budget(share)
        for model in study.models:
            for ranking in study.sensitivity.rankings:
                if ranking not in study.profiles.get(model, {}):
                    raise ConfigError(
                        f"[sensitivity] ranks by {ranking}, for which [profiles.{model}] has no "
                        "profile; add its path"
                    )
    if study.windows is not None:
        METHODS.require(study.windows.method)
        for window in study.windows.windows:
            if len(window) != 2:
                raise ConfigError(f"window {window} is not a pair; write [sink, recent]")
            Budget(0.5, *window)
