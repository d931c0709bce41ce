"""What a run will need: memory, rollouts, tokens and GPU-hours, before any weight loads.

The memory model counts what a training pass holds at its peak: weights, activations kept for the
backward pass, one layer's working set, the output head's chunk, and the caches of a decode batch.
Time is a roofline: decoding reads weights and caches once a step, the rest is arithmetic. The
efficiencies are assumptions and are named in the output.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError
from rlkv.hf.loading import spec_from_config
from rlkv.hf.published import config_for_planning, count_weights
from rlkv.tasks.base import Task
from rlkv.train.config import PHASES, TrainConfig

PROMPT_TOKENS = 200
"""Assumed length of a prompt."""
_ATTENTION_CHUNK = {"cpu": 1 << 19, "gpu": 1 << 27}
"""Scores held at once by mixed attention."""
_LEAST_BLOCK = 128
"""Queries attended with at once, at least."""
_HEAD_BYTES = {"policy": 16, "kl": 24}
"""Bytes per logit at the head's peak, measured: four float32 numbers for log-probabilities, six for
a KL, which has a teacher."""
_CACHE_SPARE = 1.5
"""Room that a decode batch's caches may take, over what is in them: they grow by halves."""


@dataclass(frozen=True, slots=True)
class Device:
    """What time is estimated for: one A100 80 GB."""

    name: str = "A100 80GB"
    memory_bytes: int = 80 * 2**30
    flops: float = 312e12
    """Dense bf16."""
    bandwidth: float = 2.0e12
    """Bytes per second."""
    compute_share: float = 0.4
    """Assumed share of ``flops`` reached in training and prefill."""
    bandwidth_share: float = 0.5
    """Assumed share of ``bandwidth`` reached in decoding."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the memory model needs to know of a model."""

    spec: ModelSpec
    """KV heads."""
    parameters: int
    """Weights."""
    layers: int
    """All layers."""
    hidden: int
    """Width of the residual stream."""
    inner: int
    """Width of the feed-forward part."""
    vocab: int
    """Tokens of the vocabulary."""
    positions: int
    """Tokens that a sequence may have; 0 where there is no limit."""
    has_query_norm: bool = False
    """Whether queries and keys are normalised, as in Qwen3."""


def sizes_of(name: str) -> tuple[Sizes, bool]:
    """Sizes of a model, and whether its own config was read.

    Raises:
        ConfigError: Its config cannot be read.
        UnsupportedModelError: Its attention cannot be split.
    """
    config, own = config_for_planning(name)
    text = config.get_text_config(decoder=True)
    parameters, has_query_norm = count_weights(config)
    sizes = Sizes(
        spec_from_config(config, name),
        parameters,
        text.num_hidden_layers,
        text.hidden_size,
        text.intermediate_size,
        text.vocab_size,
        text.max_position_embeddings or 0,
        has_query_norm,
    )
    return sizes, own


