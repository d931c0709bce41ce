"""Ray workers give the gates of a single process, also when one of them is killed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from rlkv.errors import BackendError, DataError
from rlkv.train.config import (
    LossConfig,
    MonitorConfig,
    RolloutConfig,
    TrainConfig,
    WarmStartConfig,
)
from rlkv.train.trainer import Trainer
from rlkv.train.worker import Worker
from tests.toy import ToyTask, toy_loaded

pytest.importorskip("ray", reason="ray is not installed (rlkv[ray])")

CONFIG = TrainConfig(
    "toy",
    "toy",
    steps=7,
    sink=4,
    recent=8,
    rollout=RolloutConfig(prompts_per_step=6, prompts_per_unit=2, problems=16),
    loss=LossConfig(micro_rows=2),
    warm=WarmStartConfig(steps=3, solutions=6, rows=4),
    monitor=MonitorConfig(every=0),
)


def make_worker() -> Worker:
    return Worker(toy_loaded("qwen3", layers=2), ToyTask(), CONFIG)


class FailingTask(ToyTask):
    """Its verifier cannot be reached."""

    @staticmethod
    def verifier(completion, answer):
        raise DataError("the answer file is gone; bring it back")


def make_failing_worker() -> Worker:
    return Worker(toy_loaded("qwen3", layers=2), FailingTask(), CONFIG)


def make_broken_worker() -> Worker:
    os._exit(3)


def backend(make, workers=2):
    from rlkv.train.backends.ray import RayBackend

    return RayBackend(CONFIG, workers=workers, make_worker=make)


@pytest.fixture(scope="module")
def alone():
    import torch

    torch.set_num_threads(1)
    return Trainer(CONFIG, toy_loaded("qwen3", layers=2), ToyTask()).run()


class Killer:
    """Kills a worker while the fifth step's units run."""

    def __init__(self, pool):
        self.pool, self.calls = pool, 0
        self.workers = pool.workers
        self.killed = None

    def map(self, call, arguments):
        self.calls += 1
        if self.calls == 5:
            import threading

            self.killed = self.pool.process_ids()[0]
            threading.Timer(0.05, os.kill, (self.killed, signal.SIGKILL)).start()
        return self.pool.map(call, arguments)

    def close(self):
        self.pool.close()


@pytest.mark.slow
def test_two_workers_give_the_gates_of_one_process_also_when_one_is_killed(alone):
    pool = backend(make_worker)
    try:
        found = Trainer(CONFIG, toy_loaded("qwen3", layers=2), ToyTask(), backend=pool).run()
        assert np.array_equal(found.profile.scores, alone.profile.scores)
        killer = Killer(pool)
        found = Trainer(CONFIG, toy_loaded("qwen3", layers=2), ToyTask(), backend=killer).run()
        assert np.array_equal(found.profile.scores, alone.profile.scores)
        assert killer.killed not in pool.process_ids()
    finally:
        pool.close()


@pytest.mark.slow
def test_an_error_in_a_unit_arrives_as_itself():
    pool = backend(make_failing_worker, workers=1)
    config = replace(CONFIG, objective="paper", steps=1)
    try:
        trainer = Trainer(config, toy_loaded("qwen3", layers=2), ToyTask(), backend=pool)
        with pytest.raises(DataError, match="bring it back"):
            trainer.run()
    finally:
        pool.close()


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_one_sentence():
    with pytest.raises(BackendError, match="cannot be started"):
        backend(make_broken_worker, workers=1)
