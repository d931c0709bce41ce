"""Advantages, penalty and losses against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlkv.errors import ConfigError
from rlkv.train.advantage import batch_advantages, group_advantages, is_live
from rlkv.train.config import LossConfig, PenaltyConfig, RolloutConfig, TrainConfig
from rlkv.train.loss import kl_loss, policy_loss
from rlkv.train.penalty import adaptive_weight, penalty_weight
from rlkv.train.steps import penalty_gradient


def test_group_advantages_are_centred_and_scaled_by_the_unbiased_std():
    # mean 1/4, unbiased variance (3 · 1/16 + 9/16) / 3 = 1/4
    found = group_advantages([1.0, 0.0, 0.0, 0.0])
    assert found == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3])


def test_equal_rewards_have_no_advantage():
    assert group_advantages([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]
    assert batch_advantages([0.0, 0.0], [4, 9]) == [0.0, 0.0]
    assert not is_live([0.3, 0.3])


def test_batch_advantages_weigh_rollouts_by_their_tokens():
    # R = +5 on 3 tokens, -5 on 1: mean 2.5, unbiased variance (3 · 2.5² + 7.5²) / 3 = 25
    assert batch_advantages([1.0, 0.0], [3, 1]) == pytest.approx([2.5 / 5.00001, -7.5 / 5.00001])


def test_penalty_is_cut_strictly_at_tau():
    assert adaptive_weight(0.5, 0.5) == 0.0
    assert adaptive_weight(0.5 + 1e-9, 0.5) == pytest.approx(math.exp(0.5) - 1)
    assert adaptive_weight(math.log(2), 0.5) == pytest.approx(1.0)
    assert adaptive_weight(1.0, 0.5) == pytest.approx(math.e - 1)


def test_penalty_scope_batch_and_group_differ_as_defined():
    groups = [[1.0, 1.0], [0.0, 0.0]]  # batch mean 0.5 = tau, group means 1 and 0
    assert penalty_weight(groups, PenaltyConfig(scope="batch")) == 0.0
    assert penalty_weight(groups, PenaltyConfig(scope="group")) == pytest.approx((math.e - 1) / 2)
    fixed = PenaltyConfig(kind="fixed", fixed_weight=1.5)
    assert penalty_weight(groups, fixed) == 1.5


def test_l1_gradient_is_the_weight_over_the_number_of_heads():
    alpha = np.full((3, 4), 0.5, dtype=np.float32)
    alpha[0, 0] = 0.0
    weight = 0.03 * adaptive_weight(math.log(2), 0.5)
    gradient = penalty_gradient(alpha, weight)
    assert gradient[0, 0] == 0.0
    assert gradient.reshape(-1)[1:] == pytest.approx(np.full(11, 0.03 / 12))


def log(*probs: float) -> torch.Tensor:
    return torch.tensor(probs).log()


def test_loss_clips_the_ratio_on_the_side_that_gains():
    old = log(0.5, 0.5, 0.5, 0.5)
    new = log(0.9, 0.9, 0.1, 0.1)  # ratios 1.8, 1.8, 0.2, 0.2
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    # A > 0: min(ratio, 1.4); A < 0: max(ratio, 0.6)
    loss = policy_loss(new, old, advantages, clip=0.4)
    assert float(loss) == pytest.approx(-1.4 + 1.8 - 0.2 + 0.6, abs=1e-6)


def test_clipped_tokens_have_no_gradient():
    new = log(0.9, 0.5).requires_grad_()
    policy_loss(new, log(0.5, 0.5), torch.tensor([1.0, 1.0]), clip=0.4).backward()
    assert new.grad.tolist() == pytest.approx([0.0, -1.0])


def test_decoupled_loss_weights_by_old_over_sampling_and_drops_beyond_the_cap():
    old = log(0.4, 0.6)
    drawn = log(0.8, 0.1)  # weights 0.5 and 6
    loss = policy_loss(
        old, old, torch.tensor([1.0, 1.0]), clip=0.4, sampling_log_probs=drawn, max_weight=5.0
    )
    assert float(loss) == pytest.approx(-0.5)


def test_kl_is_zero_for_equal_and_known_for_simple_distributions():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    assert float(kl_loss(logits, logits)) == 0.0
    teacher, student = log(0.5, 0.5)[None], log(0.25, 0.75)[None]
    wanted = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert float(kl_loss(teacher, student)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RolloutConfig(group_size=1),
        lambda: RolloutConfig(temperature=0.0),
        lambda: LossConfig(clip=1.0),
        lambda: PenaltyConfig(tau=1.5),
        lambda: TrainConfig("m", "t", steps=-1),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ConfigError):
        make()
