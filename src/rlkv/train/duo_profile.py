"""DuoAttention's way to a head profile: distillation on synthetic passkeys (arXiv:2410.10819).

Passkeys are hidden in filler text and asked for at its end. The gates are moved so that the gated
model's final hidden states stay close to the full model's where an answer is predicted, while
0.05·mean|alpha| pulls every gate down: a head whose gate survives needs the distant past.

Deviation: one example a step, of the lengths that the caller gives; the authors train on contexts
of 1k to 32k tokens over eight GPUs. Both windows and the schedule are theirs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkv.core.head_profile import HeadProfile
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError, DataError
from rlkv.gates import Gates
from rlkv.hf.attach import attach_gates, spec_of
from rlkv.hf.loading import PreTrainedModel

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens."""

_SHALLOWEST, _DEEPEST = 0.05, 0.95


@dataclass(frozen=True, slots=True)
class DuoConfig:
    """Settings of the distillation.

    Raises:
        ConfigError: A number is out of range.
    """

    steps: int = 2000
    """Optimizer steps, one example each."""
    learning_rate: float = 0.02
    """Peak learning rate of AdamW, without weight decay."""
    penalty: float = 0.05
    """Weight of mean|alpha|."""
    sink: int = 128
    """Sink tokens of the local branch."""
    recent: int = 256
    """Recent tokens of the local branch."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.learning_rate <= 0 or self.penalty < 0:
            raise ConfigError(
                f"steps {self.steps}, learning_rate {self.learning_rate} and penalty "
                f"{self.penalty} must be at least 1, above 0 and at least 0"
            )


@dataclass(frozen=True, slots=True)
class PasskeyExample:
    """One text with hidden passkeys, asked for at its end."""

    tokens: tuple[int, ...]
    """Token ids."""
    predicts_answer: tuple[bool, ...]
    """True on each token after which an answer token must come."""


@dataclass(frozen=True, slots=True)
class DuoLoss:
    """The parts of the objective, scalars."""

    total: Tensor
    """distillation + penalty · mean|alpha|, with gradient."""
    distillation: Tensor
    """Mean squared difference of hidden states over answers."""
    mean_gate: Tensor
    """mean|alpha|."""


def passkey_example(
    encode: Encode,
    filler: str,
    words: Sequence[str],
    *,
    length: int,
    passkeys: int = 10,
    words_per_key: int = 32,
    generator: random.Random,
) -> PasskeyExample:
    """A text of about ``length`` tokens with ``passkeys`` random word sequences hidden in it.

    Args:
        encode: Text to token ids.
        filler: Text to hide them in; repeated where it is too short.
        words: Words that passkeys are drawn from.
        length: Tokens of filler, statements and questions together.
        passkeys: Number of passkeys; all are asked for, in order.
        words_per_key: Words of each.
        generator: Source of all draws.

    Raises:
        DataError: The passkeys alone are longer than ``length``.
    """
    keys = [" ".join(generator.choices(words, k=words_per_key)) for _ in range(passkeys)]
    hidden = [encode(f"\nPasskey {i + 1} is: {key}.\n") for i, key in enumerate(keys)]
    asked = [encode(f"\nWhat was passkey {i + 1}? It was:") for i in range(passkeys)]
    answers = [encode(f" {key}") for key in keys]
    room = length - sum(len(part) for part in (*hidden, *asked, *answers))
    background = encode(filler)
    if room < passkeys or not background:
        raise DataError(
            f"{passkeys} passkeys of {words_per_key} words leave {room} of {length} tokens for "
            "filler; use fewer or shorter passkeys, or a longer text"
        )
    background = (background * (room // len(background) + 1))[:room]
    depths = sorted(generator.uniform(_SHALLOWEST, _DEEPEST) for _ in keys)
    tokens: list[int] = []
    start = 0
    for depth, statement in zip(depths, hidden, strict=True):
        stop = int(depth * room)
        tokens += background[start:stop] + statement
        start = stop
    tokens += background[start:]
    predicts = [False] * len(tokens)
    for question, answer in zip(asked, answers, strict=True):
        tokens += question + answer
        predicts += [False] * (len(question) - 1) + [True] * len(answer) + [False]
    return PasskeyExample(tuple(tokens), tuple(predicts))


def duo_loss(
    model: PreTrainedModel, gates: Gates, example: PasskeyExample, config: DuoConfig
) -> DuoLoss:
    """The objective on one example: L2 of final hidden states, full against gated, plus penalty.

    Args:
        model: A frozen model in eval mode; not attached to anything.
        gates: alpha, (layers, kv_heads).
        example: A text and where its answers are.
        config: Window and penalty weight.
    """
    tokens = torch.tensor([example.tokens], device=model.device)
    answers = torch.tensor(example.predicts_answer, device=model.device)
    decoder = model.get_decoder()
    with torch.no_grad():
        full = decoder(tokens, use_cache=False).last_hidden_state[0, answers]
    with attach_gates(model, gates, sink=config.sink, recent=config.recent):
        gated = decoder(tokens, use_cache=False).last_hidden_state[0, answers]
    distillation = (full.float() - gated.float()).square().mean()
    mean_gate = gates.l1()
    return DuoLoss(distillation + config.penalty * mean_gate, distillation, mean_gate)


def duo_profile(
    model: PreTrainedModel,
    examples: Iterable[PasskeyExample],
    config: DuoConfig | None = None,
    *,
    spec: ModelSpec | None = None,
) -> HeadProfile:
    """Learns a profile for the method ``duo_attention``.

    Args:
        model: A frozen model in eval mode.
        examples: At least ``config.steps`` of them, see :func:`passkey_example`.
        config: Settings; default: the authors'.
        spec: Shape and id of the model; default: read from its config.

    Raises:
        DataError: There are fewer examples than steps.
    """
    config = config or DuoConfig()
    spec = spec or spec_of(model)
    gates = Gates(spec.shape).to(model.device)
    optimizer = torch.optim.AdamW([gates.alpha], lr=config.learning_rate, weight_decay=0.0)
    source = iter(examples)
    last = float("nan")
    for step in range(config.steps):
        example = next(source, None)
        if example is None:
            raise DataError(
                f"only {step} examples were given for {config.steps} steps; give one a step"
            )
        loss = duo_loss(model, gates, example, config)
        (gates.alpha.grad,) = torch.autograd.grad(loss.total, [gates.alpha])
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _trapezoid(step, config.steps)
        optimizer.step()
        gates.clamp_()
        last = float(loss.distillation.detach())
    meta = {"steps": config.steps, "penalty": config.penalty, "last_distillation": last}
    return gates.to_profile(
        spec, source="duo_attention", sink=config.sink, recent=config.recent, meta=meta
    )


def _trapezoid(step: int, steps: int) -> float:
    """Share of the peak rate: up over the first fifth, down over the last, never under 0.1."""
    ramp = max(1.0, steps / 5)
    return max(0.1, min(1.0, (step + 1) / ramp, (steps - step) / ramp))
