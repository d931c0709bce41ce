"""metrics.jsonl: one row a step, cut back to the checkpoint when a run is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlkv.core.files import append_jsonl, mend_jsonl, read_jsonl, to_json, write_atomic
from rlkv.train.checkpoint import Progress
from rlkv.train.steps import StepGradient
from rlkv.train.unit import Alpha

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """The metrics of one run.

    Args:
        folder: Output folder; None keeps rows in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / FILE_NAME if folder else None
        self.rows: list[dict[str, Any]] = []

    def start(self, steps: int) -> None:
        """Keeps the rows of the first ``steps`` steps of an earlier run, drops all later ones."""
        if self.path is None:
            return
        if self.path.is_file() and steps:
            mend_jsonl(self.path)
            self.rows = [row for row in read_jsonl(self.path) if row["step"] <= steps]
        write_atomic(self.path, "".join(to_json(row, indent=None) for row in self.rows))

    def add(self, row: dict[str, Any]) -> None:
        """Appends one step."""
        self.rows.append(row)
        if self.path is not None:
            append_jsonl(self.path, row)


def step_row(
    phase: str, step: StepGradient, progress: Progress, alpha: Alpha, alarm: str | None
) -> dict[str, Any]:
    """One step's row of metrics; the trainer fills ``binary_reward`` in where it is measured.

    Args:
        phase: ``warm`` or ``grpo``.
        step: What was computed.
        progress: Counters after the step.
        alpha: Gates after the step.
        alarm: Sentence about a collapse.
    """
    return {
        "step": progress.total_steps,
        "phase": phase,
        "reward": step.mean_reward,
        "binary_reward": None,
        "loss": step.loss,
        "mean_gate": float(alpha.mean()),
        "under_half": float((alpha < 0.5).mean()),
        # 0 where every gate is 0 or 1, 1 where all are one half
        "undecided": float((alpha * (1.0 - alpha)).mean() * 4.0),
        "penalty": step.penalty,
        "groups": len(step.rewards),
        "live_groups": step.live_groups,
        "generated_tokens": progress.generated_tokens,
        "trained_tokens": progress.trained_tokens,
        "seconds": round(progress.seconds, 3),
        "alarm": alarm,
        "gates": [round(float(value), 4) for value in alpha.reshape(-1)],
    }
