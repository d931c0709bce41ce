"""`rlkv bench serve` on servers whose speed and capacity are known."""

from __future__ import annotations

import sys

import pytest

from rlkv.bench.serve import Arm, ServeRow, ServeWorkload, serve_rows
from rlkv.errors import BackendError

pytestmark = pytest.mark.vllm
pytest.importorskip("aiohttp", reason="needs aiohttp, which comes with vLLM")


def fake(step_ms: float, engine="rlkv", sparsity: float = 0.5) -> Arm:
    command = [sys.executable, "-m", "tests.vllm.fake_server"]
    return Arm(engine, sparsity, lambda port: [*command, str(port), str(step_ms)])


def test_rows_hold_what_the_servers_did():
    workload = ServeWorkload(100, 1 << 20, (40,), prompt=30, requests=4, batch=2, steps=12)
    lines: list[str] = []
    stock, ours = serve_rows(fake(60, "stock", 0.0), [fake(15)], workload, report=lines.append)
    assert list(stock) == list(ServeRow.__annotations__)
    assert (stock["engine"], stock["sparsity"]) == ("stock", 0.0)
    assert (ours["engine"], ours["sparsity"]) == ("rlkv", 0.5)
    for row in (stock, ours):
        assert row["kv_pool_bytes"] == 1 << 20
        assert (row["requests"], row["context"]) == (4, 40)
        assert (row["peak_running"], row["preemptions"]) == (2, 2)
        # two of the four waited for the first two: 20 steps of time, 10 tokens each
        assert row["ttft_p95_ms"] >= 10 * row["tpot_p50_ms"]
    # a step of 60 ms and one of 15 ms, and what the machine adds to both
    assert stock["step_ms_equal_batch"] >= 60
    assert 0.25 <= ours["step_ms_equal_batch"] / stock["step_ms_equal_batch"] < 0.9
    assert 1.1 < ours["output_tokens_per_s"] / stock["output_tokens_per_s"] <= 4
    assert lines[0] == "stock: starting"
    assert "2 preemptions" in lines[1]
    assert lines[2] == "server 1 of 1: rlkv s=0.5, starting"


def test_a_server_that_dies_is_told_with_its_last_words():
    dies = Arm("stock", 0.0, lambda port: [sys.executable, "-c", "raise SystemExit('no cache')"])
    workload = ServeWorkload(100, 1 << 20)
    with pytest.raises(BackendError, match="did not start .* no cache"):
        list(serve_rows(dies, [], workload))
