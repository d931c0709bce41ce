"""``rlkv study``: a whole grid of methods, sparsities, tasks and models, with its report."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlkv.cli.interrupts import on_interrupt
from rlkv.cli.output import print_rows


@dataclass(frozen=True)
class Study:
    """Run a study from a TOML file, write its report, and print its rows.

    The file names models, tasks, methods and sparsities; [eval] holds options of every cell,
    [profiles.MODEL] the head profile of each method; [sensitivity], [windows] and [overlap] ask for
    analyses. Cells that the output folder holds already are not run again.
    """

    file: tyro.conf.Positional[Path]
    """Study, a TOML file."""
    out: Path | None = None
    """Output folder; default: runs/NAME of the file."""
    n: int | None = None
    """Examples per cell, in place of the file's."""
    json: bool = False
    """Print one JSON list of rows on stdout instead of a table."""

    def run(self) -> int:
        """Runs the study; returns the exit status."""
        from rlkv.core.files import require_writable_folder
        from rlkv.evaluate.config import require_present
        from rlkv.evaluate.records import as_rows
        from rlkv.evaluate.study_config import load_study, require_usable

        study = load_study(self.file)
        if self.n is not None:
            study = study.scaled(self.n)
        require_usable(study)
        named = [path for by_method in study.profiles.values() for path in by_method.values()]
        require_present([*study.cells(), *study.window_cells()], named)
        out = require_writable_folder(self.out or Path("runs") / self.file.stem)

        from rlkv.evaluate.study import run_study  # takes seconds: it imports transformers

        kept = f"finished completions are kept in {out}; go on with the same command"
        with on_interrupt(lambda: kept):
            report = run_study(study, out)
        print_rows(as_rows(report.rows), as_json=self.json, title=study.title)
        print(f"report: {out / 'report.html'}", file=sys.stderr)
        return 0
