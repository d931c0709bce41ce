"""HFEngine: batched generation with transformers models, stock or compressed.

Each row stops at its own end and then leaves the batch: no step is spent on a finished row. New
prompts are batched by length, so padding stays small. With ``refill``, waiting prompts take the
places that became free, as soon as a quarter of the batch is; else they wait for its end.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from rlkv.core.engine import Completion, Prompt, SamplingParams
from rlkv.errors import PromptTooLongError
from rlkv.hf.attach import Session
from rlkv.hf.cache_adapter import RLKVCache
from rlkv.hf.compat import with_cache
from rlkv.hf.loading import LoadedModel
from rlkv.hf.sampling import next_tokens, row_generator


@dataclass(slots=True)
class _Row:
    """One completion being written."""

    prompt: Prompt
    sample: int
    source: random.Random
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Live:
    """Rows that are being decoded, side by side."""

    active: list[int]
    """Their numbers."""
    mask: Tensor
    """(rows, columns) int64, zero on left padding."""
    cache: RLKVCache
    """Holds the same columns."""
    logits: Tensor
    """(rows, vocab) that the next token is chosen from."""

    def join(self, other: _Live) -> None:
        """Takes in rows that were begun apart; last columns stay side by side."""
        columns = max(self.mask.shape[1], other.mask.shape[1])
        masks = [pad(mask, (columns - mask.shape[1], 0)) for mask in (self.mask, other.mask)]
        mask = torch.cat(masks)
        padding = columns - int(mask.sum(dim=1).max())
        self.cache.join(other.cache, padding)
        self.mask = mask[:, padding:]
        self.active = self.active + other.active
        self.logits = torch.cat([self.logits, other.logits])


class HFEngine:
    """Writes completions with a loaded model while RLKV is attached to it.

    Args:
        loaded: Model, tokenizer and shape.
        session: What ``compress`` or ``attach_gates`` yielded.
        batch_size: Rows decoded together.
        refill: Whether waiting prompts join a batch that runs, where the cache allows it.
        on_finished: Called with each completion as it ends, for progress.
        on_token: Called with prompt key, sample and token as each token is chosen, for streaming.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        session: Session,
        *,
        batch_size: int = 32,
        refill: bool = False,
        on_finished: Callable[[Completion], None] | None = None,
        on_token: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.loaded, self.session = loaded, session
        self.batch_size, self.refill = batch_size, refill
        self.on_finished = on_finished
        self.on_token = on_token
        self.stop_ids = stop_token_ids(loaded)

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[Completion]]:
        """See :class:`rlkv.core.engine.Engine`.

        Raises:
            PromptTooLongError: A prompt and its completion exceed the model's positions.
        """
        for prompt in prompts:
            self.require_room(prompt, prompt.limit(params))
        rows = [
            _Row(prompt, sample, row_generator(params.seed, prompt.key, sample))
            for prompt in prompts
            for sample in range(params.num_samples)
        ]
        # longest first: the batch that needs most memory fails first, if any does
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].prompt.token_ids))
        done: dict[int, Completion] = {}
        for i, completion in self._decode(rows, deque(order), params):
            done[i] = completion
            if self.on_finished is not None:
                self.on_finished(completion)
        return [
            [done[i * params.num_samples + sample] for sample in range(params.num_samples)]
            for i in range(len(prompts))
        ]

    def require_room(self, prompt: Prompt, max_new_tokens: int) -> None:
        """Checks that a prompt and its completion fit the model's positions.

        Raises:
            PromptTooLongError: They do not, or the prompt is empty.
        """
        config = self.loaded.model.config.get_text_config(decoder=True)
        limit = config.max_position_embeddings
        length = len(prompt.token_ids)
        if length == 0:
            raise PromptTooLongError(f"prompt {prompt.key} is empty; expected some text")
        if limit and length + max_new_tokens > limit:
            raise PromptTooLongError(
                f"prompt {prompt.key} has {length} tokens and may grow by {max_new_tokens}, but "
                f"{self.loaded.spec.model_id} holds {limit}; shorten the prompt or lower "
                "max_new_tokens"
            )

    @torch.inference_mode()
    def _decode(
        self, rows: list[_Row], waiting: deque[int], params: SamplingParams
    ) -> Iterator[tuple[int, Completion]]:
        """Writes all rows in the order they wait in; yields (index, completion) as they end."""
        live = self._begin(rows, waiting, self.batch_size)
        while live is not None:
            chosen = next_tokens(live.logits, params, [rows[i].source for i in live.active])
            kept: list[int] = []
            for place, (i, token) in enumerate(zip(live.active, chosen.tolist(), strict=True)):
                rows[i].token_ids.append(token)
                if self.on_token is not None:
                    self.on_token(rows[i].prompt.key, rows[i].sample, token)
                stopped = token in self.stop_ids
                if stopped or len(rows[i].token_ids) >= rows[i].prompt.limit(params):
                    share = live.cache.nbytes() // len(live.active)
                    yield i, self._completion(rows[i], stopped, share)
                else:
                    kept.append(place)
            live = self._continue(live, kept, chosen) if kept else None
            live = self._refilled(live, rows, waiting)

    def _begin(self, rows: list[_Row], waiting: deque[int], most: int) -> _Live | None:
        """Prefills the next rows that wait; None where none do."""
        active = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        if not active:
            return None
        prompts = [rows[i].prompt.token_ids for i in active]
        pad_id, device = pad_token_id(self.loaded), self.loaded.model.device
        tokens, mask = left_padded(prompts, pad_id, device)
        cache = self.session.new_cache()
        return _Live(active, mask, cache, self._forward(tokens, mask, cache))

    def _continue(self, live: _Live, kept: list[int], chosen: Tensor) -> _Live:
        """Feeds the chosen tokens of the rows at places ``kept``; the others leave."""
        active, mask = live.active, live.mask
        if len(kept) < len(active):
            index = torch.tensor(kept, device=mask.device)
            live.cache.select_rows(index)
            chosen, mask = chosen[index], mask[index]
            active = [active[place] for place in kept]
        mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
        return _Live(active, mask, live.cache, self._forward(chosen[:, None], mask, live.cache))

    def _refilled(self, live: _Live | None, rows: list[_Row], waiting: deque[int]) -> _Live | None:
        """``live`` with waiting rows in the free places, or the next batch where it has ended."""
        if live is None:
            return self._begin(rows, waiting, self.batch_size)
        free = self.batch_size - len(live.active)
        # a prefill costs more than a step: not for every single row
        if self.refill and waiting and free * 4 >= self.batch_size and live.cache.can_join:
            fresh = self._begin(rows, waiting, free)
            if fresh is not None:
                live.join(fresh)
        return live

    def _forward(self, tokens: Tensor, mask: Tensor, cache: RLKVCache) -> Tensor:
        """Logits (batch, vocab) of the last column."""
        return next_logits(self.loaded.model, tokens, mask, cache)[:, -1]

    def _completion(self, row: _Row, stopped: bool, kv_bytes: int) -> Completion:
        text = str(self.loaded.tokenizer.decode(row.token_ids, skip_special_tokens=True))
        return Completion(
            row.prompt.key,
            row.sample,
            text,
            tuple(row.token_ids),
            "stop" if stopped else "length",
            len(row.prompt.token_ids),
            kv_bytes,
        )


