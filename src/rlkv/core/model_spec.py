"""ModelSpec: the shape of a model's KV cache, all that budgets and profiles need to know."""

from __future__ import annotations

from dataclasses import dataclass

from rlkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The KV heads of one model: how many, how wide, in which layers.

    Layers are counted over those that keep a full-attention KV cache; ``layer_indices`` gives each
    one's index in the model, so that a hybrid model's other layers stay out of every figure.

    Raises:
        ConfigError: A count is not positive, or query heads do not divide over KV heads.

    Example:
        >>> spec = ModelSpec("m", "", num_layers=2, num_kv_heads=4, num_query_heads=8, head_dim=16)
        >>> spec.group_size, spec.kv_bytes(num_tokens=10)
        (2, 5120)
    """

    model_id: str
    """Hub id or folder name of the model."""
    revision: str
    """Commit of the weights on the hub, or "" for a local folder."""
    num_layers: int
    """Layers with a full-attention KV cache (L)."""
    num_kv_heads: int
    """KV heads per layer (H)."""
    num_query_heads: int
    """Query heads per layer, a multiple of ``num_kv_heads``."""
    head_dim: int
    """Width of one key or value."""
    dtype_bytes: int = 2
    """Bytes of one number in the cache."""
    layer_indices: tuple[int, ...] = ()
    """Model layer of each of the L layers; filled with 0..L-1 when empty."""

    def __post_init__(self) -> None:
        counts = (self.num_layers, self.num_kv_heads, self.num_query_heads, self.head_dim)
        if min(counts) < 1 or self.dtype_bytes < 1:
            raise ConfigError(f"model shape must be positive, found {self}")
        if self.num_query_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_query_heads} query heads do not divide over {self.num_kv_heads} kv "
                "heads; check the model's config"
            )
        indices = self.layer_indices or tuple(range(self.num_layers))
        if len(indices) != self.num_layers:
            raise ConfigError(f"{len(indices)} layer indices given for {self.num_layers} layers")
        object.__setattr__(self, "layer_indices", indices)

    @property
    def shape(self) -> tuple[int, int]:
        """(layers, kv_heads), the shape of gates and profiles."""
        return self.num_layers, self.num_kv_heads

    @property
    def num_heads(self) -> int:
        """All KV heads of the model, L·H."""
        return self.num_layers * self.num_kv_heads

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def bytes_per_token_per_head(self) -> int:
        """Bytes of one token's key and value in one KV head: 2 · head_dim · dtype_bytes."""
        return 2 * self.head_dim * self.dtype_bytes

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of a full cache of ``num_tokens`` tokens of one sequence."""
        return self.num_heads * self.bytes_per_token_per_head * num_tokens

    @property
    def short_name(self) -> str:
        """Last part of the model id, lower case: what identifies the model across folders."""
        return self.model_id.rstrip("/").split("/")[-1].lower()
