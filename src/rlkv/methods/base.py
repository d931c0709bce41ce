"""CacheMethod: how a method makes the cache of each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rlkv.cache.layer import CacheLayer
from rlkv.cache.split import PrefillMode, SplitKVLayer
from rlkv.core.budget import Budget
from rlkv.core.head_profile import HeadProfile, SelectionRule
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Choices that some methods have beside the budget."""

    prefill: PrefillMode = "local"
    """``"local"``: compressed heads see sink + recent in the prompt too. ``"full"``: they see the
    whole prompt in the first pass, as in the paper, and are cut afterwards."""
    draft_tokens: int = 0
    """Tokens that prompt-lookup or assisted decoding may take back at once; costs that many more
    slots in every local head."""
    seed: int = 0
    """Seed of methods that draw heads at random."""
    rule: SelectionRule = "exact"
    """How a profile's heads are chosen: ``"exact"`` or the authors' ``"quantile"``."""
    any_model: bool = False
    """Accept a profile made for another model of the same shape (transfer studies)."""

    def __post_init__(self) -> None:
        if self.prefill not in ("local", "full"):
            raise ConfigError(f"prefill {self.prefill!r} is unknown; use 'local' or 'full'")
        if self.draft_tokens < 0:
            raise ConfigError(f"draft_tokens {self.draft_tokens} is negative; use 0 or more")


class CacheMethod(ABC):
    """A way to hold the KV cache of one model under one budget.

    Args:
        spec: The model's KV heads.
        budget: What may be kept.
        profile: Head scores; needed where :attr:`needs_profile` is True, else ignored.
        options: Further choices.

    Raises:
        ConfigError: A profile is needed and none was given.
        ProfileMismatchError: The profile belongs to another model.
    """

    name: ClassVar[str]
    """The module's file name."""
    paper: ClassVar[str] = ""
    """arXiv id or URL of the method's paper; "" for a control."""
    needs_profile: ClassVar[bool] = False
    """True where heads are chosen by a profile."""
    fixed_sparsity: ClassVar[float | None] = None
    """Share of KV heads that is compressed where the budget has no say in it; None: it has."""
    frees_memory: ClassVar[bool] = True
    """False where the method only masks tokens that stay in memory."""

    def __init__(
        self,
        spec: ModelSpec,
        budget: Budget,
        profile: HeadProfile | None = None,
        options: MethodOptions | None = None,
    ) -> None:
        self.spec, self.budget = spec, budget
        self.profile = profile
        self.options = options or MethodOptions()
        if self.needs_profile:
            if profile is None:
                raise ConfigError(
                    f"method {self.name} needs a head profile and none was given; make one with "
                    "`rlkv train`, or import published scores with `rlkv profile import`"
                )
            profile.require_match(spec, any_model=self.options.any_model)

    @abstractmethod
    def make_layer(self, layer: int) -> CacheLayer:
        """An empty cache for full-attention layer ``layer`` (0 to ``spec.num_layers`` - 1)."""


class HeadSplitMethod(CacheMethod):
    """A method that keeps some KV heads full and makes all others local, for good."""

    @abstractmethod
    def full_heads(self) -> NDArray[np.bool_]:
        """(layers, kv_heads) bool: True for heads that keep the full cache."""

    def require_profile(self) -> HeadProfile:
        """The profile, for methods that have one."""
        if self.profile is None:
            raise ConfigError(f"method {self.name} was given no head profile")
        return self.profile

    def make_layer(self, layer: int) -> CacheLayer:
        """See :meth:`CacheMethod.make_layer`."""
        flags: Sequence[bool] = [bool(flag) for flag in self.full_heads()[layer]]
        return SplitKVLayer(
            flags,
            self.spec.group_size,
            sink=self.budget.sink,
            recent=self.budget.recent,
            prefill=self.options.prefill,
            draft_tokens=self.options.draft_tokens,
        )
