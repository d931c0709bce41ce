"""``rlkv bench serve``: stock vLLM and the plugin side by side on the same fixed KV pool.

Every arm is a server of its own, driven over HTTP by the same burst of requests, and read through
vLLM's own ``/metrics``. The stock server stays up beside each other arm: decode steps are timed in
turn, round by round, so that a busy machine slows both alike. The commands that start the servers
come from the caller; this module knows neither vLLM nor the plugin.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict

from rlkv.bench.stream import Timeline, run_burst
from rlkv.errors import BackendError

Engine = Literal["stock", "rlkv"]


class ServeRow(TypedDict):
    """One arm at one context length."""

    engine: Engine
    """``stock`` is vLLM without the plugin's settings."""
    sparsity: float
    """Share of KV heads compressed."""
    kv_pool_bytes: int
    """KV memory of the server; the same for all arms."""
    requests: int
    """Requests of the burst."""
    peak_running: int
    """Most requests that ran at once."""
    preemptions: int
    """Requests that were thrown out and recomputed."""
    output_tokens_per_s: float
    """New tokens of all requests over the burst's wall time."""
    ttft_p50_ms: float
    """Median time to a request's first token, queueing included."""
    ttft_p95_ms: float
    """95th percentile of the same."""
    tpot_p50_ms: float
    """Median time per further token of a request."""
    tpot_p95_ms: float
    """95th percentile of the same."""
    step_ms_equal_batch: float
    """Median time of one decode step with the same batch in all arms, at this context.

    An ``rlkv`` row's is the stock row's times the ratio of the two servers' medians over the rounds
    that they took in turn, so that a machine whose speed drifts favours none.
    """
    context: int
    """Tokens of each request at its end."""


@dataclass(frozen=True, slots=True)
class ServeWorkload:
    """What every arm is asked."""

    vocabulary: int
    """Token ids are drawn below this number."""
    kv_pool_bytes: int
    """KV memory of each server."""
    contexts: Sequence[int] = (1024,)
    """Tokens of each request at its end, one burst for each."""
    prompt: int = 128
    """Prompt tokens of each request; the rest is generated."""
    requests: int = 16
    """Requests of a burst, sent at once."""
    batch: int = 4
    """Requests that decode together when steps are timed."""
    steps: int = 32
    """Decode steps of one timing round."""
    rounds: int = 3
    """Timing rounds of each pair of arms."""
    seed: int = 0
    """Seed of the token ids."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One server to measure."""

    engine: Engine
    """Stock vLLM or the plugin."""
    sparsity: float
    """Share of KV heads compressed."""
    command: Callable[[int], list[str]]
    """The command that starts it on a given port."""


@dataclass(slots=True)
class _Measured:
    """An arm's results at one context while rounds are still added."""

    row: dict[str, object]
    mean_running: float
    steps: list[float] = field(default_factory=list)
    stock_steps: list[float] = field(default_factory=list)
    """The stock server's steps of the same rounds."""


