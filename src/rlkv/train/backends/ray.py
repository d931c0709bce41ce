"""Ray backend: workers are actors on one machine or a cluster (``pip install 'rlkv[ray]'``).

Gates go out and gradient sums come back, a few kilobytes a step: there are no weights to
synchronise. Units wait in a queue and go to whichever worker is free; a worker that dies is started
again and its unit repeated, which gives the same result since units are stateless.

A model larger than one GPU gets a placement group of several, and its layers are spread over them
(``device_map``). Transformers' ``tp_plan`` would cut each layer instead; it needs one process per
GPU and collectives in every layer, and it cuts KV heads, and with them the gates, apart.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlkv.errors import BackendError, ConfigError, MissingExtraError, RLKVError
from rlkv.train.backends.base import Call
from rlkv.train.config import TrainConfig
from rlkv.train.worker import Worker

WorkerFactory = Callable[[], Worker]
"""Makes a worker inside its actor's process; pickled by Ray."""

_RESTARTS = 3
_UNIT_RETRIES = 3


class _Actor:
    """One worker process: loads the model once, then runs calls."""

    def __init__(self, make_worker: WorkerFactory, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.worker = make_worker()

    def call(self, method: Call, arguments: tuple[Any, ...]) -> tuple[Any, float]:
        """A call's result and CPU seconds; our own errors are values: retrying would not help."""
        started = time.process_time()
        try:
            result = getattr(self.worker, method)(*arguments)
        except RLKVError as error:
            result = error
        return result, time.process_time() - started

    def gpu_ids(self) -> list[Any]:
        """GPUs that Ray gave this worker."""
        import ray

        return ray.get_gpu_ids()

    def process_id(self) -> int:
        """Process id of the worker."""
        return os.getpid()


class RayBackend:
    """Spreads calls over Ray actors.

    Args:
        config: Settings of the run; each worker loads its model and task from them.
        workers: Actors.
        address: Cluster to join, such as ``auto``; None starts Ray on this machine.
        device: Device of each worker's model where it has no GPU.
        gpus: GPUs per worker; above 1 the model's layers are spread over them.
        threads: CPU threads per worker.
        make_worker: How a worker comes to its model; default: from ``config``.

    Raises:
        MissingExtraError: Ray is not installed.
        BackendError: The cluster or a worker cannot be started.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        workers: int = 2,
        address: str | None = None,
        device: str = "cpu",
        gpus: int = 0,
        threads: int = 1,
        make_worker: WorkerFactory | None = None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingExtraError(
                "the ray backend needs the package ray, which is not installed; run `pip install "
                "'rlkv[ray]'`, or leave out --backend"
            )
        if workers < 1:
            raise ConfigError(f"workers is {workers}, expected at least 1")
        import ray

        self._ray = ray
        self.workers, self.cpu_seconds = workers, 0.0
        self._started = not ray.is_initialized()
        self._actors: list[Any] = []
        self._group: Any = None
        factory = make_worker or _factory(config, device, gpus)
        try:
            if self._started:
                # workers do all of the work; Ray's default would run them at low priority
                os.environ.setdefault("RAY_worker_niceness", "0")
                options = {"address": address} if address else {"num_cpus": workers}
                ray.init(
                    **options, include_dashboard=False, log_to_driver=False, logging_level="error"
                )
            actor = ray.remote(max_restarts=_RESTARTS, max_task_retries=_UNIT_RETRIES)(_Actor)
            self._group = _placement_group(ray, workers, gpus) if gpus > 1 else None
            self._actors = [
                actor.options(**_resources(gpus, self._group, i)).remote(factory, threads)
                for i in range(workers)
            ]
            self.process_ids()  # waits until every worker has its model
        except (ConnectionError, ray.exceptions.RayError) as error:
            self.close()
            raise BackendError(
                f"ray workers cannot be started ({_reason(error)}); check the address, and that "
                "each worker finds the model and has memory for it"
            ) from error

    def map(self, call: Call, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See :class:`~rlkv.train.backends.base.Backend`."""
        ray = self._ray
        results: list[Any] = [None] * len(arguments)
        waiting = list(range(len(arguments)))[::-1]
        free = list(self._actors)
        running: dict[Any, tuple[int, Any]] = {}
        while waiting or running:
            while waiting and free:
                index, actor = waiting.pop(), free.pop()
                running[actor.call.remote(call, arguments[index])] = index, actor
            (done,), _ = ray.wait(list(running), num_returns=1)
            index, actor = running.pop(done)
            try:
                results[index], spent = ray.get(done)
            except ray.exceptions.RayError as error:
                raise BackendError(
                    f"a ray worker failed for good ({_reason(error)}) after {_RESTARTS} restarts; "
                    "see its log for the cause, then go on with --resume"
                ) from error
            self.cpu_seconds += spent
            if isinstance(results[index], RLKVError):
                raise results[index]
            free.append(actor)
        return results

    def process_ids(self) -> list[int]:
        """Process id of each worker."""
        return self._ray.get([actor.process_id.remote() for actor in self._actors])

    def close(self) -> None:
        """Ends the workers, and Ray if it was started here."""
        if not self._ray.is_initialized():
            return
        for actor in self._actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        if self._started:
            self._ray.shutdown()


def _factory(config: TrainConfig, device: str, gpus: int) -> WorkerFactory:
    def make() -> Worker:
        from rlkv.hf.loading import load_model
        from rlkv.train.rewards import task_of

        # Ray shows a worker its own GPUs only, so a single one is always the first
        split = {"device": "cuda" if gpus else device}
        if gpus > 1:
            split = {"device": None, "device_map": "auto"}
        loaded = load_model(config.model, dtype=config.dtype, **split)  # type: ignore[arg-type]
        return Worker(loaded, task_of(config), config)

    return make


def _placement_group(ray: Any, workers: int, gpus: int) -> Any:  # noqa: ANN401 - ray has no types
    """One bundle of ``gpus`` GPUs per worker, each bundle on one node."""
    group = ray.util.placement_group([{"CPU": 1, "GPU": gpus}] * workers)
    ray.get(group.ready())
    return group


def _resources(gpus: int, group: Any, index: int) -> dict[str, Any]:  # noqa: ANN401 - as above
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus}
    if group is not None:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        )
    return options


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return lines[-1] if lines else type(error).__name__
