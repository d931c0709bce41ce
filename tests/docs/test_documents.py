"""README, docs and CI say what the code and the results say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def test_pages_made_from_code_and_results_are_up_to_date():
    found = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "build_docs.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_ci_runs_the_readmes_test_line():
    lines = [line for line in README.split("\n") if line.startswith("python3 -m venv")]
    assert len(lines) == 2
    assert lines[0].endswith("rlkv quickstart")
    assert lines[1] in (ROOT / ".ci" / "run").read_text("utf-8").split("\n")


def test_readme_is_short_and_its_files_exist():
    assert len(README.split("\n")) <= 250
    for path in re.findall(r"\]\(((?:docs|results)/[^)#]+|[A-Z]+\.[a-z]+)\)", README):
        assert (ROOT / path).exists(), path
    block = README.split("## Files")[1].split("```")[1]
    for line in block.strip().split("\n"):
        assert (ROOT / line.split()[0]).exists(), line


def test_readme_python_block_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 1
    monkeypatch.chdir(ROOT)
    exec(compile(blocks[0], "README.md", "exec"), {})
    text = capsys.readouterr().out
    # k=3 t=7 c=0 d=7 f=7 g=4 h=7 i=1 j=8 l=7 m=5 n=2
    assert "#2" in text, "the model must find n=2"
    held, full = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:of|bytes)", text)[-2:])
    assert held < 0.8 * full
