"""Recipes: a run's settings as a TOML file, with command-line settings on top.

A recipe names the objective, whose preset fills in whatever the file leaves out. Unknown keys and
values of the wrong kind are errors: a misspelt setting must not become a silent default.
"""

from __future__ import annotations

import dataclasses
import sys
import tomllib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rlkv.errors import ConfigError, DataError
from rlkv.registry import unknown_name
from rlkv.train.config import TrainConfig
from rlkv.train.presets import preset


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings in a TOML file.

    Raises:
        DataError: The file is missing or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read recipe {path} ({error}); check the path") from error
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"recipe {path} is not TOML ({error}); fix it") from error


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Settings given as ``rollout.group_size=8``; values are TOML, bare words are text.

    Example:
        >>> parse_settings(["penalty.kind=fixed", "steps=3"])
        {'penalty': {'kind': 'fixed'}, 'steps': 3}
    """
    merged: dict[str, Any] = {}
    for setting in settings:
        name, found, value = setting.partition("=")
        if not found or not name.strip():
            raise ConfigError(f"setting {setting!r} is not NAME=VALUE, such as penalty.beta=0.03")
        try:
            parsed = tomllib.loads(f"{name} = {value}")
        except tomllib.TOMLDecodeError:
            try:
                parsed = tomllib.loads(f"{name} = {_loose(value)}")
            except tomllib.TOMLDecodeError as error:
                raise ConfigError(f"setting {setting!r} cannot be read ({error})") from error
        merged = merge(merged, parsed)
    return merged


def _loose(value: str) -> str:
    """What is no TOML value: a number without its leading zero, or bare words."""
    try:
        return repr(float(value))
    except ValueError:
        return f"'''{value}'''"


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``below`` with ``above`` on top, table by table."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[name] = merge(old, value)
        else:
            merged[name] = value
    return merged


def build_config(values: Mapping[str, Any]) -> TrainConfig:
    """The config that settings describe, on top of their objective's preset.

    Raises:
        ConfigError: Model or task is missing, or a value is of the wrong kind or out of range.
        UnknownNameError: A key is unknown.
    """
    for name in ("model", "task"):
        if not isinstance(values.get(name), str):
            raise ConfigError(
                f"no {name} was given, expected a name; pass --{name}, or set it in the recipe"
            )
    objective = values.get("objective", "default")
    if objective not in get_args(get_type_hints(TrainConfig)["objective"]):
        known = list(get_args(get_type_hints(TrainConfig)["objective"]))
        raise unknown_name("objective", str(objective), known)
    base = preset(values["model"], values["task"], objective)
    return _overlay(base, values, "")


def _overlay(base: Any, values: Mapping[str, Any], prefix: str) -> Any:  # noqa: ANN401 - any config
    hints = get_type_hints(type(base))
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            raise unknown_name("setting", prefix + name, [prefix + known for known in hints])
        old = getattr(base, name)
        if dataclasses.is_dataclass(old):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{name} is {value!r}, expected a table of settings")
            changes[name] = _overlay(old, value, f"{prefix}{name}.")
        else:
            changes[name] = _converted(value, hints[name], prefix + name)
    return dataclasses.replace(base, **changes)


def _converted(value: Any, hint: Any, name: str) -> Any:  # noqa: ANN401 - any setting
    """``value`` as the type ``hint``, where TOML's types allow it."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _converted(value, next(h for h in get_args(hint) if h is not type(None)), name)
    if origin is Literal:
        if value in get_args(hint):
            return value
        raise unknown_name(f"value of {name}", str(value), [str(v) for v in get_args(hint)])
    if origin is tuple and isinstance(value, list):
        return tuple(_converted(item, get_args(hint)[0], name) for item in value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:  # NaN too
            raise ConfigError(f"{name} is {value}, expected a finite number; correct the setting")
        return float(value)
    if (
        isinstance(hint, type)
        and isinstance(value, hint)
        and not (isinstance(value, bool) and hint is not bool)
    ):
        return value
    wanted = getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{name} is {value!r}, expected {wanted}; correct the setting")