def training_bytes(
    sizes: Sizes,
    rows: int,
    tokens: int,
    *,
    checkpointing: bool,
    head_chunk: int,
    scored: int | None = None,
    kind: str = "gpu",
    loss: str = "policy",
) -> dict[str, int]:
    """Peak bytes of one forward and backward pass over frozen weights.

    Args:
        sizes: The model.
        rows: Sequences in the pass.
        tokens: Tokens of each.
        checkpointing: Whether layers keep nothing but their input.
        head_chunk: Logits held at once, in numbers.
        scored: Scored tokens of the whole pass; default: all.
        loss: ``"policy"`` or ``"kl"``, the warm start's.
        kind: ``"gpu"`` or ``"cpu"``, which hold attention scores in chunks of different size.
    """
    spec, width = sizes.spec, sizes.spec.dtype_bytes
    count = rows * tokens
    heads = spec.num_query_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    # what autograd keeps of a layer whose weights are frozen: inputs of norms, in float32, and of
    # products of two activations; a frozen linear map keeps nothing
    norms = 2 * sizes.hidden * 4 + ((heads + kv) * 4 if sizes.has_query_norm else 0)
    attention = (heads + 2 * kv) * width
    feed_forward = 3 * sizes.inner * width
    layer = count * (norms + attention + feed_forward)
    kept = sizes.layers * (count * sizes.hidden * width if checkpointing else layer)
    # both branches' probabilities, their gradients and those of the scores
    row = spec.num_query_heads * tokens
    block = min(tokens, max(_LEAST_BLOCK, _ATTENTION_CHUNK[kind] // row))
    scores = max(row * block, min(_ATTENTION_CHUNK[kind], rows * row * block))
    chunk = min(head_chunk, (scored or count) * sizes.vocab)
    return {
        "weights_bytes": sizes.parameters * width,
        "activation_bytes": kept,
        # of both branches: what may be seen, and the same as a number to add
        "mask_bytes": rows * tokens * (tokens + block) // 2 * 2 * (1 + 4),
        "recomputed_bytes": layer if checkpointing else 0,
        "working_bytes": 6 * scores * 4,
        "head_bytes": chunk * _HEAD_BYTES[loss],
    }


def peak_bytes(parts: dict[str, int]) -> int:
    """Peak of a pass from its parts: the head is done before the last layer is begun."""
    always = parts["weights_bytes"] + parts["activation_bytes"] + parts["mask_bytes"]
    return always + max(parts["head_bytes"], parts["recomputed_bytes"] + parts["working_bytes"])


def estimate(config: TrainConfig, task: Task, device: Device | None = None) -> dict[str, Any]:
    """A dry run's findings, one flat row and the config as it would run.

    Raises:
        ConfigError: The prompt and completion do not fit the model.
    """
    device = device or Device()
    sizes, own = sizes_of(config.model)
    limit = config.rollout.max_new_tokens or task.max_new_tokens
    length = PROMPT_TOKENS + limit
    if sizes.positions and length > sizes.positions:
        raise ConfigError(
            f"prompts of about {PROMPT_TOKENS} tokens and completions of {limit} do not fit the "
            f"{sizes.positions} positions of {config.model}; lower rollout.max_new_tokens"
        )
    return {
        "model": config.model,
        "task": config.task,
        "objective": config.objective,
        "shape_from": "the model's config" if own else "the published shape (config unreachable)",
        "kv_heads": f"{sizes.spec.num_layers}x{sizes.spec.num_kv_heads}",
        "parameters": sizes.parameters,
        **_memory(sizes, config, length, device),
        **_work(sizes, config, task, _mean_length(config, limit), device),
        "assuming": f"{device.name}, {device.compute_share:.0%} of its arithmetic in training, "
        f"{device.bandwidth_share:.0%} of its bandwidth in decoding",
        "config": asdict(config),
    }


def _memory(sizes: Sizes, config: TrainConfig, length: int, device: Device) -> dict[str, Any]:
    """Bytes of training and decoding, and whether the larger of them fits."""
    memory = training_bytes(
        sizes,
        config.loss.micro_rows,
        length,
        checkpointing=config.loss.gradient_checkpointing,
        head_chunk=config.loss.head_chunk,
        loss="kl" if config.objective in ("warm", "default") else "policy",
    )
    rollout, weights = config.rollout, memory["weights_bytes"]
    caches = int(rollout.decode_rows * sizes.spec.kv_bytes(length) * _CACHE_SPARE)
    engine = 0
    peak = max(weights + caches, peak_bytes(memory))
    if rollout.engine == "vllm":  # holds weights and pool of its own, all the time
        engine, caches = weights, rollout.kv_bytes or caches
        peak = peak_bytes(memory) + engine + caches
    return {
        **memory,
        "decode_cache_bytes": caches,
        "rollout_engine_bytes": engine,
        "peak_bytes": peak,
        "fits": peak <= device.memory_bytes,
    }


def settings_that_fit(
    config: TrainConfig, task: Task, device: Device | None = None
) -> dict[str, bool | int] | None:
    """The fewest changes with which a run fits, by dotted name; None: no settings make it fit.

    Whatever the settings, results stay the same up to rounding: only time and memory change.
    """
    device = device or Device()
    sizes, _ = sizes_of(config.model)
    length = PROMPT_TOKENS + (config.rollout.max_new_tokens or task.max_new_tokens)
    changes: dict[str, bool | int] = {}
    while not (memory := _memory(sizes, config, length, device))["fits"]:
        change = _next_change(config, memory, device)
        if change is None:
            return None
        table, name, value = change
        changes[f"{table}.{name}"] = value
        config = replace(config, **{table: replace(getattr(config, table), **{name: value})})
    return changes


def _next_change(
    config: TrainConfig, memory: dict[str, Any], device: Device
) -> tuple[str, str, bool | int] | None:
    """Table, name and value of a setting that makes the larger of decoding and training smaller."""
    if memory["weights_bytes"] + memory["decode_cache_bytes"] > device.memory_bytes:
        rows = config.rollout.decode_rows
        return ("rollout", "decode_rows", rows // 2) if rows > 1 else None
    if not config.loss.gradient_checkpointing:
        return "loss", "gradient_checkpointing", True
    rows = config.loss.micro_rows
    if rows > 1:
        return "loss", "micro_rows", rows // 2
    # vLLM's pool is there while the model trains; a given size does not follow decode_rows
    rollout = config.rollout
    if rollout.engine == "vllm" and rollout.kv_bytes is None and rollout.decode_rows > 1:
        return "rollout", "decode_rows", rollout.decode_rows // 2
    return None


def _work(
    sizes: Sizes, config: TrainConfig, task: Task, mean: float, device: Device
) -> dict[str, Any]:
    """Rollouts, tokens and hours; ``mean`` is the mean length of a completion."""
    steps = 0 if config.objective in ("warm", "ablation") else config.steps
    rollouts = steps * config.rollout.prompts_per_step * config.rollout.group_size
    sampled = _sampled_problems(config)
    writes = task.mode == "generate"
    generated = int(rollouts * mean) if writes else 0
    solving = int(sampled * mean) if writes else 0
    warm = config.warm.steps if "warm" in PHASES[config.objective] else 0
    trained = int((rollouts + warm * config.warm.rows) * (mean + PROMPT_TOKENS))
    # forward, backward through activations, and the forward again where layers are checkpointed
    passes = 6 if config.loss.gradient_checkpointing else 4
    compute = trained * passes * sizes.parameters / (device.flops * device.compute_share)
    decode = _decode_seconds(sizes, config, generated, mean, device)
    solve = _decode_seconds(sizes, config, solving, mean, device)
    return {
        "rollouts": rollouts,
        "sampled_problems": sampled,
        "mean_tokens": int(mean),
        "sampling_tokens": solving,
        "generated_tokens": generated,
        "trained_tokens": trained,
        "gpu_hours_sampling": round(solve / 3600, 1),
        "gpu_hours": round((decode + compute) / 3600, 1),
    }


def _mean_length(config: TrainConfig, limit: int) -> float:
    """Mean completion length: mid-strata weighted by quota, else the limit (an upper bound)."""
    distill = config.distill
    if not distill.quotas:
        return float(limit)
    starts = (0, *distill.edges[:-1])
    middles = [(a + b) / 2 for a, b in zip(starts, distill.edges, strict=True)]
    total = sum(m * n for m, n in zip(middles, distill.quotas, strict=True))
    return min(float(limit), total / sum(distill.quotas))


def _sampled_problems(config: TrainConfig) -> int:
    """Problems answered with the full cache before learning starts, at most."""
    if config.distill.enabled:
        return config.distill.candidates or config.rollout.problems
    return config.warm.solutions if config.objective in ("warm", "default") else 0


def _decode_seconds(
    sizes: Sizes, config: TrainConfig, generated: int, mean: float, device: Device
) -> float:
    """Each step reads all weights and, for every row, a cache that is half grown on average."""
    rows = config.rollout.decode_rows
    cache = rows * sizes.spec.kv_bytes(int(PROMPT_TOKENS + mean / 2))
    weights = sizes.parameters * sizes.spec.dtype_bytes
    step = (weights + cache) / (device.bandwidth * device.bandwidth_share)
    return generated / rows * step
