"""eval, generate, list, profile, study, report and reproduce through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlkv.cli.main import main
from rlkv.core.head_profile import HeadProfile
from rlkv.core.model_spec import ModelSpec
from rlkv.evaluate.study_config import load_study, require_usable
from rlkv.hf.loading import model_spec
from tests.toy_tasks import tiny_loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a real tokenizer's files, as save_pretrained leaves it."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    loaded = tiny_loaded()
    loaded.model.save_pretrained(place)
    loaded.tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def profile(folder, tmp_path):
    path = tmp_path / "p.json"
    scores = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    HeadProfile(model_spec(str(folder)), scores, "test").save(path)
    return path


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def evaluated(capsys, folder, out, *more):
    return run(
        capsys, "eval", "--model", folder, "--task", "price_lookup", "--n", 2, "--sink", 2,
        "--recent", 6, "--out", out, "--json", *more
    )  # fmt: skip


def test_eval_prints_contract_rows(capsys, folder, profile, tmp_path):
    more = ("--method", "full", "rlkv", "--sparsity", 0.25, 0.5, "--profile", profile)
    status, out, _ = evaluated(capsys, folder, tmp_path / "out", *more)
    rows = json.loads(out)
    assert status == 0
    assert [(row["method"], row["sparsity"]) for row in rows] == [
        ("full", 0.0),
        ("rlkv", 0.25),
        ("rlkv", 0.5),
    ]
    assert list(rows[0]) == [
        "model", "task", "method", "sparsity", "sink", "recent", "n", "accuracy", "ci_low",
        "ci_high", "kv_bytes_mean", "tokens_mean",
    ]  # fmt: skip
    assert rows[0]["model"] == "tiny"

    (result,) = (tmp_path / "out").rglob("rlkv-s0.25-*.json")
    status, out, err = run(capsys, "reproduce", result, "--json")
    assert status == 0, err
    stored, again = json.loads(out)
    assert stored == again == rows[1]

    status, out, _ = run(capsys, "report", tmp_path / "out")
    assert status == 0
    assert (tmp_path / "out" / "report.html").is_file()
    assert str(tmp_path / "out" / "report.html") in out


def test_a_changed_result_is_not_reproduced(capsys, folder, tmp_path):
    evaluated(capsys, folder, tmp_path / "out")
    (result,) = (tmp_path / "out").rglob("full-*.json")
    content = json.loads(result.read_text())
    content["row"]["accuracy"] = 0.75
    result.write_text(json.dumps(content))
    status, _, err = run(capsys, "reproduce", result)
    assert status == 1
    assert "not reproduced: accuracy 0.7500 then" in err


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        (("--method", "streming_llm"), 2, "Did you mean streaming_llm"),
        (("--sparsity", "1.5"), 2, "outside [0, 1)"),
        (("--recent", "0"), 2, "at least 1 token"),
        (("--method", "rlkv"), 2, "needs a head profile"),
        (("--method", "rlkv", "--profile", "missing.json"), 1, "cannot read profile"),
        (("--profile", "rlv=missing.json"), 2, "Did you mean rlkv"),
        (("--profile", "a.json", "b.json"), 2, "two profiles"),
        (("--data", "missing.jsonl"), 1, "missing.jsonl not found"),
        (("--n", "0"), 2, "n is 0"),
        (("--samples", "2"), 2, "set temperature above 0"),
    ],
)
def test_eval_refuses_bad_input_in_one_sentence(
    capsys, folder, tmp_path, monkeypatch, more, status, message
):
    monkeypatch.setattr("rlkv.evaluate.evaluation.load_model", None)  # weights are never reached
    found, out, err = evaluated(capsys, folder, tmp_path / "out", *more)
    assert found == status
    assert out == ""
    assert message in err
    assert err.startswith("rlkv: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_eval_refuses_another_models_profile(capsys, folder, tmp_path):
    path = tmp_path / "other.json"
    spec = ModelSpec("other", "", 2, 4, 8, 16)
    HeadProfile(spec, np.zeros((2, 4), np.float32), "test").save(path)
    status, _, err = evaluated(
        capsys, folder, tmp_path / "out", "--method", "rlkv", "--profile", path
    )
    assert status == 2
    assert "profile is for other (2x4 kv heads), model tiny has 3x4" in err


def test_unwritable_output_is_refused_before_the_model_loads(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("rlkv.evaluate.evaluation.load_model", None)
    (tmp_path / "file").write_text("")
    status, _, err = evaluated(capsys, folder, tmp_path / "file")
    assert status == 1
    assert "is a file, expected a folder" in err


def test_unknown_model_is_refused(capsys, tmp_path):
    status, _, err = run(capsys, "eval", "--task", "price_lookup", "--model", "embeded")
    assert status == 2
    assert "Did you mean embedded" in err


def test_generate_writes_text_to_stdout_and_bytes_to_stderr(capsys, folder, profile):
    status, out, err = run(
        capsys, "generate", "w5 w6 w7", "--model", folder, "--profile", profile,
        "--max-new-tokens", 5,
    )  # fmt: skip
    assert status == 0
    assert len(out.split()) == 5
    last = err.strip().split("\n")[-1]
    # 3 prompt tokens and 4 of the 5 written are cached: 12 heads, 16 numbers, float32
    assert last.startswith(
        f"rlkv: {12 * 7 * 2 * 16 * 4} KV bytes, full cache {12 * 7 * 2 * 16 * 4}"
    )


def test_generate_refuses_an_empty_and_a_long_prompt(capsys, folder):
    status, _, err = run(capsys, "generate", " ", "--model", folder)
    assert (status, "prompt is empty" in err) == (2, True)
    status, _, err = run(capsys, "generate", "w5", "--model", folder, "--max-new-tokens", 9999)
    assert (status, "may grow by 9999" in err) == (2, True)


def test_list_names_methods_tasks_and_models(capsys):
    status, out, _ = run(capsys, "list", "methods", "--json")
    rows = json.loads(out)
    assert status == 0
    assert {"full", "rlkv", "random_heads", "streaming_llm"} <= {row["name"] for row in rows}
    assert all(row["summary"] for row in rows)
    _, out, _ = run(capsys, "list", "tasks")
    assert "price_lookup" in out
    _, out, _ = run(capsys, "list", "models", "--json")
    assert [row["name"] for row in json.loads(out)][:2] == ["embedded", "smollm2"]


def test_profile_heads_are_contract_rows(capsys, profile):
    status, out, _ = run(capsys, "profile", "heads", profile, "--sparsity", 0.75, "--json")
    rows = json.loads(out)
    assert status == 0
    assert list(rows[0]) == ["layer", "kv_head", "score", "full"]
    assert len(rows) == 12
    assert rows[0] == {"layer": 2, "kv_head": 3, "score": 1.0, "full": True}
    assert [row["full"] for row in rows] == [True] * 3 + [False] * 9


def test_profile_show_and_import(capsys, folder, tmp_path):
    table = tmp_path / "adapter_weights.tsv"
    table.write_text("0.1\t0.2\t0.3\t1.004\n" * 3)
    out_file = tmp_path / "made.json"
    status, out, _ = run(capsys, "profile", "import", table, "--model", folder, "--out", out_file)
    assert (status, out.strip()) == (0, str(out_file))
    status, out, _ = run(capsys, "profile", "show", out_file, "--json")
    (facts,) = json.loads(out)
    assert (facts["model"], facts["meta.clipped"], facts["source"]) == ("tiny", 3, table.name)
    status, out, _ = run(capsys, "profile", "show", out_file)
    assert "layer   0  0.10 0.20 0.30 1.00" in out
    status, _, err = run(capsys, "profile", "import", table, "--model", folder, "--out", tmp_path)
    assert (status, "is a folder, expected a file path" in err) == (1, True)


def test_study_runs_from_the_command_line(capsys, folder, profile, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(
        f'title = "T"\nmodels = ["{folder}"]\ntasks = ["price_lookup"]\n'
        'methods = ["full", "rlkv"]\nsparsities = [0.5]\n'
        f'[eval]\nn = 1\n[profiles."{folder}"]\nrlkv = "p.json"\n'
    )
    status, out, err = run(capsys, "study", file, "--out", tmp_path / "out", "--json")
    assert status == 0, err
    assert json.loads(out) == json.loads((tmp_path / "out" / "study.json").read_text())
    assert [row["method"] for row in json.loads(out)] == ["full", "rlkv"]


def test_peer_profiles_are_made_from_text(capsys, folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("w5 w6 w7 w8 " * 30)
    made = tmp_path / "kvzip.json"
    status, out, err = run(
        capsys, "profile", "kvzip", "--model", folder, "--text", text, "--out", made
    )
    assert (status, out.strip()) == (0, str(made)), err
    assert HeadProfile.load(made).source == "kvzip"
    made = tmp_path / "duo.json"
    status, out, err = run(
        capsys, "profile", "duo", "--model", folder, "--text", text, "--out", made, "--steps", 2,
        "--length", 120, "--passkeys", 2, "--words-per-key", 3, "--sink", 2, "--recent", 6,
    )  # fmt: skip
    assert (status, out.strip()) == (0, str(made)), err
    found = HeadProfile.load(made)
    assert (found.source, found.sink, found.meta["steps"]) == ("duo_attention", 2, 2)
    status, _, err = run(
        capsys, "profile", "kvzip", "--model", folder, "--text", tmp_path / "no", "--out", made
    )
    assert (status, "cannot read text" in err) == (1, True)


def test_shipped_studies_are_valid():
    root = Path(__file__).resolve().parents[3] / "studies"
    files = sorted(root.glob("*.toml"))
    assert files
    for file in files:
        study = load_study(file)
        require_usable(study)
        methods = 2 if file.stem.endswith("transfer") else 9
        assert len(study.methods) == methods
        assert len(study.cells()) == len(study.tasks) * methods * 5
