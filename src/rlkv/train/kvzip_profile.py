"""KVzip's way to a head profile: which heads matter for repeating a context (arXiv:2505.23416).

The model reads a context, then is made to repeat it chunk by chunk. A token's score in a head is
the highest attention it gets meanwhile, over the head's queries, among sink tokens, the chunk and
the repetition; a head's score is that of its best token, averaged over the texts. No training.

Deviation: all of the context stays visible while a chunk is repeated, and probabilities are
renormalised over the same tokens that KVzip's softmax is over, which is the same number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlkv.attention.grouped import HeadGroup
from rlkv.cache.split import SplitKVLayer
from rlkv.core.head_profile import HeadProfile
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError, DataError
from rlkv.hf.attach import attach_layers, spec_of
from rlkv.hf.cache_adapter import RLKVCache
from rlkv.hf.compat import with_cache
from rlkv.hf.loading import PreTrainedModel

INSTRUCTION = "\n\nRepeat the previous context exactly.\n\n"
_OVERLAP = 8  # last tokens of the previous chunk, that tell where to go on


class Tokenizer(Protocol):
    """The part of a tokenizer that is used."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, list[int]]:
        """Token ids under ``"input_ids"``."""
        ...


class ReconstructionLayer(SplitKVLayer):
    """A full cache that notes how much attention a chunk of the context gets.

    Attributes:
        best: (kv_heads,) float32 in [0, 1], the highest attention any token of a chunk got.
    """

    def __init__(self, num_kv_heads: int, group_size: int, sink: int) -> None:
        super().__init__([True] * num_kv_heads, group_size, sink=sink, recent=1)
        self.best = torch.zeros(num_kv_heads)
        self._sink = sink
        self._chunk = (0, 0)
        self._context = 0

    def watch(self, start: int, stop: int, context: int) -> None:
        """Notes attention to columns start..stop from now on; ``context`` columns are context."""
        self.needs_probs = True
        self._chunk, self._context = (start, stop), context

    def observe(self, group: HeadGroup, queries: Tensor, probs: Tensor) -> None:
        """See :meth:`CacheLayer.observe`."""
        start, stop = self._chunk
        chunk = probs[..., start:stop]
        shared = chunk.sum(-1) + probs[..., self._context :].sum(-1)
        shared += probs[..., : min(self._sink, start)].sum(-1)
        share = chunk / shared.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        self.best = torch.maximum(self.best.to(share.device), share.amax(dim=(0, 2, 3, 4)))


def kvzip_profile(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    chunk: int = 2000,
    sink: int = 16,
    recent: int = 64,
    instruction: str = INSTRUCTION,
    spec: ModelSpec | None = None,
) -> HeadProfile:
    """Scores heads for the method ``kvzip``.

    Args:
        model: A model in eval mode.
        tokenizer: Its tokenizer.
        texts: Contexts to repeat; the authors use one long one.
        chunk: Tokens repeated at a time.
        sink: Sink tokens, in the scores and in the profile.
        recent: Recent tokens noted in the profile; they play no part in the scores.
        instruction: What asks for the repetition.
        spec: Shape and id of the model; default: read from its config.

    Raises:
        ConfigError: ``chunk`` is under 1.
        DataError: There is no text, or one is empty.
    """
    if chunk < 1:
        raise ConfigError(f"chunk {chunk} is under 1 token; the authors use 2000")
    if not texts:
        raise DataError("no text was given; KVzip scores heads on at least one context")
    spec = spec or spec_of(model)
    asked = list(tokenizer(instruction, add_special_tokens=False)["input_ids"])
    scores = np.zeros(spec.shape, dtype=np.float64)
    for number, text in enumerate(texts):
        context = list(tokenizer(text, add_special_tokens=True)["input_ids"])
        if not context:
            raise DataError(f"text {number} has no tokens; leave it out")
        scores += _text_scores(model, spec, context, asked, chunk, sink)
    meta = {"texts": len(texts), "chunk": chunk}
    mean = np.clip(scores / len(texts), 0.0, 1.0).astype(np.float32)
    return HeadProfile(spec, mean, "kvzip", sink, recent, meta)


@torch.no_grad()
def _text_scores(
    model: PreTrainedModel,
    spec: ModelSpec,
    context: list[int],
    asked: list[int],
    chunk: int,
    sink: int,
) -> np.ndarray:
    """(layers, kv_heads) scores from one context."""

    def make_layer(_: int) -> ReconstructionLayer:
        return ReconstructionLayer(spec.num_kv_heads, spec.group_size, sink)

    with attach_layers(model, make_layer, spec=spec) as session:
        cache = session.new_cache()
        layers = [x for x in cache.rlkv_layers() if isinstance(x, ReconstructionLayer)]
        _read(model, context, cache)
        for start, stop, repeated in _repetitions(context, asked, chunk):
            for layer in layers:
                layer.watch(start, stop, len(context))
            _read(model, repeated, cache)
            cache.crop(-len(repeated))
        return np.stack([layer.best.cpu().numpy() for layer in layers]).astype(np.float64)


def _repetitions(
    context: list[int], asked: list[int], chunk: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Each chunk's bounds, and the tokens that repeat it."""
    for start in range(0, len(context), chunk):
        stop = min(start + chunk, len(context))
        yield start, stop, asked + context[max(0, start - _OVERLAP) : start] + context[start:stop]


def _read(model: PreTrainedModel, tokens: list[int], cache: RLKVCache) -> None:
    decoder = model.get_decoder()
    inputs = {"input_ids": torch.tensor([tokens], device=model.device), "use_cache": True}
    decoder(**with_cache(decoder, inputs, cache))
