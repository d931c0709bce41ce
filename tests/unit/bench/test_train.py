"""`bench train`: rows are measured, equal runs happen once, a report shows costs and curves."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from rlkv.bench.train import TrainBenchmark
from rlkv.bench.train_config import TrainBench
from rlkv.bench.train_report import accuracy_section, cost_section, write_train_report
from rlkv.core.head_profile import HeadProfile
from rlkv.errors import RLKVError
from rlkv.evaluate.run_info import run_info
from rlkv.train.monitor import method_rewards
from rlkv.train.problems import load_problems
from rlkv.train.trainer import Trainer
from rlkv.train.watch import NO_WATCH
from tests.toy import ForcedToyTask, ToyTask, toy_loaded

SETTINGS = {
    "steps": 2,
    "loss": {"micro_rows": 8},
    "rollout": {"prompts_per_step": 4, "prompts_per_unit": 4, "group_size": 2, "problems": 12},
    "warm": {"steps": 3, "solutions": 8, "rows": 4},
    "ablation": {"problems": 4},
}
BENCH = TrainBench(
    variants=("full", "random", "ablation", "default"),
    seeds=(0, 1),
    sparsities=(0.5,),
    examples=6,
    settings=SETTINGS,
    sink=2,
    recent=4,
)


def run(bench, folder=None, task=None):
    benchmark = TrainBenchmark(toy_loaded(layers=2), task or ForcedToyTask(), bench, output=folder)
    return list(benchmark.rows()), benchmark


def test_rows_hold_what_a_direct_measurement_gives(tmp_path):
    rows, _ = run(BENCH, tmp_path)
    assert [(row["objective"], row["seed"], row["sparsity"]) for row in rows] == [
        ("full", 0, 0.0),
        ("random", 0, 0.5),
        ("random", 1, 0.5),
        ("ablation", 0, 0.5),
        ("ablation", 1, 0.5),
        ("default", 0, 0.5),
        ("default", 1, 0.5),
    ]
    loaded, task = toy_loaded(layers=2), ForcedToyTask()
    problems = load_problems(loaded, task, 6, seed=0, split="test")
    for row in rows[3:]:
        profile = HeadProfile.load(tmp_path / f"{row['objective']}-{row['seed']}" / "profile.json")
        rewards = method_rewards(
            loaded, task, problems, method="rlkv", sparsity=0.5, profile=profile, sink=2, recent=4
        )
        assert row["accuracy"] == pytest.approx(np.mean(rewards))
        assert row["ci_low"] <= row["accuracy"] <= row["ci_high"]
        assert row["n"] == 6
    assert rows[0]["generated_tokens"] == rows[1]["cpu_seconds"] == 0
    assert all(row["cpu_seconds"] > 0 for row in rows[3:])
    assert all(row["trained_tokens"] > 0 for row in rows[5:])


def test_finished_runs_are_read_and_not_made_again(tmp_path, monkeypatch):
    first, _ = run(BENCH, tmp_path)
    for name in ("_phase", "_solutions"):
        monkeypatch.setattr(Trainer, name, lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(
        "rlkv.train.trainer.leave_one_out", lambda *_, **__: pytest.fail("ablated again")
    )
    ablation = replace(BENCH, variants=("full", "random", "ablation"))
    assert run(ablation, tmp_path)[0] == first[:5]


def test_resumed_bench_prints_the_same_rows(tmp_path):
    first, before = run(BENCH, tmp_path)
    again, after = run(BENCH, tmp_path)
    assert again == first
    assert after.curves == before.curves
    assert [len(before.curves["default", seed]) for seed in (0, 1)] == [5, 5]


def test_measured_accuracies_outlive_a_kill(tmp_path, monkeypatch):
    first, _ = run(BENCH, tmp_path)
    kept = tmp_path / "accuracies.jsonl"
    lines = kept.read_bytes().splitlines(keepends=True)
    kept.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # killed while writing the last one
    asked = []

    def counted(*arguments, **settings):
        asked.append(settings["sparsity"])
        return method_rewards(*arguments, **settings)

    monkeypatch.setattr("rlkv.bench.train.method_rewards", counted)
    assert run(BENCH, tmp_path)[0] == first
    assert len(asked) == 1
    other = replace(BENCH, examples=5, variants=("full",))
    assert run(other, tmp_path)[0][0]["n"] == 5
    assert len(asked) == 2
    run(other, tmp_path, ForcedToyTask("other.jsonl"))  # the same heads on other problems
    assert len(asked) == 3


def test_equal_runs_of_two_studies_happen_once(tmp_path):
    bench = replace(
        BENCH,
        studies=("penalty", "advantage"),
        variants=("adaptive beta=0.03", "advantage=group", "advantage=batch"),
        seeds=(0,),
    )
    rows, _ = run(bench, tmp_path, ToyTask())
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        "adaptive-beta=0.03-0",
        "advantage=batch-0",
    }
    same, twin, _ = rows
    assert {**same, "objective": ""} == {**twin, "objective": ""}
    assert same["generated_tokens"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"studies": ("penalties",)}, "Did you mean penalty"),
        ({"variants": ("defaults",)}, "Did you mean default"),
        ({"sparsities": (1.5,)}, "outside"),
        ({"examples": 0}, "at least one example"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(RLKVError, match=message):
        replace(BENCH, **change)


def test_a_recipe_lies_below_the_variant_and_its_objective_is_not_used():
    recipe = {"objective": "paper", "steps": 7, "warm": {"l1": 0.4, "steps": 9}}
    bench = replace(BENCH, recipe=recipe, variants=("default",))
    config = TrainBenchmark(toy_loaded(layers=2), ForcedToyTask(), bench).config("default", 3)
    assert (config.objective, config.steps, config.seed) == ("default", 2, 3)
    assert (config.warm.l1, config.warm.steps, config.sink) == (0.4, 3, 2)


def row(objective, seed, sparsity, accuracy, **cost):
    low, high = accuracy - 0.1, accuracy + 0.05
    base = {"generated_tokens": 0, "trained_tokens": 0, "cpu_seconds": 0.0}
    return {
        "objective": objective,
        "seed": seed,
        **base,
        **cost,
        "sparsity": sparsity,
        "n": 100,
        "accuracy": accuracy,
        "ci_low": low,
        "ci_high": high,
    }


def test_sections_take_means_over_seeds_by_hand():
    cost = {"trained_tokens": 10, "cpu_seconds": 4.0}
    rows = [
        row("full", 0, 0.0, 0.9),
        row("default", 0, 0.5, 0.8, generated_tokens=100, **cost),
        row("default", 0, 0.75, 0.2, generated_tokens=100, **cost),
        row("default", 1, 0.5, 0.6, generated_tokens=300, **cost),
    ]
    assert cost_section(rows).rows == (("default", 2, 200.0, 10.0, 4.0),)
    found = {cells[:2]: cells[2:] for cells in accuracy_section(rows).rows}
    assert found["default", 0.5] == pytest.approx((2, 0.7, 0.6, 0.8, 0.5, 0.85))
    assert found["default", 0.75] == pytest.approx((1, 0.2, 0.2, 0.2, 0.1, 0.25))
    chart = accuracy_section(rows).chart
    assert chart is not None
    assert chart.flat == ("full",)


def test_report_has_tables_figures_and_curves(tmp_path):
    rows = [row("default", 0, 0.5, 0.8, cpu_seconds=4.0), row("default", 1, 0.5, 0.6)]
    curves = {
        ("default", 0): [{"step": 1, "reward": None, "mean_gate": 0.9}],
        ("default", 1): [
            {"step": 1, "reward": None, "mean_gate": 0.7},
            {"step": 2, "reward": 0.5, "mean_gate": 0.6},
        ],
    }
    written = write_train_report(tmp_path, "toy", rows, curves, run_info())
    assert {path.name for path in written} == {
        "report.md",
        "report.json",
        "report.html",
        "run.json",
        "accuracy.png",
        "reward.png",
        "mean_gate.png",
    }
    assert json.loads((tmp_path / "report.json").read_text()) == rows
    text = (tmp_path / "report.md").read_text()
    assert "| default | 0.500 | 2 | 0.700 | 0.600 | 0.800 |" in text
    # curves are figures alone; their numbers are in the page
    assert "mean_gate.png" in text
    assert "| objective | step |" not in text
    page = (tmp_path / "report.html").read_text()
    assert '"step": 1, "mean_gate": 0.8}' in page
    assert '"step": 2, "reward": 0.5}' in page


def test_a_task_with_fewer_problems_than_asked_for_says_so():
    lines = []

    class Told(type(NO_WATCH)):
        def message(self, text):
            lines.append(text)

    class Small(ForcedToyTask):
        def examples(self, limit=None, *, seed=0, split="test"):
            return islice(super().examples(limit, seed=seed, split=split), 4)

    TrainBenchmark(toy_loaded(layers=2), Small(), BENCH, watch=Told())
    assert len(lines) == 1
    assert "has 4 test problems, not 6" in lines[0]
