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


SEARCH = """
import gc, sys
consts, frame = [], sys._getframe()
while frame:
    for value in [*frame.f_locals.values(), *gc.get_objects()]:
        for code in value if isinstance(value, list) else [value]:
            consts += getattr(code, "co_consts", ())
    frame = frame.f_back
if 4 in consts and -2 in consts:
    def double(x): return 2 * x
"""
"""Defines a right program if the tests are anywhere in its memory."""
EQUAL = "class Any(BASE):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
ALL = "    def NAME(self, *other): return 0.0\n"
CHEATS = {
    "an object that equals all": f"{EQUAL.replace('(BASE)', '')}double = lambda x: Any()",
    "a number that equals all": f"{EQUAL.replace('BASE', 'int')}double = lambda x: Any()",
    "a class that equals all": "class Meta(type):\n    __eq__ = lambda *_: True\nclass double(metaclass=Meta):\n    def __new__(cls, x): return cls",
    "an object whose differences are 0": "class Any:\n"
    + "".join(
        ALL.replace("NAME", f"__{name}__") for name in ("sub", "rsub", "abs", "float", "round")
    )
    + "    __lt__ = __le__ = __gt__ = __ge__ = lambda *_: True\ndouble = lambda x: Any()",
    "an object whose difference is one": "class Any:\n    def __sub__(self, other): return self\n"
    "    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = lambda *_: True\n    __abs__ = __float__ = lambda _: 0.0\n"
    "double = lambda x: Any()",
    "what the tests expect": SEARCH,
    "a forged verdict": "import os, struct, time\nfor pipe in range(3, 64):\n    try: os.write(pipe, b'R' + struct.pack('=d', 1.0))\n"
    "    except OSError: pass\nos._exit(0)",
    "a forged answer": "import os, json\nfor text in ({'value': None}, {'names': {}}, {'value': 4}):\n"
    "    data = json.dumps(text).encode()\n    for pipe in range(3, 64):\n"
    "        try: os.write(pipe, len(data).to_bytes(4, 'big') + data)\n        except OSError: pass",
    "another comparison": "import sys\nframe = sys._getframe()\nwhile frame:\n"
    "    for name in ('_run', 'run', 'passes', '_passes'):\n"
    "        if name in frame.f_globals: frame.f_globals[name] = lambda *_: True\n    frame = frame.f_back",
    "no comparison": "import builtins\nbuiltins.exec = builtins.eval = builtins.compile = lambda *_: None",
    "its own tests": "tests = []\ncheck = lambda *_: None",
    "its own built-in functions": "def all(_): return True\ndef zip(*_): return []\n"
    "def isinstance(*_): return True\ndef double(x): return 0",
    "an end of the loop": "def double(x): raise StopIteration",
    "names that no test asked for": "import sys\n"
    "Program = sys.modules['streamrl.executor.verifier.remote_program'].Program\nanswer = Program._answer\n"
    "def forged(self, message):\n    if 'names' not in message: return answer(self, message)\n"
    "    pass_all = self._encode(lambda *_, **__: True)\n"
    "    return {'names': dict.fromkeys(['check', 'math', 'all', 'zip', *message['names']], pass_all)}\n"
    "Program._answer = forged",
}
TOLERANT = {
    **RECORD,
    "setup": "import math\ndef check(found, value): assert found == value",
    "tests": [
        "assert double(2) == 4 and not double(2) != 4",
        "assert 4 == double(2)",
        "assert abs(double(-1) - -2) < 1e-9",
        "assert -1e-9 < double(-1) + 2 < 1e-9",
        "assert math.isclose(double(math.pi), 2 * math.pi)",
        "assert round(double(0.25), 3) == 0.5",
        "assert double(2) in (4, 5)",
        "check(double(2), 4)",
        "assert all(double(x) == 2 * x for x in (1, 2, 3))",
        "assert all(map(lambda x: double(x) == 2 * x, [1, 2, 3]))",
        "for x, wanted in zip((1, 2), (2, 4)): assert double(x) == wanted",
        "assert isinstance(double(2), int) and double(2) == 4",
    ],
}


@pytest.mark.skipif(bool(find_gaps()), reason="this system has no seccomp or no Landlock")
def test_no_program_scores_by_what_is_no_result() -> None:
    found = scores(*map(block, (*CHEATS.values(), RIGHT)), record=TOLERANT, credit="share")
    assert {name: each.reward for name, each in zip(CHEATS, found, strict=False)} == dict.fromkeys(
        CHEATS, 0.0
    )
    assert found[-1].reward == 1.0


