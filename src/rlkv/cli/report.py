"""``rlkv report``: the report of results that exist already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Report:
    """Write Markdown, JSON, figures and one HTML page from the results in a folder.

    Prints the files written. Needs no model.
    """

    folder: tyro.conf.Positional[Path]
    """Folder of `rlkv eval` or `rlkv study`."""
    out: Path | None = None
    """Where the report goes; default: the same folder."""
    title: str | None = None
    """Heading; default: the folder's name."""

    def run(self) -> int:
        """Writes and prints paths; returns the exit status."""
        from rlkv.core.files import require_writable_folder
        from rlkv.evaluate.report import report_from_folder

        if self.out is not None:
            require_writable_folder(self.out)
        report = report_from_folder(self.folder, self.title)
        for path in report.write(self.out or self.folder):
            print(path)
        return 0
