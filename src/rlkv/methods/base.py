"""CacheMethod: how a method makes the cache of each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rlkv.cache.evicting import EvictingLayer
from rlkv.cache.layer import CacheLayer
from rlkv.cache.split import PrefillMode, SplitKVLayer
from rlkv.core.budget import Budget
from rlkv.core.head_profile import HeadProfile, SelectionRule
from rlkv.core.model_spec import ModelSpec
from rlkv.core.slot_plan import BudgetMode, SlotPlan
from rlkv.errors import ConfigError

StreamingRecent = Literal["fixed", "proportional"]


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
    budget_mode: BudgetMode = "equal"
    """Of methods that evict by score. ``"equal"``: the bytes of the head split, scores and cached
    queries included. ``"authors"``: (1 - s)·n + sink + recent tokens in every head, the looser rule
    of the RLKV paper's baselines. ``"fixed"``: ``budget_tokens`` at any length."""
    budget_tokens: int = 128
    """Tokens per KV head in the budget mode ``"fixed"``; R-KV's official default."""
    streaming_recent: StreamingRecent = "fixed"
    """Recent window of streaming_llm: ``"fixed"`` or, for the same bytes as other methods at the
    same sparsity, ``"proportional"``."""

    def __post_init__(self) -> None:
        if self.prefill not in ("local", "full"):
            raise ConfigError(f"prefill {self.prefill!r} is unknown; use 'local' or 'full'")
        if self.draft_tokens < 0:
            raise ConfigError(f"draft_tokens {self.draft_tokens} is negative; use 0 or more")
        if self.budget_mode not in get_args(BudgetMode):
            raise ConfigError(
                f"budget_mode {self.budget_mode!r} is unknown; use 'equal', 'authors' or 'fixed'"
            )
        if self.streaming_recent not in get_args(StreamingRecent):
            raise ConfigError(
                f"streaming_recent {self.streaming_recent!r} is unknown; use 'fixed' or "
                "'proportional'"
            )
        if self.budget_tokens < 1:
            raise ConfigError(f"budget_tokens {self.budget_tokens} is under 1; use 128 or so")


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

    @property
    def chunk_exact(self) -> bool:
        """True where a prompt fed in chunks gives what it gives in one pass."""
        return False

    @property
    def ignores_sparsity(self) -> bool:
        """True where the cache is the same at every sparsity, 0 included."""
        return False

    @property
    def fixed_sparsity(self) -> float | None:
        """Share of KV heads compressed where the budget has no say in it; None: it has."""
        return None

    @abstractmethod
    def make_layer(self, layer: int) -> CacheLayer:
        """An empty cache for full-attention layer ``layer`` (0 to ``spec.num_layers`` - 1)."""


class HeadSplitMethod(CacheMethod):
    """A method that keeps some KV heads full and makes all others local, for good."""

    @abstractmethod
    def full_heads(self) -> NDArray[np.bool_]:
        """(layers, kv_heads) bool: True for heads that keep the full cache."""

    @property
    def chunk_exact(self) -> bool:
        """True unless the first pass sees more than later ones."""
        return self.options.prefill == "local"

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


class EvictingMethod(CacheMethod):
    """A method whose heads all hold equally many tokens, the best-scored ones.

    At sparsity 0 nothing is evicted, so the cache is the full one. A prompt's own pass sees all of
    the prompt; it is cut afterwards, so that chunks of a prompt see less than one pass.

    Raises:
        ConfigError: The window is too small for what the method holds beside tokens.
    """

    slot_overhead: ClassVar[int] = 0
    """Bytes per slot and KV head beside key and value."""
    queries: ClassVar[int] = 0
    """Last queries kept for scoring, in tokens."""
    in_intervals: ClassVar[bool] = False
    """True where a compression frees several tokens at once."""

    def __init__(
        self,
        spec: ModelSpec,
        budget: Budget,
        profile: HeadProfile | None = None,
        options: MethodOptions | None = None,
    ) -> None:
        super().__init__(spec, budget, profile, options)
        if not self._keeps_all:
            self.plan(0).require_room()

    @property
    def _keeps_all(self) -> bool:
        return self.budget.sparsity == 0.0 and self.options.budget_mode != "fixed"

    def plan(self, layer: int) -> SlotPlan:
        """Slots of ``layer`` at every length."""
        return SlotPlan(
            self.spec,
            self.budget,
            layer,
            self.options.budget_mode,
            self.options.budget_tokens,
            self.slot_overhead,
            self.queries,
            self.in_intervals,
        )

    @abstractmethod
    def evicting_layer(self, plan: SlotPlan) -> EvictingLayer:
        """An empty layer that holds what ``plan`` allows."""

    def make_layer(self, layer: int) -> CacheLayer:
        """See :meth:`CacheMethod.make_layer`."""
        if self._keeps_all:
            everything = [True] * self.spec.num_kv_heads
            return SplitKVLayer(
                everything, self.spec.group_size, sink=self.budget.sink, recent=self.budget.recent
            )
        return self.evicting_layer(self.plan(layer))
