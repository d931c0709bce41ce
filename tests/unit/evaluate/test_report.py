"""The report: complete, self-contained, and made from results alone."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import pytest

from rlkv.core.head_profile import HeadProfile
from rlkv.errors import DataError
from rlkv.evaluate.config import EvalConfig
from rlkv.evaluate.evaluation import evaluate
from rlkv.evaluate.figure_style import series_styles
from rlkv.evaluate.metrics import wilson_interval
from rlkv.evaluate.plots import plot_heads, plot_section
from rlkv.evaluate.records import Record, Row
from rlkv.evaluate.report import (
    CellData,
    HeadMap,
    Report,
    accuracy_section,
    difference_sections,
    report_from_folder,
)
from rlkv.evaluate.run_info import RunInfo, git_hash, run_info
from rlkv.evaluate.sections import Section, facets, format_cell, markdown_table

PNG = b"\x89PNG\r\n\x1a\n"


def cell(method, sparsity, right, n=50, task="chain"):
    records = tuple(
        Record(
            str(i),
            0,
            float(i < right),
            "correct" if i < right else "wrong",
            None,
            "",
            "",
            "stop",
            10,
            20,
            500,
            1000,
        )
        for i in range(n)
    )
    found = wilson_interval(right, n)
    row = Row(
        "embedded",
        task,
        method,
        sparsity,
        16,
        64,
        n,
        found.value,
        found.low,
        found.high,
        500.0,
        20.0,
    )
    return CellData(row, records)


@pytest.fixture(scope="module")
def cells():
    return [
        cell("full", 0.0, 49),
        cell("rlkv", 0.2, 48),
        cell("rlkv", 0.5, 47),
        cell("random_heads", 0.2, 40),
        cell("random_heads", 0.5, 12),
        cell("streaming_llm", 1.0, 4),
    ]


@pytest.fixture(scope="module")
def report(cells):
    run = RunInfo("2026-01-01T00:00:00+00:00", "rlkv study </script>", "", {}, "cpu", "c", 1, "s")
    heads = (HeadMap("rlkv", "embedded", ((0.1, 0.9), (0.5, 0.2))),)
    rows = tuple(one.row for one in cells)
    return Report("A & <B>", rows, run, heads, tuple(difference_sections(cells)))


def test_html_needs_nothing_from_outside(report):
    page = report.to_html()
    assert "http" not in page
    assert not re.search(r"(?i)\b(src|href)\s*=\s*[\"'](?!#)", page.replace("href: `#", ""))
    assert "@import" not in page
    assert "url(" not in page
    assert "{{" not in page


def test_html_data_cannot_end_its_script(report):
    page = report.to_html()
    start = page.index('id="data">') + len('id="data">')
    payload = page[start : page.index("</script>", start)]
    data = json.loads(payload)
    assert data["run"]["command"] == "rlkv study </script>"
    assert data["title"] == "A & <B>"
    assert "<h1>A &amp; &lt;B&gt;</h1>" in page
    assert len(data["sections"][0]["records"]) == 6
    assert data["heads"][0]["scores"] == [[0.1, 0.9], [0.5, 0.2]]


def test_json_is_a_list_of_contract_rows(report):
    rows = json.loads(report.to_json())
    assert [list(row) for row in rows] == [[field.name for field in fields(Row)]] * 6


def test_differences_are_paired_within_one_budget(cells):
    (section,) = difference_sections(cells)
    rows = section.records()
    compared = [(row["sparsity"], row["method"]) for row in rows]
    assert compared == [
        (0.2, "full"),
        (0.2, "random_heads"),
        (0.2, "streaming_llm"),
        (0.5, "full"),
        (0.5, "random_heads"),
        (0.5, "streaming_llm"),
    ]
    by_name = {(row["sparsity"], row["method"]): row for row in rows}
    assert by_name[0.5, "random_heads"]["difference"] == pytest.approx(0.7)
    assert by_name[0.5, "random_heads"]["verdict"] == "rlkv better"
    assert by_name[0.2, "full"]["verdict"] == "no difference shown"


def test_another_window_is_another_budget(cells):
    other = cells[3]
    changed = Row(**{**{f.name: getattr(other.row, f.name) for f in fields(Row)}, "recent": 32})
    assert difference_sections([cells[1], CellData(changed, other.records)]) == []
    local = cell("streaming_llm", 1.0, 7)
    assert difference_sections([cells[1], local])
    assert (
        difference_sections([cells[1], CellData(replace(local.row, recent=32), local.records)])
        == []
    )


def test_runs_of_other_examples_are_left_out_of_the_differences(cells):
    full = cell("full", 0.0, 40)
    others = tuple(replace(record, id=f"seed-1-{record.id}") for record in full.records)
    assert difference_sections([cells[1], CellData(full.row, others)]) == []
    assert difference_sections([cells[1], CellData(full.row, others), full])


def test_written_files_are_complete(report, tmp_path):
    names = {path.name for path in report.write(tmp_path)}
    assert names == {
        "report.md",
        "report.json",
        "report.html",
        "run.json",
        "accuracy.png",
        "heads.png",
    }
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "heads.png").read_bytes().startswith(PNG)
    text = (tmp_path / "report.md").read_text()
    assert "![Accuracy over sparsity](accuracy.png)" in text
    assert "| embedded | chain | rlkv | 0.500 |" in text


def test_figures_are_the_same_for_the_same_rows(cells):
    rows = [one.row for one in cells] + [cell("rlkv", 0.5, 3, task="copy").row]
    section = accuracy_section(rows)
    assert [title for title, _ in facets(section)] == ["embedded · chain", "embedded · copy"]
    assert plot_section(section) == plot_section(section)
    tall = HeadMap("rlkv", "m", tuple((0.1, 0.5, 0.9) for _ in range(36)))
    assert plot_heads([tall, tall]).startswith(PNG)


def test_full_and_all_local_are_level_lines(cells):
    chart = accuracy_section([one.row for one in cells]).chart
    assert chart.flat == ("full", "streaming_llm")


def test_methods_keep_their_style():
    alone, among = series_styles(["rlkv"]), series_styles(["full", "new", "rlkv", "newer"])
    assert alone["rlkv"] == among["rlkv"]
    assert len({(style.light, style.marker, style.dash) for style in among.values()}) == 4


def test_cells_are_readable():
    shown = [format_cell(x) for x in (None, True, 0.12345, 123456.7, 12, "a|b\nc")]
    assert shown == ["", "yes", "0.123", "123,457", "12", "a\\|b c"]
    assert markdown_table(["a"], [["x"]]) == "| a |\n| --- |\n| x |"


def test_report_from_a_folder_equals_the_results(toy_tasks, tiny, tmp_path):
    path = tmp_path / "p.json"
    HeadProfile(tiny.spec, [[0.1, 0.2, 0.3, 0.4]] * 3, "test").save(path)
    configs = [
        EvalConfig("tiny", "toy_forced", method, 0.5, 2, 6, str(path), n=4)
        for method in ("full", "rlkv")
    ]
    out = tmp_path / "out"
    results = evaluate(configs, out=out, models={"tiny": tiny}, progress=False)
    found = report_from_folder(out, "T")
    assert set(found.rows) == {result.row for result in results}
    (heads,) = found.heads
    assert heads.scores[2][3] == pytest.approx(0.4)
    assert found.sections[0].key == "differences"
    found.write(out)
    assert report_from_folder(out).rows == found.rows


def test_folder_without_results_says_so(tmp_path):
    with pytest.raises(DataError, match="holds no result"):
        report_from_folder(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        report_from_folder(tmp_path / "missing")


def test_run_info_tells_the_command_as_one_would_type_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/rlkv/__main__.py", "eval", "--n", "3", "a b"])
    assert run_info().command == "rlkv eval --n 3 'a b'"
    monkeypatch.setattr("sys.argv", ["/usr/bin/pytest", "-q"])
    assert run_info().command == "pytest -q"


def test_run_info_names_versions_and_place():
    found = run_info()
    assert found.versions["torch"]
    assert found.versions["python"]
    assert found.threads >= 1
    assert found.cpu
    assert git_hash() == "" or re.fullmatch(r"[0-9a-f]{12}(-dirty)?", git_hash())


def test_sections_without_rows_are_still_tables():
    empty = Section("x", "X", "", ("a",), ())
    assert Report("t", (), None, (), (empty,)).to_markdown().count("| a |") == 1
