"""The shape of the source tree, kept true."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "rlkv"
FILES = sorted(SOURCE.rglob("*.py"))
HEAVY = {"torch", "transformers", "vllm", "matplotlib", "reasoning_gym", "math_verify", "datasets"}
LIGHT_PACKAGES = ("core", "verifiers", "tasks", "cli")


def top_level_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def all_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def relative(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_file_is_short_and_says_what_it_is(path):
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= 400, "split it by concept"
    assert ast.get_docstring(ast.parse(text)), "a file starts with what it is and where it stands"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            code = (node.end_lineno or 0) - first.lineno + 1
            assert code <= 45, f"{node.name} has {code} lines of code; split it"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_foreign_packages_stay_where_they_belong(path):
    name = relative(path)
    imports = all_imports(path)
    if not name.startswith("hf/") and not name.startswith("serve/"):
        assert "transformers" not in imports
    if not name.startswith("serve/vllm/"):
        assert "vllm" not in imports
    if name != "evaluate/plots.py":
        assert "matplotlib" not in imports
    if name.startswith(LIGHT_PACKAGES) or ("/" not in name and name != "gates.py"):
        assert not HEAVY & top_level_imports(path), "import it inside the function that needs it"


def test_import_layers_hold():
    pytest.importorskip("importlinter", reason="import-linter is not installed (rlkv[dev])")
    found = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_import_rlkv_is_light_and_help_is_quick():
    code = "import sys, rlkv; print(sorted({'torch','transformers','numpy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    code = (
        "import sys\nfrom rlkv.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit as e: assert e.code == 0, e.code\n"
        "print(sorted({'torch','transformers','matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr.strip().endswith("[]")
