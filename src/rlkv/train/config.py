"""TrainConfig: everything that decides what a training run learns.

Numbers of the paper and of its authors' configs are in :mod:`rlkv.train.presets`; the defaults here
are those of RLKV's own objective, a dense warm start followed by a short on-policy phase.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlkv.errors import ConfigError

Objective = Literal["default", "paper", "warm", "ablation"]
Scope = Literal["group", "batch"]

PHASES: dict[str, tuple[str, ...]] = {
    "default": ("warm", "grpo"),
    "warm": ("warm",),
    "paper": ("grpo",),
    "ablation": (),
}
"""Phases of each objective, in order."""


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are drawn from the gated model."""

    engine: Literal["hf", "vllm"] = "hf"
    """Who writes completions: the training model itself, or vLLM with mixed attention."""
    prompts_per_step: int = 24
    """Prompts in one optimizer step."""
    group_size: int = 4
    """Completions per prompt; advantages compare them."""
    temperature: float = 1.0
    """Logits are divided by it, in sampling and in the loss alike."""
    top_p: float = 1.0
    """Smallest set of tokens with this much probability; 1 keeps all."""
    top_k: int = 0
    """Number of most likely tokens kept; 0 keeps all."""
    max_new_tokens: int | None = None
    """Completion limit in tokens; None takes the task's."""
    prompts_per_unit: int = 24
    """Prompts in one unit of work, the piece that is handed to a worker."""
    redraws: int = 0
    """Times that further prompts are drawn in a step while too few groups carry a signal; never
    with ``loss.advantage = "batch"`` or several ``loss.updates``."""
    live_share: float = 0.1
    """Share of ``prompts_per_step`` groups with differing rewards under which prompts are redrawn;
    0 never redraws."""
    reward: Literal["task", "agreement", "likelihood"] = "task"
    """``task``: the verifier's; for tasks without a checkable answer, ``agreement`` with the full
    model's greedy answer, or ``likelihood`` of the completion under the full model. Forced tasks
    have gold answers: ``task`` only."""
    problems: int = 2000
    """Training problems to draw prompts from."""
    decode_rows: int = 96
    """Completions decoded together."""
    kv_bytes: int | None = None
    """Bytes of vLLM's KV pool; None: room for ``decode_rows`` completions of full length."""

    def __post_init__(self) -> None:
        counts = (self.prompts_per_step, self.prompts_per_unit, self.problems, self.decode_rows)
        if min(counts) < 1 or self.group_size < 2:
            raise ConfigError(
                "rollout: prompts_per_step, prompts_per_unit, problems and decode_rows must be at "
                "least 1, group_size at least 2"
            )
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(
                f"rollout max_new_tokens is {self.max_new_tokens}, expected at least 1; raise it, "
                "or leave it out for the task's own limit"
            )
        if not 0.0 < self.top_p <= 1.0 or self.top_k < 0:
            raise ConfigError(
                f"rollout top_p {self.top_p} and top_k {self.top_k}: expected top_p in (0, 1] and "
                "top_k at least 0; the defaults 1 and 0 keep all tokens"
            )
        if self.temperature <= 0:
            raise ConfigError(
                f"rollout temperature {self.temperature} leaves nothing to compare; use above 0"
            )
        if self.kv_bytes is not None and self.kv_bytes < 1:
            raise ConfigError(f"rollout kv_bytes is {self.kv_bytes}; give bytes, or leave it out")
        if self.redraws < 0 or not 0.0 <= self.live_share <= 1.0:
            raise ConfigError("rollout: redraws must be at least 0, live_share in [0, 1]")


@dataclass(frozen=True)
class LossConfig:
    """The policy-gradient loss."""

    advantage: Scope = "group"
    """Rewards are compared within a prompt's group (the paper) or over the whole batch (the
    authors' code)."""
    clip: float = 0.4
    """Probability ratios count within [1 - clip, 1 + clip]; active once ``updates`` exceeds 1."""
    decoupled: bool = False
    """Weight tokens by policy over sampling distribution, which top-p and top-k make differ."""
    max_weight: float = 5.0
    """Tokens with a larger weight than this are left out, where ``decoupled``."""
    updates: int = 1
    """Optimizer steps per batch of rollouts."""
    token_mean: Literal["live", "all"] = "live"
    """Tokens that the loss is a mean over: those of groups with a signal, or all (the paper)."""
    micro_rows: int = 16
    """Sequences in one forward and backward pass."""
    gradient_checkpointing: bool = False
    """Keep no activations inside layers: far less memory for a third more time."""
    head_chunk: int = 1 << 25
    """Logits held at once, in numbers: bounds memory where vocabularies are large."""

    def __post_init__(self) -> None:
        if not 0.0 < self.clip < 1.0:
            raise ConfigError(f"loss clip {self.clip} is outside (0, 1); the paper uses 0.4")
        if self.updates < 1 or self.micro_rows < 1 or self.head_chunk < 1:
            raise ConfigError("loss: updates, micro_rows and head_chunk must be at least 1")


