"""Hostile programs score 0 and leave nothing behind, as this user and as an unprivileged one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlkv.verifiers.sandbox as sandbox_module
from rlkv.errors import SandboxError
from rlkv.verifiers.code import CodeVerifier
from rlkv.verifiers.sandbox import RunResult, Sandbox, sandbox_problem
from tests.unit.verifiers import hostile_programs

needs_sandbox = pytest.mark.skipif(
    sandbox_problem() is not None, reason=f"no sandbox here: {sandbox_problem()}"
)
NOBODY = 65534
SOURCE = Path(sandbox_module.__file__).parents[2]
# what the driver does is all that an unprivileged user can: import the verifier and score
DRIVER = """
import json, sys
from rlkv.verifiers.code import CodeVerifier
from rlkv.verifiers.sandbox import Sandbox
programs, answer = json.load(sys.stdin)
verify = CodeVerifier(Sandbox(timeout_s=3.0))
score = lambda code: verify(f"```python\\n{code}\\n```", answer).reward
scores = {name: score(code) for name, code in programs.items()}
good = score("def f(i): return ['secret-alpha', 'secret-beta'][i]")
print(json.dumps([good, scores]))
"""


class Scene:
    """What the programs aim at, and whether it is still as it was."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        self.folder = folder
        self.secret = folder / "secret.txt"
        self.secret.write_text("secret-alpha secret-beta")
        self.secret.chmod(0o666)
        self.victim = subprocess.Popen(["sleep", "600"])
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        for listener in (self.tcp, self.udp):
            listener.setblocking(False)
        self.before = self.processes()

    def fill(self, program: str) -> str:
        values = {
            "<secret>": str(self.secret),
            "<folder>": str(self.folder),
            "<victim>": str(self.victim.pid),
            "<tcp>": str(self.tcp.getsockname()[1]),
            "<udp>": str(self.udp.getsockname()[1]),
            "<tag>": f"rlkv-test-{self.victim.pid}",
        }
        for name, value in values.items():
            program = program.replace(name, value)
        return program

    @staticmethod
    def processes() -> set[str]:
        """Command lines that hold the child's source: sandboxed processes still alive."""
        found = set()
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and b"Child side of the sandbox" in (entry / "cmdline").read_bytes()
                ):
                    found.add(entry.name)
            except OSError:
                continue
        return found

    def check_untouched(self) -> None:
        assert [path.name for path in self.folder.iterdir()] == ["secret.txt"]
        assert self.secret.read_text() == "secret-alpha secret-beta"
        assert self.secret.stat().st_mode & 0o777 == 0o666
        assert not Path(f"/dev/shm/rlkv-test-{self.victim.pid}").exists()
        assert not Path("/written").exists()
        assert self.victim.poll() is None
        assert self.processes() <= self.before
        with pytest.raises(BlockingIOError):
            self.tcp.accept()
        with pytest.raises(BlockingIOError):
            self.udp.recv(100)
        # the listeners do listen: the same calls from here arrive
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"control", self.udp.getsockname())
        assert self.udp.recv(100) == b"control"

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        self.tcp.close()
        self.udp.close()


@pytest.fixture
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("hostile") / "scene")
    yield made
    made.close()


def answer() -> str:
    return json.dumps(["assert f(0) == 'secret-alpha'", "assert f(1) == 'secret-beta'"])


def run_driver(scene: Scene, names: tuple[str, ...], python: str, user: int | None) -> None:
    programs = {name: scene.fill(hostile_programs.ALL[name]) for name in names}
    environment = {"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, "-c", DRIVER],
        input=json.dumps([programs, answer()]),
        capture_output=True,
        text=True,
        env=environment,
        user=user,
        group=user,
        extra_groups=[] if user is not None else None,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    good, scores = json.loads(done.stdout)
    assert good == 1.0  # an honest program with the right values passes
    assert {name: score for name, score in scores.items() if score != 0.0} == {}
    scene.check_untouched()


def python_for_nobody() -> str:
    """An interpreter and a source tree that any user can read."""
    for candidate in ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable):
        if not shutil.which(candidate):
            continue
        code = "import sys, rlkv.verifiers.code; sys.exit(sys.version_info < (3, 11))"
        command = [candidate, "-c", code]
        environment = {"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, user=NOBODY, group=NOBODY, extra_groups=[], env=environment, cwd="/",
            capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return candidate
    pytest.skip("no Python >= 3.11 and source tree that an unprivileged user can read")


@needs_sandbox
def test_quick_hostile_programs_score_zero_and_leave_nothing(scene: Scene) -> None:
    run_driver(scene, hostile_programs.QUICK, sys.executable, None)


@needs_sandbox
@pytest.mark.slow
def test_all_hostile_programs_score_zero_and_leave_nothing(scene: Scene) -> None:
    run_driver(scene, tuple(hostile_programs.ALL), sys.executable, None)


@needs_sandbox
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_all_hostile_programs_score_zero_as_an_unprivileged_user(scene: Scene) -> None:
    # the folders pytest makes are private to their owner
    for parent in scene.folder.parents:
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    run_driver(scene, tuple(hostile_programs.ALL), python_for_nobody(), NOBODY)


@needs_sandbox
def test_values_of_every_plain_kind_come_back_equal() -> None:
    value = [
        None,
        True,
        -(10**40),
        0.1,
        float("inf"),
        1 + 2j,
        "ü\ud800",
        b"\x00",
        (1, [2]),
        {3},
        {4: {5: 6}},
    ]
    result = Sandbox()(f"inf = float('inf')\ndef f(): return {value!r}", ["f()"])
    assert result.values == (value,)


@needs_sandbox
def test_set_order_is_the_same_in_every_run() -> None:
    code = "def f(): return list({'a', 'b', 'c', 'd', 'e', 'f'})"
    assert len({tuple(Sandbox()(code, ["f()"]).values[0]) for _ in range(3)}) == 1


@needs_sandbox
def test_a_loop_is_cut_at_the_timeout() -> None:
    result = Sandbox(timeout_s=1.0)("while True: pass", ["1"])
    assert result.outcome == "timeout"


def test_without_landlock_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "sandbox_problem", lambda: "this kernel has no Landlock")
    with pytest.raises(SandboxError, match="no Landlock"):
        CodeVerifier()("```python\ndef f(i): return 1\n```", '["assert f(0) == 1"]')


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module.sys, "platform", "darwin")
    assert "needs Linux, found darwin" in str(sandbox_problem())


def test_a_users_runner_replaces_the_sandbox() -> None:
    def runner(code: str, expressions: list[str]) -> RunResult:
        return RunResult("done", (7,) * len(expressions))

    assert (
        CodeVerifier(runner)("```python\ndef f(i): return 7\n```", "assert f(0) == 7").reward == 1.0
    )
