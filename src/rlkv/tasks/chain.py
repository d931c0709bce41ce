"""Chained variable arithmetic: every step must look earlier values up.

A prompt defines variables one after the other, the last one is asked for, and the completion works
them all out. Digits are added and subtracted modulo 10::

    prompt      k=3 t=7 c=k+t d=c-k ?d
    completion  k=3>k3 t=7>t7 c=k3+t7>c0 d=c0-k3>d7 #7

A step copies its definition from the prompt, which lies further back the further the chain gets,
and cites values found anywhere in the chain so far: a KV head that carries either must keep the
whole past, while spelling and adding need only the last few characters. That is the contrast this
package is about, at a size that a CPU solves.

Every value stands right behind its variable (``k3``, never ``k=3`` followed by ``3+7``): without
that a small model does not learn the look-up. Examples are generated, not downloaded; own work.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import string
from collections.abc import Iterator
from types import MappingProxyType
from typing import ClassVar

from rlkv.core.files import read_jsonl
from rlkv.errors import ConfigError, DataError
from rlkv.tasks.base import Example, Split, Task
from rlkv.verifiers.base import ExactVerifier

ANSWER_MARKER = "#"
"""Stands right before the answer and nowhere else in a chain."""
DEFAULT_VARIABLES = 16
"""Gives chains of 170 characters, hence 170 tokens of a character tokenizer."""
TEST_SHARE = 8
"""One problem in this many belongs to the test split."""

_GIVEN = 2  # variables that are defined by a digit; all others by two earlier ones


class Chain(Task):
    """Chained variable arithmetic modulo 10.

    Example:
        >>> example = next(Chain(num_variables=4).examples(1))
        >>> Chain().verifier(example.meta["chain"], example.answer).reward
        1.0
    """

    name: ClassVar[str] = "chain"
    max_new_tokens: ClassVar[int] = 300
    default_model: ClassVar[str | None] = "embedded"

    def __init__(self, data: str | None = None, *, num_variables: int = DEFAULT_VARIABLES) -> None:
        """A task whose problems have ``num_variables`` variables, 3 to 26.

        ``data`` is a JSON-lines file with ``id``, ``prompt`` and ``answer`` that replaces the
        generated problems.

        Raises:
            ConfigError: ``num_variables`` is out of range.
        """
        super().__init__(data)
        most = len(string.ascii_lowercase)
        if not _GIVEN < num_variables <= most:
            raise ConfigError(
                f"num_variables is {num_variables}, expected {_GIVEN + 1} to {most} (one letter "
                "per variable); choose a number in that range"
            )
        self.num_variables = num_variables
        self.verifier = ExactVerifier(ANSWER_MARKER)

    def examples(
        self, limit: int | None = None, *, seed: int = 0, split: Split = "test"
    ) -> Iterator[Example]:
        """The first ``limit`` problems of ``split``, without end where ``limit`` is None.

        A problem's own digest decides its split, so that the two share none whatever the seeds.
        """
        source = self._stored() if self.data else self._generated(seed, split)
        return itertools.islice(source, limit)

    def gold_completion(self, example: Example) -> str:
        """See :class:`rlkv.tasks.base.Task`."""
        return str(example.meta.get("chain", f"{ANSWER_MARKER}{example.answer}"))

    def _generated(self, seed: int, split: Split) -> Iterator[Example]:
        rng = random.Random(f"chain-{self.num_variables}-{split}-{seed}")
        seen: set[str] = set()
        while True:
            prompt, chain, value = draw_problem(rng, self.num_variables)
            digest = hashlib.sha256(prompt.encode()).hexdigest()
            is_test = int(digest[:8], 16) % TEST_SHARE == 0
            if is_test != (split == "test") or digest in seen:
                continue
            seen.add(digest)
            yield Example(
                id=f"chain-{self.num_variables}-{digest[:16]}",
                prompt=prompt,
                answer=str(value),
                meta=MappingProxyType({"variables": self.num_variables, "chain": chain}),
            )

    def _stored(self) -> Iterator[Example]:
        for number, row in enumerate(read_jsonl(self.data or ""), start=1):
            texts = [
                row[key] for key in ("id", "prompt", "answer") if isinstance(row.get(key), str)
            ]
            if len(texts) != 3:
                raise DataError(
                    f"{self.data} row {number} has {sorted(row)}, expected the texts id, prompt "
                    "and answer; add them"
                )
            yield Example(id=texts[0], prompt=texts[1], answer=texts[2])


def draw_problem(rng: random.Random, num_variables: int) -> tuple[str, str, int]:
    """A random problem: its prompt, its gold chain and its answer in [0, 9].

    Names are drawn without replacement and operands uniformly from all earlier variables, so
    neither the alphabet nor recency tells where a value stands.
    """
    names = rng.sample(string.ascii_lowercase, num_variables)
    values: dict[str, int] = {}
    definitions: list[str] = []
    steps: list[str] = []
    for place, name in enumerate(names):
        if place < _GIVEN:
            values[name] = rng.randrange(10)
            definitions.append(f"{name}={values[name]}")
            steps.append(f"{name}={values[name]}>{name}{values[name]}")
            continue
        left, right = rng.sample(names[:place], 2)
        sign = rng.choice("+-")
        change = values[right] if sign == "+" else -values[right]
        values[name] = (values[left] + change) % 10
        definitions.append(f"{name}={left}{sign}{right}")
        steps.append(
            f"{name}={left}{values[left]}{sign}{right}{values[right]}>{name}{values[name]}"
        )
    last = names[-1]
    prompt = " ".join([*definitions, f"?{last}"])
    chain = " ".join([*steps, f"{ANSWER_MARKER}{values[last]}"])
    return prompt, chain, values[last]
