"""A callback for transformers' Trainer, for the TRL adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class AfterOptimizerStep(TrainerCallback):
    """Calls a function after each optimizer step.

    Args:
        act: Takes nothing.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def on_optimizer_step(self, *arguments: Any, **settings: Any) -> None:
        """See transformers' TrainerCallback."""
        self.act()
