"""``rlkv list``: the methods, tasks and models that can be named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro

from rlkv.cli.output import print_rows
from rlkv.registry import METHODS, TASKS

ListRow = dict[str, str | bool]


@dataclass(frozen=True)
class List:
    """List what `--method`, `--task` or `--model` accept, with a line on each."""

    what: tyro.conf.Positional[Literal["methods", "tasks", "models"]]
    """What to list."""
    json: bool = False
    """Print one JSON list on stdout instead of a table."""

    def run(self) -> int:
        """Prints the list; returns the exit status."""
        rows = {"methods": _methods, "tasks": _tasks, "models": _models}[self.what]()
        print_rows(rows, as_json=self.json)
        return 0


def _methods() -> list[ListRow]:
    return [{"name": name, "summary": METHODS.summary(name)} for name in METHODS.names()]


def _tasks() -> list[ListRow]:
    return [{"name": name, "summary": TASKS.summary(name)} for name in TASKS.names()]


def _models() -> list[ListRow]:
    from rlkv.errors import RLKVError
    from rlkv.hf.sources import EMBEDDED, MODEL_NAMES, resolve_model

    summaries = {
        EMBEDDED: "Small reasoning model that ships with RLKV; its task is chain.",
        "smollm2": "SmolLM2-135M-Instruct; fetch it once with `rlkv fetch smollm2`.",
    }
    rows: list[ListRow] = []
    for name in MODEL_NAMES:
        try:
            resolve_model(name)
            ready = True
        except RLKVError:
            ready = False
        rows.append({"name": name, "summary": summaries[name], "ready": ready})
    rows.append(
        {
            "name": "FOLDER or ORG/NAME",
            "summary": "Any local folder or hub id whose attention can be split by KV head.",
            "ready": True,
        }
    )
    return rows