def serve_rows(
    stock: Arm,
    others: Sequence[Arm],
    workload: ServeWorkload,
    *,
    start_s: float = 600.0,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[ServeRow]:
    """Measures all arms; rows come in the order stock, others, once all are done.

    Args:
        stock: The server that all others are compared with.
        others: Servers with compressed heads.
        workload: What they are asked.
        start_s: Seconds that a server may take to start.
        report: Called with a line of text at each server's start and end.

    Raises:
        BackendError: A server does not start.
    """
    measured: list[list[_Measured]] = []
    report("stock: starting")
    with running(stock, start_s) as stock_address:
        own = [_burst(stock, stock_address, workload, context) for context in workload.contexts]
        report(_line(own))
        measured.append(own)
        for number, arm in enumerate(others, 1):
            report(f"server {number} of {len(others)}: {arm.engine} s={arm.sparsity:g}, starting")
            with running(arm, start_s) as address:
                found = [_burst(arm, address, workload, c) for c in workload.contexts]
                report(_line(found))
                measured.append(found)
                for _ in range(workload.rounds):
                    for index, context in enumerate(workload.contexts):
                        beside = _steps(stock_address, workload, context)
                        own[index].steps += beside
                        found[index].stock_steps += beside
                        found[index].steps += _steps(address, workload, context)
    for arm_results in measured:
        for result, base in zip(arm_results, measured[0], strict=True):
            step = round(1000 * _step(result, base), 3)
            yield {**result.row, "step_ms_equal_batch": step}  # type: ignore[typeddict-item]


def _step(result: _Measured, stock: _Measured) -> float:
    """Seconds of one step, on the scale of the stock server's; 0 where no round was timed."""
    if not result.steps:
        return 0.0
    own = statistics.median(result.steps)
    if not result.stock_steps:
        return own
    return own * statistics.median(stock.steps) / statistics.median(result.stock_steps)


def _line(found: Sequence[_Measured]) -> str:
    """One line on an arm's bursts, for progress."""
    return "; ".join(
        f"context {one.row['context']}: {one.row['output_tokens_per_s']} tokens/s, "
        f"{one.row['peak_running']} running at most, {one.mean_running:.1f} on average, "
        f"{one.row['preemptions']} preemptions"
        for one in found
    )


def _burst(arm: Arm, address: str, workload: ServeWorkload, context: int) -> _Measured:
    """One burst of requests over the pool's capacity."""
    before = _metrics(address)
    prompts = _prompts(workload, context, workload.requests, workload.prompt)
    seen: list[int] = []

    def poll() -> None:
        seen.append(int(_metrics(address)["vllm:num_requests_running"]))

    begin = time.perf_counter()
    lines = asyncio.run(run_burst(address, prompts, context - workload.prompt, poll=poll))
    seconds = time.perf_counter() - begin
    preemptions = _metrics(address)["vllm:num_preemptions_total"]
    first = [line.first_s - begin for line in lines]
    each = [line.per_token_s for line in lines]
    row: dict[str, object] = {
        "engine": arm.engine,
        "sparsity": arm.sparsity,
        "kv_pool_bytes": workload.kv_pool_bytes,
        "requests": workload.requests,
        "peak_running": max(seen, default=0),
        "preemptions": int(preemptions - before["vllm:num_preemptions_total"]),
        "output_tokens_per_s": round(sum(line.tokens for line in lines) / seconds, 2),
        "ttft_p50_ms": _milliseconds(first, 50),
        "ttft_p95_ms": _milliseconds(first, 95),
        "tpot_p50_ms": _milliseconds(each, 50),
        "tpot_p95_ms": _milliseconds(each, 95),
        "step_ms_equal_batch": 0.0,
        "context": context,
    }
    return _Measured(row, statistics.fmean(seen) if seen else 0.0)


def _steps(address: str, workload: ServeWorkload, context: int) -> list[float]:
    """Seconds of each decode step while all requests of a small batch are decoding."""
    length = max(1, context - workload.steps)
    prompts = _prompts(workload, context + 1, workload.batch, length)
    # the prompts' cache is filled first, so that the second run decodes almost at once
    asyncio.run(run_burst(address, prompts, 1))
    lines = asyncio.run(run_burst(address, prompts, workload.steps))
    begin, end = max(line.times[0] for line in lines), min(line.times[-1] for line in lines)
    return [step for line in lines for step in _gaps(line, begin, end)]


def _gaps(line: Timeline, begin: float, end: float) -> list[float]:
    inside = [moment for moment in line.times if begin <= moment <= end]
    return [later - earlier for earlier, later in itertools.pairwise(inside)]


def _prompts(workload: ServeWorkload, salt: int, count: int, length: int) -> list[list[int]]:
    """Random token ids; the same for every arm, different for every use."""
    draw = random.Random(f"{workload.seed}-{salt}-{count}-{length}")
    return [[draw.randrange(workload.vocabulary) for _ in range(length)] for _ in range(count)]


def _milliseconds(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    position = min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))
    return round(1000 * ordered[position], 2)


def _metrics(address: str) -> dict[str, float]:
    """VLLM's counters and gauges, summed over their labels."""
    with urllib.request.urlopen(address + "/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name, _, value = line.rpartition(" ")
            name = name.split("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


@contextmanager
def running(arm: Arm, start_s: float) -> Iterator[str]:
    """A started server; yields its address and ends it, with all its processes, at exit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                arm.command(port), stdout=file, stderr=file, start_new_session=True
            )
        try:
            _wait(address, process, log, start_s)
            yield address
        finally:
            _end(process)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path, start_s: float) -> None:
    limit = time.monotonic() + start_s
    while time.monotonic() < limit:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(address + "/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    end = " / ".join(log.read_text("utf-8", "replace").strip().splitlines()[-3:])
    raise BackendError(
        f"a server did not start within {start_s:g} s; correct what its log ends with: {end}"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to stop, then ends whatever of its own process group is left."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
