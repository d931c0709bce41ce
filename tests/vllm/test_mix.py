"""Mode "mix": gates set while the engine runs give the tokens of the trainer's mixed attention."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.vllm.conftest import (
    HEADS,
    LAYERS,
    engine,
    greedy,
    in_child,
    leaked_blocks,
    prompts,
    scheduler,
)

pytestmark = pytest.mark.vllm
SINK, RECENT = 16, 64
LENGTHS = (17, 40, 79, 80, 81, 200, 333, 700)
NEW = 32


def gates(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((LAYERS, HEADS)).astype(np.float32)


def binary() -> np.ndarray:
    """Layers that mix both kinds of head, one that is full and one that is local."""
    alpha = (gates(7) > 0.5).astype(np.float32)
    alpha[1], alpha[2] = 1.0, 0.0
    return alpha


def mix_engine(model, **options):
    from rlkv.serve.vllm.mixed_attention import EXTENSION

    settings = {"mode": "mix", "sink": SINK, "recent": RECENT}
    additional = {"rlkv": settings}
    options = {"additional_config": additional, "worker_extension_cls": EXTENSION, **options}
    return engine(model, None, **options)


def run_with(llm, alphas, requests) -> list[list[list[int]]]:
    from rlkv.serve.vllm.mixed_attention import set_gates

    found = []
    for alpha in alphas:
        set_gates(llm, alpha)
        found.append(greedy(llm, requests, NEW))
    return found


def mixed_differences(model, alpha, requests, completions) -> dict:
    """Requests whose tokens the trainer's model would not have chosen, with the first such token;
    and the smallest gap between its two best logits."""
    import torch
    from transformers import AutoModelForCausalLM

    import rlkv
    from rlkv.gates import Gates

    def task():
        hf = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
        held = Gates(alpha.shape)
        held.alpha.data.copy_(torch.from_numpy(alpha))
        different, margins = {}, []
        with rlkv.attach_gates(hf, held, sink=SINK, recent=RECENT), torch.inference_mode():
            for i, (prompt, tokens) in enumerate(zip(requests, completions, strict=True)):
                logits = hf(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
                best = logits[len(prompt) - 1 : -1].topk(2, dim=-1)
                wrong = (best.indices[:, 0] != torch.tensor(tokens)).nonzero().flatten()
                if len(wrong):
                    different[i] = int(wrong[0])
                margins.append(float((best.values[:, 0] - best.values[:, 1]).min()))
        return different, min(margins)

    return in_child(task)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def mixed_run(request, tiny_models):
    """One engine whose gates change four times between two passes over the same prompts."""
    model, requests = tiny_models[request.param], prompts(LENGTHS)
    alphas = [gates(1), gates(2), gates(1), binary()]

    def task():
        llm = mix_engine(model)
        groups = len(scheduler(llm).kv_cache_config.kv_cache_groups)
        untouched = greedy(llm, requests, NEW)
        return untouched, run_with(llm, alphas, requests), groups, leaked_blocks(llm)

    untouched, completions, groups, leaked = in_child(task)
    assert (groups, leaked) == (2, 0)
    return model, requests, untouched, alphas, completions


def test_tokens_equal_the_trainers_mixed_attention_after_every_change(mixed_run):
    model, requests, _, alphas, completions = mixed_run
    for alpha, found in list(zip(alphas, completions, strict=True))[:2]:
        different, margin = mixed_differences(model, alpha, requests, found)
        assert not different
        assert margin > 1e-5  # far above float32 rounding: equality is no accident
    assert completions[2] == completions[0]
    assert completions[1] != completions[0]


def test_other_gates_would_give_other_tokens(mixed_run):
    model, requests, _, alphas, completions = mixed_run
    different, _ = mixed_differences(model, alphas[1], requests, completions[0])
    # the two prompts that end inside sink and window see the same keys in both branches
    assert len(different) >= 4


def test_gates_of_zero_and_one_are_the_hard_masked_model(mixed_run):
    from tests.vllm.test_parity import differences

    model, requests, untouched, alphas, completions = mixed_run
    assert not differences(model, alphas[3] > 0, requests, completions[3], SINK, RECENT)
    # every gate starts at 1
    assert not differences(model, np.ones((LAYERS, HEADS), bool), requests, untouched)


def test_each_of_two_tensor_parallel_ranks_takes_the_gates_of_its_heads(tiny_models, tmp_path):
    model, requests, alphas = tiny_models["llama"], prompts((40, 200, 333)), [gates(3), gates(4)]
    job = {"prompts": requests, "alphas": [alpha.tolist() for alpha in alphas]}
    output = tmp_path / "completions.json"
    found = subprocess.run(
        [sys.executable, "-m", "tests.vllm.mix_ranks", str(model.folder), str(output)],
        input=json.dumps(job),
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    completions = json.loads(output.read_text())
    for alpha, tokens in zip(alphas, completions, strict=True):
        different, _ = mixed_differences(model, alpha, requests, tokens)
        assert not different


def test_a_compiled_model_reads_new_gates(tiny_models):
    model, requests, alphas = tiny_models["llama"], prompts((40, 200, 333)), [gates(5), gates(6)]

    def task():
        return run_with(mix_engine(model, enforce_eager=False), alphas, requests)

    for alpha, tokens in zip(alphas, in_child(task), strict=True):
        different, _ = mixed_differences(model, alpha, requests, tokens)
        assert not different


def test_gates_that_do_not_fit_are_refused(tiny_models):
    from rlkv.errors import ConfigError

    model = tiny_models["llama"]

    def task():
        from vllm import SamplingParams

        from rlkv.serve.vllm.mixed_attention import set_gates

        llm = mix_engine(model)
        wrong = [gates(1)[:2], gates(1)[:, :3], gates(1) + 1.0, np.full((LAYERS, HEADS), np.nan)]
        told = []
        for alpha in wrong:
            with pytest.raises(ConfigError) as caught:
                set_gates(llm, alpha)
            told.append(str(caught.value))
        sampling = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, detokenize=False)
        llm.llm_engine.add_request("0", {"prompt_token_ids": prompts((40,))[0]}, sampling)
        llm.llm_engine.step()
        with pytest.raises(ConfigError) as caught:
            set_gates(llm, gates(1))
        return [*told, str(caught.value)]

    told = in_child(task)
    assert "2 rows of [4] gates were given, expected one row for each of 4 layers" in told[0]
    assert "gates of 3 kv heads were given" in told[1]
    assert "in [0, 1]" in told[2]
    assert "in [0, 1]" in told[3]
    assert "while requests were running" in told[4]


def test_settings_that_make_no_sense_are_refused():
    pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own")
    from rlkv.errors import ConfigError, UnknownNameError
    from rlkv.serve.vllm.config import PluginConfig

    assert PluginConfig.parse({"mode": "mix", "recent": 32}).recent == 32
    with pytest.raises(UnknownNameError, match="Did you mean mix"):
        PluginConfig.parse({"mode": "mixed"})
    with pytest.raises(ConfigError, match='sparsity has no meaning in mode "mix"'):
        PluginConfig.parse({"mode": "mix", "sparsity": 0.5})
    with pytest.raises(ConfigError, match='lacks "profile"'):
        PluginConfig.parse({"mode": "split"})
