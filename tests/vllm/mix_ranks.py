"""Program: greedy completions of mode "mix" on two tensor-parallel ranks, gates set in between.

    python -m tests.vllm.mix_ranks FOLDER OUTPUT

Reads {"prompts": [...], "alphas": [...]} as JSON and writes a list of completions for each alpha to
a JSON file: standard output is vLLM's, for its logs. A program of its own, since vLLM
starts its workers from a main module.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from tests.vllm.conftest import TinyModel
    from tests.vllm.test_mix import mix_engine, run_with

    job = json.load(sys.stdin)
    llm = mix_engine(TinyModel(Path(sys.argv[1]), Path()), tensor_parallel_size=2)
    found = run_with(llm, job["alphas"], job["prompts"])
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
