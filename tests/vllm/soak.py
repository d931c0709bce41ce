"""Soak of a server: `python -m tests.vllm.soak --minutes 20` prints one JSON object of findings.

Mixed lengths, bursts over capacity, client disconnects, requests that cannot be served. At the end:
no block held, memory flat, a sample of completions checked against the masked-dense reference, a
SIGTERM with requests in flight, and an engine that is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from tests.vllm.conftest import make_model
from tests.vllm.test_server import ask, metric, server

NAME, SPARSITY = "qwen3", 0.5


class Soak:
    """One run's counters and samples."""

    def __init__(self, address: str, seed: int) -> None:
        self.address = address
        self.draw = random.Random(seed)
        self.counts: dict[str, int] = {}
        self.samples: list[tuple[list[int], list[int]]] = []
        self.unexpected: list[str] = []

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    async def request(self, session: aiohttp.ClientSession) -> None:
        kind = self.draw.choices(
            ["whole", "stream", "disconnect", "too_long", "nonsense"], [50, 20, 20, 5, 5]
        )[0]
        length = self.draw.choice([5, 20, 80, 81, 200, 400, 900, 1800])
        ids = [self.draw.randrange(510) for _ in range(length if kind != "too_long" else 2400)]
        tokens = self.draw.choice([1, 8, 40, 120])
        body = {
            "prompt": ids, "max_tokens": tokens if kind != "nonsense" else -3, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
            "stream": kind in ("stream", "disconnect"),
        }  # fmt: skip
        try:
            async with session.post(self.address + "/v1/completions", json=body) as answer:
                await self._read(kind, ids, tokens, answer)
        except (TimeoutError, aiohttp.ClientError) as error:
            self.unexpected.append(f"{kind}: {type(error).__name__} {error}")

    async def _read(self, kind, ids, tokens, answer) -> None:
        if answer.status != 200:
            expected = kind in ("too_long", "nonsense") and 400 <= answer.status < 500
            self.count(f"refused_{answer.status}")
            if not expected:
                self.unexpected.append(f"{kind}: status {answer.status}")
            return
        if kind in ("too_long", "nonsense"):
            self.unexpected.append(f"{kind} was accepted")
            return
        if kind == "whole":
            found = (await answer.json())["choices"][0]["token_ids"]
            if len(found) != tokens:
                self.unexpected.append(f"{len(found)} tokens instead of {tokens}")
            if len(self.samples) < 4000:
                self.samples.append((ids, found))
        else:
            left = self.draw.randrange(1, 20)
            async for part in answer.content:
                if part.startswith(b"data: {"):
                    left -= 1
                if kind == "disconnect" and not left:
                    break  # leaving the context closes the connection
        self.count(kind)

    async def run(self, seconds: float, memory: list[int], pid: int) -> None:
        end = time.monotonic() + seconds
        options = {
            "timeout": aiohttp.ClientTimeout(total=300),
            # the server closes idle connections after 5 s, maybe just as one is used again
            "connector": aiohttp.TCPConnector(limit=0, force_close=True),
            "headers": {"Authorization": "Bearer k3y"},
        }
        async with aiohttp.ClientSession(**options) as session:
            while time.monotonic() < end:
                burst = self.draw.choice([1, 3, 8, 60])
                await asyncio.gather(*(self.request(session) for _ in range(burst)))
                memory.append(tree_bytes(pid))


def tree_bytes(pid: int) -> int:
    """Resident bytes of a process and its descendants."""
    total, queue = 0, [pid]
    while queue:
        current = queue.pop()
        try:
            pages = int(Path(f"/proc/{current}/statm").read_text().split()[1])
            total += pages * os.sysconf("SC_PAGE_SIZE")
            for task in Path(f"/proc/{current}/task").iterdir():
                queue += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return total


def descendants(pid: int, word: str) -> list[int]:
    """Descendants of ``pid`` whose name holds ``word``."""
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        for task in Path(f"/proc/{current}/task").iterdir():
            queue += [int(child) for child in (task / "children").read_text().split()]
        if word in Path(f"/proc/{current}/cmdline").read_text():
            found.append(current)
    return found


