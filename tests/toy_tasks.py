"""Toy tasks and a word tokenizer for tiny random models, shared by evaluation tests."""

from __future__ import annotations

from itertools import islice

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rlkv.hf.attach import spec_of
from rlkv.hf.loading import LoadedModel
from rlkv.tasks.base import Example, Task
from rlkv.verifiers.base import Score
from tests.tiny import random_tokens, tiny_model


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word ``w0`` to ``w96``; no chat template."""
    words = {f"w{i}": i for i in range(97)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w96", padding_side="left"
    )


def tiny_loaded(architecture: str = "llama", **overrides: object) -> LoadedModel:
    """A tiny random model with the word tokenizer."""
    model = tiny_model(architecture, **overrides)
    return LoadedModel(model, word_tokenizer(), spec_of(model))


def words(count: int, seed: int) -> str:
    """``count`` random words."""
    return " ".join(f"w{i}" for i in random_tokens(1, count, seed=seed)[0].tolist())


class HasEvenWord:
    """Rewards completions whose last word has an even number."""

    def __call__(self, completion: str, answer: str) -> Score:
        last = completion.split()[-1] if completion.split() else ""
        if not last:
            return Score(0.0, None, "no_answer")
        right = int(last[1:]) % 2 == 0
        return Score(float(right), last, "correct" if right else "wrong")


class ToyGenerate(Task):
    name = "toy_generate"
    max_new_tokens = 12
    default_model = "tiny"
    verifier = HasEvenWord()

    def examples(self, limit=None, *, seed=0, split="test"):
        rows = (
            Example(f"e{i}", words(5 + 7 * (i % 4), seed=100 * seed + i), "even") for i in range(10)
        )
        return islice(rows, limit)


class ToyForced(Task):
    name = "toy_forced"
    mode = "forced"
    max_new_tokens = 30
    default_model = "tiny"
    verifier = HasEvenWord()

    def examples(self, limit=None, *, seed=0, split="test"):
        return islice((self._example(i) for i in range(6)), limit)

    def _example(self, i):
        answer = words(6 + 3 * (i % 3), seed=500 + i)
        spans, start = [], 0
        for word in answer.split():
            spans.append((start, start + len(word)))
            start += len(word) + 1
        return Example(f"f{i}", words(20 + i, seed=700 + i), answer, tuple(spans))
