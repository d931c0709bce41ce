"""The paper's recipe as settings, and the settings of each objective.

Sources: paper section 4 and appendix B, and the authors' configs. Where they differ: the paper
normalises advantages and takes mean reward within groups, the code over the batch.
"""

from __future__ import annotations

from rlkv.train.config import (
    DistillConfig,
    LossConfig,
    MonitorConfig,
    Objective,
    OptimizerConfig,
    PenaltyConfig,
    RolloutConfig,
    TrainConfig,
    WarmStartConfig,
)


def preset(model: str, task: str, objective: Objective = "default") -> TrainConfig:
    """The settings that an objective starts from."""
    if objective == "paper":
        return paper(model, task)
    if objective == "warm":  # no on-policy phase follows: gates travel all the way
        return TrainConfig(model, task, objective, warm=WarmStartConfig(steps=40))
    return TrainConfig(model, task, objective)


def paper(model: str, task: str) -> TrainConfig:
    """185 steps of 32 prompts x 4 completions at 128 + 256 tokens of window.

    Advantages are within groups, as in the paper; the penalty takes the mean reward of the batch,
    as in the authors' code (``penalty.scope`` has both).
    """
    return TrainConfig(
        model,
        task,
        objective="paper",
        steps=185,
        sink=128,
        recent=256,
        rollout=RolloutConfig(
            prompts_per_step=32,
            group_size=4,
            prompts_per_unit=8,
            redraws=0,
            live_share=0.0,
            problems=3000,
        ),
        loss=LossConfig(clip=0.4, token_mean="all"),
        penalty=PenaltyConfig(beta=1e-3, tau=0.5),
        optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.017, max_grad_norm=1.0),
        distill=DistillConfig(enabled=True),
        monitor=MonitorConfig(every=0),
    )
