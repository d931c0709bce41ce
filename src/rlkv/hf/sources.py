"""Where a model comes from: names, the cache folder, local folders and hub ids.

First step of every command that takes ``--model``. Standard library only, so that a wrong name is
refused at once, before torch or transformers load.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rlkv.errors import ModelError
from rlkv.registry import unknown_name

EMBEDDED = "embedded"
SMOLLM2 = "smollm2"
SMOLLM2_ID = "SmolLM2-135M-Instruct"
MODEL_NAMES = (EMBEDDED, SMOLLM2)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model name, resolved."""

    name: str
    """What the user wrote."""
    location: str
    """A local folder, or the hub id to download."""
    model_id: str
    """What profiles and reports call the model."""
    is_local: bool
    """Whether ``location`` is a folder on this machine."""


def cache_folder() -> Path:
    """Folder for converted models: ``$RLKV_CACHE``, else ``rlkv`` in the user's cache folder.

    The user's cache folder is ``$XDG_CACHE_HOME``, or ``~/.cache``. Nothing is created.
    """
    own = os.environ.get("RLKV_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "rlkv"


def smollm2_folder() -> Path:
    """Where ``rlkv fetch smollm2`` puts the converted model."""
    return cache_folder() / SMOLLM2_ID


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form ``ORG/NAME``."""
    return _HUB_ID.fullmatch(name) is not None


def resolve_model(name: str) -> ModelSource:
    """The source behind a model name; nothing is loaded or downloaded.

    Args:
        name: ``embedded``, ``smollm2``, a local folder, or a hub id ``ORG/NAME``, tried in this
            order.

    Raises:
        UnknownNameError: ``name`` is none of these.
        ModelError: The folder is missing or holds no model, or smollm2 was not fetched yet.
    """
    if name == EMBEDDED:
        folder = Path(__file__).resolve().parents[1] / "embedded"
        return _local(name, folder, EMBEDDED, "reinstall rlkv, whose package data is incomplete")
    if name == SMOLLM2:
        return _local(name, smollm2_folder(), SMOLLM2_ID, "run `rlkv fetch smollm2` once")
    folder = Path(name or "?").expanduser()  # the path of "" would be the current folder
    if folder.is_dir():
        advice = "pass a folder written by save_pretrained"
        return _local(name, folder, _folder_model_id(folder.resolve()), advice)
    if folder.exists():
        raise ModelError(f"model {name} is a file; pass the folder that holds its config.json")
    if is_hub_id(name):
        return ModelSource(name, name, name, is_local=False)
    if os.sep in name or name.startswith((".", "~")):
        raise ModelError(
            f"model folder {name} not found; check the path, or pass a hub id such as ORG/NAME"
        )
    known = [*MODEL_NAMES, "a local folder", "a hub id ORG/NAME"]
    raise unknown_name("model", name, known)


def _local(name: str, folder: Path, model_id: str, advice: str) -> ModelSource:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model {name} has no config.json in {folder}, expected a Hugging Face model folder; "
            f"{advice}"
        )
    return ModelSource(name, str(folder), model_id, is_local=True)


def _folder_model_id(folder: Path) -> str:
    """The folder's name, or the hub id when ``folder`` is a snapshot in the hub's own cache."""
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.removeprefix("models--").replace("--", "/", 1)
    return folder.name
