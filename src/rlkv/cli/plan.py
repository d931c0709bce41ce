"""``rlkv plan``: requests and tokens that fit in a GPU's memory, before anything loads."""

from __future__ import annotations

from dataclasses import dataclass

from rlkv.cli.output import Row, print_rows


@dataclass(frozen=True)
class Plan:
    """Requests and tokens that fit in memory at each sparsity, before anything loads."""

    model: str
    """Model to serve: embedded, smollm2, a local folder, or a hub id."""
    profile: str | None = None
    """Head profile; it matters for rounding under tensor parallelism."""
    gpu_memory: str = "80GiB"
    """Memory of one GPU."""
    context: str = "32k"
    """Length of every request, prompt and completion, in tokens."""
    sparsity: tuple[float, ...] = (0.0, 0.2, 0.4, 0.5, 0.6, 0.8)
    """Shares of KV heads to compress; 0 is stock vLLM."""
    tensor_parallel: int = 1
    """GPUs that share each layer."""
    utilization: float = 0.92
    """Share of the GPU's memory that vLLM may use (its own default)."""
    reserve: str = "2GiB"
    """Memory of each GPU for activations and captured graphs; known exactly once vLLM runs."""
    kv_memory: str | None = None
    """KV memory of each GPU, when known: nothing is then estimated."""
    sink: int = 16
    """First tokens that a compressed head keeps."""
    recent: int = 64
    """Last tokens that a compressed head keeps."""
    json: bool = False
    """Print one JSON list instead of a table."""

    def run(self) -> int:
        """Computes, prints, and returns the exit status."""
        from rlkv.core.head_profile import HeadProfile
        from rlkv.errors import ConfigError
        from rlkv.hf.loading import model_spec
        from rlkv.serve.plan import Pool, parse_size, plan_rows

        if self.tensor_parallel < 1 or not 0.0 < self.utilization <= 1.0:
            raise ConfigError(
                f"tensor_parallel {self.tensor_parallel} and utilization {self.utilization}: "
                "expected at least 1 GPU and a share in (0, 1]"
            )
        profile = None if self.profile is None else HeadProfile.load(self.profile)
        spec = model_spec(self.model)
        if profile is not None:
            profile.require_match(spec)
        kv_memory = parse_size(self.kv_memory) if self.kv_memory else self._kv_memory()
        pool = Pool(kv_memory, parse_size(self.context), self.tensor_parallel)
        rows: list[Row] = [
            dict(row)
            for row in plan_rows(
                spec, pool, self.sparsity, profile=profile, sink=self.sink, recent=self.recent
            )
        ]
        title = f"{spec.model_id}: {kv_memory / 2**30:.2f} GiB of KV memory, {pool.context} tokens"
        print_rows(rows, as_json=self.json, title=title)
        return 0

    def _kv_memory(self) -> int:
        """KV memory of one GPU: what vLLM may use, less weights and reserve."""
        from rlkv.errors import ConfigError
        from rlkv.hf.size import weight_bytes
        from rlkv.serve.plan import parse_size

        usable = int(parse_size(self.gpu_memory) * self.utilization)
        weights = weight_bytes(self.model) // self.tensor_parallel
        left = usable - weights - parse_size(self.reserve)
        if left <= 0:
            raise ConfigError(
                f"the weights take {weights / 2**30:.1f} GiB a GPU, more than the "
                f"{usable / 2**30:.1f} GiB that vLLM may use of {self.gpu_memory}; raise "
                "--gpu-memory or --tensor-parallel"
            )
        return left
