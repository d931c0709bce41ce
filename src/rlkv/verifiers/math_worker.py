"""Child process of the math verifier: compares two LaTeX answers with math-verify.

Run as a script by ``worker_process.py``, never imported by the package. It reads one JSON object a
line, ``{"gold": …, "answer": …}``, and writes one JSON boolean a line. It has no timeouts of its
own: math-verify's rest on SIGALRM, which sympy's C-level loops do not heed. The parent kills it.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys

MEMORY_BYTES = 4 * 2**30
"""Address space limit of the worker."""


def main() -> None:
    """Answers requests until standard input closes."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # stray prints of a dependency must not enter the channel
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def equal(gold: str, answer: str) -> bool:
        # None switches the alarm off, although the annotation says int
        golds = parse(f"${gold.strip('$ ')}$", parsing_timeout=None)  # type: ignore[arg-type]
        answers = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)  # type: ignore[arg-type]
        return bool(verify(golds, answers, timeout_seconds=None))

    equal("1", "\\frac{2}{2}")  # sympy's first call is slow; pay for it before "ready"
    channel.write("true\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = equal(request["gold"], request["answer"])
        except (Exception, MemoryError, RecursionError):  # a text sympy chokes on is not equal
            result = False
        channel.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
