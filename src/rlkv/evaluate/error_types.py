"""What went wrong: each wrong answer is repetition, overlength or incorrect.

The rules read plain text, so they hold for any engine:

1. **repetition**: the text ends in a loop. Either its tail is periodic (one unit of words, lines or
   paragraphs repeated at least three times, over at least ``MIN_LOOP_WORDS`` words), or, for loops
   that vary ("the time / the time to / the"), its last ``WINDOW`` words hold fewer than
   ``MIN_DISTINCT`` different ones. A loop that the model left again is no repetition.
2. **overlength**: no loop, and the length limit was reached.
3. **incorrect**: the rest.

The paper's rule (fewer than 40 distinct tokens among the last 400, checked every 400 tokens) is the
second half of rule 1, over words in place of tokens. There a loop that reached the limit in between
counted as both; here repetition comes first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ErrorType = Literal["repetition", "overlength", "incorrect"]
LoopUnit = Literal["words", "line", "paragraph", "varied"]

MIN_LOOP_WORDS = 60
"""Words a periodic tail has to span; a list of three short items is not a loop."""
MIN_COPIES = 3
"""Whole copies of the unit that a periodic tail has to hold."""
WINDOW = 400
"""Words of the tail whose variety is measured; the paper's window, there in tokens."""
MIN_WINDOW = 100
"""Words a text needs for its variety to be measured; a shorter one may just be short."""
MIN_DISTINCT = 40
"""Different words that ``WINDOW`` words must hold; in shorter tails a tenth of their number."""

_WORD = re.compile(r"\n[ \t\r]*\n|\n|[^\W_]+|[^\w\s]|_| {8}|[^\S \n\r]")
"""A word, a mark, a line end, a blank line; tabs and the like count too, as models loop on them."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop that a text ends in."""

    unit: LoopUnit
    """What is repeated; ``varied`` for a loop without an exact period."""
    period: int
    """Words of one copy, line ends and punctuation marks counting as words; 0 when varied."""
    copies: int
    """Whole copies; 0 when varied."""
    start: int
    """Character of the text where the loop begins."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why an answer is wrong."""

    error: ErrorType
    """The one type that applies."""
    loop: Loop | None = None
    """The loop, for a repetition."""


def diagnose(
    text: str,
    *,
    output_length: int | None = None,
    input_length: int | None = None,
    finish_reason: str | None = None,
    max_new_tokens: int | None = None,
    max_total_tokens: int | None = None,
) -> Diagnosis:
    """The error type of a wrong answer; lengths and limits in tokens, None where unknown."""
    loop = find_loop(text)
    if loop is not None:
        return Diagnosis("repetition", loop)
    if finish_reason is not None:
        reached = finish_reason == "length"
    else:
        output = output_length or 0
        reached = max_new_tokens is not None and output >= max_new_tokens
        if max_total_tokens is not None and output_length is not None:
            reached = reached or output + (input_length or 0) >= max_total_tokens
    return Diagnosis("overlength" if reached else "incorrect")


def find_loop(text: str) -> Loop | None:
    r"""The loop that ``text`` ends in, or None; in time linear in the text.

    Example:
        >>> find_loop("Let me see. " + "No, wait.\n" * 40)
        Loop(unit='line', period=5, copies=40, start=12)
    """
    matches = list(_WORD.finditer(text))
    words = ["\n\n" if m.group().count("\n") > 1 else m.group() for m in matches]
    period, length = _periodic_tail(words)
    for _ in range(2):
        if not period and words:
            words.pop()  # a final line end, or the half word where a limit cut the text
            period, length = _periodic_tail(words)
    if period:
        start, unit = len(words) - length, words[-period:]
        while words[start].isspace() and not "".join(unit).isspace():
            start, length = start + 1, length - 1  # the line end before the first copy
        kind: LoopUnit = "paragraph" if "\n\n" in unit else "line" if "\n" in unit else "words"
        return Loop(kind, period, length // period, matches[start].start())
    tail = _varied_tail(words)
    return Loop("varied", 0, 0, matches[len(words) - tail].start()) if tail else None


def _periodic_tail(words: Sequence[str]) -> tuple[int, int]:
    """Period and length, in words, of the longest periodic tail; (0, 0) when there is none.

    The prefix function of the reversed words: its value at ``n`` is the length of the longest
    border of the last ``n`` words, and ``n`` minus that is their period.
    """
    tail = list(reversed(words))
    border = [0] * len(tail)
    best = (0, 0)
    k = 0
    for i in range(1, len(tail)):
        while k and tail[i] != tail[k]:
            k = border[k - 1]
        if tail[i] == tail[k]:
            k += 1
        border[i] = k
        length, period = i + 1, i + 1 - k
        if length >= MIN_LOOP_WORDS and length >= MIN_COPIES * period:
            best = (period, length)
    return best


def _varied_tail(words: Sequence[str]) -> int:
    """Words of the longest tail whose every window is poor in different words; 0 when none is."""
    size = min(WINDOW, len(words))
    if size < MIN_WINDOW:
        return 0
    counts = Counter(words[-size:])
    allowed = max(1, MIN_DISTINCT * size // WINDOW)
    if len(counts) >= allowed:
        return 0
    length = size
    while length < len(words):
        counts[words[-length - 1]] += 1
        leaving = words[-length - 1 + size]
        counts[leaving] -= 1
        if not counts[leaving]:
            del counts[leaving]
        if len(counts) >= allowed:
            break
        length += 1
    return length
