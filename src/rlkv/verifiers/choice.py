r"""Choice verifier: the option letter that a completion states.

Used by MMLU-Pro and LongReason, whose prompts ask for a last line ``Answer: X``. Forms read, the
first kind that occurs decides:

1. the last ``\boxed{X}`` that holds nothing but a letter;
2. ``Answer: X`` in any dress (bold, ``$X$``, ``\text{X}``, parentheses): the last one, since
   reasoning models revise;
3. "the answer is X": the first one, as MMLU-Pro's own extraction reads it.

Letters beyond the options do not count. The published MMLU-Pro extraction goes on to take the last
single capital of the text, a truth table's "F" or the pronoun "I" included, and after that a fixed
letter; neither is an answer, so both are left out unless ``last_letter`` asks for the first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from string import ascii_uppercase

from rlkv.verifiers.base import Score
from rlkv.verifiers.math import last_boxed

_DRESS = re.compile(r"\\(?:text|mathrm|mathbf|textbf|boxed|mbox)\s*\{([^{}]*)\}|\\[()\[\]]|[*$`]")
_BOXED = re.compile(r"\(?([A-Za-z])\)?(?:[.:)].*)?", re.DOTALL)
_LINE = re.compile(r"(?i)\banswer\s*:\s*(?:option\s*)?[(\[{]*([A-Z])(?![A-Za-z'\u2019])")
_SENTENCE = re.compile(r"[Aa]nswer is:?\s*(?:[Oo]ption\s*)?[(\[{]*([A-Z])(?![A-Za-z'\u2019_^{])")
_LETTER = re.compile(r"\b([A-Z])\b")


def strip_dress(text: str) -> str:
    r"""The text without Markdown emphasis and LaTeX wrappers around single words.

    Example:
        >>> strip_dress(r"**Answer:** $\text{C}$")
        'Answer: C'
    """
    return _DRESS.sub(lambda match: match.group(1) or "", text)


@dataclass(frozen=True)
class ChoiceVerifier:
    """Compares the stated option letter with the gold letter.

    Example:
        >>> ChoiceVerifier(num_options=4)("**Answer: $B$**", "B").reward
        1.0
        >>> ChoiceVerifier(num_options=4)("Answer: J", "J").reason
        'no_answer'
    """

    num_options: int = 10
    """Letters A, B, … that can be an answer; 1 to 26."""
    last_letter: bool = False
    """Also accept the last single capital of the text, as MMLU-Pro's published scores do."""

    def __call__(self, completion: str, answer: str) -> Score:
        """See :class:`rlkv.verifiers.base.Verifier`."""
        extracted = self.extract(completion)
        if extracted is None:
            return Score(0.0, None, "no_answer")
        right = extracted == answer.strip().strip("()").upper()
        return Score(1.0 if right else 0.0, extracted, "correct" if right else "wrong")

    def extract(self, completion: str) -> str | None:
        """The stated letter in upper case, or None."""
        boxed = last_boxed(completion)
        box = _BOXED.fullmatch(strip_dress(boxed).strip()) if boxed is not None else None
        if box is not None and self._is_option(box.group(1)):
            return box.group(1).upper()
        text = strip_dress(completion)
        stated = [found for found in _LINE.findall(text) if self._is_option(found)]
        if stated:
            return stated[-1].upper()
        stated = [found for found in _SENTENCE.findall(text) if self._is_option(found)]
        if stated:
            return stated[0]
        if self.last_letter:
            stated = [found for found in _LETTER.findall(completion) if self._is_option(found)]
            return stated[-1] if stated else None
        return None

    def _is_option(self, letter: str) -> bool:
        return letter.upper() in ascii_uppercase[: self.num_options]
