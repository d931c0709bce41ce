"""vLLM as the trainer's rollout engine: the trainer's own tokens, repeatable, and counted right."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.vllm.conftest import ChildError, in_child, leaked_blocks, scheduler

pytestmark = pytest.mark.vllm
SINK, RECENT, NEW = 0, 16, 24


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory):
    pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own")
    from tests.toy import toy_loaded

    folder = tmp_path_factory.mktemp("toy") / "toy"
    # vLLM's CPU kernels take heads of 32 numbers and more; end tokens are frequent enough to matter
    loaded = toy_loaded("qwen3", layers=2, head_dim=32, eos_token_id=[96, 11, 22, 33])
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def setup(folder, **rollout):
    """Config, model, task and an engine that is not started."""
    from rlkv.hf.loading import load_model
    from rlkv.serve.vllm.rollout_engine import VLLMRolloutEngine
    from rlkv.train.config import LossConfig, MonitorConfig, RolloutConfig, TrainConfig
    from tests.toy import ToyTask

    settings = {
        "engine": "vllm",
        "prompts_per_step": 4,
        "prompts_per_unit": 2,
        "redraws": 0,
        "problems": 12,
        "max_new_tokens": NEW,
        "decode_rows": 5,
    }
    config = TrainConfig(
        str(folder),
        "toy",
        objective="paper",
        steps=3,
        sink=SINK,
        recent=RECENT,
        rollout=RolloutConfig(**{**settings, **rollout}),
        loss=LossConfig(micro_rows=4),
        monitor=MonitorConfig(every=0),
    )
    loaded = load_model(str(folder), dtype="float32")
    engine = VLLMRolloutEngine(
        loaded, str(folder), sink=SINK, recent=RECENT, rows=config.rollout.decode_rows
    )
    return config, loaded, ToyTask(), engine


def recorded(engine):
    """Everything that vLLM answers from now on, and the tokens that it computes."""
    outputs, computed = [], []
    llm, plan = engine._llm, scheduler(engine._llm)
    generate, schedule = llm.generate, plan.schedule

    def recording_generate(*args, **kwargs):
        found = generate(*args, **kwargs)
        outputs.extend(found)
        return found

    def recording_schedule(*args, **kwargs):
        found = schedule(*args, **kwargs)
        computed.append(found.total_num_scheduled_tokens)
        return found

    llm.generate, plan.schedule = recording_generate, recording_schedule
    return outputs, computed


def gates(seed: int, shape) -> np.ndarray:
    return np.random.default_rng(seed).random(shape).astype(np.float32)


@pytest.fixture(scope="module")
def unit_facts(toy_folder):
    """What one engine does with units of work; looked at by several tests."""
    from rlkv.core.engine import SamplingParams
    from rlkv.train.problems import load_problems
    from rlkv.train.worker import Worker

    def task():
        config, loaded, toy, engine = setup(toy_folder)
        problems = load_problems(loaded, toy, 6, seed=0)
        worker = Worker(loaded, toy, config, engine)
        worker.start(problems)
        alpha, other = (gates(seed, loaded.spec.shape) for seed in (1, 2))
        units = [
            worker.unit(problems[:2], alpha, 7),
            worker.unit(problems[2:6], other, 8),
            worker.unit(problems[:2], alpha, 7),
        ]
        drawn = [worker.sample(problems[:2], alpha, seed) for seed in (7, 8)]
        outputs, computed = recorded(engine)
        counted = worker.unit(problems, alpha, 9)
        trainer_greedy = Worker(
            loaded, toy, replace(config, rollout=replace(config.rollout, engine="hf"))
        )
        params = SamplingParams(NEW)
        engine.set_gates(alpha)
        written = [found[0] for found in engine.generate([p.prompt for p in problems], params)]
        trainer_greedy._set(alpha)
        with trainer_greedy._attached() as session:
            hf = trainer_greedy._engine(session, alpha)
            wanted = [found[0] for found in hf.generate([p.prompt for p in problems], params)]
        greedy = [w.evaluate(problems, alpha).rewards for w in (worker, trainer_greedy)]
        counts = [
            (len(o.prompt_token_ids), o.num_cached_tokens, len(o.outputs[0].token_ids))
            for o in outputs[: len(problems) * 4]
        ]
        return {
            "units": [(u.rewards, u.gradient.gradient, u.generated_tokens) for u in units],
            "drawn": [[[r.targets for r in g] for g in groups] for groups in drawn],
            "counts": counts,
            "computed": computed,
            "generated": counted.generated_tokens,
            "written": [(c.token_ids, c.text, c.finish_reason, c.kv_bytes > 0) for c in written],
            "wanted": [(c.token_ids, c.text, c.finish_reason, c.kv_bytes > 0) for c in wanted],
            "greedy": greedy,
            "leaked": leaked_blocks(engine._llm),
        }

    return in_child(task)


def test_greedy_completions_are_the_trainers_own(unit_facts):
    assert unit_facts["written"] == unit_facts["wanted"]
    assert unit_facts["greedy"][0] == unit_facts["greedy"][1]
    assert unit_facts["leaked"] == 0


def test_a_unit_repeats_itself_whatever_ran_in_between(unit_facts):
    first, _, second = unit_facts["units"]
    assert first[0] == second[0]
    assert np.array_equal(first[1], second[1])
    assert first[2] == second[2]
    assert np.any(first[1])


def test_another_seed_and_every_sample_draw_other_rollouts(unit_facts):
    first, second = unit_facts["drawn"]
    assert first != second
    assert all(len(set(group)) == 4 for group in first)


def test_finished_rows_are_not_decoded_and_tokens_are_counted(unit_facts):
    counts = unit_facts["counts"]
    assert unit_facts["generated"] == sum(new for _, _, new in counts)
    lengths = {new for _, _, new in counts}
    assert len(lengths) > 1
    assert max(lengths) == NEW
    # each prompt is read but for what the prefix cache holds; each new token but the last is fed in
    wanted = sum(prompt - cached + new - 1 for prompt, cached, new in counts)
    steps = np.cumsum(unit_facts["computed"])
    assert wanted in steps
    assert any(cached for _, cached, _ in counts)


def inner_model(engine):
    (found,) = engine._llm.collective_rpc("get_model")
    return found


def copies(model) -> dict:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(
        bool((first[name] == second[name]).all()) for name in first
    )


def test_three_training_steps_move_the_gates_and_nothing_else(toy_folder, tmp_path):
    from rlkv.train.trainer import Trainer

    def task():
        import random

        import torch

        config, loaded, toy, engine = setup(toy_folder)
        before = copies(loaded.model)
        served: dict = {}
        start = engine.start

        def remembering_start(longest):
            state = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
            start(longest)
            after = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
            assert torch.equal(state[0], after[0])
            assert state[1:] == after[1:]
            served.update(copies(inner_model(engine)))

        engine.start = remembering_start
        result = Trainer(config, loaded, toy, output=tmp_path / "run", engine=engine).run()
        inner = inner_model(engine)
        gates = [layer.self_attn.attn.alpha.tolist() for layer in inner.model.layers]
        untouched = [same(before, copies(loaded.model)), same(served, copies(inner))]
        engine.close()
        return untouched, len(served), gates, result

    untouched, served, gates, result = in_child(task)
    assert untouched == [True, True]
    assert served > 10
    assert len(result.metrics) == 3
    assert np.any(result.profile.scores < 1.0)
    # vLLM holds the gates of the last step's rollouts, which are those after the second step
    assert np.allclose(np.array(gates).reshape(-1), result.metrics[1]["gates"], atol=1e-4)
    assert result.progress.generated_tokens == result.metrics[-1]["generated_tokens"]
    assert 3 * 4 * 4 < result.progress.generated_tokens <= 3 * 4 * 4 * NEW
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["rollout"]["engine"] == "vllm"


def test_the_command_trains_the_embedded_model(tmp_path):
    pytest.importorskip("matplotlib", reason="`rlkv train` draws curves")
    from rlkv.cli.main import main
    from rlkv.core.head_profile import HeadProfile

    settings = (
        "rollout.prompts_per_step=3", "rollout.prompts_per_unit=3", "rollout.redraws=0",
        "rollout.problems=12", "distill.enabled=false", "monitor.every=0",
    )  # fmt: skip
    words = ["train", "--model", "embedded", "--task", "chain", "--objective", "paper"]
    words += ["--steps", "2", "--rollout", "vllm", "--output", str(tmp_path), "--set", *settings]
    assert in_child(lambda: main([*words, "sink=16", "recent=64"])) == 0
    assert HeadProfile.load(tmp_path / "profile.json").scores.shape == (6, 4)


@pytest.mark.parametrize(
    ("options", "longest", "message"),
    [
        ({"sink": 4}, 100, "sink must be a multiple of 16"),
        ({}, 5000, "holds 4096; lower rollout.max_new_tokens"),
        ({"kv_bytes": 4096}, 100, "vLLM cannot be started"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(toy_folder, options, longest, message):
    from rlkv.serve.vllm.rollout_engine import VLLMRolloutEngine

    def task():
        _, loaded, _, _ = setup(toy_folder)
        given = {"sink": SINK, "recent": RECENT, "rows": 2, **options}
        VLLMRolloutEngine(loaded, str(toy_folder), **given).start(longest)

    with pytest.raises(ChildError, match=message):
        in_child(task)
