"""Gates: one learnable weight per KV head (the paper's gating adapters).

Everything else in the model is frozen. Gates are float32 and start at 1 (full attention); the
optimizer moves them, :meth:`Gates.clamp_` keeps them in [0, 1] after every step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlkv.core.head_profile import HeadProfile, MetaValue
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError


class Gates(nn.Module):
    """alpha per KV head of one model.

    Args:
        shape: (layers, kv_heads).
        init: Starting value of every gate, in [0, 1].
    """

    def __init__(self, shape: tuple[int, int], init: float = 1.0) -> None:
        super().__init__()
        if not 0.0 <= init <= 1.0:
            raise ConfigError(f"initial gate {init} is outside [0, 1]; the paper starts at 1")
        self.alpha = nn.Parameter(torch.full(shape, init, dtype=torch.float32))

    @classmethod
    def binary(cls, full_heads: Tensor) -> Gates:
        """Gates of 1 where ``full_heads`` (layers, kv_heads) bool is True, else 0."""
        gates = cls((full_heads.shape[0], full_heads.shape[1]))
        gates.alpha.data.copy_(full_heads.float())
        return gates

    @torch.no_grad()
    def clamp_(self) -> None:
        """Puts every gate back into [0, 1], in place."""
        self.alpha.clamp_(0.0, 1.0)

    def l1(self) -> Tensor:
        """Mean |alpha| over all KV heads, a scalar with gradient: (1 / (L·H)) Σ|alpha|."""
        return self.alpha.abs().mean()

    def to_profile(
        self,
        spec: ModelSpec,
        *,
        source: str,
        sink: int,
        recent: int,
        meta: Mapping[str, MetaValue] | None = None,
    ) -> HeadProfile:
        """The gates as a profile of the model of ``spec``, learned with ``sink`` + ``recent``."""
        scores = self.alpha.detach().clamp(0.0, 1.0).cpu().numpy()
        return HeadProfile(spec, scores, source, sink, recent, dict(meta or {}))
