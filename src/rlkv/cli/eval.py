"""``rlkv eval``: accuracy and KV bytes of methods on tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlkv.cli.interrupts import on_interrupt
from rlkv.cli.output import print_rows

if TYPE_CHECKING:
    from rlkv.evaluate.config import EvalConfig
    from rlkv.evaluate.results import EvalResult


@dataclass(frozen=True)
class Eval:
    """Run tasks under methods and print one row for each combination.

    Examples that the output folder holds already are not run again, so an interrupted run goes on
    where it stopped.
    """

    task: tuple[str, ...]
    """Tasks, see `rlkv list tasks`."""
    model: str | None = None
    """Model: embedded, smollm2, a local folder, or a hub id; default: the first task's."""
    method: tuple[str, ...] = ("full",)
    """Methods, see `rlkv list methods`."""
    sparsity: tuple[float, ...] = (0.5,)
    """Shares of KV heads to compress, each in [0, 1)."""
    profile: tuple[str, ...] = ()
    """Head profile: a PATH for all methods that need one, or METHOD=PATH for each."""
    sink: int = 16
    """First tokens that a compressed head keeps."""
    recent: int = 64
    """Last tokens that a compressed head keeps."""
    n: int = 100
    """Examples per task; fewer if the task has fewer."""
    seed: int = 0
    """Seed of the examples and of sampling."""
    batch_size: int = 32
    """Completions written together."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Probability mass that sampling keeps, in (0, 1]."""
    top_k: int = 0
    """Tokens that sampling keeps; 0 keeps all."""
    samples: int = 1
    """Completions per example; accuracy is their mean (pass@1)."""
    max_new_tokens: int | None = None
    """Completion limit in tokens; default: the task's."""
    prefill: Literal["local", "full"] = "local"
    """Whether compressed heads see sink + recent (local) or all of the prompt (full)."""
    rule: Literal["exact", "quantile"] = "exact"
    """How a profile's heads are chosen; quantile is the authors' rule."""
    head_seed: int = 0
    """Seed of methods that draw heads at random."""
    budget_mode: Literal["equal", "authors", "fixed"] = "equal"
    """Of methods that evict by score: equal bytes, or the authors' or a fixed number of tokens."""
    budget_tokens: int = 128
    """Tokens per KV head in the budget mode fixed."""
    streaming_recent: Literal["fixed", "proportional"] = "fixed"
    """Of streaming_llm: a fixed window, or one with the bytes of other methods (proportional)."""
    any_model: bool = False
    """Accept a profile made for another model of the same shape."""
    data: str | None = None
    """JSON-lines file that replaces the task's dataset."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights."""
    device: str = "cpu"
    """Where the model runs, such as cpu or cuda:0."""
    out: Path = Path("runs/eval")
    """Folder for records and results."""
    fresh: bool = False
    """Run again what the output folder holds already."""
    json: bool = False
    """Print one JSON list of rows on stdout instead of a table."""

    def run(self) -> int:
        """Evaluates and prints; returns the exit status."""
        from rlkv.evaluate.config import require_present
        from rlkv.evaluate.records import as_rows

        configs = list(self.configs())
        require_present(configs)

        from rlkv.evaluate.evaluation import evaluate  # takes seconds: it imports transformers

        with on_interrupt(self._kept):
            results = evaluate(configs, out=self.out, fresh=self.fresh)
        print_rows(as_rows([result.row for result in results]), as_json=self.json)
        warn_of_failures(results)
        return 0

    def _kept(self) -> str:
        again = "the same command without --fresh" if self.fresh else "the same command"
        return f"finished completions are kept in {self.out}; go on with {again}"

    def configs(self) -> Iterator[EvalConfig]:
        """One config for each combination of task, method and sparsity.

        Raises:
            ConfigError: A value is out of range.
            UnknownNameError: A name is unknown.
        """
        from rlkv.evaluate.config import EvalConfig
        from rlkv.evaluate.profiles import default_model, profile_for, profiles_by_method

        profiles = profiles_by_method(self.profile)
        for task in self.task:
            model = self.model or default_model(task)
            for method in self.method:
                for sparsity in self.sparsity:
                    yield EvalConfig(
                        model=model,
                        task=task,
                        method=method,
                        sparsity=sparsity,
                        sink=self.sink,
                        recent=self.recent,
                        profile=profile_for(method, profiles),
                        any_model=self.any_model,
                        rule=self.rule,
                        head_seed=self.head_seed,
                        budget_mode=self.budget_mode,
                        budget_tokens=self.budget_tokens,
                        streaming_recent=self.streaming_recent,
                        prefill=self.prefill,
                        n=self.n,
                        seed=self.seed,
                        data=self.data,
                        batch_size=self.batch_size,
                        temperature=self.temperature,
                        top_p=self.top_p,
                        top_k=self.top_k,
                        samples=self.samples,
                        max_new_tokens=self.max_new_tokens,
                        dtype=self.dtype,
                        device=self.device,
                    )


def warn_of_failures(results: list[EvalResult]) -> None:
    """Says on stderr how many examples could not be run, and why the first could not."""
    failed = [record for result in results for record in result.records if record.failure]
    if failed:
        print(
            f"{len(failed)} completions could not be run or scored and count as 0; the first: "
            f"{failed[0].failure}",
            file=sys.stderr,
        )
