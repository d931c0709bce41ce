"""Exit statuses, interrupts, closed pipes and NO_COLOR."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlkv import errors
from rlkv.cli.listing import List
from rlkv.cli.main import main

STATUS = {
    "ConfigError": 2,
    "UnknownNameError": 2,
    "ProfileError": 1,
    "ProfileMismatchError": 2,
    "UnsupportedModelError": 2,
    "ModelError": 1,
    "UnsupportedFeatureError": 2,
    "PromptTooLongError": 2,
    "OutputError": 1,
    "MissingExtraError": 1,
    "CheckpointError": 1,
    "DataError": 1,
    "SandboxError": 1,
    "BackendError": 1,
}
# an interrupt is ignored by children of a shell's background job; these ask for it again
RUN = (
    "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from rlkv.cli.main import run\nrun()"
)


def raising(error):
    def run(self):
        raise error

    return run


def test_every_error_has_its_status(capsys, monkeypatch):
    found = {}
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.RLKVError):
            monkeypatch.setattr(List, "run", raising(kind("found this; do that")))
            found[name] = main(["list", "methods"])
            assert capsys.readouterr().err == "rlkv: found this; do that\n"
    assert found == {"RLKVError": 1, **STATUS}


def test_what_the_system_refuses_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(List, "run", raising(OSError(28, "No space left on device", "m.jsonl")))
    assert main(["list", "methods"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "No space left on device: 'm.jsonl'; check the path" in err


def test_an_interrupt_without_a_word_says_to_run_again(capsys, monkeypatch):
    monkeypatch.setattr(List, "run", raising(KeyboardInterrupt()))
    assert main(["list", "methods"]) == 130
    assert capsys.readouterr().err == "rlkv: interrupted; run the same command again\n"


@pytest.mark.parametrize(
    ("resume", "has_checkpoint", "advice"),
    [
        (False, True, "kept up to its last checkpoint in {}; go on with the same command and --re"),
        (True, True, "kept up to its last checkpoint in {}; go on with the same command\n"),
        (False, False, "nothing was learned yet; run the same command again\n"),
    ],
)
def test_an_interrupted_training_says_how_to_go_on(
    capsys, monkeypatch, tmp_path, resume, has_checkpoint, advice
):
    checkpoint = tmp_path / "checkpoint.safetensors"
    if resume:
        checkpoint.write_bytes(b"")

    def interrupted(self, config, loaded, task, output):
        if has_checkpoint:
            checkpoint.write_bytes(b"")
        raise KeyboardInterrupt

    monkeypatch.setattr("rlkv.hf.loading.load_model", lambda *_, **__: None)
    monkeypatch.setattr("rlkv.cli.train.Train._train", interrupted)
    arguments = ["train", "--task", "chain", "--output", str(tmp_path)]
    assert main([*arguments, *(["--resume"] if resume else [])]) == 130
    err = capsys.readouterr().err
    assert err.startswith("rlkv: interrupted; ")
    assert advice.format(tmp_path) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("more", "again"), [((), "command\n"), (("--fresh",), "without --fresh")])
def test_an_interrupted_evaluation_says_how_to_go_on(capsys, monkeypatch, tmp_path, more, again):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlkv.evaluate.evaluation.evaluate", interrupted)
    assert main(["eval", "--task", "chain", "--out", str(tmp_path), *more]) == 130
    err = capsys.readouterr().err
    assert f"rlkv: interrupted; finished completions are kept in {tmp_path}; go on with" in err
    assert again in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", ["list methods", "list tasks --json", "train --help"])
def test_a_closed_pipe_ends_quietly(arguments):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments.split()],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", RUN, "list", "methods", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("rlkv: the system refused: [Errno 28] No space left on device")
    assert done.stderr.count("\n") == 1


def on_a_terminal(arguments, **environment):
    """What a command writes to a terminal, stdout and stderr together."""
    reader, terminal = os.openpty()
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments],
        stdout=terminal,
        stderr=terminal,
        env={**clean, "TERM": "xterm-256color", "COLUMNS": "80", **environment},
    )
    os.close(terminal)
    written = b""
    while True:
        try:
            piece = os.read(reader, 4096)
        except OSError:  # Linux says so where the other side is closed
            piece = b""
        if not piece:
            break
        written += piece
    os.close(reader)
    return process.wait(), written.decode()


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("list", "methods"), 0, "streaming_llm"),
        (("plan", "--model", "smolm2"), 2, "Did you mean smollm2"),
        (("list", "nothing"), 2, "nothing"),
    ],
)
def test_no_color_leaves_no_escape_codes(arguments, status, says):
    found, text = on_a_terminal(arguments, NO_COLOR="1")
    assert found == status
    assert says in text
    assert "\x1b" not in text


def test_a_terminal_gets_styles_without_no_color():
    assert "\x1b[1m" in on_a_terminal(("list", "methods"))[1]


TRAIN = ("train", "--task", "chain")
EVAL = ("eval", "--task", "chain", "--n", "400", "--batch-size", "2", "--max-new-tokens", "8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "option", "begun", "advice"),
    [
        (TRAIN, "--output", "checkpoint.safetensors", "go on with the same command and --resume"),
        (EVAL, "--out", "embedded/chain/*.jsonl", "go on with the same command"),
    ],
)
def test_ctrl_c_ends_in_one_line(tmp_path, arguments, option, begun, advice):
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments, option, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = time.monotonic() + 300
    while time.monotonic() < limit and process.poll() is None:
        if any(file.stat().st_size for file in tmp_path.glob(begun)):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err[-2000:]
    assert out == ""
    assert "Traceback" not in err
    last = err.rstrip("\n").split("\n")[-1]
    assert last.startswith("rlkv: interrupted; ")
    assert last.endswith(advice)
    assert str(tmp_path) in last
