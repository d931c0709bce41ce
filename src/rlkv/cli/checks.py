"""Checks of options that several commands share, all before torch or transformers load."""

from __future__ import annotations

from collections.abc import Sequence

from rlkv.errors import ConfigError


def require_at_least(least: int, **options: int | Sequence[int]) -> None:
    """Refuses numbers that are too small, and options that take several and got none.

    Args:
        least: Smallest number allowed.
        **options: What was given, by the option's name with underscores.

    Raises:
        ConfigError: A number is below ``least``, or a list is empty.

    Example:
        >>> require_at_least(1, batch=(1, 8), steps=16)
    """
    for name, given in options.items():
        flag = f"--{name.replace('_', '-')}"
        values = (given,) if isinstance(given, int) else given
        if not values:
            raise ConfigError(f"{flag} names no number, expected one or more; add {least}")
        if min(values) < least:
            raise ConfigError(f"{flag} is {min(values)}, expected at least {least}; raise it")
