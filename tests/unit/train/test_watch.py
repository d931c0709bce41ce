"""Trackers receive each step's numbers; rewards keep TRL's signature."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec

import pytest

from rlkv.errors import ConfigError, MissingExtraError
from rlkv.train.config import TrainConfig
from rlkv.train.rewards import FunctionVerifier, task_of, verifier_reward
from rlkv.train.trackers import TrackedWatch
from rlkv.train.watch import NO_WATCH
from rlkv.verifiers.base import ExactVerifier


def test_steps_reach_the_tracker(tmp_path, monkeypatch):
    told = []
    module = types.ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = lambda **settings: told.append(("init", settings["name"]))
    module.log = lambda numbers, step: told.append((step, numbers))
    module.finish = lambda: told.append("finish")
    monkeypatch.setitem(sys.modules, "wandb", module)
    watch = TrackedWatch(NO_WATCH, "wandb", tmp_path / "run", {})
    watch.step({"step": 3, "phase": "warm", "reward": None, "loss": 0.5, "gates": [1.0]})
    watch.finished()
    assert told == [("init", "run"), (3, {"loss": 0.5}), "finish"]


def test_a_missing_tracker_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises((MissingExtraError, ValueError), match="pip install trackio|__spec__"):
        TrackedWatch(NO_WATCH, "trackio", tmp_path, {})


def test_verifier_as_reward_takes_text_and_messages():
    reward = verifier_reward(ExactVerifier("#"))
    chat = [{"role": "assistant", "content": "so #7"}]
    assert reward(["p", "p"], ["#3", chat], [[], []], answer=["3", "8"]) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="no column 'answer'"):
        reward(["p"], ["#3"], [[]], solution=["3"])


def test_reward_function_as_verifier_thresholds_partial_credit():
    def half(prompts, completions, completion_ids, **columns):
        return [0.5 if text else None for text in completions]

    assert FunctionVerifier(half)("x", "y").reward == 0.5
    assert FunctionVerifier(half, threshold=1.0)("x", "y").reward == 0.0
    assert FunctionVerifier(half)("", "y").reason == "no_answer"


def count_sevens(prompts, completions, completion_ids, **columns):
    return [float("7" in text) for text in completions]


def test_a_run_s_own_function_replaces_the_verifier():
    own = f"{__name__}:count_sevens"
    task = task_of(TrainConfig("embedded", "chain", reward_function=own))
    assert (task.verifier("a7", "0").reward, task.verifier("a8", "0").reward) == (1.0, 0.0)
    for wrong in ("nowhere:f", f"{__name__}:missing", "no_colon"):
        with pytest.raises(ConfigError, match=r"package\.module:name"):
            task_of(TrainConfig("embedded", "chain", reward_function=wrong))
