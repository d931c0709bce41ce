"""``rlkv fetch``: bring a model onto this machine before it is needed."""

from __future__ import annotations

from dataclasses import dataclass

import tyro


@dataclass(frozen=True)
class Fetch:
    """Download a model, or convert the small real one; prints the folder it is in."""

    name: tyro.conf.Positional[str]
    """Model: smollm2, or a hub id such as ORG/NAME."""

    def run(self) -> int:
        """Fetches and prints the folder; returns the exit status."""
        from rlkv.hf.fetch import fetch

        print(fetch(self.name))
        return 0
