"""``rlkv bench``: measurements, each one command that prints rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro
from tyro.conf import subcommand

from rlkv.cli.bench_serve import BenchServe
from rlkv.cli.bench_train import BenchTrain
from rlkv.cli.checks import require_at_least
from rlkv.cli.output import Row, print_rows


@dataclass(frozen=True)
class Decode:
    """Time per decode step and KV bytes: the stock cache and RLKV's side by side."""

    model: str = "smollm2"
    """Model to measure: embedded, smollm2, a local folder, or a hub id."""
    profile: str | None = None
    """Head profile; without one, heads are drawn at random (their number is what costs time)."""
    sparsity: tuple[float, ...] = (0.0, 0.5, 0.75)
    """Shares of KV heads to compress."""
    context: tuple[int, ...] = (256, 1024, 4096)
    """Tokens in the cache when decoding starts."""
    batch: tuple[int, ...] = (1, 8)
    """Rows decoded together."""
    sink: int = 16
    """First tokens a compressed head keeps."""
    recent: int = 64
    """Last tokens a compressed head keeps."""
    steps: int = 16
    """Timed steps of each variant; the median is reported."""
    dtype: str = "bfloat16"
    """Type of weights and cache: auto, float32, bfloat16 or float16."""
    json: bool = False
    """Print one JSON list instead of a table."""

    def run(self) -> int:
        """Measures, prints, and returns the exit status."""
        from rlkv.core.budget import Budget
        from rlkv.core.head_profile import HeadProfile
        from rlkv.hf.sources import resolve_model

        require_at_least(1, context=self.context, batch=self.batch, steps=self.steps)
        for sparsity in self.sparsity:
            Budget(sparsity, self.sink, self.recent)
        profile = None if self.profile is None else HeadProfile.load(self.profile)
        resolve_model(self.model)

        from rlkv.bench.decode import DecodeGrid, decode_rows
        from rlkv.hf.loading import load_model, model_spec

        if profile is not None:
            profile.require_match(model_spec(self.model))
        grid = DecodeGrid(
            self.sparsity, self.context, self.batch, self.sink, self.recent, self.steps
        )
        loaded = load_model(self.model, dtype=self.dtype)  # type: ignore[arg-type]
        rows: list[Row] = list(decode_rows(loaded, grid, profile))
        print_rows(rows, as_json=self.json, title="decode step, median")
        return 0


@dataclass(frozen=True)
class Memory:
    """Measured KV bytes against the budget's formula, over prompt lengths and sparsities."""

    model: str = "embedded"
    """Model to measure: embedded, smollm2, a local folder, or a hub id."""
    sparsity: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9)
    """Shares of KV heads to compress."""
    prompt: tuple[int, ...] = (50, 500, 4000)
    """Prompt lengths in tokens."""
    sink: int = 16
    """First tokens a compressed head keeps."""
    recent: int = 64
    """Last tokens a compressed head keeps."""
    json: bool = False
    """Print one JSON list instead of a table."""

    def run(self) -> int:
        """Measures, prints, and returns the exit status."""
        from rlkv.core.budget import Budget
        from rlkv.hf.sources import resolve_model

        require_at_least(1, prompt=self.prompt)
        for sparsity in self.sparsity:
            Budget(sparsity, self.sink, self.recent)
        resolve_model(self.model)

        from rlkv.bench.memory import memory_rows
        from rlkv.hf.loading import load_model

        loaded = load_model(self.model)
        rows = list(
            memory_rows(loaded, self.sparsity, self.prompt, sink=self.sink, recent=self.recent)
        )
        print_rows(rows, as_json=self.json, title="KV bytes of one sequence")
        return 0


@dataclass(frozen=True)
class Bench:
    """Measure speed, memory, learning or serving."""

    what: tyro.conf.OmitSubcommandPrefixes[
        Annotated[Decode, subcommand("decode")]
        | Annotated[Memory, subcommand("memory")]
        | Annotated[BenchTrain, subcommand("train")]
        | Annotated[BenchServe, subcommand("serve")]
    ]
    """The measurement."""

    def run(self) -> int:
        """Runs the chosen measurement."""
        return self.what.run()
