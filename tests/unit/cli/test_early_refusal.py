"""Wrong usage is refused before torch or transformers are imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import contextlib, io, json, sys
from rlkv.cli.main import main

found = []
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(line)
        except SystemExit as error:
            status = error.code
    heavy = sorted({"torch", "transformers"} & set(sys.modules))
    found.append([status, out.getvalue(), err.getvalue(), heavy])
    if heavy:
        break  # whatever comes later would be blamed for it
print(json.dumps(found))
"""

SERVE = ("serve", "--model", "embedded", "--sparsity", "0")
DUO = ("profile", "duo", "--model", "embedded", "--out", "p.json")
MISSING = [
    (("plan", "--model", "./nowhere"), "folder ./nowhere not found"),
    (("plan", "--model", "embedded", "--profile", "none.json"), "none.json"),
    (("study", "none.toml"), "cannot read study none.toml"),
    (("study", "model.toml"), "folder ./nowhere not found"),
    (("study", "profile.toml"), "none.json"),
    (("study", "data.toml"), "data file none.jsonl not found"),
    (("serve", "--model", "./nowhere"), "folder ./nowhere not found"),
    (("serve", "--model", "embedded", "--profile", "none.json"), "none.json"),
    (("serve", "--engine", "hf", "--model", "embedded", "--profile", "none.json"), "none.json"),
    (("report", "nowhere"), "nowhere is not a folder"),
    (("report", "."), "damaged run or profile"),
    (("report", ".", "--out", "file/below"), "cannot create folder"),
    (("generate", "hi", "--profile", "none.json"), "none.json"),
    (("generate", "hi", "--model", "./nowhere"), "folder ./nowhere not found"),
    (("eval", "--task", "chain", "--profile", "none.json", "--method", "rlkv"), "none.json"),
    (("eval", "--task", "gsm8k", "--model", "embedded", "--data", "no.jsonl"), "no.jsonl not"),
    (("train", "none.toml"), "cannot read recipe none.toml"),
    (("train", "--task", "chain", "--model", "./nowhere"), "folder ./nowhere not found"),
    (("bench", "decode", "--profile", "none.json"), "none.json"),
    (("bench", "train", "none.toml"), "cannot read recipe none.toml"),
]
UNKNOWN = [
    (("plan", "--model", "smolm2"), "Did you mean smollm2"),
    (("study", "method.toml"), "Did you mean rlkv"),
    (("serve", "--model", "smolm2"), "Did you mean smollm2"),
    (("generate", "hi", "--method", "rkvl"), "unknown method"),
    (("generate", "hi", "--model", "smolm2"), "Did you mean smollm2"),
    (("eval", "--task", "chian"), "unknown task"),
    (("eval", "--task", "chain", "--method", "rkvl"), "unknown method"),
    (("train", "--task", "chian"), "unknown task"),
    (("bench", "train", "--task", "chian"), "unknown task"),
    (("bench", "train", "--study", "penalti"), "unknown study"),
    (("bench", "train", "--variants", "defualt"), "unknown variant"),
]
OUT_OF_RANGE = [
    (("bench", "train", "--sparsity", "1.5"), "sparsity"),
    (("bench", "train", "--examples", "0"), "at least one example"),
    (("generate", "hi", "--max-new-tokens", "0"), "max_new_tokens is 0, expected at least 1"),
    (("generate", "hi", "--max-new-tokens", "-1"), "max_new_tokens is -1, expected at least 1"),
    (("generate", "hi", "--top-p", "0"), "top_p in (0, 1]"),
    (("generate", "hi", "--temperature", "-1"), "a finite temperature >= 0"),
    (("generate", "hi", "--sparsity", "1"), "outside [0, 1)"),
    (("eval", "--task", "chain", "--max-new-tokens", "0"), "max_new_tokens is 0"),
    (("eval", "--task", "chain", "--max-new-tokens", "-1"), "max_new_tokens is -1"),
    (("eval", "--task", "chain", "--n", "0"), "n is 0, expected at least 1"),
    (("eval", "--task", "chain", "--batch-size", "0"), "batch_size is 0"),
    (("eval", "--task", "chain", "--samples", "0"), "samples is 0, expected at least 1"),
    (("eval", "--task", "chain", "--top-k", "-1"), "top_k >= 0"),
    (("eval", "--task", "chain", "--budget-tokens", "0"), "budget_tokens is 0"),
    (("study", "grid.toml", "--n", "0"), "n is 0, expected at least 1"),
    (("plan", "--model", "embedded", "--context", "0"), "size '0' is zero"),
    (("plan", "--model", "embedded", "--gpu-memory", "80 apples"), "not understood"),
    (("plan", "--model", "embedded", "--kv-memory", "none"), "not understood"),
    (("plan", "--model", "embedded", "--sparsity", "1.5"), "outside [0, 1)"),
    (("plan", "--model", "embedded", "--sparsity"), "no sparsity is given"),
    (("plan", "--model", "embedded", "--sink", "-1"), "at least 0"),
    ((*SERVE, "--port", "99999"), "port is 99999, expected 0 to 65535"),
    ((*SERVE, "--engine", "hf", "--port", "-1"), "port is -1, expected 0 to 65535"),
    ((*SERVE, "--engine", "hf", "--batch-size", "0"), "--batch-size is 0, expected at least 1"),
    ((*SERVE, "--max-model-len", "0"), "max_model_len is 0, expected at least 1"),
    ((*SERVE, "--tensor-parallel", "0"), "tensor_parallel is 0, expected at least 1"),
    ((*SERVE, "--drain", "-1"), "drain is -1, expected at least 0"),
    ((*SERVE, "--vllm-args=--served-as 'x"), "cannot be split into words"),
    (("serve", "--model", "embedded"), "sparsity 0.5 needs a head profile"),
    (("quickstart", "--n", "0"), "n is 0, expected at least 1"),
    (("quickstart", "--steps", "-1"), "steps must be at least 0"),
    (("train", "--task", "chain", "--workers", "0"), "--workers is 0, expected at least 1"),
    (("train", "--task", "chain", "--set", "rollout.max_new_tokens=0"), "max_new_tokens is 0"),
    (("bench", "decode", "--steps", "0"), "--steps is 0, expected at least 1"),
    (("bench", "decode", "--context", "256", "0"), "--context is 0, expected at least 1"),
    (("bench", "memory", "--prompt"), "--prompt names no number"),
    (("bench", "serve", "--profile", "p.json", "--rounds", "0"), "--rounds is 0"),
    ((*DUO, "--passkeys", "0"), "--passkeys is 0, expected at least 1"),
    ((*DUO, "--words-per-key", "-1"), "--words-per-key is -1"),
]
CASES = [
    (arguments, status, message)
    for status, group in ((1, MISSING), (2, UNKNOWN), (2, OUT_OF_RANGE))
    for arguments, message in group
]

