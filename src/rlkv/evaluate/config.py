"""EvalConfig: one cell of an evaluation, one model on one task under one method and budget.

Every check that needs no model happens here, when the config is made; those that need the model's
shape or the profile's content happen in :mod:`rlkv.evaluate.cell`, still before weights load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rlkv.core.budget import Budget
from rlkv.core.engine import SamplingParams
from rlkv.core.head_profile import HeadProfile, SelectionRule
from rlkv.errors import ConfigError, DataError
from rlkv.hf.sources import resolve_model
from rlkv.registry import METHODS, TASKS
from rlkv.tasks.base import Split

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
PrefillName = Literal["local", "full"]
BudgetMode = Literal["equal", "authors", "fixed"]
StreamingRecent = Literal["fixed", "proportional"]


@dataclass(frozen=True)
class EvalConfig:
    """What is evaluated, and how.

    Raises:
        ConfigError: A value is out of range.
        UnknownNameError: The method or the task is unknown.

    Example:
        >>> EvalConfig(model="embedded", task="chain", method="full").sparsity
        0.5
    """

    model: str
    """Model: a name such as embedded or smollm2, a local folder, or a hub id."""
    task: str
    """Task, see ``rlkv list tasks``."""
    method: str = "full"
    """Method, see ``rlkv list methods``."""
    sparsity: float = 0.5
    """Share of KV heads to compress, in [0, 1); methods that fix it ignore it."""
    sink: int = 16
    """First tokens that a compressed head keeps."""
    recent: int = 64
    """Last tokens that a compressed head keeps."""
    profile: str | None = None
    """Head profile file, for methods that need one."""
    any_model: bool = False
    """Accept a profile made for another model of the same shape."""
    rule: SelectionRule = "exact"
    """How a profile's heads are chosen."""
    head_seed: int = 0
    """Seed of methods that draw heads at random."""
    prefill: PrefillName = "local"
    """Whether compressed heads see sink + recent (local) or all of the prompt (full)."""
    budget_mode: BudgetMode = "equal"
    """Of methods that evict by score: equal bytes, or the authors' or a fixed number of tokens."""
    budget_tokens: int = 128
    """Tokens per KV head in the budget mode fixed."""
    streaming_recent: StreamingRecent = "fixed"
    """Of streaming_llm: a fixed window, or one with the bytes of other methods (proportional)."""
    n: int = 100
    """Examples; fewer if the task has fewer."""
    seed: int = 0
    """Seed of the examples and of sampling."""
    split: Split = "test"
    """Which examples."""
    data: str | None = None
    """JSON-lines file that replaces the task's dataset."""
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
    """Completion limit in tokens; None takes the task's."""
    dtype: DTypeName = "auto"
    """Type of the weights."""
    device: str = "cpu"
    """Where the model runs, such as cpu or cuda:0."""

    def __post_init__(self) -> None:
        METHODS.require(self.method)
        TASKS.require(self.task)
        Budget(self.sparsity, self.sink, self.recent)
        self.sampling(1 if self.max_new_tokens is None else self.max_new_tokens)
        for name in ("n", "batch_size", "budget_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1; raise it")
        _require_choice("prefill", self.prefill, PrefillName)
        _require_choice("budget_mode", self.budget_mode, BudgetMode)
        _require_choice("streaming_recent", self.streaming_recent, StreamingRecent)
        _require_choice("dtype", self.dtype, DTypeName)
        _require_choice("rule", self.rule, SelectionRule)
        _require_choice("split", self.split, Split)

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """How completions are drawn, with this limit."""
        return SamplingParams(
            max_new_tokens, self.temperature, self.top_p, self.top_k, self.samples, self.seed
        )

    def with_sparsity(self, sparsity: float) -> EvalConfig:
        """The same cell at another sparsity."""
        return replace(self, sparsity=sparsity)


def _require_choice(name: str, value: str, choices: Any) -> None:  # noqa: ANN401 - a Literal
    known = get_args(choices)
    if value not in known:
        raise ConfigError(f"{name} {value!r} is unknown; use {', '.join(map(repr, known))}")


def require_present(configs: Iterable[EvalConfig], profiles: Iterable[str] = ()) -> None:
    """Checks that the models, profiles and data files of ``configs`` are there.

    Quick: imports neither torch nor transformers, and reads each file once.

    Args:
        configs: What is to be evaluated.
        profiles: Paths of further profiles that will be read.

    Raises:
        UnknownNameError: A model is unknown.
        ModelError: A model's folder is missing.
        ProfileError: A profile cannot be read.
        DataError: A data file is missing.
    """
    cells = list(configs)
    for model in dict.fromkeys(cell.model for cell in cells):
        resolve_model(model)
    used = [cell.profile for cell in cells if cell.profile is not None]
    for path in dict.fromkeys([*used, *profiles]):
        HeadProfile.load(path)
    for data in dict.fromkeys(cell.data for cell in cells if cell.data is not None):
        require_data(data)


def require_data(data: str) -> None:
    """Checks that ``data`` exists, where it is the name of a file.

    Raises:
        DataError: It does not.
    """
    if data.endswith((".json", ".jsonl")) and not Path(data).is_file():
        raise DataError(f"data file {data} not found, expected a JSON-lines file; check the path")
