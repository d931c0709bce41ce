"""The two other ways to a profile: their objectives against plain recomputation."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rlkv.errors import DataError
from rlkv.gates import Gates
from rlkv.hf.attach import compress
from rlkv.train.duo_profile import DuoConfig, duo_loss, duo_profile, passkey_example
from rlkv.train.kvzip_profile import kvzip_profile
from tests.tiny import random_tokens, reference_logits, tiny_model

WORDS = ["red", "green", "blue", "gold"]


def encode(text: str) -> list[int]:
    return [1 + ord(char) % 90 for char in text]


class Tokenizer:
    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": encode(text)}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=2)


def example_of(length=200, seed=0):
    generator = random.Random(seed)
    return passkey_example(
        encode, "the sea is calm. ", WORDS, length=length, passkeys=2, words_per_key=3,
        generator=generator,
    )  # fmt: skip


def test_passkeys_are_hidden_and_asked_for():
    example = example_of()
    assert len(example.tokens) == len(example.predicts_answer) == 200
    tokens = list(example.tokens)
    answers = [tokens[i + 1] for i, asks in enumerate(example.predicts_answer) if asks]
    keys = random.Random(0)
    expected = [encode(" " + " ".join(keys.choices(WORDS, k=3))) for _ in range(2)]
    assert answers == expected[0] + expected[1]
    text = str(tokens)
    for key in expected:  # once as a statement, once as the answer
        assert text.count(str(key)[1:-1]) >= 2


def test_a_text_too_short_for_its_passkeys_is_refused():
    with pytest.raises(DataError, match="longer text"):
        example_of(length=60)


def test_distillation_equals_the_difference_of_hidden_states(model):
    example, config = example_of(), DuoConfig(sink=4, recent=12)
    gates = Gates((2, 4))
    gates.alpha.data.uniform_(0.2, 0.9, generator=torch.Generator().manual_seed(1))
    loss = duo_loss(model, gates, example, config)
    tokens = torch.tensor([example.tokens])
    hidden = {}

    def keep(name):
        return lambda module, args: hidden.__setitem__(name, args[0])

    for name, alpha in (("full", torch.ones(2, 4)), ("gated", gates.alpha.detach())):
        handle = model.lm_head.register_forward_pre_hook(keep(name))
        reference_logits(model, tokens, alpha)
        handle.remove()
    where = torch.tensor(example.predicts_answer)
    expected = (hidden["full"] - hidden["gated"])[0, where].square().mean()
    assert float(expected) > 1e-4
    assert abs(float(loss.distillation.detach() - expected)) < 1e-6
    total = expected + 0.05 * gates.alpha.abs().mean()
    assert abs(float(loss.total.detach() - total.detach())) < 1e-6


def test_gates_of_one_have_no_distillation_loss(model):
    loss = duo_loss(model, Gates((2, 4)), example_of(), DuoConfig(sink=4, recent=12))
    assert float(loss.distillation.detach()) < 1e-10
    assert abs(float(loss.total.detach()) - 0.05) < 1e-6


def test_training_lowers_gates_and_leaves_the_model_alone(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = DuoConfig(steps=8, learning_rate=0.1, penalty=1.0, sink=4, recent=12)
    profile = duo_profile(model, (example_of(seed=i) for i in range(8)), config)
    assert profile.source == "duo_attention"
    assert (profile.sink, profile.recent) == (4, 12)
    assert profile.scores.mean() < 0.9
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with compress(model, method="duo_attention", profile=profile, sink=4, recent=12):
        model(random_tokens(1, 40))


def test_too_few_examples_are_refused(model):
    config = DuoConfig(steps=2, sink=4, recent=12)
    with pytest.raises(DataError, match="only 1 examples"):
        duo_profile(model, [example_of()], config)


def slow_kvzip(model, context, repeated, start, stop, sink):
    """Head scores of one chunk from eager attention over context and repetition."""
    tokens = torch.tensor([context + repeated])
    attentions = model(tokens, output_attentions=True, use_cache=False).attentions
    scores = np.zeros((len(attentions), 4))
    for layer, probs in enumerate(attentions):
        for head in range(8):
            for query in range(len(context), tokens.shape[1]):
                row = probs[0, head, query]
                seen = set(range(min(sink, start))) | set(range(start, stop))
                seen |= set(range(len(context), tokens.shape[1]))
                share = row[start:stop].max() / row[sorted(seen)].sum()
                scores[layer, head // 2] = max(scores[layer, head // 2], float(share))
    return scores


def test_kvzip_scores_equal_plain_recomputation(model):
    text = "a context to say again, word for word"
    context, asked = encode(text), encode("again:")
    profile = kvzip_profile(model, Tokenizer(), [text], chunk=25, sink=4, instruction="again:")
    first = slow_kvzip(model, context, asked + context[:25], 0, 25, 4)
    second = slow_kvzip(model, context, asked + context[17:], 25, len(context), 4)
    assert np.abs(profile.scores - np.maximum(first, second)).max() < 1e-5
    assert profile.source == "kvzip"
    with compress(model, method="kvzip", profile=profile):
        model(random_tokens(1, 40))


def test_kvzip_scores_are_a_mean_over_texts(model):
    texts = ["one short text", "and another one, longer"]
    each = [kvzip_profile(model, Tokenizer(), [text]).scores for text in texts]
    both = kvzip_profile(model, Tokenizer(), texts).scores
    assert np.abs(both - (each[0] + each[1]) / 2).max() < 1e-6


def test_kvzip_without_text_is_refused(model):
    with pytest.raises(DataError, match="at least one context"):
        kvzip_profile(model, Tokenizer(), [])
