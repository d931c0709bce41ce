"""End to end: a head that is known to matter keeps its gate, all others lose theirs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlkv.errors import DataError
from rlkv.hf.attach import attention_modules
from rlkv.train.config import (
    AblationConfig,
    DistillConfig,
    LossConfig,
    MonitorConfig,
    PenaltyConfig,
    RolloutConfig,
    TrainConfig,
    WarmStartConfig,
)
from rlkv.train.monitor import collapse_alarm, is_stable, kept_heads, overlap
from rlkv.train.problems import load_problems
from rlkv.train.self_distillation import solve
from rlkv.train.trainer import Trainer
from tests.toy import ForcedToyTask, ToyTask, toy_loaded

NEEDED = (1, 2)
CONFIG = TrainConfig(
    "toy",
    "forced_toy",
    sink=2,
    recent=4,
    loss=LossConfig(micro_rows=8),
    rollout=RolloutConfig(prompts_per_step=8, prompts_per_unit=8, problems=24, group_size=8),
    warm=WarmStartConfig(steps=40, solutions=16, rows=8, l1=0.02, learning_rate=5e-2),
    monitor=MonitorConfig(every=0),
)


def one_head_model():
    """A random model in which every KV head but one writes nothing."""
    loaded = toy_loaded("qwen3", layers=2)
    with torch.no_grad():
        for layer, module in enumerate(attention_modules(loaded.model, loaded.spec)):
            weight = module.o_proj.weight.view(64, 4, 2 * 16)  # hidden, kv heads, group · head_dim
            for head in range(4):
                if (layer, head) != NEEDED:
                    weight[:, head] = 0.0
                else:
                    weight[:, head] *= 4.0
    return loaded


def test_warm_start_finds_the_head_that_matters():
    config = replace(CONFIG, objective="warm")
    scores = Trainer(config, one_head_model(), ForcedToyTask()).run().profile.scores
    assert scores[NEEDED] > 0.5
    others = np.delete(scores.reshape(-1), NEEDED[0] * 4 + NEEDED[1])
    assert others.max() == 0.0


def test_kl_ablation_finds_it_too():
    config = replace(CONFIG, objective="ablation", ablation=AblationConfig("kl", problems=4))
    scores = Trainer(config, one_head_model(), ForcedToyTask()).run().profile.scores
    assert scores[NEEDED] == 1.0
    assert np.delete(scores.reshape(-1), NEEDED[0] * 4 + NEEDED[1]).max() < 1e-3


def test_reward_ablation_scores_every_head():
    config = replace(CONFIG, objective="ablation", ablation=AblationConfig("reward", problems=8))
    result = Trainer(config, toy_loaded("qwen3", layers=2), ToyTask()).run()
    assert result.profile.source == "ablation"
    assert result.profile.scores.max() in (0.0, 1.0)
    # greedy completions of 8 problems, once in full and once per head
    assert 9 * 8 <= result.progress.generated_tokens <= 9 * 8 * ToyTask.max_new_tokens


def test_grpo_keeps_gates_at_one_without_penalty_and_signal():
    config = replace(
        CONFIG,
        objective="paper",
        steps=2,
        penalty=PenaltyConfig(beta=0.0),
        rollout=replace(CONFIG.rollout, redraws=1),
        task="toy",
    )

    class Never(ToyTask):
        @staticmethod
        def verifier(completion, answer):
            from rlkv.verifiers.base import Score

            return Score(0.0, None, "wrong")

    result = Trainer(config, toy_loaded("qwen3", layers=2), Never()).run()
    assert (result.profile.scores == 1.0).all()
    assert [row["live_groups"] for row in result.metrics] == [0, 0]
    # too few live groups: each step drew once more
    assert result.progress.drawn == 2 * 2 * 8


def test_stable_heads_end_a_phase_early():
    config = replace(
        CONFIG,
        objective="warm",
        monitor=MonitorConfig(every=0, stable_steps=5, sparsity=0.5),
        warm=replace(CONFIG.warm, steps=60),
    )
    result = Trainer(config, one_head_model(), ForcedToyTask()).run()
    assert 5 < result.progress.total_steps < 60


def test_solutions_continue_from_a_file(tmp_path):
    loaded = toy_loaded("qwen3", layers=2)
    problems = load_problems(loaded, ToyTask(), 20, seed=0)
    settings = {"config": DistillConfig(), "max_new_tokens": 6, "rows": 4}
    path = tmp_path / "solutions.jsonl"
    whole = solve(loaded, ToyTask(), problems, count=6, path=path, **settings)
    assert len(whole.solutions) == 6
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:30])  # killed while writing
    again = solve(loaded, ToyTask(), problems, count=6, path=path, **settings)
    assert again == whole
    assert path.read_bytes().splitlines(keepends=True) == lines
    with pytest.raises(DataError, match="remove the file"):
        solve(loaded, ToyTask(), problems, count=6, path=path, **{**settings, "rows": 5})


def test_strata_fill_up_to_their_quota():
    loaded = toy_loaded("qwen3", layers=2)
    problems = load_problems(loaded, ToyTask(), 40, seed=0)
    config = DistillConfig(enabled=True, edges=(2, 6), quotas=(1, 3))
    found = solve(
        loaded, ToyTask(), problems, count=99, config=config, max_new_tokens=6, rows=8
    ).solutions
    lengths = [solution.length for solution in found]
    assert sum(length <= 2 for length in lengths) <= 1
    assert sum(2 < length <= 6 for length in lengths) == 3


def test_kept_heads_break_ties_like_profiles():
    alpha = np.array([[0.5, 0.9], [0.5, 0.1]], dtype=np.float32)
    assert kept_heads(alpha, 0.5) == {1, 0}
    assert overlap(frozenset({1, 2}), frozenset({2, 3})) == pytest.approx(1 / 3)
    assert not is_stable([alpha, alpha], sparsity=0.5, steps=2, least=0.9)
    assert is_stable([alpha] * 3, sparsity=0.5, steps=2, least=0.9)
    assert not is_stable([1 - alpha, alpha, alpha], sparsity=0.5, steps=2, least=0.9)


def test_collapse_is_named_with_what_to_change():
    falling = [0.9] * 10 + [0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0]
    gates = [1.0 - 0.02 * i for i in range(len(falling))]
    fixed = collapse_alarm(falling, gates, PenaltyConfig(kind="fixed", beta=0.3))
    assert fixed is not None
    assert "penalty.kind" in fixed
    assert "0.3" in fixed
    adaptive = collapse_alarm(falling, gates, PenaltyConfig(tau=0.2))
    assert adaptive is not None
    assert "penalty.tau" in adaptive
    assert collapse_alarm([0.9] * 30, gates + [0.1] * 12, PenaltyConfig()) is None
    assert collapse_alarm(falling, [0.5] * len(falling), PenaltyConfig()) is None


def test_several_updates_draw_once_and_train_each_time():
    once = replace(CONFIG, objective="paper", steps=2, task="toy")
    found = []
    for updates in (1, 3):
        loss = replace(CONFIG.loss, updates=updates, advantage="batch")
        result = Trainer(replace(once, loss=loss), toy_loaded("qwen3", layers=2), ToyTask()).run()
        found.append(result)
    first, third = found
    assert first.progress.drawn == third.progress.drawn == 2 * 8
    first_step = [result.metrics[0] for result in found]
    assert first_step[0]["generated_tokens"] == first_step[1]["generated_tokens"] > 0
    assert first_step[1]["trained_tokens"] == 3 * first_step[0]["trained_tokens"]
    assert not np.array_equal(first.profile.scores, third.profile.scores)
