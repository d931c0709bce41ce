"""evaluate(): many cells, each model loaded once, everything checked before weights load.

What ``rlkv eval``, ``rlkv quickstart`` and ``rlkv study`` call. With an output folder, each cell
leaves two files: its records (JSON lines) and its result (the row, the config, and where and with
what it ran), which ``rlkv reproduce`` can run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlkv.core.files import locked_folder, require_writable_folder, to_json, write_atomic
from rlkv.evaluate.cell import Cell, prepare
from rlkv.evaluate.config import EvalConfig
from rlkv.evaluate.metrics import accuracy
from rlkv.evaluate.progress import EvalProgress
from rlkv.evaluate.records import Record, Row
from rlkv.evaluate.results import RESULT_FORMAT, EvalResult, profile_summary
from rlkv.evaluate.run_info import run_info
from rlkv.evaluate.runner import RecordStore, run_cell
from rlkv.hf.loading import LoadedModel, load_model
from rlkv.tasks.base import Example


def evaluate(
    configs: Iterable[EvalConfig],
    *,
    out: str | Path | None = None,
    fresh: bool = False,
    models: Mapping[str, LoadedModel] | None = None,
    progress: bool = True,
    one_each: bool = False,
) -> list[EvalResult]:
    """Runs cells and returns their results, in order and without duplicates.

    Args:
        configs: Cells; those that differ only in a sparsity that the method ignores are one.
        out: Folder for records and results. Records found there are not run again.
        fresh: Run everything again and replace what ``out`` holds of these cells.
        models: Models that are loaded already, by the name that configs use.
        progress: Show progress on stderr.
        one_each: Return a result for every config, repeated where two are one cell.

    Raises:
        RLKVError: Whatever is wrong with a config, or ``out`` is in use by another run; raised
            before any weights load.
    """
    given = models or {}
    cells: dict[str, Cell] = {}
    keys = []
    for config in configs:
        loaded = given.get(config.model)
        cell = prepare(config, None if loaded is None else loaded.spec)
        keys.append(f"{cell.model}/{cell.fingerprint}/{config.n}")
        cells.setdefault(keys[-1], cell)
    folder = None if out is None else require_writable_folder(out)
    with (
        locked_folder(folder),
        EvalProgress(enabled=progress) as shown,
        _Models(given) as loader,
    ):
        done = {
            key: _evaluate_cell(cell, folder, fresh, loader, shown) for key, cell in cells.items()
        }
    return [done[key] for key in (keys if one_each else cells)]


def _evaluate_cell(
    cell: Cell, folder: Path | None, fresh: bool, loader: _Models, shown: EvalProgress
) -> EvalResult:
    config = cell.config
    examples: list[Example] = list(
        cell.task.examples(config.n, seed=config.seed, split=config.split)
    )
    path = None if folder is None else cell.records_path(folder)
    store = RecordStore.open(path, fresh=fresh)
    store.on_record = shown.note
    found = store.of(examples, config.samples)
    shown.start_cell(cell.label, len(examples) * config.samples, len(found))
    if store.is_complete(examples, config.samples):  # nothing to run: the model is not needed
        records = found
    else:
        records = run_cell(cell, loader.get(config), examples, store)
    row = make_row(cell, records)
    result = None if path is None else path.with_suffix(".json")
    if result is not None and path is not None:
        write_atomic(result, to_json(_result(cell, row, path)))
    return EvalResult(config, row, tuple(records), result)


def make_row(cell: Cell, records: Sequence[Record]) -> Row:
    """The figures of a cell.

    Raises:
        DataError: There are no records.
    """
    estimate = accuracy(records)
    # an example that could not be run held no cache and wrote nothing
    ran = [record for record in records if record.finish_reason != "failed"]
    return Row(
        model=cell.model,
        task=cell.config.task,
        method=cell.config.method,
        sparsity=cell.sparsity,
        sink=cell.config.sink,
        recent=cell.config.recent,
        n=len({record.id for record in records}),
        accuracy=estimate.value,
        ci_low=estimate.low,
        ci_high=estimate.high,
        kv_bytes_mean=_mean([record.kv_bytes for record in ran]),
        tokens_mean=_mean([record.tokens for record in ran]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _result(cell: Cell, row: Row, records: Path) -> dict[str, Any]:
    profile = cell.profile
    return {
        "format": RESULT_FORMAT,
        "row": asdict(row),
        "config": asdict(cell.config),
        "fingerprint": cell.fingerprint,
        "records": records.name,
        "profile": None if profile is None else profile_summary(profile),
        "run": asdict(run_info(cell.config.device)),
    }


class _Models:
    """Loads models when first needed and holds one at a time."""

    def __init__(self, given: Mapping[str, LoadedModel]) -> None:
        self._given = given
        self._key: tuple[str, str, str] | None = None
        self._loaded: LoadedModel | None = None

    def __enter__(self) -> _Models:
        return self

    def __exit__(self, *_: object) -> None:
        self._loaded = None

    def get(self, config: EvalConfig) -> LoadedModel:
        """The model of a config."""
        if config.model in self._given:
            return self._given[config.model]
        key = (config.model, config.dtype, config.device)
        if self._loaded is None or key != self._key:
            self._loaded = None  # freed before the next one fills memory
            self._loaded = load_model(config.model, dtype=config.dtype, device=config.device)
            self._key = key
        return self._loaded
