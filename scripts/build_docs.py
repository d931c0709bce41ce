"""Writes the parts of the documents that follow from code or results.

``docs/cli.md`` is every command's ``--help``; tables in README.md and docs/training.md between
``<!-- results:… -->`` marks come from files in ``results/``. ``--check`` writes nothing and fails
where a page is stale.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    ["quickstart"],
    ["train"],
    ["generate"],
    ["eval"],
    ["study"],
    ["report"],
    ["reproduce"],
    ["score"],
    ["profile", "show"],
    ["profile", "heads"],
    ["profile", "import"],
    ["profile", "duo"],
    ["profile", "kvzip"],
    ["serve"],
    ["plan"],
    ["bench", "decode"],
    ["bench", "memory"],
    ["bench", "train"],
    ["bench", "serve"],
    ["list"],
    ["fetch"],
)
KIB, MIB = 1024, 1024 * 1024


def command_help(command: list[str]) -> str:
    """The ``--help`` text of one command, 100 columns wide and without colour."""
    from rlkv.cli.main import main

    # set before anything prints: rich reads them once
    os.environ.update({"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return re.sub(r"[ \t]+$", "", out.getvalue(), flags=re.MULTILINE).strip()


def cli_page() -> str:
    """docs/cli.md."""
    parts = [
        "# Command line",
        "Made by `scripts/build_docs.py` from each command's `--help`. stdout is data, stderr "
        "progress and errors, each one sentence.",
        "| exit status | meaning |\n|---|---|\n"
        "| 0 | done |\n"
        "| 1 | failed: a file is missing, damaged or not writable, or a package, the network or "
        "memory is missing; of `reproduce`: the accuracies differ |\n"
        "| 2 | wrong usage: options, names and settings, and what cannot be combined, such as a "
        "profile and another model |\n"
        "| 130 | interrupted; stderr says what is kept and how to go on |",
    ]
    for command in COMMANDS:
        parts.append(f"## rlkv {' '.join(command)}\n\n```\n{command_help(command)}\n```")
    return "\n\n".join(parts) + "\n"


def read_result(name: str) -> dict[str, Any]:
    """A file in results/."""
    return cast("dict[str, Any]", json.loads((ROOT / "results" / name).read_text("utf-8")))


def quickstart_table() -> str:
    """Accuracy and bytes of the embedded model."""
    result = read_result("quickstart.json")
    rows = result["rows"]
    full = next(row["kv_bytes_mean"] for row in rows if row["method"] == "full")
    lines = ["| method | s | accuracy (95 % interval) | KV bytes |", "|---|---|---|---|"]
    for row in rows:
        interval = f"{row['ci_low']:.3f} to {row['ci_high']:.3f}"
        share = row["kv_bytes_mean"] / full
        lines.append(
            f"| `{row['method']}` | {row['sparsity']:g} | {row['accuracy']:.3f} ({interval}) "
            f"| {row['kv_bytes_mean'] / KIB:.0f} KiB ({share:.0%}) |"
        )
    note = f"n = {rows[0]['n']} unseen problems; `{result['command']}`; `results/quickstart.json`."
    return "\n".join([*lines, "", note])


def decode_table() -> str:
    """Decode time and bytes as ratios to stock."""
    result = read_result("bench_decode.json")
    rows = result["rows"]
    stock = {(r["batch"], r["context"]): r for r in rows if r["cache"] == "stock"}
    ours = {(r["batch"], r["context"], r["sparsity"]): r for r in rows if r["cache"] == "rlkv"}
    steps = sorted({r["sparsity"] for r in rows if r["cache"] == "rlkv"})
    head = " | ".join(f"s = {s:g}" for s in steps)
    lines = [f"| batch | context | stock, ms | {head} |", "|---|---|---|" + "---|" * len(steps)]
    for (batch, context), base in stock.items():
        cells = []
        for s in steps:
            row = ours[batch, context, s]
            time = row["ms_per_token"] / base["ms_per_token"]
            cells.append(f"{time:.2f} time, {row['kv_bytes'] / base['kv_bytes']:.2f} bytes")
        lines.append(f"| {batch} | {context} | {base['ms_per_token']:.0f} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"`{result['command']}`; `results/bench_decode.json`."])


def peers_table(name: str = "study_embedded.json") -> str:
    """Accuracy of every method over sparsity."""
    result = read_result(name)
    rows = result["rows"]
    steps = sorted({row["sparsity"] for row in rows if row["method"] == "rlkv"})
    lines = [
        "| method | " + " | ".join(f"s = {s:g}" for s in steps) + " |",
        "|---|" + "---|" * len(steps),
    ]
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "full"):
        own = {row["sparsity"]: row["accuracy"] for row in rows if row["method"] == method}
        lines.append(f"| `{method}` | " + " | ".join(f"{own[s]:.3f}" for s in steps) + " |")
    full = next(row for row in rows if row["method"] == "full")
    note = (
        f"Full cache {full['accuracy']:.3f}; n = {full['n']}; intervals, bytes and the figure: "
        f"`results/{name}`; `{result['command']}`."
    )
    return "\n".join([*lines, "", note])


def serve_table() -> str:
    """Stock vLLM and the plugin on one KV pool: long answers, then long prompts."""
    names = ("bench_serve.json", "bench_serve_prompts.json")
    answers, prompts = (read_result(name) for name in names)
    full = {row["sparsity"]: row for row in prompts["rows"] if row["engine"] == "rlkv"}
    stock_running = next(r["peak_running"] for r in prompts["rows"] if r["engine"] == "stock")
    contexts = sorted({row["context"] for row in answers["rows"]})
    steps = " | ".join(f"step at {context}" for context in contexts)
    lines = [
        f"| engine | s | requests in the pool | tokens/s | {steps} |",
        "|---|---|---|---|" + "---|" * len(contexts),
    ]
    longest = contexts[-1]
    arms = dict.fromkeys((row["engine"], row["sparsity"]) for row in answers["rows"])
    found = {(r["engine"], r["sparsity"], r["context"]): r for r in answers["rows"]}
    for engine, s in arms:
        running = stock_running if engine == "stock" else full[s]["peak_running"]
        base, own = found["stock", 0.0, longest], found[engine, s, longest]
        ratios = " | ".join(
            f"{_ratio(found[engine, s, c], found['stock', 0.0, c], 'step_ms_equal_batch')}"
            for c in contexts
        )
        speed = f"{own['output_tokens_per_s']:.0f} ({_ratio(own, base, 'output_tokens_per_s')})"
        lines.append(f"| {engine} | {s:g} | {running} | {speed} | {ratios} |")
    note = (
        f"Requests in the pool: `{prompts['command']}`; `results/{names[1]}`. The rest: "
        f"`{answers['command']}`; `results/{names[0]}`."
    )
    return "\n".join([*lines, "", note])


def _ratio(row: dict[str, Any], base: dict[str, Any], name: str) -> str:
    return f"{row[name] / base[name]:.2f} x"


def train_table(name: str) -> str:
    """Cost and accuracy of every objective: means over seeds, worst and best where they differ."""
    from rlkv.bench.train_report import accuracy_section, cost_section

    result = read_result(name)
    rows = result["rows"]
    costs = {row[0]: row[2:] for row in cost_section(rows).rows}
    found = {row[:2]: row for row in accuracy_section(rows).rows}
    steps = sorted({row["sparsity"] for row in rows if row["sparsity"]})
    head = " | ".join(f"s = {s:g}" for s in steps)
    lines = [
        f"| objective | seeds | generated tokens | trained tokens | CPU seconds | {head} |",
        "|---|---|---|---|---|" + "---|" * len(steps),
    ]
    for variant in dict.fromkeys(row["objective"] for row in rows if row["sparsity"]):
        numbers = " | ".join(f"{number:,.0f}" for number in costs.get(variant, (0, 0, 0)))
        cells = " | ".join(_range(*found[variant, s][3:6]) for s in steps)
        lines.append(f"| `{variant}` | {found[variant, steps[0]][2]} | {numbers} | {cells} |")
    full = found.get(("full", 0.0))
    known = f"Full cache {full[3]:.3f}; " if full else ""
    note = f"{known}n = {rows[0]['n']}; `{result['command']}`; intervals in `results/{name}`."
    return "\n".join([*lines, "", note])


def _range(mean: float, low: float, high: float) -> str:
    return f"{low:.3f}" if low == high else f"{mean:.3f} ({low:.3f} to {high:.3f})"


TABLES = {
    "README.md": {
        "quickstart": quickstart_table,
        "peers": peers_table,
        "peers_real": lambda: peers_table("study_smollm2.json"),
        "decode": decode_table,
        "serve": serve_table,
    },
    "docs/training.md": {
        "train": lambda: train_table("bench_train.json"),
        "price": lambda: train_table("bench_price.json"),
        "copy": lambda: train_table("bench_copy.json"),
    },
}


def filled(page: str) -> str:
    """A page with its tables made anew."""
    text = (ROOT / page).read_text("utf-8")
    for name, make in TABLES[page].items():
        start, end = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = f"{before}{start}\n{make()}\n{end}{after}"
    return text


def main() -> int:
    """Writes or checks every page; returns the exit status."""
    pages = {ROOT / page: filled(page) for page in TABLES} | {ROOT / "docs/cli.md": cli_page()}
    stale = [path for path, text in pages.items() if not _is(path, text)]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date; run python scripts/build_docs.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages[path], "utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text("utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
