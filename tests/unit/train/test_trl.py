"""TRL's trainer with gates: the same gradient as ours on the same rollouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlkv.gates import Gates
from rlkv.hf.attach import attention_modules
from rlkv.hf.engine import left_padded
from rlkv.train.advantage import group_advantages
from rlkv.train.config import LossConfig, PenaltyConfig
from rlkv.train.penalty import adaptive_weight
from rlkv.train.problems import load_problems
from rlkv.train.rewards import verifier_reward
from rlkv.train.worker import Worker
from tests.toy import EvenWords, ToyTask, toy_loaded
from tests.unit.train.test_worker import CONFIG

trl = pytest.importorskip("trl", reason="trl is not installed (rlkv[trl])")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
PENALTY = PenaltyConfig(beta=0.3, tau=0.1)
SHAPE = (2, 4)


def make_trainer(folder, loaded, gates, **settings):
    from datasets import Dataset

    from rlkv.train.trl_adapter import gate_trainer

    examples = list(ToyTask().examples(16, split="train"))
    dataset = Dataset.from_dict(
        {"prompt": [e.prompt for e in examples], "answer": [e.answer for e in examples]}
    )
    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        epsilon=0.4,
        loss_type="dapo",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        **settings,
    )
    return gate_trainer(
        loaded,
        gates,
        penalty=PENALTY,
        sink=4,
        recent=8,
        reward_funcs=verifier_reward(EvenWords()),
        args=arguments,
        train_dataset=dataset,
    )


def test_same_rollouts_give_the_same_gate_gradient(tmp_path):
    loaded = toy_loaded("qwen3", layers=2)
    alpha = np.random.default_rng(0).uniform(0.2, 0.9, SHAPE).astype(np.float32)
    config = replace(CONFIG, loss=LossConfig(micro_rows=8, token_mean="all"))
    worker = Worker(loaded, ToyTask(), config)
    groups = worker.sample(load_problems(loaded, ToyTask(), 2, seed=0), alpha, 0)
    rollouts = [rollout for group in groups for rollout in group]
    advantages = [a for group in groups for a in group_advantages([r.reward for r in group])]
    assert any(advantages)
    ours = worker.policy_gradient(rollouts, advantages, alpha)

    gates = Gates(SHAPE)
    gates.alpha.data.copy_(torch.from_numpy(alpha))
    trainer = make_trainer(tmp_path, loaded, gates, max_steps=1)
    prompts = [r.tokens[: len(r.tokens) - len(r.targets)] for r in rollouts]
    prompt_ids, prompt_mask = left_padded(prompts, 0)
    flipped, mask = left_padded([r.targets[::-1] for r in rollouts], 0)
    mean = sum(r.reward for r in rollouts) / len(rollouts)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": flipped.flip(1),  # padded on the right, as TRL does
        "completion_mask": mask.flip(1),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(ours.tokens),
        "rlkv_mean_reward": torch.tensor(mean),
    }
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer._compute_loss(trainer.model, inputs).backward()
    weight = PENALTY.beta * adaptive_weight(mean, PENALTY.tau) / alpha.size
    wanted = ours.gradient / ours.tokens + weight
    assert np.abs(gates.alpha.grad.numpy() - wanted).max() <= 1e-5
    assert np.abs(wanted).max() > 1e-3
    trainer.detach()
    loaded.model.eval()
    assert not any("rlkv_slot" in vars(m) for m in attention_modules(loaded.model, loaded.spec))
    assert "rlkv_gates.alpha" not in dict(loaded.model.named_parameters())


def test_three_real_steps_move_gates_and_nothing_else(tmp_path):
    loaded = toy_loaded("qwen3", layers=2)
    before = {name: p.clone() for name, p in loaded.model.named_parameters()}
    gates = Gates(SHAPE)
    trainer = make_trainer(tmp_path, loaded, gates, max_steps=3, save_steps=2)
    trainer.train()
    trainer.detach()
    assert trainer.state.global_step == 3
    assert 0 < float((1.0 - gates.alpha.detach()).abs().max()) < 0.1
    assert float(gates.alpha.max()) <= 1.0
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    saved = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert "gates.safetensors" in saved
    assert not any(name.startswith("model") for name in saved)
