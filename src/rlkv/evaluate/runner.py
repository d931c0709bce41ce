"""Runs one cell: prompts, batches, completions, scores, records.

Batches are fixed by the examples alone, so a run that was interrupted forms the same batches and
gets the same completions; records that exist are kept, the others are appended as they come. One
bad example is a record with the reason, never the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlkv.core.budget import Budget
from rlkv.core.engine import Completion, Prompt
from rlkv.core.files import append_jsonl
from rlkv.errors import DataError, PromptTooLongError, RLKVError
from rlkv.evaluate.cell import Cell, method_options
from rlkv.evaluate.records import Record, as_rows, recover_records
from rlkv.hf.attach import Session, compress
from rlkv.hf.engine import HFEngine, encode_chat
from rlkv.hf.forced import ForcedCompletion, Gold, encode_gold, force
from rlkv.hf.loading import LoadedModel
from rlkv.tasks.base import Example
from rlkv.tasks.forced import span_token_ranges
from rlkv.verifiers.base import Score

OnRecord = Callable[[Record], None]


@dataclass
class RecordStore:
    """The records of one cell, in memory and, where a path is given, on disk."""

    path: Path | None = None
    """JSON-lines file; None keeps records in memory only."""
    on_record: OnRecord | None = None
    """Called with each new record."""
    found: dict[tuple[str, int], Record] = field(default_factory=dict)
    """Records by (example id, sample)."""

    @classmethod
    def open(cls, path: Path | None, *, fresh: bool = False) -> RecordStore:
        """The store at ``path`` with what an earlier run left there, unless ``fresh``."""
        if path is None:
            return cls()
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        return cls(path, found={(r.id, r.sample): r for r in recover_records(path)})

    def add(self, record: Record) -> None:
        """Keeps a record, unless there is one of that example and sample already."""
        if (record.id, record.sample) in self.found:
            return
        self.found[record.id, record.sample] = record
        if self.path is not None:
            append_jsonl(self.path, as_rows([record])[0])
        if self.on_record is not None:
            self.on_record(record)

    def of(self, examples: Sequence[Example], samples: int) -> list[Record]:
        """The records of ``examples`` in order; those that are missing are left out."""
        keys = [(example.id, sample) for example in examples for sample in range(samples)]
        return [self.found[key] for key in keys if key in self.found]

    def is_complete(self, examples: Sequence[Example], samples: int) -> bool:
        """True where nothing is left to run."""
        return len(self.of(examples, samples)) == len(examples) * samples


@dataclass(frozen=True, slots=True)
class _Item:
    """An example, ready to run."""

    example: Example
    prompt: Prompt
    gold: Gold | None
    """Forced tasks: the gold completion."""
    spans: tuple[range, ...]
    """Forced tasks: gold tokens of each scored span."""


def run_cell(
    cell: Cell, loaded: LoadedModel, examples: Sequence[Example], store: RecordStore
) -> list[Record]:
    """Completes the cell's records and returns them in the order of ``examples``.

    Args:
        cell: What to run.
        loaded: Its model.
        examples: Its examples.
        store: Receives records; examples it has already are not run.
    """
    config = cell.config
    with compress(
        loaded.model,
        method=config.method,
        profile=cell.profile,
        sparsity=cell.budget_sparsity,
        sink=config.sink,
        recent=config.recent,
        options=method_options(config),
        spec=loaded.spec,
    ) as session:
        engine = HFEngine(loaded, session, batch_size=config.batch_size)
        items = []
        for example in examples:
            item = _item(cell, engine, example)
            if isinstance(item, _Item):
                items.append(item)
            else:
                for record in item:
                    store.add(record)
        for batch in _batches(items, max(1, config.batch_size // config.samples)):
            if not store.is_complete([item.example for item in batch], config.samples):
                _run_batch(cell, engine, session, batch, store)
    return store.of(examples, config.samples)


def _item(cell: Cell, engine: HFEngine, example: Example) -> _Item | list[Record]:
    """The example ready to run, or its records where it cannot be run."""
    try:
        prompt = encode_chat(engine.loaded, example.id, cell.task.messages(example))
        if cell.task.mode == "forced":
            gold = encode_gold(engine.loaded, example.answer)
            engine.require_room(prompt, len(gold.token_ids))
            if not example.spans:
                raise DataError(f"example {example.id} has no spans to score; expected some")
            spans = span_token_ranges(gold.offsets, example.spans)
            return _Item(example, prompt, gold, tuple(spans))
        prompt = Prompt(prompt.key, prompt.token_ids, _limit(cell, prompt))
        engine.require_room(prompt, prompt.max_new_tokens or 1)
        return _Item(example, prompt, None, ())
    except RLKVError as error:
        samples = range(cell.config.samples)
        return [_failed(example, sample, str(error)) for sample in samples]


def _limit(cell: Cell, prompt: Prompt) -> int:
    """Completion limit of one prompt, in tokens.

    Raises:
        PromptTooLongError: The task's limit on prompt and completion leaves no room.
    """
    limit = cell.config.max_new_tokens or cell.task.max_new_tokens
    total = cell.task.max_total_tokens
    if total is None:
        return limit
    length = len(prompt.token_ids)
    if length >= total:
        raise PromptTooLongError(
            f"prompt {prompt.key} has {length} tokens, task {cell.config.task} allows {total} with "
            "the completion; leave the example out"
        )
    return min(limit, total - length)


def _batches(items: Sequence[_Item], size: int) -> Iterator[list[_Item]]:
    """Items of similar length together, the longest first; the sort is stable."""

    def tokens(item: _Item) -> int:
        return len(item.prompt.token_ids) + (len(item.gold.token_ids) if item.gold else 0)

    ordered = sorted(items, key=tokens, reverse=True)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _run_batch(
    cell: Cell, engine: HFEngine, session: Session, batch: Sequence[_Item], store: RecordStore
) -> None:
    prompts = [item.prompt for item in batch]
    if cell.task.mode == "forced":
        golds = [item.gold for item in batch if item.gold is not None]
        forced = force(engine.loaded, session, prompts, golds)
        for item, gold, one in zip(batch, golds, forced, strict=True):
            store.add(_forced_record(cell, item, gold, one, engine.loaded))
        return
    examples = {item.example.id: item.example for item in batch}

    def finished(completion: Completion) -> None:
        store.add(_generated_record(cell, examples[completion.key], completion, engine.loaded))

    engine.on_finished = finished
    engine.generate(prompts, cell.config.sampling(max(p.max_new_tokens or 1 for p in prompts)))


def _generated_record(
    cell: Cell, example: Example, completion: Completion, loaded: LoadedModel
) -> Record:
    failure = None
    try:
        score = cell.task.verifier(completion.text, example.answer)
    except RLKVError:
        raise  # the verifier cannot work here at all, for want of a sandbox or a package
    except Exception as error:  # a verifier must not raise; if one does, the run goes on
        score = Score(0.0, None, "invalid")
        failure = f"the verifier raised {type(error).__name__}: {error}"
    tokens = len(completion.token_ids)
    return Record(
        id=example.id,
        sample=completion.sample,
        reward=score.reward,
        reason=score.reason,
        extracted=score.extracted,
        completion=completion.text,
        answer=example.answer,
        finish_reason=completion.finish_reason,
        prompt_tokens=completion.prompt_tokens,
        tokens=tokens,
        kv_bytes=completion.kv_bytes,
        # the last token is written but never fed back
        full_bytes=loaded.spec.kv_bytes(completion.prompt_tokens + tokens - 1),
        budget_bytes=_budget_bytes(cell, loaded, completion.prompt_tokens + tokens - 1),
        failure=failure,
    )


def forced_reward(predicted: Sequence[int], gold: Sequence[int], spans: Sequence[range]) -> float:
    """Share of spans whose every token is the one that the model would have written.

    Args:
        predicted: Most likely token in place of each gold token.
        gold: Gold tokens.
        spans: Gold tokens of each scored span, as indices; at least one.

    Example:
        >>> forced_reward([5, 6, 0, 8], [5, 6, 7, 8], [range(0, 2), range(1, 3)])
        0.5
    """
    right = [all(predicted[i] == gold[i] for i in span) for span in spans]
    return sum(right) / len(right)


def _forced_record(
    cell: Cell, item: _Item, gold: Gold, forced: ForcedCompletion, loaded: LoadedModel
) -> Record:
    reward = forced_reward(forced.predicted, gold.token_ids, item.spans)
    length, tokens = len(item.prompt.token_ids), len(gold.token_ids)
    return Record(
        id=item.example.id,
        sample=0,
        reward=reward,
        reason="correct" if reward == 1.0 else "wrong",
        extracted=None,
        completion=str(loaded.tokenizer.decode(forced.predicted, skip_special_tokens=True)),
        answer=item.example.answer,
        finish_reason="forced",
        prompt_tokens=length,
        tokens=tokens,
        kv_bytes=forced.kv_bytes,
        # the last gold token is predicted but never fed
        full_bytes=loaded.spec.kv_bytes(length + tokens - 1),
        budget_bytes=_budget_bytes(cell, loaded, length + tokens - 1),
    )


def _budget_bytes(cell: Cell, loaded: LoadedModel, length: int) -> int:
    """Bytes that the cell's budget allows a sequence of ``length`` tokens."""
    budget = Budget(cell.budget_sparsity, cell.config.sink, cell.config.recent)
    if cell.sparsity == 1.0:  # every head local, which no budget can say
        return loaded.spec.kv_bytes(budget.tokens_in_compressed_head(length))
    return budget.kv_bytes(loaded.spec, length)


def _failed(example: Example, sample: int, failure: str) -> Record:
    return Record(
        id=example.id,
        sample=sample,
        reward=0.0,
        reason="invalid",
        extracted=None,
        completion="",
        answer=example.answer,
        finish_reason="failed",
        prompt_tokens=0,
        tokens=0,
        kv_bytes=0,
        full_bytes=0,
        failure=failure,
    )
