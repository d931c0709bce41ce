"""Rows of a published dataset, from the hub or from a local JSON-lines file.

Shared by the tasks whose examples are fixed: each gives its rows' meaning, this gives the rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from random import Random
from typing import ClassVar, cast

from rlkv.core.files import read_jsonl
from rlkv.errors import ConfigError, DataError, MissingExtraError
from rlkv.tasks.base import DatasetRef, Example, Split, Task

Row = Mapping[str, object]


def load_published(ref: DatasetRef) -> Iterable[Row]:
    """The rows of a dataset on the hub, or in the local cache when offline.

    Raises:
        MissingExtraError: ``datasets`` is not installed.
        DataError: The dataset cannot be loaded.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            f"loading {ref.repo} needs the package datasets; install rlkv[data], or pass a local "
            "JSON-lines file with --data"
        ) from error
    try:
        found = datasets.load_dataset(ref.repo, ref.config, split=ref.split, revision=ref.revision)
        return cast("Iterable[Row]", found)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"dataset {ref.repo} ({ref.split}, {ref.revision}) cannot be loaded: {error}; check "
            "the connection, or pass a local JSON-lines file with --data"
        ) from error


def text_field(row: Row, *names: str, default: str | None = None) -> str:
    """The first of the named fields that the row has, as text.

    Raises:
        DataError: It has none of them, and there is no default.
    """
    for name in names:
        value = row.get(name)
        if value is not None:
            return str(value)
    if default is None:
        raise DataError(
            f"a row has the fields {', '.join(row)}, expected one of {', '.join(names)}; "
            "see the task's module for the rows it reads"
        )
    return default


class PublishedTask(Task):
    """A task over fixed rows: for testing in the published order whatever the seed.

    For training they are shuffled by the seed, since files are sorted by source and a run takes
    only some of their rows.
    """

    dataset: ClassVar[DatasetRef]
    train_split: ClassVar[str | None] = None
    """Split of ``dataset`` for training, where it has one."""
    max_examples: ClassVar[int | None] = None
    """Rows of the published protocol, where it uses fewer than the dataset has."""

    @abstractmethod
    def example(self, row: Row, number: int) -> Example | None:
        """The example of a row, ``number`` being its place in the file; None skips the row."""

    def examples(
        self, limit: int | None = None, *, seed: int = 0, split: Split = "test"
    ) -> Iterator[Example]:
        """See :class:`rlkv.tasks.base.Task`; ``split`` is ignored for a local file."""
        found = (self.example(row, number) for number, row in enumerate(self._rows(split)))
        some = (example for example in found if example is not None)
        if split == "train":
            drawn = list(some)
            Random(f"{self.name}/{seed}").shuffle(drawn)
            some = iter(drawn)
        bounds = [bound for bound in (limit, self.max_examples) if bound is not None]
        yield from islice(some, min(bounds, default=None))

    def _rows(self, split: Split) -> Iterable[Row]:
        if self.data is not None:
            return read_jsonl(self.data)
        if split == "test":
            return load_published(self.dataset)
        if self.train_split is None:
            raise ConfigError(
                f"task {self.name} has no training examples; train on deepscaler or gsm8k"
            )
        return load_published(replace(self.dataset, split=self.train_split))
