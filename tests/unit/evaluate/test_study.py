"""Studies: their format, a whole run, resume, and reproduction of one cell."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlkv.core.head_profile import HeadProfile
from rlkv.errors import ConfigError, DataError, UnknownNameError
from rlkv.evaluate.report import report_from_folder
from rlkv.evaluate.reproduce import reproduce
from rlkv.evaluate.study import run_study
from rlkv.evaluate.study_config import load_study

TEXT = """
title = "Tiny"
models = ["tiny"]
tasks = ["toy_forced", "toy_generate"]
methods = ["full", "rlkv", "random_heads"]
sparsities = [0.25, 0.5]

[eval]
n = 4
sink = 2
recent = 6

[profiles.tiny]
rlkv = "p.json"

[sensitivity]
shares = [0.25]
draws = 2

[windows]
windows = [[1, 4], [2, 8]]

[overlap]
shares = [0.5]
"""


@pytest.fixture
def study_file(toy_tasks, tiny, tmp_path):
    scores = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    HeadProfile(tiny.spec, scores, "test").save(tmp_path / "p.json")
    file = tmp_path / "s.toml"
    file.write_text(TEXT)
    return file


def changed(file, old, new):
    other = file.with_name("other.toml")
    other.write_text(TEXT.replace(old, new))
    return other


def test_grid_and_paths_follow_the_file(study_file):
    study = load_study(study_file)
    cells = study.cells()
    assert len(cells) == 2 * 3 * 2
    assert cells[0].sink == 2
    assert {c.profile for c in cells if c.method == "rlkv"} == {str(study_file.parent / "p.json")}
    assert {c.n for c in study.scaled(9).cells()} == {9}


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("methods =", "metods =", ConfigError, "Did you mean methods"),
        ("recent = 6", "recant = 6", ConfigError, "Did you mean recent"),
        ('"random_heads"', '"random_head"', UnknownNameError, "Did you mean random_heads"),
        ("[0.25, 0.5]", "[1.0]", ConfigError, r"outside \[0, 1\)"),
        ("sparsities = [0.25, 0.5]", "sparsities = []", ConfigError, "has no sparsities"),
        ("[profiles.tiny]", "[profiles.other]", ConfigError, "does not run"),
        ('title = "Tiny"', "title =", DataError, "is not TOML"),
        ("windows = [[1, 4], [2, 8]]", "windows = [[1, 0]]", ConfigError, "recent 0"),
        ("draws = 2", 'rankings = ["kvzip"]', ConfigError, "has no profile"),
    ],
)
def test_faulty_files_are_refused(study_file, tiny, tmp_path, old, new, error, message):
    with pytest.raises(error, match=message):
        run_study(load_study(changed(study_file, old, new)), tmp_path / "out")


def test_missing_file_and_missing_profile(study_file, tiny, tmp_path):
    with pytest.raises(DataError, match="cannot read study"):
        load_study(tmp_path / "missing.toml")
    lacking = changed(study_file, '[profiles.tiny]\nrlkv = "p.json"', "")
    with pytest.raises(ConfigError, match="needs a head profile"):
        run_study(load_study(lacking), tmp_path / "out", models={"tiny": tiny}, progress=False)


def test_study_runs_once_and_reports_everything(study_file, tiny, tmp_path, monkeypatch):
    out = tmp_path / "out"
    options = {"models": {"tiny": tiny}, "progress": False}
    report = run_study(load_study(study_file), out, **options)
    rows = json.loads((out / "study.json").read_text())
    # full once a task; rlkv and random_heads at two sparsities
    assert len(rows) == 2 * (1 + 2 + 2)
    assert json.loads((out / "report.json").read_text()) == rows
    keys = [section.key for section in report.sections]
    assert keys == ["differences", "bytes", "length", "errors", "sensitivity", "windows"]
    assert (out / "sensitivity.png").is_file()
    assert (out / "windows.png").is_file()
    rankings = {row["ranking"] for row in _section(report, "sensitivity").records()}
    assert rankings == {"rlkv", "random_heads"}
    windows = {(row["sink"], row["recent"]) for row in _section(report, "windows").records()}
    assert windows == {(1, 4), (2, 8)}

    monkeypatch.setattr("rlkv.evaluate.evaluation.run_cell", None)
    again = run_study(load_study(study_file), out, **options)
    assert again.rows == report.rows
    assert again.sections == report.sections

    stored = report_from_folder(out, "Tiny")
    assert sorted(map(repr, stored.rows)) == sorted(map(repr, report.rows))
    assert [section.key for section in stored.sections] == keys
    assert _section(stored, "sensitivity") == _section(report, "sensitivity")


def _section(report, key):
    return next(section for section in report.sections if section.key == key)


def test_a_result_is_reproduced_from_its_file_alone(study_file, tiny, tmp_path):
    out = tmp_path / "out"
    options = {"models": {"tiny": tiny}, "progress": False}
    run_study(load_study(study_file), out, **options)
    (result,) = (out / "cells").rglob("toy_generate/rlkv-s0.5-*.json")
    (study_file.parent / "p.json").unlink()
    found = reproduce(result, **options)
    assert found.again == found.stored
    assert found.difference == 0.0
    assert found.changes == ()


def test_results_of_other_kinds_are_not_reproduced(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("[]")
    with pytest.raises(DataError, match="expected rlkv-result/1"):
        reproduce(file)
    file.write_text("{")
    with pytest.raises(DataError, match="cannot read result"):
        reproduce(file)