def next_logits(
    model: PreTrainedModel, tokens: Tensor, mask: Tensor, cache: RLKVCache, keep: int = 1
) -> Tensor:
    """Feeds columns to a cache and returns the logits of the last ``keep``.

    Args:
        model: The model, with RLKV attached.
        tokens: (batch, new) int64.
        mask: (batch, past + new) int64, zero on left padding.
        cache: Holds the ``past`` columns; takes the new ones.
        keep: Columns to return logits of.

    Returns:
        (batch, keep, vocab).
    """
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    arguments = with_cache(model, {"use_cache": True}, cache)
    out = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=positions,
        logits_to_keep=keep,
        **arguments,
    )
    return out.logits[:, -keep:]


def pad_token_id(loaded: LoadedModel) -> int:
    """The token that fills rows on the left."""
    pad = loaded.tokenizer.pad_token_id
    return pad if isinstance(pad, int) else 0


def left_padded(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Token ids (batch, longest) int64 padded on the left, and the mask of real tokens."""
    longest = max(len(sequence) for sequence in sequences)
    tokens = torch.full((len(sequences), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, longest - len(sequence) :] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, longest - len(sequence) :] = 1
    return tokens.to(device), mask.to(device)


def stop_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """Tokens that end a completion: those of the generation config and of the tokenizer."""
    found: set[int] = set()
    config = loaded.model.generation_config
    for ids in (config.eos_token_id if config else None, loaded.tokenizer.eos_token_id):
        if isinstance(ids, int):
            found.add(ids)
        elif ids is not None:
            found.update(int(i) for i in ids)
    return frozenset(found)


def encode_chat(loaded: LoadedModel, key: str, messages: Sequence[dict[str, str]]) -> Prompt:
    """A prompt from chat messages, with the model's chat template applied exactly once.

    The template already writes the special tokens, so it is tokenized in one go: rendering to text
    and tokenizing again would double the BOS token of some models.
    """
    tokenizer = loaded.tokenizer
    if tokenizer.chat_template is None:
        text = "\n\n".join(message["content"] for message in messages)
        return Prompt(key, tuple(tokenizer(text)["input_ids"]))
    encoded: Any = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return Prompt(key, tuple(int(i) for i in encoded["input_ids"]))
