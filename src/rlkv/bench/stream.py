"""Bursts of streamed completions, each token's arrival timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlkv.errors import MissingExtraError

if TYPE_CHECKING:
    import aiohttp

_POLL_S = 0.1


@dataclass(slots=True)
class Timeline:
    """When the tokens of one request arrived, in seconds of ``time.perf_counter``."""

    times: list[float] = field(default_factory=list)
    """Arrival of each token."""

    @property
    def tokens(self) -> int:
        """Tokens that arrived."""
        return len(self.times)

    @property
    def first_s(self) -> float:
        """Arrival of the first token."""
        return self.times[0]

    @property
    def per_token_s(self) -> float:
        """Mean time from one token to the next; 0 for a single one."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


async def run_burst(
    address: str,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    poll: Callable[[], None] | None = None,
) -> list[Timeline]:
    """Sends all prompts at once and reads the streams until each has ``tokens`` tokens.

    Args:
        address: Base address of an OpenAI-compatible server.
        prompts: Token ids of each request.
        tokens: New tokens of each request.
        poll: Called now and then while the burst runs.

    Raises:
        MissingExtraError: aiohttp, which comes with vLLM, is not installed.
    """
    try:
        import aiohttp
    except ImportError as error:
        raise MissingExtraError(
            "aiohttp is not installed; run `pip install 'rlkv[vllm]'` or `pip install aiohttp`"
        ) from error
    limits = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limits, connector=connector) as session:
        jobs = [asyncio.create_task(_stream(session, address, p, tokens)) for p in prompts]
        while poll is not None and not all(job.done() for job in jobs):
            await asyncio.to_thread(poll)
            await asyncio.sleep(_POLL_S)
        return await asyncio.gather(*jobs)


async def _stream(
    session: aiohttp.ClientSession, address: str, prompt: Sequence[int], tokens: int
) -> Timeline:
    body = {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    line = Timeline()
    async with session.post(address + "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for part in answer.content:
            if part.startswith(b"data: {"):
                # a busy server may put several tokens into one event
                line.times += [time.perf_counter()] * max(1, _tokens_in(part))
    return line


def _tokens_in(event: bytes) -> int:
    import json

    choices = json.loads(event[len(b"data: ") :]).get("choices") or [{}]
    return len(choices[0].get("token_ids") or ())
