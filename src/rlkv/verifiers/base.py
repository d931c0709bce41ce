"""Score and Verifier: how a completion is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Reason = Literal["correct", "wrong", "no_answer", "timeout", "invalid"]


@dataclass(frozen=True, slots=True)
class Score:
    """The judgement of one completion."""

    reward: float
    """In [0, 1]; 1 only for a fully correct answer."""
    extracted: str | None
    """The answer found in the completion, or None."""
    reason: Reason
    """Why the reward is what it is."""


class Verifier(Protocol):
    """Judges a completion against the expected answer; no model, no randomness."""

    def __call__(self, completion: str, answer: str) -> Score:
        """The score of ``completion``; bad text is a score with a reason, never an exception."""
        ...


@dataclass(frozen=True, slots=True)
class ExactVerifier:
    r"""The last ``marker``-prefixed line's text must equal the answer, white space aside.

    Example:
        >>> ExactVerifier("=")("b=2\n= 7 ", "7").reward
        1.0
    """

    marker: str
    """What stands right before the answer."""

    def __call__(self, completion: str, answer: str) -> Score:
        """See :class:`Verifier`."""
        _, found, tail = completion.rpartition(self.marker)
        if not found:
            return Score(0.0, None, "no_answer")
        extracted = tail.strip().split("\n")[0].strip()
        if not extracted:
            return Score(0.0, None, "no_answer")
        right = extracted == answer.strip()
        return Score(1.0 if right else 0.0, extracted, "correct" if right else "wrong")
