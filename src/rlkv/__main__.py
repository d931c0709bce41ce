"""``python -m rlkv`` is the same as ``rlkv``."""

from __future__ import annotations

from rlkv.cli.main import run

if __name__ == "__main__":
    run()
