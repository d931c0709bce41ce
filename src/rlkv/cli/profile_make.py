"""``rlkv profile duo`` and ``rlkv profile kvzip``: profiles of the peers, without reinforcement.

Both read ordinary text: by default the questions that ship with the task copy_question, or the
problems and solutions of a task, or a file.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlkv.cli.checks import require_at_least

if TYPE_CHECKING:
    from rlkv.core.head_profile import HeadProfile
    from rlkv.hf.loading import LoadedModel
    from rlkv.train.duo_profile import DuoConfig, PasskeyExample

_DTypes = Literal["auto", "float32", "bfloat16", "float16"]
_DEFAULT_TASK = "copy_question"


@dataclass(frozen=True)
class Duo:
    """Learn a profile by DuoAttention's distillation on passkeys; prints the file written.

    The defaults suit small models; the authors use 10 passkeys of 32 words in 1k to 32k tokens,
    sink 128, recent 256 and 2000 steps.
    """

    model: str
    """Model: embedded, smollm2, a local folder, or a hub id."""
    out: Path
    """Profile to write."""
    steps: int = 200
    """Optimizer steps, one text each."""
    length: int = 512
    """Tokens of a text."""
    passkeys: int = 4
    """Passkeys hidden in a text."""
    words_per_key: int = 8
    """Words of a passkey."""
    sink: int = 16
    """Sink tokens of the local branch."""
    recent: int = 64
    """Recent tokens of the local branch."""
    learning_rate: float = 0.02
    """Peak learning rate."""
    penalty: float = 0.05
    """Weight of the mean gate in the loss."""
    task: str = _DEFAULT_TASK
    """Task whose text the passkeys are hidden in."""
    text: Path | None = None
    """Text file to hide them in instead."""
    seed: int = 0
    """Seed of all draws."""
    dtype: _DTypes = "auto"
    """Type of the weights."""
    device: str = "cpu"
    """Where the model runs, such as cpu or cuda:0."""

    def run(self) -> int:
        """Learns and prints the path; returns the exit status."""
        from rlkv.core.budget import Budget
        from rlkv.core.files import require_writable
        from rlkv.hf.sources import resolve_model

        require_at_least(1, steps=self.steps, length=self.length)
        require_at_least(1, passkeys=self.passkeys, words_per_key=self.words_per_key)
        Budget(0.0, self.sink, self.recent)
        resolve_model(self.model)
        require_writable(self.out)

        from rlkv.hf.loading import load_model
        from rlkv.train.duo_profile import DuoConfig

        config = DuoConfig(
            steps=self.steps,
            learning_rate=self.learning_rate,
            penalty=self.penalty,
            sink=self.sink,
            recent=self.recent,
        )
        texts = _texts(self.text, self.task, 64)
        loaded = load_model(self.model, dtype=self.dtype, device=self.device)
        _save(self._learn(loaded, config, texts), self.out)
        return 0

    def _learn(self, loaded: LoadedModel, config: DuoConfig, texts: list[str]) -> HeadProfile:
        from rlkv.train.duo_profile import duo_profile

        return duo_profile(
            loaded.model,
            _shown(self._examples(loaded, texts), self.steps),
            config,
            spec=loaded.spec,
        )

    def _examples(self, loaded: LoadedModel, texts: list[str]) -> Iterator[PasskeyExample]:
        from rlkv.train.duo_profile import passkey_example

        def encode(text: str) -> list[int]:
            return list(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])

        generator = random.Random(f"duo/{self.seed}")
        words = sorted({word for text in texts for word in text.split() if word.isalpha()})
        # a text of formulas has no words: spell passkeys with letters
        words = words if len(words) > 100 else [a + b for a in "bdkmrt" for b in "aeiou"]
        while True:
            filler = "\n".join(generator.sample(texts, len(texts)))
            yield passkey_example(
                encode,
                filler,
                words,
                length=self.length,
                passkeys=self.passkeys,
                words_per_key=self.words_per_key,
                generator=generator,
            )


@dataclass(frozen=True)
class KVzip:
    """Score heads by KVzip's context reconstruction; prints the profile written."""

    model: str
    """Model: embedded, smollm2, a local folder, or a hub id."""
    out: Path
    """Profile to write."""
    texts: int = 16
    """Contexts to repeat; the scores are their mean."""
    chunk: int = 2000
    """Tokens repeated at a time."""
    task: str = _DEFAULT_TASK
    """Task whose problems and solutions are the contexts."""
    text: Path | None = None
    """Text file that is the one context instead."""
    sink: int = 16
    """Sink tokens, in the scores and in the profile."""
    recent: int = 64
    """Recent tokens noted in the profile."""
    dtype: _DTypes = "auto"
    """Type of the weights."""
    device: str = "cpu"
    """Where the model runs, such as cpu or cuda:0."""

    def run(self) -> int:
        """Scores and prints the path; returns the exit status."""
        from rlkv.core.budget import Budget
        from rlkv.core.files import require_writable
        from rlkv.hf.sources import resolve_model

        require_at_least(1, texts=self.texts, chunk=self.chunk)
        Budget(0.0, self.sink, self.recent)
        resolve_model(self.model)
        require_writable(self.out)
        texts = _texts(self.text, self.task, self.texts)

        from rlkv.hf.loading import load_model
        from rlkv.train.kvzip_profile import kvzip_profile

        loaded = load_model(self.model, dtype=self.dtype, device=self.device)
        profile = kvzip_profile(
            loaded.model,
            loaded.tokenizer,
            texts,
            chunk=self.chunk,
            sink=self.sink,
            recent=self.recent,
            spec=loaded.spec,
        )
        _save(profile, self.out)
        return 0


def _texts(path: Path | None, task_name: str, count: int) -> list[str]:
    """The file's text, or problems with their solutions from a task's training examples."""
    from rlkv.errors import DataError
    from rlkv.registry import TASKS

    if path is not None:
        try:
            return [path.read_text("utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read text {path} ({error}); pass a UTF-8 file") from error
    task = TASKS.load(task_name)()
    found = []
    for example in task.examples(count, seed=0, split="train"):
        # a solution where the example carries one, else the bare answer
        solution = example.meta.get("chain", example.answer)
        found.append(f"{example.prompt}\n{solution}")
    if not found:
        raise DataError(f"task {task_name} has no training examples; pass --text with a file")
    return found


def _shown(examples: Iterator[PasskeyExample], steps: int) -> Iterator[PasskeyExample]:
    """The first ``steps`` examples, with progress on stderr."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    for _ in track(range(steps), "passkeys", console=console, disable=not sys.stderr.isatty()):
        yield next(examples)


def _save(profile: HeadProfile, out: Path) -> None:
    profile.save(out)
    print(out)
