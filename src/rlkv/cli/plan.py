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
        from rlkv.hf.sources import resolve_model
        from rlkv.serve.plan import Pool, parse_size, plan_rows

        self._require_in_range()
        context = parse_size(self.context)
        usable, reserve = self._usable(), parse_size(self.reserve)
        kv_memory = parse_size(self.kv_memory) if self.kv_memory else None
        resolve_model(self.model)
        profile = None if self.profile is None else HeadProfile.load(self.profile)

        from rlkv.hf.loading import model_spec  # takes seconds: it imports transformers

        spec = model_spec(self.model)
        if profile is not None:
            profile.require_match(spec)
        if kv_memory is None:
            kv_memory = self._left(usable, reserve)
        pool = Pool(kv_memory, context, self.tensor_parallel)
        rows: list[Row] = [
            dict(row)
            for row in plan_rows(
                spec, pool, self.sparsity, profile=profile, sink=self.sink, recent=self.recent
            )
        ]
        title = f"{spec.model_id}: {kv_memory / 2**30:.2f} GiB of KV memory, {pool.context} tokens"
        print_rows(rows, as_json=self.json, title=title)
        return 0

    def _require_in_range(self) -> None:
        """Refuses numbers that no model and no memory could make right."""
        from rlkv.core.budget import Budget
        from rlkv.errors import ConfigError

        if self.tensor_parallel < 1 or not 0.0 < self.utilization <= 1.0:
            raise ConfigError(
                f"tensor_parallel {self.tensor_parallel} and utilization {self.utilization}: "
                "expected at least 1 GPU and a share in (0, 1]"
            )
        if not self.sparsity:
            raise ConfigError("no sparsity is given, expected at least one, such as --sparsity 0.5")
        for sparsity in self.sparsity:
            Budget(sparsity, self.sink, self.recent)

    def _usable(self) -> int:
        """Bytes of one GPU that vLLM may use."""
        from rlkv.serve.plan import parse_size

        return int(parse_size(self.gpu_memory) * self.utilization)

    def _left(self, usable: int, reserve: int) -> int:
        """KV memory of one GPU: what vLLM may use, less weights and reserve, in bytes."""
        from rlkv.errors import ConfigError
        from rlkv.hf.size import weight_bytes

        weights = weight_bytes(self.model) // self.tensor_parallel
        left = usable - weights - reserve
        if left <= 0:
            raise ConfigError(
                f"the weights take {weights / 2**30:.1f} GiB a GPU and the reserve "
                f"{reserve / 2**30:.1f} GiB, more than the {usable / 2**30:.1f} GiB that vLLM may "
                f"use of {self.gpu_memory}; raise --gpu-memory or --tensor-parallel"
            )
        return left
