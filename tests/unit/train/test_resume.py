"""A killed run that is resumed ends with the gates of an undisturbed one, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlkv.core.head_profile import HeadProfile
from rlkv.errors import CheckpointError, ConfigError
from rlkv.train.checkpoint import Checkpoint, Progress, load_checkpoint, save_checkpoint
from rlkv.train.config import (
    LossConfig,
    MonitorConfig,
    RolloutConfig,
    TrainConfig,
    WarmStartConfig,
    unused_sections,
)
from rlkv.train.trainer import Trainer
from tests.toy import ToyTask, toy_loaded

ROOT = Path(__file__).resolve().parents[3]
CONFIG = TrainConfig(
    "toy",
    "toy",
    steps=5,
    sink=4,
    recent=8,
    checkpoint_every=2,
    rollout=RolloutConfig(prompts_per_step=4, prompts_per_unit=2, problems=16),
    loss=LossConfig(micro_rows=4),
    warm=WarmStartConfig(steps=4, solutions=6, rows=3),
    monitor=MonitorConfig(every=3, problems=3),
)


def trainer(output: Path | None, config: TrainConfig = CONFIG) -> Trainer:
    torch.set_num_threads(1)
    return Trainer(config, toy_loaded("qwen3", layers=2), ToyTask(), output=output)


class _Slow:
    """A watch that waits after each step, so that a kill finds the run anywhere."""

    def __getattr__(self, name):
        return lambda *arguments: time.sleep(0.15) if name == "step" else None


def _main(output: str, resume: str) -> None:
    run = trainer(Path(output))
    run.watch = _Slow()
    run.run(resume=resume == "resume")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, trainer(folder).run()


def start(folder: Path, resume: bool) -> subprocess.Popen:
    how = "resume" if resume else "new"
    code = f"from tests.unit.train import test_resume as t; t._main({str(folder)!r}, {how!r})"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT)


def rows_in(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("kill_after", [1, 5, 8])
def test_sigkill_and_resume_give_the_same_gates(tmp_path, undisturbed, kill_after):
    folder = tmp_path / "killed"
    process = start(folder, resume=False)
    deadline = time.monotonic() + 120
    while rows_in(folder) < kill_after and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert rows_in(folder) < 9
    assert start(folder, resume=True).wait() == 0
    compare(folder, undisturbed)


def compare(folder: Path, undisturbed) -> None:
    whole, result = undisturbed
    found = HeadProfile.load(folder / "profile.json")
    assert np.array_equal(found.scores, result.profile.scores)
    settings = json.loads((folder / "config.json").read_text())
    assert torch.equal(
        load_checkpoint(folder, settings).alpha, load_checkpoint(whole, settings).alpha
    )
    timeless = [
        [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.open()]
        for path in (folder / "metrics.jsonl", whole / "metrics.jsonl")
    ]
    assert timeless[0] == timeless[1]


class _Stop(Exception):
    pass


@pytest.mark.parametrize("stop_at", [1, 4, 6])
def test_interrupted_anywhere_and_resumed_gives_the_same_gates(tmp_path, undisturbed, stop_at):
    class Stopping:
        def __getattr__(self, name):
            def told(*arguments):
                if name == "step" and arguments[0]["step"] == stop_at:
                    raise _Stop

            return told

    first = trainer(tmp_path)
    first.watch = Stopping()
    with pytest.raises(_Stop):
        first.run()
    trainer(tmp_path).run(resume=True)
    compare(tmp_path, undisturbed)


def test_learning_moves_gates_and_writes_everything(undisturbed):
    folder, result = undisturbed
    names = {path.name for path in folder.iterdir()}
    assert names == {
        ".lock",
        "checkpoint.safetensors",
        "config.json",
        "metrics.jsonl",
        "profile.json",
        "solutions.jsonl",
    }
    assert result.progress.total_steps == 9
    assert [row["phase"] for row in result.metrics] == ["warm"] * 4 + ["grpo"] * 5
    assert result.progress.generated_tokens > 0
    assert 0 < result.profile.scores.mean() < 0.9


def test_another_run_s_checkpoint_is_refused_by_the_setting_that_differs(undisturbed):
    folder, _ = undisturbed
    changed = replace(CONFIG, penalty=replace(CONFIG.penalty, beta=0.5))
    with pytest.raises(CheckpointError, match=r"penalty\.beta"):
        trainer(folder, changed).run(resume=True)


def test_settings_that_the_objective_does_not_use_may_change(undisturbed):
    folder, result = undisturbed
    changed = replace(CONFIG, ablation=replace(CONFIG.ablation, problems=3))
    again = trainer(folder, changed).run(resume=True)
    assert np.array_equal(again.profile.scores, result.profile.scores)
    with pytest.raises(CheckpointError, match=r"warm\.steps"):
        trainer(folder, replace(CONFIG, warm=replace(CONFIG.warm, steps=9))).run(resume=True)
    assert unused_sections("paper") == {"warm", "ablation"}


def test_a_folder_with_a_run_is_not_overwritten(undisturbed):
    with pytest.raises(ConfigError, match="--resume"):
        trainer(undisturbed[0]).run()


def test_resuming_nothing_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        trainer(tmp_path).run(resume=True)
    with pytest.raises(CheckpointError, match="no output folder"):
        trainer(None).run(resume=True)


def test_damaged_checkpoint_is_one_sentence(tmp_path, undisturbed):
    whole = (undisturbed[0] / "checkpoint.safetensors").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"\x00" * 64, b""):
        (tmp_path / "checkpoint.safetensors").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            trainer(tmp_path).run(resume=True)


def test_a_setting_that_is_younger_than_the_run_counts_as_its_default(tmp_path):
    settings = json.loads(json.dumps(asdict(CONFIG)))
    older = json.loads(json.dumps(settings))
    del older["rollout"]["engine"]
    save_checkpoint(tmp_path, Checkpoint(torch.ones(2, 4), {}, Progress(), {}, older))
    load_checkpoint(tmp_path, settings)
    settings["rollout"]["engine"] = "vllm"
    with pytest.raises(CheckpointError, match=r"other settings \(rollout\.engine\)"):
        load_checkpoint(tmp_path, settings)
