"""``rlkv serve``: an OpenAI-compatible server with compressed KV heads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from rlkv.cli.checks import require_at_least

if TYPE_CHECKING:
    from rlkv.core.budget import Budget
    from rlkv.core.head_profile import HeadProfile


@dataclass(frozen=True)
class Serve:
    """An OpenAI-compatible server with compressed KV heads."""

    model: str
    """Model to serve: embedded, smollm2, a local folder, or a hub id."""
    profile: str | None = None
    """Head profile; without one, and with --sparsity 0, the model is served uncompressed."""
    sparsity: float = 0.5
    """Share of KV heads to compress."""
    engine: Literal["vllm", "hf"] = "vllm"
    """What serves: vLLM with the RLKV plugin, or a small reference server over transformers."""
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
    drain: int = 30
    """Seconds that requests in flight may finish in after SIGTERM (vLLM's own default is 0)."""
    batch_size: int = 16
    """Requests decoded together by --engine hf."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights with --engine hf; for vLLM use --vllm-args="--dtype float32"."""
    device: str = "cpu"
    """Where the model runs with --engine hf, such as cpu or cuda:0."""
    vllm_args: str = ""
    """Further options for vLLM in one string, such as --vllm-args="--max-num-seqs 64"."""

    def run(self) -> int:
        """Checks everything, then serves until it is told to stop."""
        from rlkv.core.budget import Budget

        budget = Budget(self.sparsity, self.sink, self.recent)
        return self._serve_hf() if self.engine == "hf" else self._serve_vllm(budget)

    def _serve_vllm(self, budget: Budget) -> int:
        from rlkv.hf.sources import resolve_model
        from rlkv.serve.launch import (
            ServerOptions,
            require_options,
            require_servable,
            require_vllm,
            start_server,
        )

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
            drain_s=self.drain,
            extra=self.vllm_args,
        )
        require_options(options)
        require_vllm()

        from rlkv.hf.loading import model_config, model_spec  # takes seconds: transformers

        config = model_config(self.model)
        require_servable(options, model_spec(self.model), config.architectures or [])
        start_server(options)
        return 0

    def _serve_hf(self) -> int:
        profile, key = self._checked_for_hf()
        import uvicorn

        from rlkv.hf.attach import compress
        from rlkv.hf.engine import HFEngine
        from rlkv.hf.loading import load_model, model_spec
        from rlkv.methods.base import MethodOptions
        from rlkv.serve.openai_api import ReferenceServer

        if profile is not None:
            profile.require_match(model_spec(self.model), any_model=self.any_model)
        loaded = load_model(self.model, dtype=self.dtype, device=self.device)
        with compress(
            loaded.model,
            method="full" if profile is None else "rlkv",
            profile=profile,
            sparsity=self.sparsity,
            sink=self.sink,
            recent=self.recent,
            options=MethodOptions(any_model=self.any_model),
            spec=loaded.spec,
        ) as session:
            engine = HFEngine(loaded, session, batch_size=self.batch_size)
            server = ReferenceServer(engine, loaded.spec.model_id, key)
            uvicorn.run(server.app(), host=self.host, port=self.port, log_level="warning")
            server.stop()
        return 0

    def _checked_for_hf(self) -> tuple[HeadProfile | None, str | None]:
        """Profile and API key, once everything that needs no model has been checked."""
        from rlkv.errors import MissingExtraError
        from rlkv.hf.sources import resolve_model
        from rlkv.serve.launch import require_port, require_profile

        require_at_least(1, batch_size=self.batch_size)
        require_port(self.port)
        key = self._api_key()
        resolve_model(self.model)
        profile = require_profile(self.profile, self.sparsity)
        if find_spec("uvicorn") is None:
            raise MissingExtraError(
                "the reference server needs uvicorn; run `pip install 'rlkv[serve]'`"
            )
        return profile, key

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
