"""Budget: how much of the KV cache a method may keep, in tokens and in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError

_LONGEST = 2**31 - 1
"""Tokens of a window at most: positions are kept in 32 bits."""


def round_half_up(value: float) -> int:
    """``value`` rounded to the nearest integer, halves away from zero (``round`` goes to even).

    The small constant absorbs binary error: (1 - 0.9) * 5 is 0.49999999999999994, meant as 0.5.
    """
    return int(value + 0.5 + 1e-9)


@dataclass(frozen=True, slots=True)
class Budget:
    """A share of KV heads to compress, and the tokens that a compressed head keeps.

    Raises:
        ConfigError: ``sparsity`` is outside [0, 1), or ``sink + recent`` is under 1.

    Example:
        >>> budget = Budget(sparsity=0.5)
        >>> budget.window, budget.num_full_heads(256)
        (80, 128)
        >>> round(budget.kv_fraction(3000), 3)
        0.513
    """

    sparsity: float
    """s: share of KV heads that are compressed, in [0, 1); 0 is the full cache."""
    sink: int = 16
    """First tokens of a sequence that a compressed head keeps, in tokens."""
    recent: int = 64
    """Last tokens that a compressed head keeps, the current one included, in tokens."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.sparsity < 1.0:
            raise ConfigError(
                f"sparsity {self.sparsity} is outside [0, 1); it is the share of kv heads to "
                "compress, for example 0.5 (for all heads use the method streaming_llm)"
            )
        if self.sink < 0 or self.recent < 0 or self.sink + self.recent < 1:
            raise ConfigError(
                f"sink {self.sink} and recent {self.recent} must be at least 0 and sum to at least "
                "1 token; the defaults are 16 and 64"
            )
        if self.window > _LONGEST:
            raise ConfigError(
                f"sink {self.sink} and recent {self.recent} sum to more than {_LONGEST} tokens, no "
                "sequence is that long; use a smaller window, or the method full"
            )
        if self.recent < 1:
            raise ConfigError(
                f"recent {self.recent} leaves a query without its own key; use at least 1 token"
            )

    @property
    def window(self) -> int:
        """W = sink + recent: tokens a compressed head keeps at most."""
        return self.sink + self.recent

    def num_full_heads(self, num_heads: int) -> int:
        """KV heads of ``num_heads`` that stay full: round((1 - s) · num_heads)."""
        return round_half_up((1.0 - self.sparsity) * num_heads)

    def tokens_in_compressed_head(self, seq_len: int) -> int:
        """min(seq_len, W)."""
        return min(seq_len, self.window)

    def kv_bytes(self, spec: ModelSpec, seq_len: int) -> int:
        """Bytes that a sequence of ``seq_len`` tokens may hold: the measure every method meets."""
        full = self.num_full_heads(spec.num_heads)
        compressed = spec.num_heads - full
        tokens = full * seq_len + compressed * self.tokens_in_compressed_head(seq_len)
        return tokens * spec.bytes_per_token_per_head

    def kv_fraction(self, seq_len: int) -> float:
        """Bytes kept over bytes of the full cache: (1-s) + s · min(n, W) / n, before rounding."""
        if seq_len < 1:
            return 1.0
        kept = self.tokens_in_compressed_head(seq_len)
        return (1.0 - self.sparsity) + self.sparsity * kept / seq_len

    def tokens_per_head(self, seq_len: int) -> int:
        """Tokens a method with one uniform budget may keep per head: the same bytes, rounded down.

        Rounding down keeps a uniform method (H2O, R-KV) from ever holding more than the split.
        """
        return max(1, int(self.kv_fraction(seq_len) * seq_len + 1e-9))
