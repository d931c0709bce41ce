"""Cells end to end on tiny models: forced rewards, resume, bad examples, rows."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import torch

from rlkv.core.engine import Prompt
from rlkv.core.head_profile import HeadProfile
from rlkv.errors import ConfigError, DataError, ProfileError, ProfileMismatchError, UnknownNameError
from rlkv.evaluate.config import EvalConfig
from rlkv.evaluate.evaluation import evaluate
from rlkv.evaluate.records import Row, read_records, recover_records
from rlkv.evaluate.runner import forced_reward
from rlkv.hf.attach import compress
from rlkv.hf.engine import HFEngine
from rlkv.hf.forced import encode_gold, force
from rlkv.methods.base import MethodOptions
from tests.tiny import reference_logits
from tests.toy_tasks import ToyForced, tiny_loaded
from tests.unit.hf.test_parity import MASK, sparsity_of

ROW_FIELDS = ["model", "task", "method", "sparsity", "sink", "recent"]
ROW_FIELDS += ["n", "accuracy", "ci_low", "ci_high", "kv_bytes_mean", "tokens_mean"]


def config(task="toy_generate", method="streaming_llm", **changes):
    values = {"n": 10, "sink": 2, "recent": 6, "batch_size": 4, **changes}
    return EvalConfig(model="tiny", task=task, method=method, **values)


def run(tiny, *configs, **options):
    return evaluate(configs, models={"tiny": tiny}, progress=False, **options)


def test_row_has_the_contract_fields_in_order(toy_tasks, tiny):
    (result,) = run(tiny, config())
    assert [field.name for field in fields(Row)] == ROW_FIELDS
    assert (result.row.model, result.row.n, result.row.sparsity) == ("tiny", 10, 1.0)
    assert result.row.ci_low <= result.row.accuracy <= result.row.ci_high
    rewards = [record.reward for record in result.records]
    assert result.row.accuracy == pytest.approx(sum(rewards) / 10)


def test_forced_reward_is_the_share_of_fully_right_spans():
    gold, predicted = [5, 6, 7, 8, 9], [5, 6, 1, 8, 9]
    spans = [range(0, 2), range(1, 3), range(3, 5), range(2, 3)]
    assert forced_reward(predicted, gold, spans) == 0.5


@pytest.mark.parametrize("method", ["full", "streaming_llm"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_forced_predictions_equal_the_dense_reference(tiny, method, one_by_one, monkeypatch):
    if one_by_one:
        monkeypatch.setattr("rlkv.hf.forced._is_exact_in_chunks", lambda cache: False)
    examples = list(ToyForced().examples())
    prompts = [Prompt(e.id, tuple(tiny.tokenizer(e.prompt)["input_ids"])) for e in examples]
    golds = [encode_gold(tiny, e.answer) for e in examples]
    with compress(tiny.model, method=method, sparsity=0.0, sink=2, recent=6) as session:
        found = force(tiny, session, prompts, golds)
    alpha = torch.full((3, 4), 1.0 if method == "full" else 0.0)
    for prompt, gold, one in zip(prompts, golds, found, strict=True):
        tokens = torch.tensor([prompt.token_ids + gold.token_ids])
        logits = reference_logits(tiny.model, tokens, alpha, sink=2, recent=6)[0]
        length = len(prompt.token_ids)
        assert one.predicted == logits[length - 1 : -1].argmax(-1).tolist()
        held = 8 if method == "streaming_llm" else length + len(gold.token_ids) - 1
        if method == "streaming_llm":
            assert one.kv_bytes == tiny.spec.kv_bytes(held)
        else:  # the batch's padding counts, and at most 1 % of spare room
            longest = max(len(p.token_ids) for p in prompts)
            most = tiny.spec.kv_bytes(longest + len(gold.token_ids) - 1)
            assert tiny.spec.kv_bytes(held) <= one.kv_bytes <= 1.01 * most


def test_full_prefill_lets_local_heads_see_the_prompt(tiny):
    """With prefill="full" the first gold token is predicted as with the full cache."""
    examples = list(ToyForced().examples())
    prompts = [Prompt(e.id, tuple(tiny.tokenizer(e.prompt)["input_ids"])) for e in examples]
    golds = [encode_gold(tiny, e.answer) for e in examples]
    first = {}
    for method, options in (("full", None), ("streaming_llm", MethodOptions(prefill="full"))):
        with compress(
            tiny.model, method=method, sparsity=0.0, sink=2, recent=6, options=options
        ) as session:
            first[method] = [one.predicted[0] for one in force(tiny, session, prompts, golds)]
    assert first["full"] == first["streaming_llm"]


def test_resume_skips_finished_examples_and_gives_the_same_rows(
    toy_tasks, tiny, tmp_path, monkeypatch
):
    cell = config(temperature=1.0, samples=2, seed=3)
    (whole,) = run(tiny, cell, out=tmp_path / "whole")
    (first,) = run(tiny, cell, out=tmp_path / "cut")
    file = first.path.with_suffix(".jsonl")
    lines = file.read_bytes().split(b"\n")
    # as after a kill: seven records, and half of the eighth
    file.write_bytes(b"\n".join(lines[:7]) + b"\n" + lines[7][:40])
    asked = []
    generate = HFEngine.generate

    def counting(self, prompts, params):
        asked.extend(prompt.key for prompt in prompts)
        return generate(self, prompts, params)

    monkeypatch.setattr(HFEngine, "generate", counting)
    (resumed,) = run(tiny, cell, out=tmp_path / "cut")
    assert resumed.row == whole.row
    assert resumed.records == whole.records
    # batches hold two examples; the first was whole, the second lacked a record
    assert sorted(asked) == sorted({r.id for r in whole.records} - {"e3", "e7"})
    asked.clear()
    (again,) = run(tiny, cell, out=tmp_path / "cut")
    assert again.row == whole.row
    assert asked == []
    assert sorted(map(repr, read_records(file))) == sorted(map(repr, whole.records))


def test_a_finished_cell_needs_no_model(toy_tasks, tiny, tmp_path, monkeypatch):
    (first,) = run(tiny, config(), out=tmp_path)
    monkeypatch.setattr("rlkv.evaluate.evaluation.run_cell", None)
    (again,) = run(tiny, config(), out=tmp_path)
    assert again.row == first.row


def test_another_setting_does_not_reuse_records(toy_tasks, tiny, tmp_path):
    (first,) = run(tiny, config(), out=tmp_path)
    (other,) = run(tiny, config(recent=7), out=tmp_path)
    (same,) = run(tiny, config(batch_size=3), out=tmp_path)
    assert first.path != other.path
    assert first.path == same.path


def test_bad_examples_are_records_with_a_reason(toy_tasks, tmp_path):
    short = tiny_loaded(max_position_embeddings=30)
    (result,) = run(short, config("toy_generate", "full"))
    failed = [record for record in result.records if record.failure]
    # prompts of 5, 12, 19 and 26 tokens, and completions of 12
    assert {record.id for record in failed} == {"e2", "e3", "e6", "e7"}
    assert "has 19 tokens and may grow by 12" in failed[0].failure
    assert all(record.reward == 0 and record.reason == "invalid" for record in failed)
    assert result.row.n == 10
    assert result.row.tokens_mean > 0


def test_a_raising_verifier_is_a_record(toy_tasks, tiny, monkeypatch):
    def broken(self, completion, answer):
        raise RuntimeError("boom")

    monkeypatch.setattr("tests.toy_tasks.HasEvenWord.__call__", broken)
    (result,) = run(tiny, config(n=2))
    assert result.row.accuracy == 0.0
    assert result.records[0].failure == "the verifier raised RuntimeError: boom"


def test_cells_that_ignore_sparsity_run_once(toy_tasks, tiny):
    cells = [config(method=m, sparsity=s) for m in ("full", "streaming_llm") for s in (0.2, 0.8)]
    rows = [result.row for result in run(tiny, *cells)]
    assert [(row.method, row.sparsity) for row in rows] == [("full", 0.0), ("streaming_llm", 1.0)]


def test_profile_decides_the_heads(toy_tasks, tiny, tmp_path):
    path = tmp_path / "p.json"
    HeadProfile(tiny.spec, MASK, "test").save(path)
    cell = config("toy_forced", "rlkv", sparsity=sparsity_of(), profile=str(path))
    (result,) = run(tiny, cell, out=tmp_path / "out")
    stored = json.loads(result.path.read_text())
    assert stored["format"] == "rlkv-result/1"
    assert stored["row"]["method"] == "rlkv"
    assert stored["run"]["versions"]["torch"]
    full, local = int(MASK.sum()), int((1 - MASK).sum())
    # the longest row alone in its batch: no padding, so the bytes follow from its length
    alone = replace(cell, n=1)
    (single,) = run(tiny, alone)
    (record,) = single.records
    length = record.prompt_tokens + record.tokens - 1
    exact = (full * length + local * 8) * tiny.spec.bytes_per_token_per_head
    assert exact <= record.kv_bytes <= exact * 1.01
    assert record.budget_bytes == exact
    assert record.full_bytes == tiny.spec.kv_bytes(length)


def test_wrong_configs_say_what_to_do(toy_tasks, tiny, tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean streaming_llm"):
        config(method="streming_llm")
    with pytest.raises(UnknownNameError, match="Did you mean toy_forced"):
        config("toy_force")
    with pytest.raises(ConfigError, match=r"outside \[0, 1\)"):
        config(sparsity=1.0)
    with pytest.raises(ConfigError, match="n is 0"):
        config(n=0)
    with pytest.raises(ConfigError, match="needs a head profile"):
        run(tiny, config(method="rlkv"))
    other = tiny_loaded(layers=2).spec
    HeadProfile(other, MASK[:2], "test").save(tmp_path / "other.json")
    with pytest.raises(ProfileMismatchError, match="2x4"):
        run(tiny, config(method="rlkv", profile=str(tmp_path / "other.json")))
    with pytest.raises(ProfileError, match="cannot read profile"):
        run(tiny, config(method="rlkv", profile=str(tmp_path / "missing.json")))


def test_a_foreign_line_in_the_records_is_refused(tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text('{"id": "a"}\n')
    with pytest.raises(DataError, match="record 1 is not a record"):
        recover_records(file)


def test_proportional_streaming_follows_the_sparsity(toy_tasks, tiny):
    cells = [
        config("toy_forced", sparsity=s, streaming_recent="proportional") for s in (0.25, 0.75)
    ]
    rows = [result.row for result in run(tiny, *cells)]
    assert [row.sparsity for row in rows] == [0.25, 0.75]
    assert rows[0].kv_bytes_mean > rows[1].kv_bytes_mean


def test_evicting_methods_decode_gold_tokens_one_by_one(toy_tasks, tiny):
    (forced,) = run(tiny, config("toy_forced", "h2o", sparsity=0.5, batch_size=1, n=1))
    (record,) = forced.records
    full = tiny.spec.kv_bytes(record.prompt_tokens + record.tokens - 1)
    assert record.full_bytes == full
    assert record.kv_bytes <= 0.5 * full + tiny.spec.kv_bytes(8)
