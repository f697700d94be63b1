"""What a completion can do that its scorer evaluates: nothing but choose its own reward."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from streamrl.executor.verifier import landlock, seccomp
from streamrl.executor.verifier.sandbox import Sandbox, SandboxLimits, find_gaps
from streamrl.executor.verifier.verifier import Scoring
from tests.verifying import EVALUATED, WAS_STOPPED, WENT_THROUGH, attempt, verdicts

sandboxed = pytest.mark.skipif(
    bool(find_gaps()), reason="this system has no seccomp or no Landlock"
)

ATTACKS = {
    "start a process": "import os\nos.system('true') and 1/0",
    "start another": "import subprocess\nsubprocess.run(['true'])",
    "fork": "import os\nos.fork()",
    "fork for ever": "import os\nwhile True: os.fork()",
    "start a thread": "import _thread\n_thread.start_new_thread(print, ())",
    "kill its parent": "import os\nos.kill(os.getppid(), 9)",
    "kill everybody": "import os\nos.kill(-1, 9)",
    "stop its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "limit its parent": "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
    "lift its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "have signals sent": "import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
    "trace its parent": "import ctypes, os\nctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) and 1/0",
    "connect": "import socket\nsocket.create_connection(('127.0.0.1', {port}))",
    "connect by file": "import socket\nsocket.socket(socket.AF_UNIX).connect('{tmp}/socket')",
    "write a file": "open('{tmp}/canary', 'w')",
    "write where it is": "open('canary', 'w')",
    "fill the disk": "import os\nos.write(os.open('{tmp}/kept', os.O_WRONLY), b'x' * 10**9)",
    "empty a file": "import os\nos.open('{tmp}/kept', os.O_RDONLY | os.O_TRUNC)",
    "cut a file": "import os\nos.truncate('{tmp}/kept', 0)",
    "remove a file": "import os\nos.unlink('{tmp}/kept')",
    "move a file": "import os\nos.rename('{tmp}/kept', '{tmp}/moved')",
    "close a file to others": "import os\nos.chmod('{tmp}/kept', 0)",
    "read a file": "open('{tmp}/kept').read()",
    "read the environment": "open('/proc/self/environ').read()",
    "read its parent's": "import os\nopen('/proc/' + str(os.getppid()) + '/environ').read()",
    "find the secret": "import os\nos.environ['STREAMRL_SECRET']",
    "find anything": "import os\nnext(iter(os.environ))",
    "list processes": "import os\nos.listdir('/proc')",
    "take shared memory": "import ctypes\nctypes.CDLL(None).shmget(0, 4096, 0o1777) == -1 and 1/0",
    "make a file of memory": "import os\nos.memfd_create('canary')",
    "take much memory": "x = bytearray(10**9)",
    "recur": "f = lambda: f()\nf()",
}
"""What an answer may try; in `{tmp}` are a file `kept` and a `socket` that is listened to, as `{port}` is."""
ANSWER = """
import os
for pipe in range(3, 64):
    try:
        os.write(pipe, {})
    except OSError:
        pass
"""
FAULTS = {
    "spin": ("while True: pass", "time limit"),
    "sleep": ("import time\ntime.sleep(600)", "time limit"),
    "spin with signals blocked": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        "time limit",
    ),
    "exit": ("import sys\nsys.exit()", "error: SystemExit"),
    "leave something for the exit": (
        "import atexit, sys\natexit.register(open, '{tmp}/canary', 'w')\nsys.exit()",
        "error: SystemExit",
    ),
    "exit at once": ("import os\nos._exit(0)", "process ended: exit status 0"),
    "crash": ("import ctypes\nctypes.string_at(0)", "process ended: SIGSEGV"),
    "answer in the worker's place": (ANSWER.format(b"junk"), "no reward"),
    "answer with what is no number": (ANSWER.format(b"R" + b"\xff" * 8), "no reward"),
    "answer with much": (ANSWER.format(b"R" * 5000), "no reward"),
}
HARMLESS = {
    "nothing": "pass",
    "compute": "import math\nassert math.comb(10, 5) == 252",
    "print": "print('x' * 10**6, flush=True)",
    "import what nothing has imported": "import wave",
    "read a file of Python's": "import json\nopen(json.__file__).read(10)",
}

Outcomes = dict[str, Scoring | BaseException]


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("attacked")
    (directory / "kept").write_text("kept")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory / "socket"))
        server.listen()
        yield directory


@pytest.fixture(scope="module")
def outcomes(tmp: Path) -> Iterator[Outcomes]:
    """What becomes of every attack, all made in one go."""
    codes = {**ATTACKS, **HARMLESS, **{name: code for name, (code, _) in FAULTS.items()}}
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as server:
        patch.setenv("STREAMRL_SECRET", "secret")
        port = server.getsockname()[1]
        answers = [attempt(code.format(tmp=tmp, port=port)) for code in codes.values()]
        work = [(answer, EVALUATED) for answer in answers]
        found = verdicts("reasoning-gym", work, log=tmp / "log")
    yield dict(zip(codes, found, strict=True))


@sandboxed
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_answer_cannot(attack: str, outcomes: Outcomes) -> None:
    assert outcomes[attack] == Scoring(WAS_STOPPED, None)


@pytest.mark.parametrize("attack", HARMLESS)
def test_an_answer_is_evaluated_and_may(attack: str, outcomes: Outcomes) -> None:
    assert outcomes[attack] == Scoring(WENT_THROUGH, None)


@pytest.mark.parametrize("attack", FAULTS)
def test_an_answer_that_cannot_be_scored_has_reward_0_and_says_why(
    attack: str, outcomes: Outcomes
) -> None:
    assert outcomes[attack] == Scoring(0.0, FAULTS[attack][1])


@sandboxed
def test_attacks_leave_nothing_behind(outcomes: Outcomes, tmp: Path) -> None:
    assert sorted(path.name for path in tmp.iterdir()) == ["kept", "log", "socket"]
    assert (tmp / "log").read_text() == ""
    assert (tmp / "kept").read_text() == "kept" and (tmp / "kept").stat().st_mode & 0o400


def test_where_the_kernel_offers_no_sandbox_limits_hold_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seccomp, "is_available", lambda: False)
    monkeypatch.setattr(landlock, "is_available", lambda: False)
    assert len(find_gaps()) == 2
    child = os.fork()
    if child == 0:
        Sandbox(SandboxLimits(time=2.5, memory=1e8), []).enter()
        limits = {name: getattr(resource, f"RLIMIT_{name}") for name in ("CPU", "FSIZE", "CORE")}
        hard = {name: resource.getrlimit(limit)[1] for name, limit in limits.items()}
        with suppress(MemoryError):
            bytearray(2 * 10**8)
            os._exit(1)
        os._exit(hard != {"CPU": 5, "FSIZE": 0, "CORE": 0})
    assert os.waitpid(child, 0)[1] == 0


def test_an_answer_does_not_change_what_the_next_one_gets() -> None:
    poison = "import builtins\nbuiltins.eval = lambda text: 'ABC'"
    answers = [attempt(poison), "XYZ", "[]", "ABC"]
    found = verdicts("reasoning-gym", [(answer, EVALUATED) for answer in answers], workers=1)
    assert [verdict[0] for verdict in found] == [WENT_THROUGH, 0.0, 0.0, 1.0]  # type: ignore[index]
