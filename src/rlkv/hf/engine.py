"""HFEngine: batched generation with transformers models, stock or compressed.

Each row stops at its own end and then leaves the batch: no step is spent on a finished row. New
prompts are batched by length, so padding stays small.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
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


class HFEngine:
    """Writes completions with a loaded model while RLKV is attached to it.

    Args:
        loaded: Model, tokenizer and shape.
        session: What ``compress`` or ``attach_gates`` yielded.
        batch_size: Rows decoded together.
        on_finished: Called with each completion as it ends, for progress.
        on_token: Called with prompt key, sample and token as each token is chosen, for streaming.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        session: Session,
        *,
        batch_size: int = 32,
        on_finished: Callable[[Completion], None] | None = None,
        on_token: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.loaded, self.session = loaded, session
        self.batch_size = batch_size
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
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            for position, completion in self._decode([rows[i] for i in chosen], params):
                done[chosen[position]] = completion
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
    def _decode(self, rows: list[_Row], params: SamplingParams) -> Iterator[tuple[int, Completion]]:
        """Writes one batch; yields (index in ``rows``, completion) as rows end."""
        device = self.loaded.model.device
        pad_id = pad_token_id(self.loaded)
        tokens, mask = left_padded([row.prompt.token_ids for row in rows], pad_id, device)
        cache = self.session.new_cache()
        active = list(range(len(rows)))
        logits = self._forward(tokens, mask, cache)
        for step in itertools.count(1):
            chosen = next_tokens(logits, params, [rows[i].source for i in active])
            kept: list[int] = []
            for place, (i, token) in enumerate(zip(active, chosen.tolist(), strict=True)):
                rows[i].token_ids.append(token)
                if self.on_token is not None:
                    self.on_token(rows[i].prompt.key, rows[i].sample, token)
                stopped = token in self.stop_ids
                if stopped or step >= rows[i].prompt.limit(params):
                    share = cache.nbytes() // len(active)
                    yield i, self._completion(rows[i], stopped, share)
                else:
                    kept.append(place)
            if not kept:
                return
            if len(kept) < len(active):
                index = torch.tensor(kept, device=device)
                cache.select_rows(index)
                chosen, mask = chosen[index], mask[index]
                active = [active[place] for place in kept]
            mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
            logits = self._forward(chosen[:, None], mask, cache)

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
