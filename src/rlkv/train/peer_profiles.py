"""Profiles made the way of peer methods, from the texts of a task: ``rlkv profile make``.

DuoAttention hides passkeys in filler; KVzip has the model repeat contexts. Both take their text
from a task's training examples, so that a comparison gives every method the same material. Lengths
and steps are scaled to the model at hand; the authors' values are the defaults of ``DuoConfig`` and
``kvzip_profile``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from rlkv.core.head_profile import HeadProfile
from rlkv.errors import ConfigError, DataError
from rlkv.hf.loading import LoadedModel
from rlkv.tasks.base import Task
from rlkv.train.duo_profile import DuoConfig, PasskeyExample, duo_profile, passkey_example
from rlkv.train.kvzip_profile import kvzip_profile

PeerMethod = Literal["duo_attention", "kvzip"]
_TEXTS = 64


@dataclass(frozen=True)
class PeerProfileConfig:
    """How a peer's profile is made.

    Raises:
        ConfigError: A number is out of range.
    """

    method: PeerMethod
    """Whose way."""
    length: int = 512
    """Tokens of one text: a passkey example, or a context to repeat."""
    steps: int = 200
    """DuoAttention: optimizer steps, one example each (the authors take 2,000)."""
    passkeys: int = 4
    """DuoAttention: passkeys in a text (the authors take 10)."""
    words_per_key: int = 8
    """DuoAttention: words of a passkey (the authors take 32)."""
    contexts: int = 4
    """KVzip: contexts to repeat (the authors take one)."""
    sink: int = 16
    """First tokens of the local branch."""
    recent: int = 64
    """Last tokens of the local branch."""
    seed: int = 0
    """Seed of the texts and passkeys."""

    def __post_init__(self) -> None:
        if min(self.length, self.passkeys, self.words_per_key, self.contexts) < 1:
            raise ConfigError("length, passkeys, words_per_key and contexts must be at least 1")
        DuoConfig(steps=self.steps, sink=self.sink, recent=self.recent)


def make_peer_profile(loaded: LoadedModel, task: Task, config: PeerProfileConfig) -> HeadProfile:
    """The profile of ``config.method`` for a loaded model.

    Args:
        loaded: Frozen model and tokenizer.
        task: Where the texts come from: training prompts with their gold completions.
        config: Method and sizes.

    Raises:
        DataError: The task has no training example, or a text has no room for its passkeys.
    """
    limit = loaded.model.config.get_text_config(decoder=True).max_position_embeddings
    length = min(config.length, limit // 4) if limit else config.length
    sized = replace(config, length=length)
    make = _duo if config.method == "duo_attention" else _kvzip
    profile = make(loaded, _texts(task, config.seed), sized)
    meta = {"task": task.name, "length": length, "seed": config.seed, **profile.meta}
    return replace(profile, meta=meta)


def _texts(task: Task, seed: int) -> list[str]:
    examples = islice(task.examples(_TEXTS, seed=seed, split="train"), _TEXTS)
    texts = [f"{example.prompt}\n{task.gold_completion(example)}" for example in examples]
    if not texts:
        raise DataError(f"task {task.name} has no training examples to take texts from")
    return texts


def _duo(loaded: LoadedModel, texts: list[str], config: PeerProfileConfig) -> HeadProfile:
    def encode(text: str) -> list[int]:
        return list(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])

    words = sorted({word for text in texts for word in text.split() if len(word) > 1})[:500]

    def examples() -> Iterator[PasskeyExample]:
        generator = random.Random(f"duo/{config.seed}")
        for _ in range(config.steps):
            yield passkey_example(
                encode,
                "\n".join(generator.sample(texts, k=min(8, len(texts)))),
                words,
                length=config.length,
                passkeys=config.passkeys,
                words_per_key=config.words_per_key,
                generator=generator,
            )

    settings = DuoConfig(steps=config.steps, sink=config.sink, recent=config.recent)
    return duo_profile(loaded.model, examples(), settings, spec=loaded.spec)


def _kvzip(loaded: LoadedModel, texts: list[str], config: PeerProfileConfig) -> HeadProfile:
    generator = random.Random(f"kvzip/{config.seed}")
    contexts = []
    for _ in range(config.contexts):
        tokens: list[int] = []
        for text in generator.sample(texts, k=len(texts)):
            tokens += loaded.tokenizer(text + "\n", add_special_tokens=False)["input_ids"]
            if len(tokens) >= config.length:
                break
        contexts.append(loaded.tokenizer.decode(tokens[: config.length]))
    return kvzip_profile(
        loaded.model,
        loaded.tokenizer,
        contexts,
        sink=config.sink,
        recent=config.recent,
        spec=loaded.spec,
    )
