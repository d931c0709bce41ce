"""Requests of a reference server, decoded together by one thread.

Handlers of the web server put requests in; a worker takes those that wait and share their sampling
settings, runs them as one batch, and hands each token back to the handler's event loop. A request
that arrives while a batch runs waits for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from rlkv.core.engine import Completion, Prompt, SamplingParams
from rlkv.errors import RLKVError
from rlkv.hf.engine import HFEngine

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way."""

    prompt: Prompt
    """Tokens, with the request's own completion limit; the key is unique."""
    params: SamplingParams
    """Sampling settings; the completion limit in them is not used."""
    loop: asyncio.AbstractEventLoop
    """Where the handler waits."""
    events: asyncio.Queue[int | Completion | Exception] = field(default_factory=asyncio.Queue)
    """Tokens as they come, then the completion or what went wrong."""

    def tell(self, event: int | Completion | Exception) -> None:
        """Hands an event over from the worker's thread."""
        # the loop is closed when the server went down while a batch ran
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Batcher:
    """Runs jobs in batches on one thread."""

    def __init__(self, engine: HFEngine) -> None:
        self._engine = engine
        self._engine.on_token = self._token
        self._waiting: deque[Job] = deque()
        self._running: dict[str, Job] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._served = 0
        self._thread = threading.Thread(target=self._work, name="rlkv-batcher", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests being decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    async def run(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[int | Completion]:
        """The tokens of one completion as they come, then the completion itself.

        Raises:
            PromptTooLongError: Prompt and completion exceed the model's positions.
        """
        self._engine.require_room(prompt, prompt.limit(params))
        job = Job(prompt, replace(params, max_new_tokens=1), asyncio.get_running_loop())
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()
        while True:
            event = await job.events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, Completion):
                return

    def stop(self) -> None:
        """Finishes the batch that runs, and takes no other."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                jobs = self._take()
            self._run(jobs)

    def _take(self) -> list[Job]:
        """The oldest job and those that can share its batch."""
        params = self._waiting[0].params
        chosen = [job for job in self._waiting if job.params == params]
        chosen = chosen[: self._engine.batch_size]
        for job in chosen:
            self._waiting.remove(job)
            self._running[job.prompt.key] = job
        return chosen

    def _run(self, jobs: list[Job]) -> None:
        try:
            answers = self._engine.generate([job.prompt for job in jobs], jobs[0].params)
            for job, (completion,) in zip(jobs, answers, strict=True):
                job.tell(completion)
        except (RLKVError, RuntimeError, MemoryError) as error:
            # one bad batch must not end the server; its clients learn what happened
            logger.exception("a batch of %d requests failed", len(jobs))
            for job in jobs:
                job.tell(error)
        finally:
            for job in jobs:
                self._running.pop(job.prompt.key, None)

    def _token(self, key: str, sample: int, token: int) -> None:
        self._running[key].tell(token)
