"""Teacher forcing: what a model says about tokens that are given to it.

Only the columns that predict a scored token go through the output head, and where vocabularies are
large a chunk at a time, recomputed in the backward pass: logits of a whole sequence never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlkv.core.engine import SamplingParams
from rlkv.errors import UnsupportedModelError
from rlkv.hf.compat import set_layer_checkpointing
from rlkv.hf.engine import left_padded, pad_token_id
from rlkv.hf.loading import LoadedModel
from rlkv.hf.sampling import filtered_probs


@dataclass(frozen=True, slots=True)
class Trace:
    """A sequence to feed in, and the tokens of it whose prediction is asked for."""

    tokens: tuple[int, ...]
    """Prompt and completion."""
    positions: tuple[int, ...]
    """Ascending indices into ``tokens``, each at least 1: the predicted tokens."""


class TeacherForcing:
    """Log-probabilities and logits of given tokens, with a gradient where gates have one.

    Call inside ``attach_gates`` or ``compress``; outside, the stock model answers.

    Args:
        loaded: Model and tokenizer.
        head_chunk: Logits held at once, in numbers.
        checkpointing: Keep no activations inside layers for the backward pass.

    Raises:
        UnsupportedModelError: The output head is not a linear map that can be applied by columns.
    """

    def __init__(
        self, loaded: LoadedModel, *, head_chunk: int = 1 << 25, checkpointing: bool = False
    ) -> None:
        self.loaded = loaded
        self.head_chunk, self.checkpointing = head_chunk, checkpointing
        self._head = cast("nn.Module", loaded.model.get_output_embeddings())
        self._scale = _head_scale(loaded)

    def hidden(self, traces: Sequence[Trace]) -> Tensor:
        """Outputs of the last layer that predict the scored tokens of all traces, in order.

        Returns:
            (scored tokens, hidden size) in the model's dtype.
        """
        model = self.loaded.model
        # the last token predicts nothing that is asked for
        sequences = [trace.tokens[: max(trace.positions)] for trace in traces]
        tokens, mask = left_padded(sequences, pad_token_id(self.loaded), model.device)
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        with _layer_checkpointing(model, self.checkpointing and torch.is_grad_enabled()):
            out = model.get_decoder()(
                input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False
            ).last_hidden_state
        rows: list[int] = []
        columns: list[int] = []
        for row, trace in enumerate(traces):
            shift = tokens.shape[1] - len(sequences[row]) - 1
            rows.extend([row] * len(trace.positions))
            columns.extend(shift + position for position in trace.positions)
        return out[torch.tensor(rows), torch.tensor(columns)]

    def logits(self, hidden: Tensor) -> Tensor:
        """(scored tokens, vocab) logits of hidden states."""
        logits = self._head(hidden)
        return logits if self._scale == 1.0 else logits * self._scale

    def log_probs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probabilities of chosen tokens.

        Args:
            hidden: (scored tokens, hidden size).
            targets: (scored tokens, choices) int64.
            temperature: Logits are divided by it.

        Returns:
            (scored tokens, choices) float32.
        """

        def score(states: Tensor, chosen: Tensor) -> Tensor:
            logits = self.logits(states).float() / temperature
            # the head of a model over several devices may answer on another one than it was asked
            chosen = chosen.to(logits.device)
            return logits.gather(1, chosen) - logits.logsumexp(dim=-1, keepdim=True)

        return torch.cat(list(self._by_chunk(score, hidden, targets))).to(targets.device)

    def sampling_log_probs(self, hidden: Tensor, targets: Tensor, params: SamplingParams) -> Tensor:
        """Same under the distribution that tokens are drawn from, top-p and top-k included."""

        def score(states: Tensor, chosen: Tensor) -> Tensor:
            probs = filtered_probs(self.logits(states), params)
            probs /= probs.sum(dim=-1, keepdim=True)
            return probs.gather(1, chosen.to(probs.device)).log()

        with torch.no_grad():
            return torch.cat(list(self._by_chunk(score, hidden, targets))).to(targets.device)

    def compare(
        self, loss: Callable[[Tensor, Tensor], Tensor], teacher: Tensor, hidden: Tensor
    ) -> Tensor:
        """Sum of ``loss(teacher logits, logits)`` over chunks of scored tokens.

        Args:
            loss: Of two (tokens, vocab) logits, a scalar.
            teacher: (scored tokens, hidden size) of the full model.
            hidden: (scored tokens, hidden size) with gradient.
        """

        def score(states: Tensor, teacher_states: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = self.logits(teacher_states)
            return loss(wanted, self.logits(states))

        return torch.stack(list(self._by_chunk(score, hidden, teacher))).sum()

    def choices(self, hidden: Tensor) -> Tensor:
        """(scored tokens,) int64: the greedy token at each."""
        with torch.no_grad():
            return torch.cat(
                list(self._by_chunk(lambda h, _: self.logits(h).argmax(dim=-1), hidden, hidden))
            )

    def _by_chunk(
        self, score: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, other: Tensor
    ) -> Iterator[Tensor]:
        vocab = self.loaded.model.config.get_text_config(decoder=True).vocab_size
        step = max(1, self.head_chunk // vocab)
        if hidden.shape[0] <= step:
            yield score(hidden, other)
            return
        for start in range(0, hidden.shape[0], step):
            h, o = hidden[start : start + step], other[start : start + step]
            if torch.is_grad_enabled() and h.requires_grad:
                yield checkpoint(score, h, o, use_reentrant=False)
            else:
                yield score(h, o)


def _head_scale(loaded: LoadedModel) -> float:
    """The factor between the head's output and the model's logits, 1 for most models."""
    model = loaded.model
    head = model.get_output_embeddings()
    tokens = torch.tensor([[1, 2]], device=model.device)
    with torch.inference_mode():
        hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        wanted = model(input_ids=tokens, use_cache=False).logits.float()
        found = head(hidden).float() if head is not None else wanted * 0
    scale = float((wanted * found).sum() / (found * found).sum().clamp(min=1e-30))
    if torch.equal(found, wanted):
        return 1.0
    tolerance = 0.02 * float(wanted.abs().max())  # bf16 rounding
    if not torch.allclose(found * scale, wanted, atol=tolerance):
        raise UnsupportedModelError(
            f"{loaded.spec.model_id} changes its output head's logits, expected a linear head; its "
            "gates cannot be trained: choose another model"
        )
    return scale


@contextmanager
def _layer_checkpointing(model: PreTrainedModel, enabled: bool) -> Iterator[None]:
    """Checkpoints each decoder layer; transformers does so only for layers in training mode."""
    if not enabled:
        yield
        return
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    set_layer_checkpointing(model, True)
    for layer in layers:
        layer.training = True  # the layer alone: its dropout stays in evaluation mode
    try:
        yield
    finally:
        set_layer_checkpointing(model, False)
        for layer in layers:
            layer.training = False
