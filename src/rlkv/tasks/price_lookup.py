"""Price look-up: repeat prices from a list far above; needs heads that reach back.

A user message lists 16 prices, one line each ("lamp costs 42 dollars."). The gold completion asks
for 12 of them again, in the same words; only the digits are scored. A key may be asked twice, so a
few answers also stand inside the recent window. The model never sees an instruction: the pattern of
the lines is enough, and a small model follows it better than a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from random import Random
from typing import ClassVar

from rlkv.tasks.base import Example, Split, Task
from rlkv.tasks.forced import VerbatimVerifier

LINES = 16
LOOK_UPS = 12

_THINGS = (
    "apple bag ball bed bell belt bike boat book bowl box bread broom brush bus cake camera candle "
    "car chair clock coat cup desk door dress fan flag guitar hammer hat jar kettle key knife lamp "
    "map mirror pen phone piano pillow plate radio ring rope scarf shirt soap sofa spoon table "
    "tent towel toy train umbrella vase watch window"
)


class PriceLookup(Task):
    """16 prices in the prompt, 12 of them looked up; every look-up scored by its digits."""

    name: ClassVar[str] = "price_lookup"
    mode = "forced"
    max_new_tokens = 160
    default_model = "smollm2"

    verifier = VerbatimVerifier()

    def examples(
        self, limit: int | None = None, *, seed: int = 0, split: Split = "test"
    ) -> Iterator[Example]:
        """See :class:`~rlkv.tasks.base.Task`; without a limit, 500 examples.

        The prices of a list add up to an even number in ``test`` and to an odd one in ``train``, so
        that the two share no list.
        """
        numbers = count() if limit is not None else range(500)
        for number in islice(numbers, limit):
            yield _example(seed, split, number)


def _example(seed: int, split: Split, number: int) -> Example:
    # a text seed hashes the same on every machine, and makes each example independent of the rest
    rng = Random(f"price_lookup/{seed}/{split}/{number}")
    things = rng.sample(_THINGS.split(), LINES)
    prices = {thing: rng.randint(10, 99) for thing in things}
    if sum(prices.values()) % 2 != (split == "train"):
        last = things[-1]
        prices[last] += 1 if prices[last] < 99 else -1
    prompt = "Price list:\n" + "".join(f"{_line(thing, prices[thing])}\n" for thing in things)
    answer, spans = "", []
    for thing in (rng.choice(things) for _ in range(LOOK_UPS)):
        start = len(answer) + len(thing) + len(" costs ")
        spans.append((start, start + 2))
        answer += f"{_line(thing, prices[thing])}\n"
    return Example(f"{split}-{seed}-{number}", prompt, answer, tuple(spans))


def _line(thing: str, price: int) -> str:
    return f"{thing} costs {price} dollars."
