"""Programs that a model wrote, run with the tests of their records; and what else such a program may try."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from streamrl.executor.roles import Scoring
from streamrl.executor.verifier.reward_checks import check_prompts
from streamrl.executor.verifier.sandbox import find_gaps
from streamrl.executor.verifier.scorers import last_program
from streamrl.runfile.files import make_run
from streamrl.runfile.roles_config import RewardConfig
from tests.patients import local_table
from tests.verifying import verdicts

RECORD = {
    "prompt": "Write double(x).",
    "setup": "import math",
    "tests": ["assert double(2) == 4", "assert double(-1) == -2", "assert double(math.pi) > 6"],
    "solution": "def double(x): return 2 * x",
}
RIGHT = "def double(x):\n    return 2 * x"
PARTLY = "def double(x):\n    return x * x"
"""Passes the first test and the last."""


def block(code: str, language: str = "python") -> str:
    return f"So it is\n```{language}\n{code}\n```\nas was asked."


def scores(*texts: str, record: dict[str, Any] = RECORD, **keys: Any) -> list[Any]:
    """Return what completions get."""
    limits = {"time_limit": 1.0, "memory_limit": 3e8}
    reward = RewardConfig(scorer="unit-tests", **keys)
    return verdicts([reward], [(text, record) for text in texts], **limits)


def rewards(*texts: str, **keys: Any) -> list[float]:
    return [each.reward for each in scores(*texts, **keys)]


def test_a_program_has_a_reward_where_all_tests_pass_or_the_share_that_does() -> None:
    texts = [block(code) for code in (RIGHT, PARTLY, "def double(x): return 0", "not Python")]
    assert rewards(*texts) == [1.0, 0.0, 0.0, 0.0]
    assert rewards(*texts, credit="share") == [1.0, 2 / 3, 0.0, 0.0]


def test_tests_may_be_one_program() -> None:
    record = {**RECORD, "tests": "def check(f):\n    assert f(3) == 6\ncheck(double)"}
    assert rewards(block(RIGHT), block(PARTLY), record=record) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (block("a"), "a\n"),
        (block("a", "") + block("b", "py"), "b\n"),
        (block("a") + block("ls", "bash"), "a\n"),
        (block("a") + "```python\nb", "a\n"),
        ("a", ""),
        ("```python\na", ""),
        ("", ""),
    ],
)
def test_the_program_is_the_last_whole_block_of_python(completion: str, program: str) -> None:
    assert last_program(completion) == program


HOSTILE = {
    "sleep for ever": ("import time\nwhile True: time.sleep(600)", "time limit"),
    "spin": ("while True: pass", "time limit"),
    "sleep in a test": ("import time\ndef double(x): time.sleep(600)", "time limit"),
    "leave at once": ("import os\nos._exit(0)", "process ended: exit status 0"),
    "crash": ("import ctypes\nctypes.string_at(0)", "process ended: SIGSEGV"),
    "take 10 GB": ("x = bytearray(10 * 10**9)", "memory limit"),
    "take 10 GB in a test": ("def double(x): return bytearray(10 * 10**9)", None),
    "leave": ("import sys\nsys.exit(0)", None),
    "leave in a test": ("def double(x): raise SystemExit(0)", None),
    "print a result": ("print('1.0')\nprint('3 passed', flush=True)", None),
    "write a result": (
        "import os\nfor pipe in (0, 1, 2): os.write(pipe, b'R' + b'\\x00' * 8)",
        None,
    ),
    "replace what runs": (
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None",
        None,
    ),
    "replace the error": ("import builtins\nbuiltins.AssertionError = type('E', (), {})", None),
    "fork": ("import os\nos.fork()", None),
    "fork for ever": ("import os\nwhile True: os.fork()", None),
    "start a program": ("import subprocess\nsubprocess.run(['touch', '{tmp}/canary'])", None),
    "start a thread": ("import _thread\n_thread.start_new_thread(print, ())", None),
    "write a file": ("open('{tmp}/canary', 'w').write('x')", None),
    "read a file": ("assert False, open('{tmp}/kept').read()", None),
    "remove a file": ("import os\nos.unlink('{tmp}/kept')", None),
    "connect": ("import socket\nsocket.create_connection(('127.0.0.1', {port}))", None),
    "open a socket": ("import socket\nsocket.socket()", None),
    "kill its parent": ("import os\nos.kill(os.getppid(), 9)", None),
}
"""Programs that define no `double` that works, and why each has no reward where it cannot be scored."""


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("attacked")
    (directory / "kept").write_text("kept")
    return directory


@pytest.fixture(scope="module")
def outcomes(tmp: Path) -> dict[str, Any]:
    """What becomes of every hostile program, each followed by a right one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        filled = {"{tmp}": str(tmp), "{port}": str(server.getsockname()[1])}
        texts = []
        for code, _ in HOSTILE.values():
            for name, value in filled.items():
                code = code.replace(name, value)
            texts += [block(code), block(RIGHT)]
        found = scores(*texts)
    assert found[1::2] == [Scoring(1.0, None, {"unit-tests": 1.0})] * len(HOSTILE)
    return dict(zip(HOSTILE, found[::2], strict=True))


@pytest.mark.skipif(bool(find_gaps()), reason="this system has no seccomp or no Landlock")
@pytest.mark.parametrize("attack", HOSTILE)
def test_a_program_has_no_reward_for(attack: str, outcomes: dict[str, Any], tmp: Path) -> None:
    fault = HOSTILE[attack][1]
    expected = fault and f"unit-tests: {fault}"
    assert outcomes[attack] == Scoring(0.0, expected, {"unit-tests": 0.0})
    assert [path.name for path in tmp.iterdir()] == ["kept"]


@pytest.mark.skipif(bool(find_gaps()), reason="this system has no seccomp or no Landlock")
def test_what_the_sandbox_refuses_a_program_goes_on_without() -> None:
    attempts = ["import os\ntry: os.fork()", "import socket\ntry: socket.socket()"]
    codes = [f"{attempt}\nexcept OSError: pass\n{RIGHT}" for attempt in attempts]
    assert rewards(*map(block, codes)) == [1.0, 1.0]


def test_tests_that_no_program_can_pass_are_an_error() -> None:
    record = {**RECORD, "setup": "import no_such_module"}
    (found,) = scores(block(RIGHT), record=record)
    assert isinstance(found, RuntimeError) and "no_such_module" in str(found)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({}, r"1 lines of .* have no 'tests' \(lines 2\): verifier\.scorer 'unit-tests'"),
        ({"tests": []}, r"jsonl:2: unit-tests cannot run its tests: .* got \[\]"),
        ({"tests": [3]}, r"jsonl:2: unit-tests cannot run its tests: .* got \[3\]"),
        ({"tests": ["assert ("]}, r"jsonl:2: unit-tests cannot run its tests: SyntaxError"),
        ({"tests": "pass", "setup": "1 +"}, r"jsonl:2: .*SyntaxError"),
    ],
)
def test_records_without_tests_that_could_run_are_refused_before_the_run(
    tmp_path: Path, line: dict[str, Any], says: str
) -> None:
    run = make_run(local_table(tmp_path, {"verifier.scorer": "unit-tests"}))
    lines = [RECORD, {"prompt": "p", **line}]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    with pytest.raises(ValueError, match=rf"^workload\.prompts: .*{says}"):
        check_prompts(run.verifier, run.workload)