GRID = 'models = ["embedded"]\ntasks = ["chain"]\nmethods = ["full"]\nsparsities = [0.5]\n'
STUDIES = {
    "grid": GRID,
    "model": GRID.replace("embedded", "./nowhere"),
    "method": GRID.replace("full", "rlvk"),
    "data": GRID + '[eval]\ndata = "none.jsonl"\n',
    "profile": GRID + '[profiles.embedded]\nrlkv = "none.json"\n',
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Status, stdout, stderr and heavy imports of all command lines, from one process."""
    folder = tmp_path_factory.mktemp("commands")
    for name, text in STUDIES.items():
        (folder / f"{name}.toml").write_text(text)
    (folder / "file").write_text("")
    names = "model task method sparsity sink recent n accuracy ci_low ci_high kv_bytes_mean"
    row = dict.fromkeys([*names.split(), "tokens_mean"], 0)
    rest = {"config": {}, "records": "none.jsonl", "profile": None, "run": {"device": "cpu"}}
    (folder / "r.json").write_text(json.dumps({"format": "rlkv-result/1", "row": row, **rest}))
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        input=json.dumps([arguments for arguments, *_ in CASES]),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: " ".join(CASES[i][0]))
def test_wrong_usage_is_one_sentence_before_the_slow_imports(found, number):
    if number >= len(found):
        pytest.skip("an earlier command line imported torch")
    _, expected, message = CASES[number]
    status, out, err, heavy = found[number]
    assert heavy == []
    assert (status, out) == (expected, "")
    assert err.startswith("rlkv: ")
    assert err.count("\n") == 1
    assert message in err
