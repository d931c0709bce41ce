"""Tiny random models, profiles, and engines run each in a forked child.

vLLM takes many seconds to import, so it is imported once; a child per engine keeps them apart.
"""

from __future__ import annotations

import os
import pickle
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

os.environ.update(
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
)

LAYERS, HEADS = 4, 4
ARCHITECTURES = ("llama", "qwen2", "qwen3")
PROMPT_LENGTHS = (17, 40, 64, 79, 80, 81, 96, 130, 200, 300, 333, 512, 700, 1000, 1500, 2000)


@dataclass(frozen=True)
class TinyModel:
    """A random model on disk, with a profile that has an all-full and an all-local layer."""

    folder: Path
    profile: Path

    def full(self, sparsity: float) -> np.ndarray:
        from rlkv.core.head_profile import HeadProfile

        return HeadProfile.load(self.profile).full_heads(sparsity)


@dataclass(frozen=True)
class Run:
    """What one engine produced."""

    completions: list[list[int]]
    facts: dict = field(default_factory=dict)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> dict[str, TinyModel]:
    pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own")
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder, name) for name in ARCHITECTURES}


def make_model(folder: Path, name: str, *, heads: int = HEADS, layers: int = LAYERS) -> TinyModel:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    from rlkv.core.head_profile import HeadProfile
    from rlkv.core.model_spec import ModelSpec

    config_class = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[name]
    torch.manual_seed(1)
    config = config_class(
        vocab_size=512,
        hidden_size=64 * heads,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=2 * heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        initializer_range=0.08,  # wide enough that greedy choices are far from ties
        tie_word_embeddings=False,
        eos_token_id=511,
        bos_token_id=510,
        **({"head_dim": 32} if name == "qwen3" else {}),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for block in model.model.layers:
        for projection in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
            if projection.bias is not None:  # zero by default, which would hide a lost reordering
                torch.nn.init.normal_(projection.bias, std=0.3)
    model.save_pretrained(folder / name)
    scores = np.random.default_rng(0).random((layers, heads)).astype(np.float32) * 0.8 + 0.1
    scores[1], scores[2] = 0.99, 0.01
    path = folder / f"{name}.rlkv.json"
    spec = ModelSpec(name, "", layers, heads, 2 * heads, 32, 4)
    HeadProfile(spec, scores, "random").save(path)
    return TinyModel(folder / name, path)


def prompts(lengths=PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(510) for _ in range(length)] for length in lengths]


def in_child(task: Callable[[], object]) -> object:
    """The result of ``task``, run in a forked child; its traceback on failure."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            result = (True, task())
        except BaseException as error:
            # vLLM wraps errors of its workers; the text keeps the whole chain
            result = (False, f"{error}\n{traceback.format_exc()}")
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    if not data:
        raise RuntimeError("the child died without an answer")
    done, result = pickle.loads(data)
    if not done:
        raise ChildError(result)
    return result


class ChildError(RuntimeError):
    """A child's task raised; the message holds its traceback."""


def engine(model: TinyModel, sparsity: float | None, **options):
    """An in-process vLLM engine; ``sparsity`` None leaves the plugin unasked."""
    from vllm import LLM

    settings = {"profile": str(model.profile), "sparsity": sparsity}
    settings |= options.pop("rlkv", {})
    return LLM(
        str(model.folder),
        **{
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 2304,
            "max_num_batched_tokens": 256,
            "kv_cache_memory_bytes": 64 << 20,
            "disable_log_stats": True,
            "additional_config": {} if sparsity is None else {"rlkv": settings},
            **options,
        },
    )


def greedy(llm, requests: list[list[int]], tokens: int, **options) -> list[list[int]]:
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in requests],
        SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
        ),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def scheduler(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def leaked_blocks(llm) -> int:
    pool = scheduler(llm).kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def watch(llm) -> dict[str, int]:
    """Counts, from now on, preemptions and the most requests that ran at once."""
    counts = {"preemptions": 0, "peak_running": 0, "steps": 0}
    target = scheduler(llm)
    preempt, schedule = target._preempt_request, target.schedule

    def counted_preempt(*args, **kwargs):
        counts["preemptions"] += 1
        return preempt(*args, **kwargs)

    def counted_schedule(*args, **kwargs):
        result = schedule(*args, **kwargs)
        counts["steps"] += 1
        counts["peak_running"] = max(counts["peak_running"], len(target.running))
        return result

    target._preempt_request, target.schedule = counted_preempt, counted_schedule
    return counts
