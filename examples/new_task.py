"""A task in one file: reverse a word, letter by letter.

To ship it inside RLKV, put the class in ``src/rlkv/tasks/<name>.py``; from a package of yours, use
the entry point group ``rlkv.tasks`` in the same way as ``rlkv.methods`` (see new_method.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from rlkv.tasks.base import Example, Split, Task
from rlkv.verifiers.base import ExactVerifier


class ReverseWord(Task):
    """Reverse a random word of eight letters."""

    name = "reverse_word"
    max_new_tokens = 64
    verifier = ExactVerifier("Answer:")

    def examples(
        self, limit: int | None = None, *, seed: int = 0, split: Split = "test"
    ) -> Iterator[Example]:
        """Words drawn by (seed, split, index): the same on every machine."""
        for index in range(1000 if limit is None else limit):
            letters = random.Random(f"{split}/{seed}/{index}").choices("abcdefgh", k=8)
            word = "".join(letters)
            yield Example(
                id=f"reverse_word-{split}-{seed}-{index}",
                prompt=f"Spell {word} backwards. End with 'Answer:' and the word.",
                answer=word[::-1],
            )

    def gold_completion(self, example: Example) -> str:
        """A completion that must score 1; the contract tests use it."""
        return f"Answer: {example.answer}"


def main() -> None:
    """Prints one example and the score of its right answer."""
    task = ReverseWord()
    example = next(task.examples(1))
    print(example.prompt)
    print(task.verifier(f"Answer: {example.answer}", example.answer))


if __name__ == "__main__":
    main()