@dataclass(frozen=True)
class PenaltyConfig:
    """The L1 pressure on gates: beta · c(mean reward) · mean|alpha|."""

    beta: float = 0.1
    """Strength; the paper's 1e-3 belongs to its 185 steps on 256 heads."""
    tau: float = 0.5
    """Mean reward up to which there is no pressure."""
    kind: Literal["adaptive", "fixed"] = "adaptive"
    """``"adaptive"``: c = exp(r) - 1 above tau; ``"fixed"``: c = ``fixed_weight`` always."""
    fixed_weight: float = 1.2
    """c of the fixed penalty; 1.2 is the adaptive one at a mean reward of 0.79."""
    scope: Scope = "batch"
    """Mean reward of the batch (the authors' code), or of each group, then averaged (eq. 4)."""

    def __post_init__(self) -> None:
        if self.beta < 0 or self.fixed_weight < 0 or not 0.0 <= self.tau <= 1.0:
            raise ConfigError("penalty: beta and fixed_weight must be at least 0, tau in [0, 1]")


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam on the gates; a step moves a gate by about the learning rate."""

    learning_rate: float = 2e-2
    """Constant over the run."""
    weight_decay: float = 0.0
    """Decoupled (AdamW); pulls gates towards 0."""
    max_grad_norm: float | None = None
    """Norm that the gradient is scaled down to; None leaves it."""

    def __post_init__(self) -> None:
        if self.learning_rate <= 0 or self.weight_decay < 0:
            raise ConfigError("optimizer: learning_rate must be above 0, weight_decay at least 0")


@dataclass(frozen=True)
class WarmStartConfig:
    """The dense phase: KL(full ‖ gated) + l1 · mean alpha on the model's own correct rollouts."""

    steps: int = 12
    """Optimizer steps; a gate needs 30 from ``init`` to 0 at the default learning rate. Few of them
    leave the order of the needed heads to the rewards of the on-policy phase."""
    solutions: int = 128
    """Correct full-cache completions to learn from; forced tasks use as many gold ones. With
    ``distill.enabled`` the warm start learns from all problems that it kept."""
    rows: int = 12
    """Solutions in one step."""
    l1: float = 0.1
    """Weight of the mean gate against the KL in nats per token."""
    init: float = 0.9
    """Starting value of every gate; at 1 the KL has no gradient."""
    learning_rate: float = 3e-2
    """Of Adam, in this phase."""
    teacher_bytes: int = 1 << 30
    """Memory for the full model's cached outputs; beyond it they are computed again."""

    def __post_init__(self) -> None:
        if self.steps < 0 or min(self.solutions, self.rows) < 1:
            raise ConfigError("warm: steps must be at least 0, solutions and rows at least 1")
        if not 0.0 < self.init <= 1.0 or self.learning_rate <= 0 or self.l1 < 0:
            raise ConfigError("warm: init in (0, 1], learning_rate above 0, l1 at least 0")


@dataclass(frozen=True)
class DistillConfig:
    """Self-distillation sampling: training problems that the full model itself solves."""

    enabled: bool = False
    """Draw on-policy prompts only from problems solved by greedy full-cache decoding."""
    candidates: int = 0
    """Training problems to try; 0 tries ``rollout.problems``."""
    edges: tuple[int, ...] = ()
    """Ascending response lengths in tokens that separate the strata; the last one is the longest
    response kept. Empty: one stratum."""
    quotas: tuple[int, ...] = ()
    """Problems kept in each stratum; empty: ``rollout.problems`` in all."""

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.quotas) or list(self.edges) != sorted(set(self.edges)):
            raise ConfigError(
                "distill: edges must ascend and quotas must have one number for each of them"
            )


@dataclass(frozen=True)
class AblationConfig:
    """Leave-one-head-out scores, the baseline without training."""

    signal: Literal["reward", "kl"] = "reward"
    """What a head's absence costs: reward of greedy rollouts, or KL on stored solutions."""
    problems: int = 64
    """Problems or solutions per head."""


@dataclass(frozen=True)
class MonitorConfig:
    """What is watched while training."""

    sparsity: float = 0.5
    """Sparsity that the profile is meant for: the binary model's reward is measured at it."""
    every: int = 10
    """Steps between two measurements of the binary model; 0 never measures."""
    problems: int = 48
    """Problems in one measurement, none of which are trained on."""
    stable_steps: int = 0
    """A phase ends early when the set of kept heads has hardly changed for as many steps; 0: no."""
    stable_overlap: float = 0.95
    """Jaccard overlap of kept heads that counts as unchanged."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: str
    """Model name, local folder or hub id."""
    task: str
    """Name of a task, see ``rlkv list tasks``."""
    objective: Objective = "default"
    """``default``: warm start, then GRPO; ``paper``: GRPO alone; ``warm``: warm start alone;
    ``ablation``: leave-one-head-out."""
    steps: int = 20
    """GRPO steps."""
    seed: int = 0
    """Decides problems, draws and order."""
    sink: int = 16
    """First tokens that the local branch sees."""
    recent: int = 64
    """Last tokens that the local branch sees."""
    checkpoint_every: int = 10
    """Steps between two checkpoints."""
    dtype: str = "auto"
    """Type of the weights: auto, float32, bfloat16 or float16."""
    data: str | None = None
    """Local JSON-lines file that replaces the task's own data."""
    reward_function: str | None = None
    """``package.module:name`` of a function in TRL's signature; replaces the task's verifier."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How completions are drawn."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The policy-gradient loss."""
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    """The L1 pressure."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Adam in the GRPO phase."""
    warm: WarmStartConfig = field(default_factory=WarmStartConfig)
    """The dense phase."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """Self-distillation sampling."""
    ablation: AblationConfig = field(default_factory=AblationConfig)
    """Leave-one-head-out."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """What is watched."""

    def __post_init__(self) -> None:
        if self.steps < 0 or self.checkpoint_every < 1:
            raise ConfigError("steps must be at least 0 and checkpoint_every at least 1")


def unused_sections(objective: str) -> set[str]:
    """Tables of settings that have no part in what an objective learns."""
    unused = set() if "warm" in PHASES[objective] else {"warm"}
    return unused if objective == "ablation" else {*unused, "ablation"}
