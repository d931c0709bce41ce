"""Runs a command with --json and keeps its rows in results/, with all that makes them repeatable.

    python scripts/record_result.py bench_memory.json -- rlkv bench memory --json

The file holds the command, the commit (marked where the tree was changed), machine, versions
and the rows exactly as printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from rlkv.core.files import to_json, write_atomic
from rlkv.evaluate.run_info import run_info

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Runs, records, and returns the command's exit status."""
    if "--" not in sys.argv or len(sys.argv) < 4:
        print(__doc__, file=sys.stderr)
        return 2
    split = sys.argv.index("--")
    name, command = sys.argv[1], sys.argv[split + 1 :]
    run = asdict(run_info())
    # the console script may not be on the path of this interpreter: run the module instead
    actual = [sys.executable, "-m", *command] if command[0] == "rlkv" else command
    found = subprocess.run(actual, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode:
        return found.returncode
    shown = {key: run[key] for key in ("created", "versions", "cpu", "threads", "system")}
    result = {
        "command": " ".join(command),
        "commit": run["git_hash"],
        **shown,
        "rows": json.loads(found.stdout),
    }
    write_atomic(ROOT / "results" / name, to_json(result))
    print(f"wrote results/{name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
