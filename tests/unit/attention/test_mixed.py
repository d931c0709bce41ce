"""Mixed attention: its hand-written derivative is that of the plain formula."""

from __future__ import annotations

import pytest
import torch

from rlkv.attention import mixed
from rlkv.attention.masks import additive, visible
from rlkv.attention.mixed import mixed_attention, query_block

BATCH, KV_HEADS, GROUP, TOKENS, HEAD_DIM = 3, 2, 2, 20, 8


def plain(q, k, v, alpha, full_bias, local_bias, scale):
    """alpha · softmax(full) V + (1 - alpha) · softmax(local) V, for autograd to differentiate."""
    keys, values = (t.repeat_interleave(GROUP, dim=1) for t in (k, v))
    scores = q @ keys.transpose(-1, -2) * scale
    a = alpha.view(-1, KV_HEADS, 1, 1).repeat_interleave(GROUP, dim=1)
    full = (scores + full_bias).softmax(-1) @ values
    local = (scores + local_bias).softmax(-1) @ values
    return a * full + (1 - a) * local


def inputs(per_row: bool, queries: int = TOKENS):
    torch.manual_seed(0)
    q = torch.randn(BATCH, KV_HEADS * GROUP, queries, HEAD_DIM)
    k, v = (torch.randn(BATCH, KV_HEADS, TOKENS, HEAD_DIM) for _ in range(2))
    alpha = torch.rand((BATCH, KV_HEADS) if per_row else (KV_HEADS,))
    first = torch.tensor([0, 3, 7])
    positions = torch.arange(TOKENS)[None] - first[:, None]
    at = positions[:, TOKENS - queries :]
    full = additive(visible(at, positions))
    local = additive(visible(at, positions, sink=2, recent=4))
    tensors = [t.requires_grad_() for t in (q, k, v, alpha)]
    return tensors, {"full_bias": full, "local_bias": local, "scale": HEAD_DIM**-0.5}


@pytest.mark.parametrize("chunk", [1, 700, 1 << 19])
@pytest.mark.parametrize("per_row", [False, True], ids=["gates", "gates per row"])
@pytest.mark.parametrize("queries", [1, TOKENS])
def test_value_and_gradients_equal_autograd_of_the_formula(monkeypatch, chunk, per_row, queries):
    monkeypatch.setitem(mixed._CHUNK_ELEMENTS, "cpu", chunk)
    tensors, options = inputs(per_row, queries)
    upstream = torch.randn(BATCH, KV_HEADS * GROUP, queries, HEAD_DIM)
    found = mixed_attention(*tensors, **options)
    gradients = torch.autograd.grad((found * upstream).sum(), tensors)
    wanted = plain(*tensors, **options)
    expected = torch.autograd.grad((wanted * upstream).sum(), tensors)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_only_what_is_asked_for_is_differentiated():
    (q, k, v, alpha), options = inputs(per_row=False)
    frozen = [t.detach() for t in (q, k, v)]
    mixed_attention(*frozen, alpha, **options).sum().backward()
    assert alpha.grad is not None
    assert q.grad is None


def test_query_blocks_bound_the_scores_held():
    cpu = torch.device("cpu")
    assert query_block(8, 100, cpu) * 8 * 100 <= 1 << 19
    assert query_block(32, 100_000, cpu) == 128
    assert query_block(32, 8_000, torch.device("meta")) * 32 * 8_000 <= 1 << 27
