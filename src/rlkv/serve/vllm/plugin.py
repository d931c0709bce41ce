"""Entry point of the plugin: vLLM calls ``register`` in every one of its processes.

It names the model classes and the cache spec and does nothing else. The classes act as vLLM's own
unless ``additional_config["rlkv"]`` is set, so installing the plugin changes nothing by itself.
"""

from __future__ import annotations


def register() -> None:
    """Registers the model classes and the cache spec; may be called again."""
    from vllm import ModelRegistry

    from rlkv.serve.vllm.kv_spec import register_spec
    from rlkv.serve.vllm.metrics import publish_usage

    register_spec()
    publish_usage()
    for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        # by name, so that the model's module is imported only where a model is built
        ModelRegistry.register_model(name, f"rlkv.serve.vllm.models:RLKV{name}")
