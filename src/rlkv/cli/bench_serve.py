"""``rlkv bench serve``: stock vLLM and the plugin on the same fixed KV pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlkv.cli.checks import require_at_least
from rlkv.cli.output import print_progress, print_rows

if TYPE_CHECKING:
    from rlkv.bench.serve import Arm
    from rlkv.serve.launch import ServerOptions


@dataclass(frozen=True)
class BenchServe:
    """Stock vLLM and the plugin side by side on the same fixed KV pool."""

    profile: str
    """Head profile of the model."""
    model: str = "smollm2"
    """Model to serve: embedded, smollm2, a local folder, or a hub id."""
    sparsity: tuple[float, ...] = (0.0, 0.2, 0.4, 0.5, 0.6, 0.8)
    """Shares of KV heads to compress, each beside the stock server."""
    kv_pool: str = "96MiB"
    """KV memory of every server; small enough for the burst to fill it."""
    context: tuple[int, ...] = (1024,)
    """Tokens of each request at its end."""
    prompt: int = 128
    """Prompt tokens of each request; the rest is generated."""
    requests: int = 16
    """Requests of a burst."""
    batch: int = 4
    """Requests that decode together when steps are timed."""
    rounds: int = 3
    """Timing rounds of each pair of servers."""
    vllm_args: str = ""
    """Further options for all servers in one string."""
    json: bool = False
    """Print one JSON list instead of a table."""

    def run(self) -> int:
        """Measures, prints, and returns the exit status."""
        from rlkv.bench.serve import Arm, ServeWorkload, serve_rows
        from rlkv.core.budget import Budget
        from rlkv.errors import ConfigError
        from rlkv.serve.plan import parse_size

        require_at_least(1, context=self.context, prompt=self.prompt, requests=self.requests)
        require_at_least(1, batch=self.batch, rounds=self.rounds)
        if self.prompt >= min(self.context):
            raise ConfigError(
                f"prompt {self.prompt} leaves nothing to generate in a context of "
                f"{min(self.context)} tokens; lower --prompt"
            )
        pool = parse_size(self.kv_pool)
        options = [self._options(None, Budget(0.0), pool)]
        options += [self._options(self.profile, Budget(s), pool) for s in self.sparsity]

        from rlkv.hf.loading import model_config

        workload = ServeWorkload(
            vocabulary=model_config(self.model).get_text_config().vocab_size,
            kv_pool_bytes=pool,
            contexts=self.context,
            prompt=self.prompt,
            requests=self.requests,
            batch=self.batch,
            rounds=self.rounds,
        )
        stock = Arm("stock", 0.0, _command(options[0]))
        others: list[Arm] = [
            Arm("rlkv", sparsity, _command(option))
            for sparsity, option in zip(self.sparsity, options[1:], strict=True)
        ]
        rows = list(serve_rows(stock, others, workload, report=print_progress))
        print_rows(rows, as_json=self.json, title="same KV pool, same burst")
        return 0

    def _options(self, profile: str | None, budget: object, pool: int) -> ServerOptions:
        """One server's options, checked before the first server starts."""
        from rlkv.hf.sources import resolve_model
        from rlkv.serve.launch import (
            ServerOptions,
            require_options,
            require_servable,
            require_vllm,
        )

        source = resolve_model(self.model)
        options = ServerOptions(
            location=source.location,
            name=source.model_id,
            profile=profile,
            budget=budget,  # type: ignore[arg-type]
            max_model_len=max(self.context) + 64,
            extra=f"--kv-cache-memory-bytes {pool} {self.vllm_args}",
        )
        require_options(options)
        require_vllm()

        from rlkv.hf.loading import model_config, model_spec

        config = model_config(self.model)
        require_servable(options, model_spec(self.model), config.architectures or [])
        return options


def _command(options: ServerOptions) -> Callable[[int], list[str]]:
    from dataclasses import replace

    from rlkv.serve.launch import server_command

    return lambda port: server_command(replace(options, port=port))
