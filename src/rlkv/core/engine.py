"""Engine: the one way in which training, evaluation and benchmarks ask for text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rlkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn."""

    max_new_tokens: int
    """Completion limit in tokens."""
    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_p: float = 1.0
    """Smallest set of tokens with this much probability, in (0, 1]; 1 keeps all."""
    top_k: int = 0
    """Number of most likely tokens kept; 0 keeps all."""
    num_samples: int = 1
    """Completions per prompt."""
    seed: int = 0
    """Draws depend on (seed, prompt key, sample) alone, never on the batch."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens is {self.max_new_tokens}, expected at least 1; raise it"
            )
        if self.num_samples < 1:
            raise ConfigError(f"samples is {self.num_samples}, expected at least 1; raise it")
        # written so that NaN fails too
        if not 0 <= self.temperature < inf or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ConfigError(
                f"temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k}: expected "
                "a finite temperature >= 0, top_p in (0, 1], top_k >= 0; the defaults 0, 1 and 0 "
                "are greedy"
            )
        if self.temperature == 0 and self.num_samples > 1:
            raise ConfigError(
                "greedy decoding gives the same completion every time; set temperature above 0 to "
                "draw several"
            )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt."""

    key: str
    """Identity of the prompt: sampling is seeded by it."""
    token_ids: tuple[int, ...]
    """Tokens, chat template applied."""
    max_new_tokens: int | None = None
    """Completion limit of this prompt in tokens; None: the one of the sampling parameters."""

    def limit(self, params: SamplingParams) -> int:
        """Completion limit in tokens."""
        return params.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model wrote for one prompt."""

    key: str
    """Key of the prompt."""
    sample: int
    """Index among the prompt's completions."""
    text: str
    """Decoded tokens, special tokens left out."""
    token_ids: tuple[int, ...]
    """Tokens written, the end token included."""
    finish_reason: Literal["stop", "length"]
    """``"stop"``: the model ended; ``"length"``: the limit did."""
    prompt_tokens: int
    """Tokens of the prompt."""
    kv_bytes: int
    """Bytes of KV cache this sequence held when it ended."""


class Engine(Protocol):
    """Anything that writes completions."""

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[Completion]]:
        """Completions of each prompt, in order, ``params.num_samples`` each."""
        ...


class GatedEngine(Engine, Protocol):
    """An engine with a model of its own, whose heads mix full and local attention by gates."""

    def start(self, longest: int) -> None:
        """Gets ready for sequences of up to ``longest`` tokens, prompts included.

        Raises:
            RLKVError: The engine cannot run here, or not with this model.
        """
        ...

    def set_gates(self, alpha: NDArray[np.float32]) -> None:
        """Gates (layers, kv_heads) in [0, 1] of everything that is written from now on."""
        ...

    def close(self) -> None:
        """Lets the model go."""
        ...
