"""``rlkv``: one command a file; this one only dispatches and turns errors into one sentence.

stdout carries data, stderr progress and errors. Exit status: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
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
from rlkv.errors import ConfigError, RLKVError, UnknownNameError

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

DONE, FAILED, USAGE = 0, 1, 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in (["--version"], ["-V"]):
        print(__version__)
        return DONE
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        command = tyro.cli(
            Command,  # type: ignore[arg-type]
            prog="rlkv",
            description="Learn which KV heads a reasoning model needs, and compress the others.",
            args=given or ["--help"],
            config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
        )
        return command.run()
    except (ConfigError, UnknownNameError) as error:
        return _fail(error, USAGE)
    except RLKVError as error:
        return _fail(error, FAILED)
    except KeyboardInterrupt:
        print("rlkv: interrupted; what was finished is kept", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has gone; there is nobody left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _fail(error: RLKVError, status: int) -> int:
    print(f"rlkv: {error}", file=sys.stderr)
    return status


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()
