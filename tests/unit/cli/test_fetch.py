"""rlkv fetch: prints the folder as data, and stays light until it runs."""

from __future__ import annotations

import subprocess
import sys

import tyro

from rlkv.cli.fetch import Fetch


def test_fetch_prints_the_folder_and_succeeds(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert tyro.cli(Fetch, args=[str(tmp_path)]).run() == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_importing_the_command_loads_no_torch():
    code = "import sys, rlkv.cli.fetch, rlkv.hf.fetch; print({'torch', 'rich'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
