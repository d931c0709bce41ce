"""``rlkv``: one command a file; this one only dispatches and turns errors into one sentence.

stdout carries data, stderr progress and errors. Exit status: 0 done; 1 failed, for want of a file,
a package, memory or a network; 2 wrong usage, that is options, names and settings; 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import tyro
from tyro.conf import subcommand

from rlkv import __version__
from rlkv.cli.bench import Bench
from rlkv.cli.eval import Eval
from rlkv.cli.fetch import Fetch
from rlkv.cli.generate import Generate
from rlkv.cli.listing import List
from rlkv.cli.plan import Plan
from rlkv.cli.profile import Profile
from rlkv.cli.quickstart import Quickstart
from rlkv.cli.report import Report
from rlkv.cli.reproduce import Reproduce
from rlkv.cli.score import Score
from rlkv.cli.serve import Serve
from rlkv.cli.study import Study
from rlkv.cli.train import Train
from rlkv.errors import (
    ConfigError,
    ProfileMismatchError,
    PromptTooLongError,
    RLKVError,
    UnknownNameError,
    UnsupportedFeatureError,
    UnsupportedModelError,
)

Command = (
    Annotated[Quickstart, subcommand("quickstart")]
    | Annotated[Train, subcommand("train")]
    | Annotated[Generate, subcommand("generate")]
    | Annotated[Eval, subcommand("eval")]
    | Annotated[Study, subcommand("study")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Reproduce, subcommand("reproduce")]
    | Annotated[Score, subcommand("score")]
    | Annotated[Profile, subcommand("profile")]
    | Annotated[Serve, subcommand("serve")]
    | Annotated[Plan, subcommand("plan")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[List, subcommand("list")]
    | Annotated[Fetch, subcommand("fetch")]
)

_DESCRIPTION = "Learn which KV heads a reasoning model needs, and compress the others."

DONE, FAILED, USAGE = 0, 1, 2
INTERRUPTED = 130
"""What a shell reports of a program that SIGINT ended."""

WRONG_USAGE = (
    ConfigError,
    UnknownNameError,
    ProfileMismatchError,
    UnsupportedModelError,
    UnsupportedFeatureError,
    PromptTooLongError,
)
"""Errors that no machine and no other content of a file could make right."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in (["--version"], ["-V"]):
        print(__version__)
        return DONE
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        status = _dispatch(given)
    except SystemExit:  # --help, and options that cannot be parsed
        _flush_stdout()
        raise
    except OSError as error:
        status = _fail_in_system(error)
    problem = _flush_stdout()
    if problem is not None and status == DONE:
        status = _fail_in_system(problem)
    return status


def _dispatch(given: list[str]) -> int:
    """Parses and runs; RLKV's own errors and interrupts become one sentence and a status."""
    try:
        with _no_color_obeyed():
            command = tyro.cli(
                Command,  # type: ignore[arg-type]
                prog="rlkv",
                description=_DESCRIPTION,
                args=given or ["--help"],
                config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
            )
        return command.run()
    except WRONG_USAGE as error:
        return _fail(error, USAGE)
    except RLKVError as error:
        return _fail(error, FAILED)
    except KeyboardInterrupt as interrupt:
        advice = str(interrupt) or "run the same command again"
        print(f"rlkv: interrupted; {advice}", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def _no_color_obeyed() -> Iterator[None]:
    """Calls the terminal dumb under NO_COLOR, which tyro's help and errors do not look at."""
    if not os.environ.get("NO_COLOR"):
        yield
        return
    terminal = os.environ.get("TERM")
    os.environ["TERM"] = "dumb"
    try:
        yield
    finally:
        if terminal is None:
            del os.environ["TERM"]
        else:
            os.environ["TERM"] = terminal


def _fail(error: RLKVError, status: int) -> int:
    print(f"rlkv: {error}", file=sys.stderr)
    return status


def _fail_in_system(error: OSError) -> int:
    """Says what the operating system refused; nothing where the reader of our output has gone."""
    if not isinstance(error, BrokenPipeError):
        advice = "check the path, its permissions and the space on the disk"
        print(f"rlkv: the system refused: {error}; {advice}", file=sys.stderr)
    return FAILED


def _flush_stdout() -> OSError | None:
    """Delivers what was printed; returns why where that fails."""
    if sys.stdout is None:  # closed by whoever started us
        return None
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python tries again at exit, and would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()
