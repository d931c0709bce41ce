"""What ``rlkv bench train`` runs: studies, their variants, seeds and sparsities; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlkv.core.budget import Budget
from rlkv.errors import ConfigError
from rlkv.registry import unknown_name
from rlkv.train.recipe import merge

_ON_POLICY = {
    "objective": "paper",
    "steps": 45,
    "optimizer": {"learning_rate": 2e-2, "weight_decay": 0.0},
    "penalty": {"beta": 0.03},
    "distill": {"enabled": False},
    "rollout": {"prompts_per_step": 12, "prompts_per_unit": 12, "problems": 500},
}
"""GRPO alone at a rate at which a gate can nearly cross [0, 1]: a tenth of the paper's rollouts."""

STUDIES: dict[str, dict[str, dict[str, Any]]] = {
    "objectives": {
        "full": {},
        "random": {},
        "ablation": {"objective": "ablation"},
        "warm": {"objective": "warm"},
        "default": {"objective": "default"},
        "paper": {"objective": "paper"},
    },
    "penalty": {
        f"{kind} beta={beta}": merge(_ON_POLICY, {"penalty": {"kind": kind, "beta": beta}})
        for beta in (0.03, 0.3)
        for kind in ("adaptive", "fixed")
    },
    "advantage": {
        f"advantage={scope}": merge(_ON_POLICY, {"loss": {"advantage": scope}})
        for scope in ("group", "batch")
    },
    "windows": {
        f"window={sink}+{recent}": merge(_ON_POLICY, {"sink": sink, "recent": recent})
        for sink, recent in ((16, 64), (32, 96))
    },
    "sampling": {
        f"self_distillation={on}": merge(_ON_POLICY, {"distill": {"enabled": on}})
        for on in (True, False)
    },
}
"""Variants of each study: settings on top of the objective's preset."""


@dataclass(frozen=True)
class TrainBench:
    """What to run."""

    studies: tuple[str, ...] = ("objectives",)
    """Names of studies."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of training."""
    sparsities: tuple[float, ...] = (0.25, 0.5, 0.6, 0.75)
    """Where the binary model is measured."""
    examples: int = 500
    """Test problems."""
    variants: tuple[str, ...] = ()
    """Some variants of the studies; empty: all."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Settings below every variant's; its objective is not used."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings on top of every variant's."""
    sink: int = 16
    """Sink tokens, in training (unless a variant says otherwise) and in use."""
    recent: int = 64
    """Recent tokens, likewise."""

    def __post_init__(self) -> None:
        for study in self.studies:
            if study not in STUDIES:
                raise unknown_name("study", study, sorted(STUDIES))
        known = self.settings_of_variants()
        for name in self.variants:
            if name not in known:
                raise unknown_name("variant", name, list(known))
        for sparsity in self.sparsities:
            Budget(sparsity, self.sink, self.recent)
        if self.examples < 1 or not self.seeds:
            raise ConfigError("bench train needs at least one example and one seed")

    def settings_of_variants(self) -> dict[str, dict[str, Any]]:
        """All variants of the studies, in their order."""
        return {
            name: settings for study in self.studies for name, settings in STUDIES[study].items()
        }
