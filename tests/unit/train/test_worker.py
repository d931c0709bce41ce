"""Units of work: stateless, repeatable, and their gradients are derivatives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlkv.errors import ConfigError
from rlkv.gates import Gates
from rlkv.hf.attach import attach_gates
from rlkv.hf.engine import HFEngine
from rlkv.train.backends.local import LocalBackend
from rlkv.train.config import DistillConfig, LossConfig, MonitorConfig, RolloutConfig, TrainConfig
from rlkv.train.problems import SeededStream, load_problems, training_problems
from rlkv.train.self_distillation import gold_solutions
from rlkv.train.steps import batch_of, policy_step, sampled_groups, update_step
from rlkv.train.unit import Solution
from rlkv.train.worker import Worker
from tests.toy import ForcedToyTask, ToyTask, toy_loaded

CONFIG = TrainConfig(
    "toy",
    "toy",
    sink=4,
    recent=8,
    rollout=RolloutConfig(prompts_per_step=6, prompts_per_unit=3, redraws=0, problems=12),
    loss=LossConfig(micro_rows=4),
)


@pytest.fixture(scope="module")
def loaded():
    return toy_loaded("qwen3", layers=2)


@pytest.fixture(scope="module")
def worker(loaded):
    return Worker(loaded, ToyTask(), CONFIG)


@pytest.fixture(scope="module")
def problems(loaded):
    return load_problems(loaded, ToyTask(), 6, seed=0)


@pytest.fixture
def alpha(loaded):
    return np.random.default_rng(0).uniform(0.2, 0.9, loaded.spec.shape).astype(np.float32)


def same(first, second):
    assert first.rewards == second.rewards
    assert np.array_equal(first.gradient.gradient, second.gradient.gradient)
    assert first.gradient.tokens == second.gradient.tokens


def test_a_unit_repeats_itself_whatever_ran_in_between(loaded, worker, problems, alpha):
    first = worker.unit(problems[:3], alpha, 7)
    worker.unit(problems[3:], 1.0 - alpha, 8)
    same(first, worker.unit(problems[:3], alpha, 7))
    same(first, Worker(loaded, ToyTask(), CONFIG).unit(problems[:3], alpha, 7))
    assert first.live_groups
    assert first.n == 12


def test_another_seed_draws_other_rollouts(worker, problems, alpha):
    first = worker.sample(problems[:2], alpha, 1)
    second = worker.sample(problems[:2], alpha, 2)
    assert [r.targets for g in first for r in g] != [r.targets for g in second for r in g]


def test_rollouts_do_not_depend_on_the_unit_they_are_in(worker, problems, alpha):
    together = worker.sample(problems[:4], alpha, 3)
    apart = [worker.sample([problem], alpha, 3)[0] for problem in problems[:4]]
    assert [[r.targets for r in g] for g in together] == [[r.targets for r in g] for g in apart]


def test_step_is_the_sum_of_its_units(worker, problems, alpha):
    stream = SeededStream(problems, "0")
    step = policy_step(LocalBackend(worker), stream, alpha, CONFIG, drawn=0, seed=5)
    units = [worker.unit(stream.take(start, 3), alpha, 5) for start in (0, 3)]
    assert step.rewards == tuple(group for unit in units for group in unit.rewards)
    tokens = sum(unit.gradient.live_tokens for unit in units)
    wanted = sum(unit.gradient.gradient for unit in units) / tokens
    weight = step.penalty / alpha.size
    assert np.allclose(step.gradient, wanted + weight, atol=1e-12)


@pytest.mark.parametrize("advantage", ["group", "batch"])
def test_a_problem_that_comes_twice_in_a_step_is_drawn_afresh(
    worker, problems, alpha, monkeypatch, advantage
):
    drawn = []
    sample = worker.sample
    monkeypatch.setattr(worker, "sample", lambda *a: drawn.extend(g := sample(*a)) or g)
    stream = SeededStream(problems[:3], "0")  # half as many as a step takes
    config = replace(CONFIG, loss=replace(CONFIG.loss, advantage=advantage))
    step = policy_step if advantage == "group" else sampled_groups
    step(LocalBackend(worker), stream, alpha, config, drawn=0, seed=5)
    first, again = ({g[0].tokens[:20]: g for g in part} for part in (drawn[:3], drawn[3:]))
    assert first.keys() == again.keys()
    for start, group in first.items():
        assert [r.targets for r in group] != [r.targets for r in again[start]]


def test_groups_without_a_signal_cost_no_backward(worker, problems, alpha):
    rollouts = [r for group in worker.sample(problems[:2], alpha, 1) for r in group]
    found = worker.policy_gradient(rollouts, [0.0] * len(rollouts), alpha)
    assert found.trained_tokens == found.live_tokens == 0
    assert not found.gradient.any()
    assert found.tokens == sum(len(rollout.targets) for rollout in rollouts)


def differences(value, alpha, eps=1e-2):
    """Central differences of ``value(alpha)`` at every gate."""
    slopes = np.zeros(alpha.shape)
    for index in np.ndindex(*alpha.shape):
        up, down = alpha.copy(), alpha.copy()
        up[index] += eps
        down[index] -= eps
        slopes[index] = (value(up) - value(down)) / (2 * eps)
    return slopes


@pytest.mark.parametrize("task", [ToyTask(), ForcedToyTask()], ids=lambda task: task.name)
def test_policy_gradient_is_the_derivative_of_the_loss(loaded, task, alpha):
    worker = Worker(loaded, task, CONFIG)
    problems = load_problems(loaded, task, 2, seed=0)
    rollouts = [r for group in worker.sample(problems, alpha, 1) for r in group][:8]
    advantages = [1.0, -0.5, 0.7, -1.2, 0.3, 0.0, 0.9, -0.1][: len(rollouts)]
    base = worker.policy_gradient(rollouts, advantages, alpha, None, True)
    old = base.log_probs

    # the rollout of advantage 0 was left out of the first pass and keeps no log-probabilities
    def loss(at):
        return worker.policy_gradient(rollouts, advantages, at, old).loss

    assert np.allclose(base.gradient, differences(loss, alpha), atol=3e-3, rtol=2e-2)


def test_distillation_gradient_is_the_derivative_of_the_kl(loaded, alpha):
    worker = Worker(loaded, ForcedToyTask(), CONFIG)
    solutions = gold_solutions(load_problems(loaded, ForcedToyTask(), 3, seed=0), 3).solutions
    found = worker.distill(solutions, alpha)
    slopes = differences(lambda at: worker.distill(solutions, at).loss, alpha)
    assert np.allclose(found.gradient, slopes, atol=3e-3, rtol=2e-2)
    assert worker.distill(solutions, np.ones_like(alpha)).loss == pytest.approx(0.0, abs=1e-5)


def test_chunked_head_and_checkpointed_layers_change_nothing(loaded, alpha):
    solutions = gold_solutions(load_problems(loaded, ForcedToyTask(), 3, seed=0), 3).solutions
    plain = Worker(loaded, ForcedToyTask(), CONFIG).distill(solutions, alpha)
    sparing = replace(
        CONFIG, loss=LossConfig(micro_rows=4, head_chunk=97 * 3, gradient_checkpointing=True)
    )
    found = Worker(loaded, ForcedToyTask(), sparing).distill(solutions, alpha)
    assert np.allclose(found.gradient, plain.gradient, atol=1e-6)
    assert found.loss == pytest.approx(plain.loss, abs=1e-6)
    assert not any(module.training for module in loaded.model.modules())


def test_teacher_cache_does_not_show_in_results(loaded, alpha):
    solutions = gold_solutions(load_problems(loaded, ForcedToyTask(), 4, seed=0), 4).solutions
    cached = Worker(loaded, ForcedToyTask(), CONFIG)
    cached.distill(solutions[2:], alpha)
    recomputing = Worker(
        loaded, ForcedToyTask(), replace(CONFIG, warm=replace(CONFIG.warm, teacher_bytes=0))
    )
    first, second = (w.distill(solutions, alpha) for w in (cached, recomputing))
    assert np.array_equal(first.gradient, second.gradient)


def test_forced_rollouts_reward_exactly_the_gold_spans(loaded, alpha):
    worker = Worker(loaded, ForcedToyTask(), CONFIG)
    (problem,) = load_problems(loaded, ForcedToyTask(), 1, seed=0)
    groups = worker.sample([problem], alpha, 0)
    assert len(groups) == len(problem.spans) == 4
    for group, (first, last) in zip(groups, problem.spans, strict=True):
        assert len(group) == CONFIG.rollout.group_size
        for rollout in group:
            gold = problem.gold_ids[first:last]
            assert rollout.reward == float(rollout.targets == gold)
            assert rollout.generated == 0


def test_second_update_uses_the_first_one_s_probabilities(worker, problems, alpha):
    config = replace(CONFIG, loss=replace(CONFIG.loss, updates=2, advantage="batch"))
    backend = LocalBackend(worker)
    stream = SeededStream(problems, "0")
    batch = batch_of(sampled_groups(backend, stream, alpha, config, drawn=0, seed=1), config)
    first, old = update_step(backend, batch, alpha, config, None)
    again, _ = update_step(backend, batch, alpha, config, old)
    assert np.allclose(first.gradient, again.gradient, atol=1e-7)  # same gates: ratio 1
    assert first.generated_tokens > 0
    assert again.generated_tokens == 0


def test_later_updates_keep_the_distribution_that_tokens_were_drawn_from(loaded, problems, alpha):
    # top-k cuts a third of the words; after an update others are among them, but the tokens at hand
    # were drawn before it: every weight is old policy over old sampling distribution
    config = replace(
        CONFIG,
        rollout=replace(CONFIG.rollout, top_k=64),
        loss=replace(CONFIG.loss, decoupled=True, updates=2),
    )
    worker = Worker(loaded, ToyTask(), config)
    rollouts = [r for group in worker.sample(problems[:2], alpha, 1) for r in group]
    advantages = [1.0, -1.0] * (len(rollouts) // 2)
    old = worker.policy_gradient(rollouts, advantages, alpha, None, True).log_probs
    moved = np.clip(alpha + 0.3 * np.sign(0.5 - alpha), 0.0, 1.0).astype(np.float32)
    found = worker.policy_gradient(rollouts, advantages, moved, old)
    plain = Worker(loaded, ToyTask(), replace(config, loss=replace(config.loss, decoupled=False)))
    now = plain.policy_gradient(rollouts, advantages, moved, None, True).log_probs
    wanted = 0.0
    for advantage, before, after in zip(advantages, old, now, strict=True):
        policy, drawn, new = map(np.array, (before.policy, before.sampling, after.policy))
        assert (policy < drawn).all()  # the cut mass went to the tokens that stayed
        ratio = np.exp(new - policy)
        losses = np.maximum(-advantage * ratio, -advantage * ratio.clip(0.6, 1.4))
        wanted += float((np.exp(policy - drawn) * losses).sum())
    assert found.loss == pytest.approx(wanted, rel=1e-5)


def test_solution_positions_are_what_is_scored(loaded):
    problems = load_problems(loaded, ForcedToyTask(), 2, seed=0)
    solution = gold_solutions(problems, 1).solutions[0]
    assert isinstance(solution, Solution)
    gold = [solution.tokens[p] for p in solution.positions]
    wanted = [t for a, b in problems[0].spans for t in problems[0].gold_ids[a:b]]
    assert gold == wanted


@pytest.mark.parametrize("reward", ["agreement", "likelihood"])
def test_the_full_model_can_judge_in_place_of_a_verifier(loaded, problems, alpha, reward):
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, reward=reward))
    worker = Worker(loaded, ToyTask(), config)
    found = worker.sample(problems[:2], alpha, 1)
    plain = Worker(loaded, ToyTask(), CONFIG).sample(problems[:2], alpha, 1)
    assert [[r.targets for r in g] for g in found] == [[r.targets for r in g] for g in plain]
    rewards = [r.reward for g in found for r in g]
    assert all(0.0 <= value <= 1.0 for value in rewards)
    if reward == "agreement":
        assert set(rewards) <= {0.0, 1.0}
    else:
        assert len(set(rewards)) > 4  # a probability, different for each completion


@pytest.mark.parametrize(("enabled", "candidates", "tried"), [(0, 5, 12), (1, 0, 12), (1, 5, 5)])
def test_as_many_problems_are_tried_as_the_settings_say(loaded, enabled, candidates, tried):
    distill = DistillConfig(enabled=bool(enabled), candidates=candidates)
    config = replace(CONFIG, distill=distill, monitor=MonitorConfig(problems=4))
    held_out, found = training_problems(loaded, ToyTask(), config)
    assert len(found) + len(held_out) == tried + 4
    assert len(held_out) == min(4, (tried + 4) // 4)


def test_forced_tasks_refuse_rewards_that_they_would_ignore(loaded):
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, reward="likelihood"))
    with pytest.raises(ConfigError, match="likelihood, but task forced_toy"):
        Worker(loaded, ForcedToyTask(), config)


def test_a_stream_gives_every_item_once_an_epoch_whatever_was_taken_before():
    stream = SeededStream(list("abcde"), "s")
    first, second = stream.take(0, 5), stream.take(5, 5)
    assert sorted(first) == sorted(second) == list("abcde")
    assert first != second
    assert SeededStream(list("abcde"), "s").take(3, 4) == first[3:] + second[:2]


class OtherEngine:
    """Stands for an engine with a model of its own: the same one here, attached anew each time."""

    def __init__(self, loaded):
        self.loaded = loaded
        self.told = []

    def start(self, longest):
        self.told.append(("start", longest))

    def set_gates(self, alpha):
        self.told.append(("gates", alpha.copy()))
        self.alpha = alpha

    def generate(self, prompts, params):
        self.told.append(("generate", len(prompts), params))
        other = toy_loaded("qwen3", layers=2)
        gates = Gates(other.spec.shape)
        gates.alpha.data.copy_(torch.from_numpy(self.alpha))
        with attach_gates(other.model, gates, sink=4, recent=8) as session:
            return HFEngine(other, session).generate(prompts, params)

    def close(self):
        self.told.append(("close",))


VLLM = replace(CONFIG, rollout=replace(CONFIG.rollout, engine="vllm"))


def test_an_engine_of_its_own_writes_what_the_trainer_learns_from(loaded, worker, problems, alpha):
    engine = OtherEngine(loaded)
    other = Worker(loaded, ToyTask(), VLLM, engine)
    other.start(problems)
    unit = other.unit(problems[:3], alpha, 7)
    same(unit, worker.unit(problems[:3], alpha, 7))
    assert unit.generated_tokens == worker.unit(problems[:3], alpha, 7).generated_tokens > 0
    longest = max(len(problem.prompt_ids) for problem in problems) + ToyTask.max_new_tokens
    assert engine.told[0] == ("start", longest)
    assert engine.told[1][0] == "gates"
    assert np.array_equal(engine.told[1][1], alpha)
    assert engine.told[2][0:2] == ("generate", 3)
    assert (engine.told[2][2].num_samples, engine.told[2][2].seed) == (4, 7)
    assert other.evaluate(problems, alpha) == worker.evaluate(problems, alpha)
    # gates are set again for every call, equal or not: what is cached must not show
    assert [told[0] for told in engine.told] == ["start"] + ["gates", "generate"] * 2


def test_agreement_asks_the_engine_for_the_full_model(loaded, problems, alpha):
    config = replace(VLLM, rollout=replace(VLLM.rollout, reward="agreement"))
    engine = OtherEngine(loaded)
    Worker(loaded, ToyTask(), config, engine).sample(problems[:2], alpha, 1)
    gates = [told[1] for told in engine.told if told[0] == "gates"]
    assert np.array_equal(gates[0], alpha)
    assert np.all(gates[1] == 1.0)


def test_the_engine_must_be_the_one_that_the_settings_name(loaded):
    with pytest.raises(ConfigError, match=r"rollout\.engine is vllm but the engine passed is none"):
        Worker(loaded, ToyTask(), VLLM)
    with pytest.raises(ConfigError, match="is hf but the engine passed is OtherEngine"):
        Worker(loaded, ToyTask(), CONFIG, OtherEngine(loaded))