def check_samples(model, samples) -> dict[str, object]:
    from tests.vllm.masked_reference import compare, load_reference

    reference = load_reference(model.folder, model.full(SPARSITY), 16, 64)
    wrong = [compare(reference, ids, tokens).first_difference for ids, tokens in samples]
    return {"rechecked": len(samples), "wrong": sum(first is not None for first in wrong)}


def soak(minutes: float, seed: int, folder: Path) -> dict[str, object]:
    model = make_model(folder, NAME)
    log = folder / "log"
    # a pool for about six requests of full length, so that bursts queue and preempt
    extra = ("--num-gpu-blocks-override", "1100", "--max-num-seqs", "48")
    memory: list[int] = []
    with server(model, SPARSITY, log, *extra) as (address, process):
        run = Soak(address, seed)
        asyncio.run(run.run(60 * minutes, memory, process.pid))
        time.sleep(2)
        text = ask(address, "/metrics").decode()
        held = metric(text, "rlkv:kv_cache_bytes")
        running = metric(text, "vllm:num_requests_running")
        preempted = metric(text, "vllm:num_preemptions_total")
        note = {"requests": run.counts, "unexpected": run.unexpected[:5], "held": held}
        print(json.dumps(note), file=sys.stderr, flush=True)  # noqa: T201 - progress
        drained = asyncio.run(terminate(address, process))
        print(json.dumps(drained), file=sys.stderr, flush=True)  # noqa: T201 - progress
    with server(model, SPARSITY, log, *extra) as (address, process):
        killed = asyncio.run(kill_engine(address, process))
        print(json.dumps(killed), file=sys.stderr, flush=True)  # noqa: T201 - progress
    draw = random.Random(seed)
    samples = draw.sample(run.samples, min(60, len(run.samples)))
    third = max(1, len(memory) // 3)
    return {
        "minutes": minutes,
        "requests": dict(sorted(run.counts.items())),
        "unexpected": run.unexpected[:20],
        "preemptions": preempted,
        "held_bytes_at_end": held,
        "running_at_end": running,
        "resident_mib_first_third": max(memory[:third]) >> 20,
        "resident_mib_last_third": max(memory[-third:]) >> 20,
        "sigterm_in_flight": drained,
        "engine_killed": killed,
        **check_samples(model, samples),
    }


async def in_flight(address: str, count: int) -> list[str]:
    """What became of ``count`` requests of 200 tokens."""

    async def one(session) -> str:
        body = {"prompt": [7] * 50, "max_tokens": 200, "ignore_eos": True}
        try:
            async with session.post(address + "/v1/completions", json=body) as answer:
                await answer.read()
                return str(answer.status)
        except aiohttp.ClientError as error:
            return type(error).__name__

    headers = {"Authorization": "Bearer k3y"}
    async with aiohttp.ClientSession(headers=headers) as session:
        return await asyncio.gather(*(one(session) for _ in range(count)))


async def terminate(address: str, process) -> dict[str, object]:
    job = asyncio.create_task(in_flight(address, 8))
    await asyncio.sleep(0.3)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    outcomes = await job
    code = await asyncio.to_thread(process.wait, 60)
    seconds = round(time.monotonic() - begin, 2)
    return {"outcomes": sorted(outcomes), "exit_status": code, "seconds": seconds}


async def kill_engine(address: str, process) -> dict[str, object]:
    job = asyncio.create_task(in_flight(address, 4))
    await asyncio.sleep(0.3)
    for pid in descendants(process.pid, "EngineCore"):
        os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    outcomes = await asyncio.wait_for(job, 60)
    code = await asyncio.to_thread(process.wait, 60)
    seconds = round(time.monotonic() - begin, 2)
    return {"outcomes": sorted(outcomes), "exit_status": code, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(given.minutes, given.seed, Path(folder))
    json.dump(found, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
