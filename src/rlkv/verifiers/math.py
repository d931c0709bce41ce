r"""Math verifier: the last ``\boxed{…}`` against the gold answer.

Used as the reward of training and as the score of GSM8K, MATH-500, AIME and DeepScaleR. Extraction:
the last box whose braces balance, else the text after the last "final answer is" (or "answer is").
Comparison: equal after normalisation, else equal as exact numbers, else equal for sympy, which runs
in a worker process (``math_worker.py``) that is killed when it takes too long.

Deviation from the published graders: a completion that never states an answer scores 0; the last
number of the text is not taken for one. A box inside unfinished reasoning counts, as it does there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

from rlkv.verifiers.base import Score
from rlkv.verifiers.worker_process import SymbolicComparer

MAX_ANSWER_CHARS = 2000
"""Longer answers are never compared symbolically; no gold answer comes near."""

_STATED = re.compile(r"(?i)\banswer\s*(?:is|:)\s*:?\s*(?=([^\n]+))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(\{)|([A-Za-z0-9]))")
_BETWEEN_BOXES = re.compile(r"[ $]*(?:,|and|,[ $]*and|\\text\{ *(?:and|,) *\})(?:[ $]|\\[,; ])*")
_CLAUSE = re.compile(r"\.(?:\s|$)|,? +(?:and|but|because|since|when|where|which|so|if|for|as)\b")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,(?:\\!)?\d{3})+(?:\.\d+)?")
_FRACTION = re.compile(r"([+-]?)\\frac\{([+-]?\d+)\}\{([+-]?\d+)\}|([+-]?\d+)/(\d+)")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textrm|textit)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\(?:[,;:! ]|quad|qquad|displaystyle|left(?![a-z])|right(?![a-z]))|[\s~]")
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degree|°")


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed`` with balanced braces, in time linear in the text.

    Boxes joined by a comma or "and" are one list.

    Example:
        >>> last_boxed(r"so \boxed{\frac{1}{2}} or \boxed{3")
        '\\frac{1}{2}'
    """
    closing: dict[int, int] = {}
    open_braces: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            open_braces.append(match.start())
        elif match.group() == "}" and open_braces:
            closing[open_braces.pop()] = match.start()
    parts: list[str] = []
    start = -1
    for box in reversed(list(_BOX.finditer(text))):
        end = box.end() if box.group(2) else closing.get(box.start(1), -1) + 1
        content = box.group(2) or (text[box.end() : end - 1].strip() if end else "")
        if not content:
            continue
        # "\boxed{1}, \boxed{-2}" is one answer: a list given in several boxes
        if parts and not _BETWEEN_BOXES.fullmatch(text[end:start]):
            break
        parts.insert(0, content)
        start = box.start()
    return ",".join(parts) or None


def extract_answer(text: str) -> str | None:
    r"""The answer that a completion states, or None.

    Example:
        >>> extract_answer("Therefore, the final answer is: $12$. I hope it is correct")
        '12'
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    stated = None
    for stated in _STATED.finditer(text):  # noqa: B007 - the last match is wanted
        pass
    if stated is None:
        return None
    line = stated.group(1).replace("**", "").strip()
    inline = re.match(r"\$+([^$]+)\$+|\\[(\[](.+?)\\[)\]]", line)
    answer = (inline.group(1) or inline.group(2)) if inline else _CLAUSE.split(line)[0]
    return answer.strip(" .:,*") or None


def gold_answer(answer: str) -> str:
    r"""The bare gold answer: after ``####``, or in the last box of a full solution, or as given."""
    if "####" in answer:
        return answer.rpartition("####")[2].strip()
    return last_boxed(answer) or answer.strip()


def normalise(answer: str) -> str:
    r"""One spelling for answers that differ in LaTeX dress only.

    Example:
        >>> normalise(r"$x = \dfrac12\text{ cm}$"), normalise("1,234.50")
        ('\\frac{1}{2}', '1234.50')
    """
    text = answer.strip().strip("$").strip()
    text = re.sub(r"^\\[(\[](.*)\\[)\]]$", r"\1", text, flags=re.DOTALL)
    text = text.replace("\\$", "").replace("\\%", "").replace("%", "").replace("\u2212", "-")
    text = _DEGREES.sub("", text)
    if _GROUPED.fullmatch(text.strip()):
        text = re.sub(r",(?:\\!)?", "", text)
    # a unit after a number is dropped, text elsewhere keeps its words
    text = re.sub(r"(?<=[\d}])\s*\\(?:text|mbox|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$", "", text)
    text = _TEXT.sub(r"\1", text)
    text = _SPACING.sub("", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\{([^{}]+)\}(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"^[A-Za-z](?:\([A-Za-z]\))?(?:=|\\in(?![a-z]))", "", text)
    return text.rstrip(".").replace("\\ne ", "\\neq ")


def as_number(normalised: str) -> Fraction | None:
    """The exact value of an integer, decimal or simple fraction; None for anything else."""
    if _NUMBER.fullmatch(normalised):
        return Fraction(normalised)
    match = _FRACTION.fullmatch(normalised)
    if match is None:
        return None
    sign, top, bottom, plain_top, plain_bottom = match.groups()
    below = int(bottom or plain_bottom)
    if below == 0:
        return None
    return Fraction(int(top or plain_top), below) * (-1 if sign == "-" else 1)


def _numbers_equal(left: Fraction, right: Fraction) -> bool:
    if left.denominator == right.denominator == 1:
        return left == right
    return abs(left - right) < Fraction(1, 10**6)


@dataclass(frozen=True)
class MathVerifier:
    r"""Scores the last box, or the stated final answer, against the gold answer.

    Example:
        >>> verify = MathVerifier()
        >>> verify(r"Hence \boxed{0.5}.", r"\frac{1}{2}").reason
        'correct'
        >>> verify("I do not know", "2").reason
        'no_answer'
    """

    timeout_s: float = 5.0
    """Seconds that one symbolic comparison may take before its process is killed."""
    comparer: SymbolicComparer = field(default_factory=SymbolicComparer, compare=False)
    """Where answers are compared that differ as text and are not plain numbers."""

    def __call__(self, completion: str, answer: str) -> Score:
        """See :class:`rlkv.verifiers.base.Verifier`; reason ``timeout`` scores 0."""
        extracted = extract_answer(completion)
        if extracted is None:
            return Score(0.0, None, "no_answer")
        gold = gold_answer(answer)
        mine, theirs = normalise(extracted), normalise(gold)
        if not mine:
            return Score(0.0, None, "no_answer")
        if mine.lower() == theirs.lower():
            return Score(1.0, extracted, "correct")
        left, right = self._values(mine, theirs)
        if left is not None and right is not None:
            equal: bool | None = _numbers_equal(left, right)
        elif max(len(extracted), len(gold)) > MAX_ANSWER_CHARS:
            equal = False
        else:
            equal = self.comparer.equal(gold, extracted, timeout_s=self.timeout_s)
        if equal is None:
            return Score(0.0, extracted, "timeout")
        return Score(1.0 if equal else 0.0, extracted, "correct" if equal else "wrong")

    @staticmethod
    def _values(mine: str, theirs: str) -> tuple[Fraction | None, Fraction | None]:
        if max(len(mine), len(theirs)) > 300:  # int() refuses numbers of thousands of digits
            return None, None
        return as_number(mine), as_number(theirs)
