"""``rlkv serve``: an OpenAI-compatible server with compressed KV heads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Serve:
    """An OpenAI-compatible server with compressed KV heads."""

    model: str
    """Model to serve: embedded, smollm2, a local folder, or a hub id."""
    profile: str | None = None
    """Head profile; without one, and with --sparsity 0, the model is served uncompressed."""
    sparsity: float = 0.5
    """Share of KV heads to compress."""
    engine: Literal["vllm"] = "vllm"
    """What serves: vLLM with the RLKV plugin."""
    host: str = "127.0.0.1"
    """Address to listen on; other machines reach 0.0.0.0 only."""
    port: int = 8000
    """Port to listen on."""
    api_key_env: str | None = None
    """Environment variable that holds the key clients must send; none is asked for by default."""
    max_model_len: int | None = None
    """Longest request, prompt and completion, in tokens; the model's own limit by default."""
    tensor_parallel: int = 1
    """GPUs that share each layer."""
    sink: int = 16
    """First tokens that a compressed head keeps; a multiple of 16."""
    recent: int = 64
    """Last tokens that a compressed head keeps; at least 16."""
    any_model: bool = False
    """Accept a profile that was made for another model of the same shape."""
    vllm_args: str = ""
    """Further options for vLLM in one string, such as --vllm-args="--max-num-seqs 64"."""

    def run(self) -> int:
        """Checks everything, then becomes the server."""
        from rlkv.core.budget import Budget
        from rlkv.hf.loading import model_config, model_spec
        from rlkv.hf.sources import resolve_model
        from rlkv.serve.launch import ServerOptions, require_servable, require_vllm, start_server

        budget = Budget(self.sparsity, self.sink, self.recent)
        require_vllm()
        source = resolve_model(self.model)
        options = ServerOptions(
            location=source.location,
            name=source.model_id,
            profile=self.profile,
            budget=budget,
            host=self.host,
            port=self.port,
            api_key=self._api_key(),
            max_model_len=self.max_model_len,
            tensor_parallel=self.tensor_parallel,
            any_model=self.any_model,
            extra=self.vllm_args,
        )
        config = model_config(self.model)
        require_servable(options, model_spec(self.model), config.architectures or [])
        start_server(options)
        return 0

    def _api_key(self) -> str | None:
        from rlkv.errors import ConfigError

        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise ConfigError(
                f"environment variable {self.api_key_env} is empty; put the API key into it"
            )
        return key
