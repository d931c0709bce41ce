"""The clipped policy-gradient loss of each token, and the KL of the warm start.

With w = pi / pi_sampling where decoupled, ratio = pi / pi_old:
loss_t = w · max(-A · ratio, -A · clip(ratio, 1 - eps, 1 + eps)); tokens with w above the cap count
0. Losses are summed here and divided by the batch's tokens by the caller: a token mean.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    sampling_log_probs: Tensor | None = None,
    max_weight: float = 5.0,
) -> Tensor:
    """Sum of token losses, a scalar with gradient.

    Args:
        log_probs: (tokens,) float32, of the policy being trained.
        old_log_probs: (tokens,) float32, of the policy before this batch's first update.
        advantages: (tokens,) float32.
        clip: eps, half-width of the ratio's range.
        sampling_log_probs: (tokens,) float32, of the distribution that tokens were drawn from; None
            takes it to be the old policy.
        max_weight: Cap on w.
    """
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1.0 - clip, 1.0 + clip)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    if sampling_log_probs is not None:
        weight = (old_log_probs - sampling_log_probs).exp()
        losses = losses * torch.where(weight > max_weight, 0.0, weight).detach()
    return losses.sum()


def kl_loss(teacher_logits: Tensor, logits: Tensor) -> Tensor:
    """Sum over tokens of KL(teacher ‖ student) in nats, a scalar with gradient.

    Args:
        teacher_logits: (tokens, vocab), without gradient.
        logits: (tokens, vocab).
    """
    teacher = teacher_logits.float().log_softmax(dim=-1)
    student = logits.float().log_softmax(dim=-1)
    return (teacher.exp() * (teacher - student)).sum()
