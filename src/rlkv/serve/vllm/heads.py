"""Puts the KV heads of a checkpoint in order while it is loaded: full heads first.

Reordering the rows of q, k and v and the columns of o leaves the model's function unchanged and
lets attention slice instead of gather. Checkpoints stay as they are on disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from rlkv.errors import UnsupportedModelError
from rlkv.serve.geometry import HeadSplit

_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.([qkvo])_proj\.(weight|bias)$")


class HeadOrder:
    """Reorders the attention weights of a stream of checkpoint tensors."""

    def __init__(self, split: HeadSplit, *, group_size: int, head_dim: int) -> None:
        """Prepares the order of every layer.

        Args:
            split: Head order of each layer.
            group_size: Query heads per KV head.
            head_dim: Width of a head.
        """
        self._orders = [torch.tensor(order) for order in split.order]
        self._group_size = group_size
        self._head_dim = head_dim

    def apply(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, attention weights reordered.

        Raises:
            UnsupportedModelError: Attention weights carry names that are not known, so that their
                order would stay the checkpoint's.
        """
        seen: set[tuple[int, str]] = set()
        empty = True
        for name, tensor in weights:
            empty = False
            match = _NAME.search(name)
            if match is None:
                yield name, tensor
                continue
            layer, projection, kind = int(match[1]), match[2], match[3]
            if kind == "weight":
                seen.add((layer, projection))
            yield name, self._reorder(tensor, layer, projection, kind)
        expected = {(i, p) for i in range(len(self._orders)) for p in "qkvo"}
        # a later weight update may bring only some tensors, but a layer's four belong together
        touched = {layer for layer, _ in seen}
        missing = {pair for pair in expected - seen if pair[0] in touched or not touched}
        if missing and not empty:
            layer, projection = min(missing)
            raise UnsupportedModelError(
                f"the checkpoint has no tensor layers.{layer}.self_attn.{projection}_proj.weight, "
                "so its heads cannot be put in order; use a Hugging Face checkpoint"
            )

    def _reorder(
        self, tensor: torch.Tensor, layer: int, projection: str, kind: str
    ) -> torch.Tensor:
        if projection == "o" and kind == "bias":
            return tensor  # one number per hidden unit, not per head
        order = self._orders[layer]
        per_head = self._head_dim * (self._group_size if projection in "qo" else 1)
        dim = 1 if projection == "o" else 0
        heads = tensor.unflatten(dim, (len(order), per_head))
        return heads.index_select(dim, order.to(tensor.device)).flatten(dim, dim + 1)
