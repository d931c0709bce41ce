"""Recipes: presets, overlays, and errors that name the closest setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.errors import ConfigError, DataError, UnknownNameError
from rlkv.registry import TASKS
from rlkv.train.estimate import (
    Device,
    estimate,
    peak_bytes,
    settings_that_fit,
    sizes_of,
    training_bytes,
)
from rlkv.train.presets import preset
from rlkv.train.recipe import build_config, merge, parse_settings, read_recipe

RECIPES = sorted((Path(__file__).resolve().parents[3] / "recipes").glob("*.toml"))
BASE = {"model": "embedded", "task": "chain"}


def test_paper_preset_is_the_paper():
    config = preset("m", "t", "paper")
    assert (config.steps, config.sink, config.recent) == (185, 128, 256)
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (32, 4)
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (1e-2, 0.017)
    assert (config.loss.clip, config.loss.advantage, config.loss.token_mean) == (
        0.4,
        "group",
        "all",
    )
    assert config.rollout.redraws == 0


def test_the_warm_start_is_short_only_where_rewards_follow():
    alone, followed = preset("m", "t", "warm"), preset("m", "t", "default")
    # a gate travels learning_rate a step: all the way from 0.9 alone, about a third before GRPO
    assert alone.warm.steps * alone.warm.learning_rate > alone.warm.init
    assert followed.warm.steps * followed.warm.learning_rate < 0.5 * followed.warm.init


def test_settings_come_on_top_of_the_objective_s_preset():
    config = build_config({**BASE, "objective": "paper", "penalty": {"beta": 1}, "steps": 3})
    assert config.penalty.beta == 1.0
    assert config.penalty.tau == 0.5
    assert (config.steps, config.sink) == (3, 128)


def test_command_line_settings_are_toml_or_words():
    found = parse_settings(["distill.edges=[1, 2]", "penalty.kind=fixed", "rollout.top_p=0.9"])
    assert found == {
        "distill": {"edges": [1, 2]},
        "penalty": {"kind": "fixed"},
        "rollout": {"top_p": 0.9},
    }
    assert parse_settings(["penalty.beta=.1"]) == {"penalty": {"beta": 0.1}}
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parse_settings(["steps"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout": {"grup_size": 3}}, r"rollout\.group_size"),
        ({"stpes": 3}, "Did you mean steps"),
        ({"objective": "papr"}, "Did you mean paper"),
        ({"penalty": {"kind": "adaptiv"}}, "Did you mean adaptive"),
        ({"rollout": {"engine": "vlm"}}, "Did you mean vllm"),
    ],
)
def test_unknown_names_come_with_the_closest_known_one(values, message):
    with pytest.raises(UnknownNameError, match=message):
        build_config({**BASE, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": "many"}, "steps is 'many', expected int"),
        ({"steps": True}, "expected int"),
        ({"rollout": 3}, "expected a table"),
        ({"loss": {"clip": "wide"}}, "expected float"),
        ({"rollout": {"group_size": 1}}, "group_size at least 2"),
        ({"rollout": {"kv_bytes": 0}}, "rollout kv_bytes is 0"),
        ({"penalty": {"beta": float("nan")}}, "expected a finite number"),
        ({"penalty": {"beta": 10**400}}, "expected a finite number"),
    ],
)
def test_wrong_values_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        build_config({**BASE, **values})


def test_missing_model_and_broken_file_are_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="no model was given"):
        build_config({"task": "chain"})
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(DataError, match="is not TOML"):
        read_recipe(tmp_path / "bad.toml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_fit_their_models(path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = build_config(read_recipe(path))
    found = estimate(config, TASKS.load(config.task)(None))
    assert found["fits"]
    other = build_config({**read_recipe(path), "objective": "default"})
    assert estimate(other, TASKS.load(config.task)(None))["fits"]
    shape = {
        "llama-3.1-8b-r1": ("32x8", 8_030_261_248, 23_680),
        "qwen2.5-7b-r1": ("28x4", 7_615_616_512, 23_680),
        "qwen3-4b-thinking": ("36x8", 4_022_468_096, 23_680),
    }
    if path.stem in shape:
        assert (found["kv_heads"], found["parameters"], found["rollouts"]) == shape[path.stem]


def test_a_decode_batch_counts_with_the_room_its_caches_grow_into():
    config = build_config({"model": "embedded", "task": "chain"})
    found = estimate(config, TASKS.load("chain")())
    sizes, _ = sizes_of("embedded")
    tokens = 200 + TASKS.load("chain").max_new_tokens
    assert found["decode_cache_bytes"] == int(96 * sizes.spec.kv_bytes(tokens) * 1.5)


def test_the_gentlest_settings_that_fit_are_found(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    task = TASKS.load("deepscaler")(None)
    config = build_config({"model": "Qwen/Qwen3-4B-Thinking-2507", "task": "deepscaler"})
    changes = settings_that_fit(config, task)
    assert changes == {"rollout.decode_rows": 24, "loss.gradient_checkpointing": True}
    settings = parse_settings([f"{k}={str(v).lower()}" for k, v in changes.items()])
    fitting = build_config({"model": config.model, "task": config.task, **settings})
    assert estimate(fitting, task)["fits"]
    assert settings_that_fit(fitting, task) == {}
    assert settings_that_fit(config, task, Device(memory_bytes=2**30)) is None
    # one row with checkpointing needs less than 16 rows do: halved until it fits
    small = settings_that_fit(config, task, Device(memory_bytes=20 * 2**30))
    assert small["loss.micro_rows"] < 16
    # vLLM's weights and pool stay while the model trains: there fewer rows help as well
    settings = {"rollout": {"engine": "vllm", "decode_rows": 24}}
    beside = build_config({"model": config.model, "task": config.task, **settings})
    tight = settings_that_fit(beside, task, Device(memory_bytes=48 * 2**30))
    assert tight is not None
    assert tight["loss.micro_rows"] == 1
    assert tight["rollout.decode_rows"] < 24


def test_the_head_and_the_last_layer_are_never_held_together():
    parts = {
        "weights_bytes": 100,
        "activation_bytes": 20,
        "mask_bytes": 3,
        "recomputed_bytes": 7,
        "working_bytes": 4,
        "head_bytes": 10,
    }
    assert peak_bytes(parts) == 123 + 11
    assert peak_bytes({**parts, "head_bytes": 12}) == 123 + 12


def test_checkpointing_keeps_one_number_per_layer_token_and_channel():
    sizes, own = sizes_of("embedded")
    assert own
    plain = training_bytes(sizes, 4, 250, checkpointing=False, head_chunk=1 << 25, kind="cpu")
    sparing = training_bytes(sizes, 4, 250, checkpointing=True, head_chunk=1 << 25, kind="cpu")
    assert sparing["recomputed_bytes"] == plain["activation_bytes"] // sizes.layers
    kept = sizes.layers * 4 * 250 * sizes.hidden * sizes.spec.dtype_bytes
    assert sparing["activation_bytes"] == kept


def test_a_rollout_engine_of_its_own_is_counted_with_its_weights_and_pool():
    task = TASKS.load("chain")()
    plain = estimate(build_config(BASE), task)
    own = estimate(build_config({**BASE, "rollout": {"engine": "vllm", "kv_bytes": 1000}}), task)
    assert (plain["rollout_engine_bytes"], plain["decode_cache_bytes"] > 1000) == (0, True)
    assert own["rollout_engine_bytes"] == own["weights_bytes"] == plain["weights_bytes"]
    assert own["peak_bytes"] == peak_bytes(own) + own["rollout_engine_bytes"] + 1000
