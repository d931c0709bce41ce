"""`rlkv bench train`: mistakes are one sentence; a recipe, a study and a report work end to end."""

from __future__ import annotations

import json

import pytest

from rlkv.cli.main import main

SMALL = (
    "warm.steps=2",
    "warm.solutions=4",
    "warm.rows=2",
    "steps=1",
    "rollout.prompts_per_step=2",
    "rollout.prompts_per_unit=2",
    "rollout.problems=8",
    "rollout.decode_rows=8",
)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--study", "penalties"], 2, "Did you mean penalty"),
        (["--variants", "defaults"], 2, "Did you mean default"),
        (["--task", "chian"], 2, "Did you mean chain"),
        (["--set", "warm.stepz=3"], 2, "warm.steps"),
        (["--sparsity", "1.5"], 2, "outside [0, 1)"),
        (["--examples", "0"], 2, "at least one example"),
        (["nowhere.toml"], 1, "cannot read recipe"),
    ],
)
def test_mistakes_are_one_sentence(capsys, monkeypatch, tmp_path, arguments, status, message):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "train", *arguments]) == status
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert message in told.err


@pytest.mark.slow
def test_a_recipe_is_benched_and_reported(capsys, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('model = "embedded"\ntask = "chain"\nobjective = "paper"\n')
    arguments = ["bench", "train", str(recipe), "--variants", "full", "default", "--seeds", "0"]
    arguments += ["--sparsity", "0.5", "--examples", "4", "--output", str(tmp_path / "out")]
    assert main([*arguments, "--json", "--set", *SMALL]) == 0
    full, default = json.loads(capsys.readouterr().out)
    assert (full["objective"], full["accuracy"], full["n"]) == ("full", 1.0, 4)
    assert default["generated_tokens"] > 0
    assert default["trained_tokens"] > 0
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Cost of learning" in report
    assert (tmp_path / "out" / "mean_gate.png").stat().st_size > 5_000
