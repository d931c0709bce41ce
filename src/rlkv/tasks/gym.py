"""reasoning-gym: over a hundred generated puzzles, ``gym:chain_sum`` and so on by dataset name.

An example is determined by (dataset name, seed, index) and made on the spot: offline, endless, the
same on every machine with the same reasoning-gym. Its scorer decides; reasoning-gym gives partial
credit for ill-formed answers, which would inflate a reward, so only a full 1.0 counts. A few
datasets (boxnet, graph_color, propositional_logic, rubiks_cube, rush_hour) state no gold answer of
their own, since many are right; their scorer works all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from rlkv.errors import ConfigError
from rlkv.registry import unknown_name
from rlkv.tasks.base import Example, Split, Task
from rlkv.verifiers.base import Score
from rlkv.verifiers.math import last_boxed

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

DEFAULT_EXAMPLES = 500
"""Examples of a run that names no limit; the test scores of the peers' study use as many."""
TRAIN_SEED_OFFSET = 1_000_000
"""Training seeds are shifted by this, so that no training example is a test example."""
PROMPT = "{question}\n\nThink step by step, then give your final answer as <answer>ANSWER</answer>."


def make_dataset(name: str, size: int, seed: int) -> ProceduralDataset:
    """reasoning-gym's dataset ``name``.

    Raises:
        UnknownNameError: reasoning-gym has no such dataset.
    """
    import reasoning_gym  # takes seconds to import, and only this task needs it
    from reasoning_gym.factory import DATASETS

    known = sorted({*DATASETS} - {"composite"})  # a mixture, which needs a list of others
    if name not in known:
        raise unknown_name("reasoning-gym dataset", name, known)
    return reasoning_gym.create_dataset(name, size=size, seed=seed)


class GymVerifier:
    """Scores the text in the last ``<answer>`` tags, or the last box, with the dataset's scorer.

    The answer is JSON, ``{"seed": …, "index": …, "size": …, "answer": …}``: enough to make the
    puzzle again, whose metadata the scorer may need. Any other text must be matched exactly.
    """

    def __init__(self, dataset_name: str) -> None:
        self.dataset_name = dataset_name
        self._made: tuple[tuple[int, int], ProceduralDataset] | None = None

    def __call__(self, completion: str, answer: str) -> Score:
        """See :class:`rlkv.verifiers.base.Verifier`."""
        extracted = self._extract(completion)
        if not extracted:
            return Score(0.0, None, "no_answer")
        right = self._is_right(extracted, answer)
        return Score(1.0 if right else 0.0, extracted, "correct" if right else "wrong")

    @staticmethod
    def _extract(completion: str) -> str | None:
        before, opened, tail = completion.rpartition("<answer>")
        if opened and "</answer>" in tail:
            return tail.partition("</answer>")[0].strip()
        if opened and "</answer>" in before:
            return GymVerifier._extract(before.rpartition("</answer>")[0] + "</answer>")
        return last_boxed(completion)

    def _is_right(self, extracted: str, answer: str) -> bool:
        try:
            place = json.loads(answer)
            seed, index, size = place["seed"], place["index"], place["size"]
        except (ValueError, TypeError, KeyError):
            return extracted == answer.strip()
        if self._made is None or self._made[0] != (seed, size):
            self._made = ((seed, size), make_dataset(self.dataset_name, size, seed))
        dataset = self._made[1]
        try:
            return float(dataset.score_answer(extracted, dataset[index])) >= 1.0
        except Exception:  # a scorer may fail in any way on text it did not expect
            return False


class Gym(Task):
    """Puzzles of one reasoning-gym dataset."""

    name: ClassVar[str] = "gym"
    dataset_name: ClassVar[str | None] = None
    """reasoning-gym's name of the dataset."""
    max_new_tokens: ClassVar[int] = 4096

    def __init__(self, data: str | None = None) -> None:
        super().__init__(data)
        if self.dataset_name is None:
            raise ConfigError("task gym needs a dataset name, such as gym:chain_sum")
        if data is not None:
            raise ConfigError(
                f"task {self.name} makes its own examples, found a data file {data}; leave it out"
            )
        self._dataset_name = self.dataset_name
        self.verifier = GymVerifier(self.dataset_name)

    @classmethod
    def variant(cls, name: str) -> type[Gym]:
        """The task over reasoning-gym's dataset ``name``; the name is checked on first use."""
        fields = {"name": f"gym:{name}", "dataset_name": name, "__module__": cls.__module__}
        return type(cls.__name__, (cls,), fields)

    def examples(
        self, limit: int | None = None, *, seed: int = 0, split: Split = "test"
    ) -> Iterator[Example]:
        """See :class:`rlkv.tasks.base.Task`."""
        size = DEFAULT_EXAMPLES if limit is None else limit
        actual_seed = seed + (TRAIN_SEED_OFFSET if split == "train" else 0)
        # always made at one size: some datasets draw differently for another
        made_size = max(size, DEFAULT_EXAMPLES)
        dataset = make_dataset(self._dataset_name, made_size, actual_seed)
        for index in range(size):
            entry = dataset[index]
            place = {"seed": actual_seed, "index": index, "size": made_size}
            yield Example(
                id=f"{self.name}-{actual_seed}-{index}",
                prompt=PROMPT.format(question=str(entry["question"]).strip()),
                answer=json.dumps({**place, "answer": str(entry["answer"])}, ensure_ascii=False),
            )

    def gold_completion(self, example: Example) -> str:
        """See :class:`rlkv.tasks.base.Task`."""
        return f"<answer>{json.loads(example.answer)['answer']}</answer>"
