"""``rlkv reproduce``: run a stored result again and compare."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlkv.cli.output import print_rows
from rlkv.errors import ConfigError


@dataclass(frozen=True)
class Reproduce:
    """Run a stored result again from its file alone; print the stored row and the new one.

    Exit status 0 if the accuracies differ by no more than the tolerance, else 1.
    """

    result: tyro.conf.Positional[Path]
    """Result file (.json) of `rlkv eval` or `rlkv study`."""
    tolerance: float = 0.0
    """Largest difference in accuracy that counts as reproduced."""
    json: bool = False
    """Print one JSON list of the two rows on stdout instead of a table."""

    def run(self) -> int:
        """Runs and prints; returns the exit status."""
        if not 0.0 <= self.tolerance < 1.0:
            raise ConfigError(f"tolerance {self.tolerance} is outside [0, 1); 0 asks for equality")

        from rlkv.evaluate.records import as_rows
        from rlkv.evaluate.reproduce import reproduce

        found = reproduce(self.result)
        print_rows(as_rows([found.stored, found.again]), as_json=self.json)
        for change in found.changes:
            print(f"changed since: {change}", file=sys.stderr)
        if abs(found.difference) > self.tolerance:
            print(
                f"rlkv: not reproduced: accuracy {found.stored.accuracy:.4f} then, "
                f"{found.again.accuracy:.4f} now; see what changed above",
                file=sys.stderr,
            )
            return 1
        return 0
