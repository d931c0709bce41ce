"""Ray workers give the gates of a single process, also when they or their driver are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlkv.core.head_profile import HeadProfile
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

ROOT = Path(__file__).resolve().parents[3]
CONFIG = TrainConfig(
    "toy",
    "toy",
    steps=7,
    sink=4,
    recent=8,
    checkpoint_every=2,
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


class DyingTask(ToyTask):
    """Its verifier takes the whole process down, each time it is tried."""

    @staticmethod
    def verifier(completion, answer):
        os._exit(3)


def make_dying_worker() -> Worker:
    return Worker(toy_loaded("qwen3", layers=2), DyingTask(), CONFIG)


class PidWatch:
    """Writes the workers' process ids down, then waits after each step for a kill to come."""

    def __init__(self, pool, path):
        path.write_text("\n".join(str(pid) for pid in pool.process_ids()))

    def __getattr__(self, name):
        return lambda *arguments: time.sleep(0.3) if name == "step" else None


def drive(folder: str, resume: bool) -> None:
    """A whole training process over two Ray workers; run in an interpreter of its own."""
    import torch

    torch.set_num_threads(1)
    output = Path(folder)
    pool = backend(make_worker)
    run = Trainer(
        CONFIG,
        toy_loaded("qwen3", layers=2),
        ToyTask(),
        output=output,
        backend=pool,
        watch=PidWatch(pool, output.with_suffix(".pids")),
    )
    run.run(resume=resume)
    pool.close()


def start_driver(folder: Path, resume: bool) -> subprocess.Popen:
    code = f"from tests.unit.train import test_ray as t; t.drive({str(folder)!r}, {resume})"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def backend(make, workers=2, gpus=0):
    from rlkv.train.backends.ray import RayBackend

    return RayBackend(CONFIG, workers=workers, gpus=gpus, make_worker=make)


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

    @property
    def cpu_seconds(self):
        return self.pool.cpu_seconds

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
        assert found.progress.cpu_seconds > pool.cpu_seconds > 0
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


@pytest.mark.slow
def test_a_killed_driver_is_resumed_to_the_same_gates_and_leaves_no_worker(tmp_path, alone):
    folder = tmp_path / "run"
    driver = start_driver(folder, resume=False)
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 300
    # warm start of three steps, checkpoints at 2 and 3: five rows are two GRPO steps in
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 5):
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL
    assert metrics.read_bytes().count(b"\n") < 10
    workers = [int(pid) for pid in folder.with_suffix(".pids").read_text().split()]
    assert len(workers) == 2
    while any(is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert start_driver(folder, resume=True).wait(timeout=300) == 0
    assert np.array_equal(HeadProfile.load(folder / "profile.json").scores, alone.profile.scores)


@pytest.mark.slow
def test_a_worker_that_keeps_dying_is_one_sentence(monkeypatch):
    from rlkv.train.backends import ray

    monkeypatch.setattr(ray, "_RESTARTS", 1)
    monkeypatch.setattr(ray, "_UNIT_RETRIES", 1)
    pool = backend(make_dying_worker, workers=1)
    try:
        config = replace(CONFIG, objective="paper", steps=1)
        trainer = Trainer(config, toy_loaded("qwen3", layers=2), ToyTask(), backend=pool)
        with pytest.raises(BackendError, match="a ray worker failed for good") as caught:
            trainer.run()
        assert "\n" not in str(caught.value)
        assert "--resume" in str(caught.value)
    finally:
        pool.close()


@pytest.mark.slow
def test_each_worker_of_several_gpus_gets_its_own():
    import ray

    # Ray takes our word for the GPUs; the toy models stay on the CPU
    ray.init(num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        pool = backend(make_worker, gpus=2)
        groups = ray.get([actor.gpu_ids.remote() for actor in pool._actors])
        assert sorted(len(ids) for ids in groups) == [2, 2]
        assert len({i for ids in groups for i in ids}) == 4
        pool.close()
        deadline = time.monotonic() + 60
        while ray.available_resources().get("GPU") != 4:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        ray.shutdown()
