"""The harness model: scores as our runner's on the same items, and exact log-likelihoods."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed (rlkv[lm-eval])")

from rlkv.errors import ConfigError
from rlkv.evaluate.config import EvalConfig
from rlkv.evaluate.evaluation import evaluate
from rlkv.evaluate.lm_harness import RLKVModel, cut_at
from rlkv.tasks.chain import Chain

YAML = """
task: rlkv_chain
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
output_type: generate_until
generation_kwargs: {{until: [], max_gen_toks: 300, do_sample: false}}
filter_list:
  - name: answer
    filter:
      - {{function: regex, regex_pattern: "#([0-9])", group_select: -1}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture(scope="module")
def model():
    return RLKVModel("embedded", method="streaming_llm", sink=4, recent=40, batch_size=4)


def test_scores_equal_our_runners(tmp_path, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    examples = list(Chain().examples(12))
    data = tmp_path / "chain.jsonl"
    rows = [{"id": e.id, "prompt": e.prompt, "answer": e.answer} for e in examples]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rlkv_chain.yaml").write_text(YAML.format(data=data))
    found = simple_evaluate(
        "rlkv",
        {"pretrained": "embedded", "method": "random_heads", "sparsity": 0.25},
        ["rlkv_chain"],
        batch_size=12,
        apply_chat_template=True,
        task_manager=TaskManager(include_path=str(tmp_path)),
        log_samples=True,
    )
    config = EvalConfig("embedded", "chain", "random_heads", 0.25, n=12, batch_size=12)
    (ours,) = evaluate([config], progress=False)
    theirs = {
        examples[sample["doc_id"]].id: sample["exact_match"]
        for sample in found["samples"]["rlkv_chain"]
    }
    assert theirs == {record.id: record.reward for record in ours.records}
    assert found["results"]["rlkv_chain"]["exact_match,answer"] == ours.row.accuracy


def test_loglikelihood_equals_a_plain_forward(model):
    # shorter than the window, so that nothing is compressed and the stock model must agree
    pairs = [("a=1 b=2", " c=a+b"), ("x=3", " y=4 z=x"), ("", "k=7")]
    found = model.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])
    stock = RLKVModel("embedded", method="full").loaded
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        before = model.tok_encode(context) or [model.eot_token_id]
        after = model.tok_encode(continuation, add_special_tokens=False)
        tokens = torch.tensor([before + after])
        with torch.no_grad():
            logits = stock.model(tokens, use_cache=False).logits
        scores = logits[0, len(before) - 1 : -1].log_softmax(-1)
        expected = scores.gather(1, torch.tensor(after)[:, None]).sum().item()
        assert value == pytest.approx(expected, abs=1e-3)
        assert is_greedy == (scores.argmax(-1).tolist() == after)


def test_rolling_counts_every_token_once(model):
    text = "a=1 b=2 c=a+b"
    (whole,) = model.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    ((joined, _),) = model.loglikelihood([SimpleNamespace(args=("", text))])
    assert whole == pytest.approx(joined, abs=1e-4)


def test_stops_cut_the_text():
    assert cut_at("one two\n\nthree", ["\n\n", "zzz"]) == "one two"
    assert cut_at("one", []) == "one"


def test_unknown_arguments_are_refused():
    with pytest.raises(ConfigError, match="no argument 'sparsty'"):
        RLKVModel("embedded", sparsty=0.5)
    with pytest.raises(ConfigError, match="batch_size is 'auto'"):
        RLKVModel("embedded", batch_size="auto")