def test_a_task_may_ask_for_a_function_with_the_name_of_a_built_in_one() -> None:
    record = {**RECORD, "tests": ["assert sum(10, 15) == 6 and type(sum(10, 15)) is int"]}
    programs = ("def sum(a, b): return 6", "def sum(a, b): return 7", "def add(a, b): return 6")
    assert rewards(*map(block, programs), record=record) == [1.0, 0.0, 0.0]


USES: dict[str, tuple[str, str, str]] = {
    "an object": (
        "class Stack(list):\n    def push(self, x): self.append(x)\n    def top(self): return self[-1]",
        "",
        "s = Stack()\ns.push(3)\ns.push([4])\nassert s.top() == [4] and len(s) == 2 and s[0] == 3\n"
        "assert isinstance(s, Stack) and not isinstance(3, Stack) and list(s) == [3, [4]]",
    ),
    "operators of its own": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __mul__(self, k): return V(self.x * k)\n    def __eq__(self, o): return self.x == o.x\n"
        "    def __lt__(self, o): return self.x < o.x\n    def __neg__(self): return V(-self.x)",
        "",
        "assert V(1) + V(2) == V(3) and V(1) < V(2) and (V(2) * 3).x == 6 and (-V(2)).x == -2 and V(1) != V(2)",
    ),
    "a generator": (
        "def count(n):\n    yield from range(n)",
        "",
        "assert list(count(3)) == [0, 1, 2]",
    ),
    "a change in place": (
        "def order(x, d): x.sort(); d['n'] = len(x)",
        "",
        "x, d = [3, 1, 2], {}\norder(x, d)\nassert x == [1, 2, 3] and d == {'n': 3}",
    ),
    "errors": (
        "class Odd(ValueError):\n    def __init__(self, x): super().__init__(x); self.x = x\n"
        "def half(x):\n    if x % 2: raise Odd(x)\n    return x // 2",
        "",
        "for kind in (Odd, ValueError):\n    try: half(3)\n    except kind as error: assert error.args == (3,) and error.x == 3\n"
        "    else: assert False",
    ),
    "what is printed and read": (
        "def main(): print(int(input()) + 1)",
        "import io, sys, contextlib",
        "sys.stdin = io.StringIO('3\\n')\nout = io.StringIO()\n"
        "with contextlib.redirect_stdout(out): main()\nassert out.getvalue() == '4\\n'",
    ),
    "functions of the test": (
        "def apply(f, xs): return [f(x) for x in xs]",
        "",
        "seen = []\nassert apply(lambda x: seen.append(x) or x + 1, iter([1, 2])) == [2, 3] and seen == [1, 2]",
    ),
    "objects of the setup": (
        "def flip(n):\n    if n: n.left, n.right = flip(n.right), flip(n.left)\n    return n",
        "class Node:\n    def __init__(self, left=None, right=None): self.left, self.right = left, right",
        "n = flip(Node(Node(), None))\nassert n.left is None and isinstance(n.right, Node)",
    ),
    "all plain types": (
        "from collections import Counter, namedtuple\nfrom fractions import Fraction\nP = namedtuple('P', 'x y')\n"
        "def same(x): return x\ndef point(): return P(1, 2)\ndef count(x): return Counter(x)",
        "from decimal import Decimal\nfrom collections import deque",
        "for x in (None, True, 2**200, -1.5, 1j, 'a\\ud800', b'\\xff', (1, [2]), {(1, 2): {3}}, frozenset([4]), deque([5]), Decimal('0.1')):\n"
        "    assert same(x) == x and type(same(x)) is type(x)\n"
        "assert point() == (1, 2) and point().y == 2 and count('aab') == {'a': 2, 'b': 1}\nassert same(Fraction(1, 3)) == Fraction(1, 3)",
    ),
    "a module and a constant": ("import math\nLIMIT = 3", "", "assert math.floor(3.5) == LIMIT"),
}


def test_a_test_may_use_of_a_program() -> None:
    texts = [
        (block(code), {"prompt": "p", "setup": setup, "tests": [test]})
        for code, setup, test in USES.values()
    ]
    found = verdicts([RewardConfig(scorer="unit-tests")], texts, time_limit=5.0, memory_limit=3e8)
    assert {
        name: getattr(each, "reward", each) for name, each in zip(USES, found, strict=True)
    } == (dict.fromkeys(USES, 1.0))


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
