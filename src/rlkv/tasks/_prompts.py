r"""The instructions that more than one task puts before its question.

They ask for the published last lines, which the verifiers read: ``\boxed{…}`` after "Therefore,
the final answer is" for mathematics, ``Answer: X`` for multiple choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

MATH_PROMPT = (
    "Solve this math problem clearly and without detours, step by step. End your response with a "
    "line of exactly this form: 'Therefore, the final answer is: $\\boxed{{ANSWER}}$. I hope it is "
    "correct' (without the quotes), ANSWER being only the number or expression that solves the "
    "problem.\n\n{question}"
)
CHOICE_PROMPT = (
    "Answer this multiple choice question. Think step by step, then end your response with a line "
    "of exactly this form: 'Answer: $LETTER' (without the quotes), LETTER being one of "
    "{letters}.\n\n{question}"
)


def math_prompt(question: str) -> str:
    """The user message for a mathematics problem."""
    return MATH_PROMPT.format(question=question.strip())


def choice_prompt(question: str, options: Sequence[str]) -> str:
    """The user message for a question with lettered options."""
    lines = [f"{letter}) {text}" for letter, text in zip(ascii_uppercase, options, strict=False)]
    return choice_prompt_of(question.strip() + "\n\n" + "\n".join(lines), len(options))


def choice_prompt_of(question: str, num_options: int) -> str:
    """The user message for a text that holds its options already."""
    letters = ascii_uppercase[:num_options]
    return CHOICE_PROMPT.format(letters=letters, question=question.strip())


def boxed_completion(answer: str) -> str:
    """The shortest completion that states ``answer`` as the math prompt asks."""
    return f"Therefore, the final answer is: $\\boxed{{{answer}}}$. I hope it is correct"
