"""Record and Row: what is kept of each completion, and of each cell.

A cell's records are one JSON-lines file, a line per completion, appended as completions end. Rows
are the output contract of ``rlkv eval``: their fields and their order do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from rlkv.core.files import mend_jsonl, read_jsonl
from rlkv.errors import DataError
from rlkv.verifiers.base import Reason

FinishReason = Literal["stop", "length", "forced", "failed"]


@dataclass(frozen=True, slots=True)
class Record:
    """One completion of one example, judged."""

    id: str
    """Id of the example within its task."""
    sample: int
    """Index among the example's completions."""
    reward: float
    """In [0, 1]; what accuracy is the mean of."""
    reason: Reason
    """Why the reward is what it is."""
    extracted: str | None
    """Answer found in the completion."""
    completion: str
    """Text written; for a forced task, the tokens that the model would have written."""
    answer: str
    """What the verifier compared with."""
    finish_reason: FinishReason
    """``stop`` or ``length`` of a generated completion; ``forced``; ``failed``: see failure."""
    prompt_tokens: int
    """Tokens of the prompt."""
    tokens: int
    """Tokens of the completion."""
    kv_bytes: int
    """Bytes of KV cache the sequence held when it ended, measured."""
    full_bytes: int
    """Bytes that the full cache of as many tokens takes, computed."""
    budget_bytes: int | None = None
    """Bytes that the budget allows at this length, computed; None in records of older runs."""
    failure: str | None = None
    """Why the example could not be run; None when it was."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.reward <= 1.0 or self.reason not in get_args(Reason):
            raise DataError(
                f"record {self.id} has reward {self.reward} and reason {self.reason!r}, expected a "
                "reward in [0, 1] and a known reason; run the example again"
            )

    @classmethod
    def from_row(cls, row: Mapping[str, Any], where: str) -> Record:
        """The record of a parsed JSON line.

        Raises:
            DataError: A field is missing, unknown or of the wrong kind.
        """
        try:
            return cls(**row)
        except TypeError as error:
            raise DataError(
                f"{where} is not a record of `rlkv eval` ({error}); remove the file or pass another"
            ) from error


@dataclass(frozen=True, slots=True)
class Row:
    """One cell's result, as printed by ``rlkv eval --json``."""

    model: str
    """Model name, or the folder's or hub id."""
    task: str
    """Task name."""
    method: str
    """Method name."""
    sparsity: float
    """Share of KV heads compressed; 0 for full, 1 where all heads are local."""
    sink: int
    """First tokens that a compressed head keeps."""
    recent: int
    """Last tokens that a compressed head keeps."""
    n: int
    """Examples."""
    accuracy: float
    """Mean reward, in [0, 1]."""
    ci_low: float
    """Lower end of the 95 % interval of accuracy."""
    ci_high: float
    """Upper end of it."""
    kv_bytes_mean: float
    """Mean bytes of KV cache a sequence held when it ended."""
    tokens_mean: float
    """Mean completion length in tokens."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any], where: str) -> Row:
        """The row of a parsed JSON object; further keys are ignored.

        Raises:
            DataError: A field is missing.
        """
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in row]
        if missing:
            raise DataError(
                f"{where} lacks {', '.join(missing)}; expected a row of `rlkv eval --json`"
            )
        return cls(**{name: row[name] for name in names})


def read_records(path: str | Path) -> list[Record]:
    """The records of a file, in order.

    Raises:
        DataError: The file is missing or a line is not a record.
    """
    rows = enumerate(read_jsonl(path), start=1)
    return [Record.from_row(row, f"{path} record {number}") for number, row in rows]


def recover_records(path: str | Path) -> list[Record]:
    """The records of an interrupted run; a line cut short by a kill is removed from the file.

    Raises:
        DataError: A whole line is not a record.
        OutputError: The file cannot be repaired.
    """
    file = Path(path)
    if not file.is_file():
        return []
    mend_jsonl(file)
    return read_records(file)


def as_rows(items: Sequence[Record] | Sequence[Row]) -> list[dict[str, Any]]:
    """The items as plain dictionaries, fields in order."""
    return [asdict(item) for item in items]
