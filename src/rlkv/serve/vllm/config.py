"""The plugin's settings, and what it refuses to be combined with.

Settings come from vLLM's own ``--additional-config '{"rlkv": {...}}'``. Everything is checked while
the model object is built, before weights are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from vllm.config import VllmConfig

from rlkv.core.budget import Budget
from rlkv.core.head_profile import HeadProfile
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError, UnsupportedFeatureError, UnsupportedModelError
from rlkv.registry import unknown_name
from rlkv.serve.launch import ARCHITECTURES, require_vllm

KEY = "rlkv"
_Mode = Literal["split", "mix"]
_SPLIT_ONLY = ("profile", "sparsity", "any_model")
_LOADERS = ("auto", "hf", "safetensors", "pt", "npcache", "fastsafetensors", "dummy")


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """What ``additional_config["rlkv"]`` may hold.

    Raises:
        ConfigError: A value is out of range or of the wrong type.
    """

    profile: str = ""
    """Path of the head profile; none in mode "mix"."""
    sparsity: float = 0.5
    """Share of KV heads to compress, in [0, 1)."""
    sink: int = 16
    """First tokens that a compressed head keeps; a multiple of 16."""
    recent: int = 64
    """Last tokens that a compressed head keeps, the current one included; at least 16."""
    any_model: bool = False
    """Accept the profile of another model of the same shape."""
    untested_gpu: bool = False
    """Run the GPU backend, which has only been checked with Triton's interpreter."""
    mode: _Mode = "split"
    """"split": full and compressed heads by the profile; "mix": every head computes both kinds of
    attention, mixed by a gate that starts at 1 and is set while the engine runs."""
    profile_sha256: str = ""
    """Digest of the profile's file; filled in by the plugin, see ``load_profile``."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(_Mode):
            raise unknown_name("rlkv mode", str(self.mode), list(get_args(_Mode)))
        if self.mode == "split" and (not isinstance(self.profile, str) or not self.profile):
            raise ConfigError(f"rlkv profile is {self.profile!r}; expected the path of a profile")
        if not isinstance(self.sparsity, int | float):
            raise ConfigError(f"rlkv sparsity is {self.sparsity!r}; expected a number in [0, 1)")
        if not isinstance(self.sink, int) or not isinstance(self.recent, int):
            raise ConfigError("rlkv sink and recent must be whole numbers of tokens")
        self.budget()

    def budget(self) -> Budget:
        """Sparsity and window as a budget, which checks their ranges."""
        return Budget(float(self.sparsity), sink=self.sink, recent=self.recent)

    @classmethod
    def parse(cls, values: object) -> PluginConfig:
        """The settings from a mapping.

        Raises:
            ConfigError: It is no mapping, lacks the profile, or a value is wrong.
            UnknownNameError: A key or the mode is unknown.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"additional config {KEY!r} is {values!r}; expected an object such as "
                '{"profile": "x.rlkv.json", "sparsity": 0.5}'
            )
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise unknown_name("rlkv setting", str(key), known)
        if values.get("mode") == "mix":
            for key in _SPLIT_ONLY:
                if key in values:
                    raise ConfigError(
                        f'rlkv setting {key} has no meaning in mode "mix", where every head is '
                        "mixed by its gate; leave it out"
                    )
        elif values.get("mode", "split") == "split" and "profile" not in values:
            raise ConfigError('additional config "rlkv" lacks "profile", the head profile\'s path')
        return cls(**values)


def read_config(vllm_config: VllmConfig) -> PluginConfig | None:
    """The plugin's settings, or None when the user asked for none: vLLM then stays as it is."""
    additional: Any = vllm_config.additional_config
    if not isinstance(additional, Mapping) or KEY not in additional:
        return None
    return PluginConfig.parse(additional[KEY])


def load_profile(config: PluginConfig, vllm_config: VllmConfig) -> HeadProfile:
    """The head profile, checked against the model that vLLM is about to load.

    The file's digest is added to vLLM's settings: they are part of the key of its compile cache,
    from which a graph traced for other heads must not be taken.

    Raises:
        ProfileError: The file cannot be read.
        ProfileMismatchError: It belongs to another model.
    """
    model = vllm_config.model_config
    profile = HeadProfile.load(config.profile)
    spec = ModelSpec(
        model.model,
        "",
        model.hf_text_config.num_hidden_layers,
        model.get_total_num_kv_heads(),
        model.hf_text_config.num_attention_heads,
        model.get_head_size(),
        model.dtype.itemsize,
    )
    profile.require_match(spec, any_model=config.any_model)
    digest = hashlib.sha256(Path(config.profile).read_bytes()).hexdigest()
    settings: Any = vllm_config.additional_config
    settings[KEY] = {**settings[KEY], "profile_sha256": digest}
    return profile


def require_supported(vllm_config: VllmConfig) -> None:
    """Refuses what compressed heads cannot be combined with, one sentence each.

    Raises:
        UnsupportedFeatureError: A feature is on that would give wrong tokens or crash later.
        UnsupportedModelError: The architecture is not one of ``ARCHITECTURES``.
    """
    require_vllm()
    names = vllm_config.model_config.architectures
    if not any(name in ARCHITECTURES for name in names):
        raise UnsupportedModelError(
            f"architecture {', '.join(names)} cannot be compressed in vLLM; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    for found, advice in _conflicts(vllm_config):
        raise UnsupportedFeatureError(f"{found} cannot be combined with compressed heads; {advice}")


def _conflicts(config: VllmConfig) -> Iterator[tuple[str, str]]:
    """Each unsupported feature that is on, with what to do."""
    cache, parallel, model = config.cache_config, config.parallel_config, config.model_config
    if config.speculative_config is not None:
        yield "speculative decoding", "remove --speculative-config"
    if config.kv_transfer_config is not None:
        yield "a KV connector", "remove --kv-transfer-config"
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield f"a {cache.cache_dtype} KV cache", "use --kv-cache-dtype auto"
    if config.quant_config is not None:
        yield "a quantized checkpoint (heads are reordered in weights)", "use unquantized weights"
    if config.lora_config is not None:
        yield "LoRA (its weights would need the same head order)", "merge the adapter first"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism", "use tensor or data parallelism"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism", "use tensor or data parallelism"
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        yield "--disable-hybrid-kv-cache-manager", "remove that flag"
    if config.load_config.load_format not in _LOADERS:
        yield (
            f"load format {config.load_config.load_format}",
            f"use one of {', '.join(_LOADERS)}",
        )
    if model.runner_type != "generate":
        yield f"runner {model.runner_type}", "serve the model for generation"
    if model.original_max_model_len == -1:
        yield "--max-model-len auto", "give the longest request in tokens"
    if getattr(model.hf_text_config, "dual_chunk_attention_config", None):
        yield "dual chunk attention", "remove dual_chunk_attention_config from the model's config"
