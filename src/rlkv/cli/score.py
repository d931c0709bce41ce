"""``rlkv score``: grades existing generations of any engine."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Score:
    """Grade existing generations of any engine with a task's verifier."""

    file: tyro.conf.Positional[Path]
    """JSON lines, one generation each: {id, completion, answer}, or the authors' files as they are
    (prompt, pred, answers, input_length, output_length)."""
    task: str
    """Task whose verifier judges, such as math500, gsm8k, mbpp, mmlu_pro or gym:chain_sum."""
    data: str | None = None
    """Local JSON-lines file of the task, for generations that carry no answer of their own."""
    json: bool = False
    """Write JSON lines instead of a table."""
    records: bool = False
    """Also write a line an example: id, extracted answer, correct, error type."""

    def run(self) -> int:
        """Writes the records, if asked for, and then the row of totals to standard output.

        Returns:
            Exit status: 0.

        Raises:
            UnknownNameError: There is no such task.
            DataError: The file cannot be read, or a line of it not graded.
            SandboxError: The task runs code and this system cannot confine it.
        """
        from rlkv.evaluate.score_file import as_record, score_file, summarise
        from rlkv.registry import TASKS

        task = TASKS.load(self.task)(self.data)
        scored = []
        for example in score_file(self.file, task):
            scored.append(example)
            if self.records:
                _write_record(as_record(example), as_json=self.json)
        row = as_record(summarise(task.name, scored))
        if self.json:
            _write_record(row, as_json=True)
        else:
            _write_table(row)
        return 0


def _write_record(record: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        line = json.dumps(record, ensure_ascii=True)
    else:
        extracted = str(record["extracted"] or "").replace("\n", " ")[:60]
        outcome = "correct" if record["correct"] else str(record["error"])
        line = f"{record['id']!s:<28} {outcome:<10} {extracted}"
    sys.stdout.write(line + "\n")


def _write_table(row: dict[str, object]) -> None:
    for name, value in row.items():
        shown = f"{100 * value:.2f} %" if isinstance(value, float) else str(value)
        sys.stdout.write(f"{name:<11} {shown}\n")
