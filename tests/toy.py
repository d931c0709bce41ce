"""A toy task, and a tiny model built by hand in which one KV head does all the work."""

from __future__ import annotations

import random

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rlkv.hf.attach import spec_of
from rlkv.hf.loading import LoadedModel
from rlkv.tasks.base import Example, Task
from rlkv.verifiers.base import Score
from tests.tiny import tiny_model


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(97)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w96", padding_side="left"
    )


def toy_loaded(architecture: str = "qwen3", **settings: object) -> LoadedModel:
    model = tiny_model(architecture, **settings)
    return LoadedModel(model, word_tokenizer(), spec_of(model))


class EvenWords:
    """Rewards a completion whose last word is even, so that random models earn about a half."""

    def __call__(self, completion: str, answer: str) -> Score:
        words = completion.split()
        if not words:
            return Score(0.0, None, "no_answer")
        right = int(words[-1].removeprefix("w")) % 2 == 0
        return Score(float(right), words[-1], "correct" if right else "wrong")


class ToyTask(Task):
    """Random words in, any words out."""

    name = "toy"
    max_new_tokens = 6
    verifier = EvenWords()

    def examples(self, limit=None, *, seed=0, split="test"):
        for number in range(limit or 40):
            rng = random.Random(f"{seed}/{split}/{number}")
            words = " ".join(f"w{rng.randrange(1, 96)}" for _ in range(rng.randrange(20, 30)))
            yield Example(f"{split}-{number}", words, "")


class ForcedToyTask(Task):
    """Random words, with every second word of the answer scored."""

    name = "forced_toy"
    mode = "forced"
    max_new_tokens = 12
    verifier = EvenWords()

    def examples(self, limit=None, *, seed=0, split="test"):
        for number in range(limit or 40):
            rng = random.Random(f"{seed}/{split}/{number}")
            prompt = " ".join(f"w{rng.randrange(1, 96)}" for _ in range(24))
            answer, spans = "", []
            for place in range(8):
                word = f"w{rng.randrange(1, 96)}"
                if place % 2:
                    spans.append((len(answer), len(answer) + len(word)))
                answer += word + " "
            yield Example(f"{split}-{number}", prompt, answer.strip(), tuple(spans))
