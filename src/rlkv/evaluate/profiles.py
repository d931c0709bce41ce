"""Which head profile each method of an evaluation uses, and which model a task defaults to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlkv.errors import ConfigError
from rlkv.registry import METHODS, TASKS

ANY_METHOD = ""
"""Key of the profile that methods without one of their own use."""


def profiles_by_method(entries: Sequence[str]) -> dict[str, str]:
    """Profile paths by method, from ``PATH`` and ``METHOD=PATH`` entries.

    Raises:
        UnknownNameError: A method is unknown.
        ConfigError: Two entries are for the same method.

    Example:
        >>> profiles_by_method(["a.json", "rlkv=b.json"])
        {'': 'a.json', 'rlkv': 'b.json'}
    """
    found: dict[str, str] = {}
    for entry in entries:
        method, equals, path = entry.partition("=")
        if not equals:
            method, path = ANY_METHOD, entry
        else:
            METHODS.require(method)
        if method in found:
            whose = f"method {method}" if method else "all methods"
            raise ConfigError(
                f"two profiles are given for {whose}; pass METHOD=PATH for each method"
            )
        found[method] = path
    return found


def profile_for(method: str, profiles: Mapping[str, str]) -> str | None:
    """The path for ``method``: its own, else the one for all; None where there is neither."""
    return profiles.get(method, profiles.get(ANY_METHOD))


def default_model(task: str) -> str:
    """The model of a task where none is named.

    Raises:
        UnknownNameError: The task is unknown.
        ConfigError: The task has no default model.
    """
    name: str | None = TASKS.load(task).default_model
    if name is None:
        raise ConfigError(
            f"task {task} has no default model, expected one; pass --model with a folder or a hub "
            "id"
        )
    return name
