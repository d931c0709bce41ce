"""What forced tasks share: which tokens belong to a span, and an exact verifier.

In a forced task the gold completion is fed in, and a span counts as right when the model would have
written every one of its tokens greedily.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlkv.errors import DataError
from rlkv.verifiers.base import Score


def span_token_ranges(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[range]:
    """The tokens of each character span.

    A token belongs to a span when they share at least one character, so a token that reaches over
    the edge counts. Special tokens, of zero width, belong to none.

    Args:
        offsets: [start, end) characters of each token, in order, as fast tokenizers return them.
        spans: [start, end) characters of the same text.

    Returns:
        For each span, the indices of its tokens in ``offsets``.

    Raises:
        DataError: A span covers no token.

    Example:
        >>> span_token_ranges([(0, 4), (4, 5), (5, 6), (6, 7)], [(5, 7)])
        [range(2, 4)]
    """
    ranges = []
    for start, end in spans:
        inside = [
            index
            for index, (first, last) in enumerate(offsets)
            if max(first, start) < min(last, end)
        ]
        if not inside:
            raise DataError(
                f"span {start}:{end} covers no token, expected a range of the tokenized text; "
                "check the spans of this example"
            )
        ranges.append(range(inside[0], inside[-1] + 1))
    return ranges


@dataclass(frozen=True, slots=True)
class VerbatimVerifier:
    """The completion must repeat the answer word for word; white space is free.

    It serves where a forced task is generated after all; forced scoring goes by spans.
    """

    def __call__(self, completion: str, answer: str) -> Score:
        """See :class:`~rlkv.verifiers.base.Verifier`."""
        words = completion.split()
        if not words:
            return Score(0.0, None, "no_answer")
        right = words == answer.split()
        return Score(float(right), completion.strip(), "correct" if right else "wrong")
