"""Compressed and gated models against the stock model and the dense reference.

Tolerance 1e-5: float32 logits of order 1, with sums taken in another order.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rlkv
from rlkv.core.head_profile import HeadProfile
from rlkv.gates import Gates
from rlkv.hf.attach import attach_gates, compress, spec_of
from rlkv.hf.compat import given_cache
from rlkv.methods.base import MethodOptions
from tests.tiny import (
    ARCHITECTURES,
    RECENT,
    SINK,
    holding,
    random_tokens,
    reference_logits,
    tiny_model,
)

TOLERANCE = 1e-5
WINDOW = {"sink": SINK, "recent": RECENT}
# a layer without full heads, one with some out of order, one with all
MASK = np.array([[0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]], dtype=np.float32)


def profile_of(model, scores=MASK) -> HeadProfile:
    return HeadProfile(spec_of(model), scores, "test")


def sparsity_of(scores=MASK) -> float:
    return 1.0 - float(scores.mean())


def compressed(model, scores=MASK, options=None):
    return compress(
        model,
        profile=profile_of(model, scores),
        sparsity=sparsity_of(scores),
        options=options,
        **WINDOW,
    )


def chunked_logits(model, tokens, sizes, mask=None):
    """Logits of all columns, fed to one cache in chunks of ``sizes``."""
    cache, parts, start = None, [], 0
    for size in sizes:
        stop = start + size
        seen = None if mask is None else mask[:, :stop]
        positions = None
        if mask is not None:
            positions = (mask[:, :stop].cumsum(-1) - 1).clamp(min=0)[:, start:]
        with torch.no_grad():
            out = model(
                tokens[:, start:stop],
                attention_mask=seen,
                position_ids=positions,
                **holding(model, cache),
                use_cache=True,
            )
        cache, start = given_cache(dict(out)), stop
        parts.append(out.logits)
    assert start == tokens.shape[1]
    return torch.cat(parts, 1)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    return tiny_model(request.param)


def test_gates_of_one_equal_the_stock_model(model):
    tokens = random_tokens(2, 40)
    stock = model(tokens).logits
    with attach_gates(model, Gates((3, 4)), **WINDOW), torch.no_grad():
        assert (model(tokens).logits - stock).abs().max() <= TOLERANCE
        assert (model(tokens, use_cache=False).logits - stock).abs().max() <= TOLERANCE


def test_split_cache_equals_the_dense_reference_over_three_windows(model):
    tokens = random_tokens(2, 20 + 4 * RECENT + 3, seed=1)
    expected = reference_logits(model, tokens, torch.tensor(MASK))
    with compressed(model):
        steps = [20] + [1] * (tokens.shape[1] - 20)
        found = chunked_logits(model, tokens, steps)
    assert (found - expected).abs().max() <= TOLERANCE
    dense = model(tokens).logits
    assert (found - dense).abs().max() > 0.05, "the mask must matter for this test to mean anything"


def test_mixed_attention_equals_the_reference_at_random_gates(model):
    tokens = random_tokens(2, 45, seed=2)
    alpha = torch.rand(3, 4, generator=torch.Generator().manual_seed(3))
    expected = reference_logits(model, tokens, alpha)
    gates = Gates((3, 4))
    gates.alpha.data.copy_(alpha)
    with attach_gates(model, gates, **WINDOW):
        one_shot = chunked_logits(model, tokens, [45])
        by_token = chunked_logits(model, tokens, [30] + [1] * 15)
    assert (one_shot - expected).abs().max() <= TOLERANCE
    assert (by_token - expected).abs().max() <= TOLERANCE


def test_padded_row_equals_the_row_alone(model):
    tokens = random_tokens(3, 60, seed=4)
    starts = [0, 23, 7]
    mask = torch.ones_like(tokens)
    for row, start in enumerate(starts):
        mask[row, :start] = 0
        tokens[row, :start] = 0
    with compressed(model):
        batch = chunked_logits(model, tokens, [30] + [1] * 30, mask)
        for row, start in enumerate(starts):
            alone = chunked_logits(model, tokens[row : row + 1, start:], [30 - start] + [1] * 30)
            assert (batch[row, start:] - alone[0]).abs().max() <= TOLERANCE, row


def test_chunked_prefill_equals_one_shot(model):
    tokens = random_tokens(2, 70, seed=5)
    with compressed(model):
        one_shot = chunked_logits(model, tokens, [70])
        for sizes in ([9] * 7 + [7], [1, 35, 34], [50, 20]):
            found = chunked_logits(model, tokens, sizes)
            assert (found - one_shot).abs().max() <= TOLERANCE, sizes


def test_long_prefill_in_query_blocks_equals_the_reference(model, monkeypatch):
    monkeypatch.setattr("rlkv.cache.split._LOCAL_BLOCK", 16)
    monkeypatch.setattr("rlkv.cache.split._FULL_BLOCK", 16)
    tokens = random_tokens(2, 75, seed=6)
    mask = torch.ones_like(tokens)
    mask[1, :20] = 0
    expected = reference_logits(model, tokens, torch.tensor(MASK), first_real=[0, 20])
    with compressed(model):
        found = chunked_logits(model, tokens, [75], mask)
    assert (found[0] - expected[0]).abs().max() <= TOLERANCE
    assert (found[1, 20:] - expected[1, 20:]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_all_local_and_all_full_models(model, fill):
    scores = np.full((3, 4), fill, dtype=np.float32)
    tokens = random_tokens(2, 64, seed=7)
    expected = reference_logits(model, tokens, torch.tensor(scores))
    method = "full" if fill else "streaming_llm"
    with compress(model, method=method, **WINDOW):
        found = chunked_logits(model, tokens, [40] + [1] * 24)
    assert (found - expected).abs().max() <= TOLERANCE


def test_full_prefill_shows_local_heads_the_whole_prompt(model):
    tokens = random_tokens(1, 40, seed=8)
    stock = model(tokens).logits
    with compressed(model, options=MethodOptions(prefill="full")) as session:
        found = chunked_logits(model, tokens, [40])
        assert (found - stock).abs().max() <= TOLERANCE
        local_only = compressed_bytes = session.kv_bytes()
    assert compressed_bytes == local_only > 0


def test_leaving_restores_the_model_bit_for_bit(model):
    tokens = random_tokens(2, 30)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    before = model(tokens).logits
    attributes = [set(vars(module)) for module in model.modules()]
    with compressed(model):
        model(tokens)
    assert torch.equal(model(tokens).logits, before)
    assert model.config._attn_implementation == implementation
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert not model._forward_pre_hooks
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_restored_after_an_error_inside(model):
    tokens = random_tokens(1, 10)
    before = model(tokens).logits
    with pytest.raises(RuntimeError, match="inside"), compressed(model):
        raise RuntimeError("inside")
    assert torch.equal(model(tokens).logits, before)


def test_gate_gradient_equals_finite_differences():
    model = tiny_model("qwen3").double()
    tokens = random_tokens(2, 40, seed=9)
    gates = Gates((3, 4)).double()
    gates.alpha.data.uniform_(0.3, 0.7, generator=torch.Generator().manual_seed(1))

    def loss() -> torch.Tensor:
        logits = model(tokens, use_cache=False).logits
        return torch.log_softmax(logits, -1)[:, :-1].gather(-1, tokens[:, 1:, None]).mean()

    with attach_gates(model, gates, **WINDOW):
        loss().backward()
        analytic = gates.alpha.grad.clone()
        assert all(p.grad is None for p in model.parameters())
        # scores are float32 inside, so the step must stand clear of their rounding
        step = 1e-2
        with torch.no_grad():
            for layer in range(3):
                for head in range(4):
                    gates.alpha[layer, head] += step
                    up = loss()
                    gates.alpha[layer, head] -= 2 * step
                    down = loss()
                    gates.alpha[layer, head] += step
                    numeric = (up - down) / (2 * step)
                    assert abs(float(numeric - analytic[layer, head])) < 2e-4
    assert (analytic.abs() > 1e-6).all(), "every gate must receive a gradient"


def test_public_names_are_lazy_and_complete():
    for name in rlkv.__all__:
        assert getattr(rlkv, name) is not None


def test_query_blocks_do_not_show_in_logits_or_gradients(monkeypatch):
    from rlkv.attention import mixed

    model = tiny_model("qwen3")
    tokens = random_tokens(2, 60)
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    found = []
    for least, chunk in ((128, 1 << 19), (7, 1)):
        monkeypatch.setattr(mixed, "_LEAST_BLOCK", least)
        monkeypatch.setitem(mixed._CHUNK_ELEMENTS, "cpu", chunk)
        gates = Gates(spec_of(model).shape, 0.4)
        with attach_gates(model, gates, **WINDOW):
            logits = model(tokens, attention_mask=mask).logits[:, 9:]
        logits.square().sum().backward()
        found.append((logits.detach(), gates.alpha.grad / gates.alpha.grad.abs().max()))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)
