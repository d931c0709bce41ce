"""Through separate processes: vLLM's OpenAI server as `rlkv serve` starts it, and two TP ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.vllm.conftest import prompts
from tests.vllm.test_parity import assert_equal_reference

pytestmark = pytest.mark.vllm
START_S = 420


@contextmanager
def server(model, sparsity: float, log: Path, *extra: str, tokenizer: bool = False):
    """`rlkv serve` on a free loopback port, ready; yields its address and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = f"--dtype float32 --enforce-eager --kv-cache-memory-bytes {64 << 20} "
    options += "--max-num-batched-tokens 256 " + " ".join(extra)
    options += "" if tokenizer else " --skip-tokenizer-init"
    command = [
        sys.executable, "-m", "rlkv.cli.main", "serve", "--model", str(model.folder),
        "--profile", str(model.profile), "--sparsity", str(sparsity), "--port", str(port),
        "--max-model-len", "2304", "--api-key-env", "TEST_KEY", f"--vllm-args={options}",
    ]  # fmt: skip
    environment = {**os.environ, "TEST_KEY": "k3y", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_ready(address, process, log)
        yield address, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_ready(address: str, process: subprocess.Popen, log: Path) -> None:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise RuntimeError(f"server ended with {process.returncode}: {log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(address + "/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"server not ready: {log.read_text()[-3000:]}")


def ask(address: str, path: str, body: dict | None = None, key: str | None = "k3y") -> bytes:
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read()


def metric(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def complete(address: str, name: str, ids: list[int], tokens: int) -> list[int]:
    body = {
        "model": name, "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "detokenize": False,
    }  # fmt: skip
    answer = json.loads(ask(address, "/v1/completions", body))
    return answer["choices"][0]["token_ids"]


def test_server_gives_reference_tokens_and_metrics(tiny_models, tmp_path):
    model, requests = tiny_models["qwen3"], prompts()
    with server(model, 0.5, tmp_path / "log") as (address, process):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(address, "/v1/models", key=None)
        names = json.loads(ask(address, "/v1/models"))["data"]
        assert names[0]["id"] == "qwen3"
        with ThreadPoolExecutor(16) as pool:
            jobs = [pool.submit(complete, address, "qwen3", ids, 40) for ids in requests]
            held = []
            while not all(job.done() for job in jobs):
                text = ask(address, "/metrics").decode()
                kinds = ("full", "compressed")
                held.append([metric(text, f'rlkv:kv_cache_bytes{{heads="{k}"}}') for k in kinds])
                time.sleep(0.05)
            completions = [job.result() for job in jobs]
        assert max(full for full, _ in held) > 0
        assert max(compressed for _, compressed in held) > 0
        text = ask(address, "/metrics").decode()
        assert metric(text, "rlkv:kv_cache_bytes") == 0  # all requests are done
        assert metric(text, "rlkv:kv_cache_requests") == 0
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert_equal_reference(model, 0.5, requests, completions)


def test_two_tensor_parallel_ranks_give_reference_tokens(tiny_models, tmp_path):
    import numpy as np

    from rlkv.core.head_profile import HeadProfile
    from rlkv.serve.geometry import split_heads

    model, requests = tiny_models["llama"], prompts()
    log = tmp_path / "log"
    running = server(model, 0.4, log, "--tensor-parallel-size", "2")
    with running as (address, _), ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(complete, address, "llama", ids, 24) for ids in requests]
        completions = [job.result() for job in jobs]
    profile = HeadProfile.load(model.profile)
    split = split_heads(profile.full_heads(0.4), profile.scores, 2)
    assert split.added_full_heads > 0
    assert f"{split.added_full_heads} more heads keep the full cache" in log.read_text()
    rounded = np.zeros((4, 4), dtype=bool)
    for layer, (order, count) in enumerate(zip(split.order, split.full_counts, strict=True)):
        for rank in range(2):
            rounded[layer, list(order[rank * 2 : rank * 2 + count])] = True
    from tests.vllm.test_parity import differences

    assert not differences(model, rounded, requests, completions)
    assert differences(model, model.full(0.4), requests, completions)
