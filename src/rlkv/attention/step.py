"""Step: the tokens of one forward pass, shared by all layers.

Which columns are new, which are padding, and every mask that follows from it are the same in all
layers, so one Step is built per forward pass and masks are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import torch
from torch import Tensor

from rlkv.attention.masks import visible

T = TypeVar("T")


@dataclass(slots=True)
class Step:
    """One forward pass over ``new`` columns after ``past`` cached ones.

    A column is one slot of the padded batch; a position counts a row's real tokens from 0.
    """

    batch: int
    """Rows."""
    past: int
    """Columns that the cache already holds, padding included."""
    new: int
    """Columns of this pass."""
    first_real: Tensor | None
    """(batch,) int64: column of each row's first real token; None when there is no padding."""
    device: torch.device
    """Device of the masks."""
    _memo: dict[Hashable, object] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Columns after this pass."""
        return self.past + self.new

    def positions(self, start: int, stop: int) -> Tensor:
        """(batch or 1, stop - start) int64: positions of columns start..stop; negative: padding."""
        columns = torch.arange(start, stop, device=self.device)[None]
        return columns if self.first_real is None else columns - self.first_real[:, None]

    def last_positions(self, stop: int) -> Tensor:
        """(batch or 1,) int64: position of column ``stop - 1`` in each row."""
        return self.positions(stop - 1, stop)[:, 0]

    def on(self, device: torch.device) -> Self:
        """The same pass with its masks on ``device``, for models spread over several devices."""
        if device == self.device:
            return self
        first = None if self.first_real is None else self.first_real.to(device)
        return self.memoize(
            ("on", device), lambda: replace(self, first_real=first, device=device, _memo={})
        )

    def memoize(self, key: Hashable, build: Callable[[], T]) -> T:
        """``build()``, computed once per forward pass and key."""
        if key not in self._memo:
            self._memo[key] = build()
        return self._memo[key]  # type: ignore[return-value]

    def mask(
        self, start: int, stop: int, *, sink: int | None = None, recent: int | None = None
    ) -> Tensor:
        """(batch or 1, 1, stop - start, past + stop) bool: new columns start..stop over all so far.

        ``start`` and ``stop`` count within this pass.
        """
        return self.memoize(
            ("mask", start, stop, sink, recent),
            lambda: visible(
                self.positions(self.past + start, self.past + stop),
                self.positions(0, self.past + stop),
                sink=sink,
                recent=recent,
            ),
        )


def step_from_mask(
    mask: Tensor | None, *, batch: int, past: int, new: int, device: torch.device
) -> Step:
    """The Step of a forward pass, from the usual 2-D padding mask.

    Args:
        mask: (batch, past + new), non-zero on real tokens; None when there is no padding.
        batch: Rows.
        past: Columns already cached.
        new: Columns of this pass.
        device: Device of the masks.
    """
    if mask is None or bool(mask.all()):
        return Step(batch, past, new, None, device)
    real = mask.to(torch.int64)
    # a row may be padding throughout while its prompt comes in chunks
    first_real = real.argmax(dim=-1).masked_fill(real.sum(dim=-1) == 0, real.shape[-1])
    return Step(batch, past, new, first_real.to(device), device)


def has_inner_padding(mask: Tensor) -> bool:
    """True where a row of the (batch, columns) mask has a zero after its first real token."""
    real = mask.to(torch.int64)
    count = real.sum(dim=-1)
    return bool(((real.argmax(dim=-1) + count != real.shape[-1]) & (count > 0)).any())
