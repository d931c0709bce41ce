"""Capacity figures against hand-computed ones."""

from __future__ import annotations

import pytest

from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError
from rlkv.serve.plan import Pool, parse_size, plan_rows

LLAMA_8B = ModelSpec("llama", "", 32, 8, 32, 128, 2)


def test_an_8b_model_at_half_sparsity():
    stock, half = plan_rows(LLAMA_8B, Pool(64 * 2**30, 16384), (0.0, 0.5))
    # 256 heads x 512 bytes; half of them grow, the others hold 6 blocks of 16 tokens
    assert stock["kv_bytes_per_token"] == 131072
    assert stock["constant_bytes_per_request"] == 0
    assert stock["max_requests"] == 32.0
    assert abs(half["kv_bytes_per_token"] - 65536) <= 512
    assert abs(half["constant_bytes_per_request"] - 6 * 2**20) <= 6 * 16 * 512
    assert half["max_requests"] == pytest.approx(32 / (1030 / 2048), rel=0.01)
    assert half["max_tokens"] == pytest.approx(half["max_requests"] * 16384, rel=0.001)


def test_tensor_parallel_ranks_share_the_heads():
    one = plan_rows(LLAMA_8B, Pool(64 * 2**30, 16384, ranks=1), (0.5,))[0]
    two = plan_rows(LLAMA_8B, Pool(32 * 2**30, 16384, ranks=2), (0.5,))[0]
    assert two["max_requests"] == pytest.approx(one["max_requests"], rel=0.01)


def test_a_pool_without_room_for_one_request_is_refused():
    with pytest.raises(ConfigError, match="cannot hold one request of 32768 tokens"):
        plan_rows(LLAMA_8B, Pool(2**30, 32768), (0.0,))


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("24 GB", 24 * 10**9), ("32k", 32768), ("4096", 4096)]
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "80 parsecs", "-3", "0"])
def test_sizes_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError):
        parse_size(text)
