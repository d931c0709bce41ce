"""What a command says when it is interrupted: what is kept, and how to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_interrupt(advice: Callable[[], str]) -> Iterator[None]:
    """Gives an interrupt inside the block a sentence, which ``rlkv`` prints in place of a trace.

    Args:
        advice: What is kept and how to go on; asked only once the interrupt is there.

    Raises:
        KeyboardInterrupt: The interrupt, with the sentence.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(advice()) from None
