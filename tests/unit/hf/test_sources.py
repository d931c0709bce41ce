"""Model names: which source each resolves to, and what is said about the ones that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.errors import ModelError, UnknownNameError
from rlkv.hf.sources import cache_folder, resolve_model


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_cache_folder_prefers_its_own_variable_then_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RLKV_CACHE", raising=False)
    assert cache_folder() == tmp_path / "rlkv"
    monkeypatch.setenv("RLKV_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_smollm2_names_the_converted_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RLKV_CACHE", str(tmp_path))
    folder = model_folder(tmp_path / "SmolLM2-135M-Instruct")
    source = resolve_model("smollm2")
    assert (source.location, source.model_id) == (str(folder), "SmolLM2-135M-Instruct")


def test_smollm2_not_fetched_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("RLKV_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"run `rlkv fetch smollm2`"):
        resolve_model("smollm2")


def test_a_local_folder_is_called_by_its_name(tmp_path):
    source = resolve_model(str(model_folder(tmp_path / "My-Model")))
    assert (source.model_id, source.is_local) == ("My-Model", True)


def test_a_snapshot_of_the_hub_cache_is_called_by_its_hub_id(tmp_path):
    folder = model_folder(tmp_path / "models--org--Model" / "snapshots" / "0123abcd")
    assert resolve_model(str(folder)).model_id == "org/Model"


def test_a_hub_id_is_not_local():
    source = resolve_model("no-such-org/No-Model")
    assert (source.location, source.is_local) == ("no-such-org/No-Model", False)


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("smolm2", UnknownNameError, "Did you mean smollm2"),
        ("./nowhere", ModelError, "folder ./nowhere not found"),
        ("~/a/b/c", ModelError, "not found"),
        ("", UnknownNameError, "unknown model"),
    ],
)
def test_a_name_that_is_nothing_is_refused_with_advice(name, error, sentence):
    with pytest.raises(error, match=sentence):
        resolve_model(name)


def test_a_folder_without_config_and_a_file_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(file))
