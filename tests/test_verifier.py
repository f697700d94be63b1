"""Rewards by name, and the verifier's processes: limits, faults, replacement, their end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.executor.directory_lock import MARK
from streamrl.executor.verifier.fork_server import read_verdict
from streamrl.executor.verifier.fork_server_process import ENVIRONMENT
from streamrl.executor.verifier.reward_checks import check_prompts
from streamrl.executor.verifier.scorers import can_act, final_answer
from streamrl.executor.verifier.verifier import Scoring, Verifier
from streamrl.runfile.roles_config import RewardConfig
from tests.runs import small_run
from tests.verifying import (
    children,
    config,
    score,
    use,
    verdicts,
    wait_until_gone,
    work_time,
)

ROOT = Path(__file__).parent.parent
TOWERS = ("$9^{9^{9^{9}}}$", 10, {"answer": "0.5"})
"""What math-verify compares for five seconds."""
REGEX = RewardConfig(scorer="regex", pattern="(?:a+)+b")
"""Loads in no time, and looks at 2**n ways to take n letters where no b follows."""
ENDLESS, AT_ONCE = ("a" * 60, 60, {}), ("ab", 2, {})


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("2+3=5\n#### 5", "5"),
        ("first #### 4, no: #### 7 ", "7"),
        ("so the answer: 12", "12"),
        ("work\n 9 \n", "9"),
        ("", ""),
    ],
)
def test_the_final_answer_follows_the_last_marker_or_is_the_last_line(
    completion: str, answer: str
) -> None:
    assert final_answer(completion) == answer


def test_exact_wants_the_very_answer() -> None:
    right, wrong = "#### 12", "#### 120"
    assert score("exact", right, {"answer": "12"}) == 1.0
    assert score("exact", wrong, {"answer": "12"}) == 0.0
    found = verdicts("exact", [(text, {"answer": "12"}) for text in (right, wrong, right)])
    assert found == [Scoring(1.0, None), Scoring(0.0, None), Scoring(1.0, None)]


def test_reasoning_gym_scores_with_the_task_of_the_record() -> None:
    record = {"task": "chain_sum", "answer": "15"}
    assert score("reasoning-gym", "12+3=15\n#### 15", record) == 1.0
    assert score("reasoning-gym", "12+3=15\n#### 14", record) < 0.5
    with pytest.raises(ValueError, match="no_such_task"):
        score("reasoning-gym", "#### 15", {"task": "no_such_task", "answer": "15"})


def test_math_verify_knows_equal_values_in_the_forms_that_answers_and_completions_have() -> None:
    forms = [
        ("0.5", r"so it is $\boxed{\frac{1}{2}}$", r"it is $\boxed{2}$"),
        (r"\sqrt{3}", r"\boxed{\sqrt{3}}", r"\boxed{3}"),
        (r"3\pi", r"so it is \boxed{3\pi}", r"\boxed{3}"),
        ("C", r"\boxed{C}", r"\boxed{A}"),
        (r"$\frac{1}{2}$", r"\boxed{0.5}", r"\boxed{2}"),
        ("(1,2)", r"\boxed{(1,2)}", r"\boxed{(2,1)}"),
    ]
    asked = [(text, {"answer": answer}) for answer, *texts in forms for text in texts]
    found = verdicts("math-verify", asked, time_limit=30)
    assert found == [Scoring(1.0, None), Scoring(0.0, None)] * len(forms)


@pytest.mark.parametrize(
    ("scorer", "line", "says"),
    [
        ("math-verify", {"answer": "$ $"}, "reads no answer in"),
        ("reasoning-gym", {"answer": "1", "task": "nope"}, "has no task 'nope'"),
        ("reasoning-gym", {"answer": "1", "task": ["chain_sum"]}, "has no task"),
    ],
)
def test_prompts_that_no_completion_could_answer_are_refused_before_the_run(
    tmp_path: Path, scorer: str, line: dict[str, Any], says: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    good = {"prompt": "1+1=", "answer": "2", "task": "chain_sum"}
    file.write_text(f"{json.dumps(good)}\n{json.dumps({'prompt': 'p', **line})}\n")
    run = small_run({"workload.prompts": str(file), "verifier.scorer": scorer})
    with pytest.raises(ValueError, match=rf"^workload\.prompts: .*prompts\.jsonl:2: .*{says}"):
        check_prompts(run.verifier, run.workload)


def test_an_answer_too_long_for_any_pipe_is_wrong_and_holds_up_nobody() -> None:
    texts = ["9" * 10_000_000, "15"]
    found = verdicts("exact", [(text, {"answer": "15"}) for text in texts])
    assert found == [Scoring(0.0, "too long"), Scoring(1.0, None)]


def test_code_that_is_spelled_in_numbers_changes_no_other_rollouts_reward() -> None:
    task = "sys.modules['reasoning_gym.games.countdown']"
    code = f'exec("import sys; m = {task}; m.sorted = lambda x: 0; m.np.isclose = lambda *a, **k: True")'
    payload = "'" + "".join(f"\\{ord(character):03o}" for character in code) + "'!"
    metadata = {"numbers": [1, 2, 3], "target": 7}
    record = {"task": "countdown", "entry": {"answer": "1+2*3", "metadata": metadata}}
    found = verdicts(
        "reasoning-gym", [(text, record) for text in ("1+1+1", payload, "1+1+1")], workers=1
    )
    assert found[0] == found[2] and found[0].reward < 1


@pytest.mark.parametrize(
    ("answer", "is_able"),
    [
        *((text, False) for text in ("", "15", "-1.5", "9**9", "[[0, 1], [2, 3]]", "Yes")),
        *((text, False) for text in ("a+7=07;b-2=5", "2x^3 - x + C", "x1 < y", "N 5")),
        *(
            (text, True)
            for text in (
                "f()",
                "a.b",
                "import os",
                "[0 for x[0] in y]",
                "\N{SMALL ROMAN NUMERAL ONE}(1)",
                "_()",
                "x(1)",
                "x[0]",
                "(a:=1)",
                "a or b",
                "a1b+2",
                "0xab-1",
                "x+\N{SMALL ROMAN NUMERAL ONE}",
                "x!",
                "x@y",
                "x\n.y",
                "'\\145\\170\\151\\164'!",
            )
        ),
    ],
)
def test_an_answer_can_act_only_if_it_names_something_and_is_more_than_a_name(
    answer: str, is_able: bool
) -> None:
    assert can_act(answer) == is_able


@pytest.mark.parametrize(
    "data",
    [b"R", b"R1.0", b"R" + b"\0" * 9, b"", b"Rjunk" * 100, b"M1", b"\xff"]
    + [b"R" + data for data in (b"\0" * 6 + b"\xf8\x7f", b"\0" * 6 + b"\xf0\x7f", b"\xff" * 8)],
)
def test_what_is_no_reward_from_0_to_1_is_a_fault(data: bytes) -> None:
    assert read_verdict(data, (0.0, 1.0))[:2] == (0.0, "no reward")


@pytest.mark.parametrize("limit", ["time_limit=0 s", "memory_limit=0 MB", "time_limit=1e999 s"])
def test_a_limit_must_be_above_0_and_finite(limit: str) -> None:
    key, _, value = limit.partition("=")
    with pytest.raises(ValueError, match=rf"verifier\.{key}"):
        small_run({f"verifier.{key}": value})


# Faults -------------------------------------------------------------------------------------------


def test_a_number_too_large_for_its_scorer_is_a_wrong_answer_and_holds_up_nobody() -> None:
    metadata = {"numbers": [1, 1], "target": 2}
    records = [
        {"task": "countdown", "entry": {"answer": "1+1", "metadata": metadata}},
        {"task": "binary_matrix", "entry": {"answer": "0 1", "metadata": {}}},
    ]

    async def go() -> tuple[list[Scoring], int]:
        verifier, num_turns = Verifier(config("reasoning-gym", time_limit=1.0)), 0
        work = asyncio.gather(*(verifier.verify("9**9**9**9", 10, record) for record in records))
        while not work.done():
            await asyncio.sleep(0.01)
            num_turns += 1
        verifier.close()
        return await work, num_turns

    found, num_turns = asyncio.run(asyncio.wait_for(go(), timeout=60))
    assert found == [Scoring(0.0, "time limit")] * 2 and num_turns > 50


def test_what_is_wrong_with_every_completion_of_a_record_is_an_error_with_its_reason() -> None:
    broken = [
        ({"answer": "15"}, "KeyError: 'task'"),
        ({"task": "no_such_task", "answer": "15"}, "no_such_task"),
        ({"task": "chain_sum"}, "KeyError: 'answer'"),
        ({"task": "futoshiki", "answer": "1"}, "KeyError: 'solution'"),
    ]
    found = verdicts("reasoning-gym", [("#### 15", record) for record, _ in broken])
    for error, (_, reason) in zip(found, broken, strict=True):
        assert isinstance(error, RuntimeError) and reason in str(error)


def test_limits_under_which_no_answer_can_be_scored_are_an_error() -> None:
    completion = ("$\\frac{1}{2}$", {"answer": "$\\frac{1}{2}$"})
    (error,) = verdicts("math-verify", [completion], time_limit=0.001)
    assert isinstance(error, RuntimeError) and "time limit" in str(error)


def test_a_scorer_that_cannot_be_loaded_is_an_error_with_its_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(Path(msgspec.__file__).parent, tmp_path / "msgspec")
    paths = [path for path in sys.path if "site-packages" not in path]
    monkeypatch.setattr(sys, "path", [*paths, str(tmp_path)])
    (error,) = verdicts("math-verify", [("1", {"answer": "1"})])
    assert isinstance(error, RuntimeError) and "No module named 'math_verify'" in str(error)


async def begin_to_hang(
    verifier: Verifier, answer: tuple[str, int, dict[str, Any]] = ENDLESS
) -> tuple[asyncio.Task[Scoring], int, int]:
    """Return a verification that takes long, with the ids of the fork server and of the worker."""
    server = (await verifier.start()).pid
    task = asyncio.create_task(verifier.verify(*answer))
    async with asyncio.timeout(30):
        while not ((workers := children(server)) and work_time(workers[0]) > 0.1):
            await asyncio.sleep(0.01)
    return task, server, workers[0]


def test_the_process_with_the_scorer_inherits_no_environment_and_no_ctrl_c() -> None:
    async def do(verifier: Verifier) -> None:
        assert (await verifier.verify(*AT_ONCE)).reward == 1.0
        pid = (await verifier.start()).pid
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")[:-1]
        names = {os.fsdecode(variable).partition("=")[0] for variable in variables}
        assert names == {*ENVIRONMENT, MARK}
        assert os.getsid(pid) == pid  # signals of a terminal go to its session

    use(do, reward=REGEX)


async def next_worker(server: int, worker: int) -> int:
    """Return the process that a fork server starts in place of a worker, as soon as it grades."""
    async with asyncio.timeout(10):
        while True:
            for pid in children(server):
                with suppress(FileNotFoundError, ProcessLookupError):
                    if pid != worker and work_time(pid) > 0.1:
                        return pid
            await asyncio.sleep(0.01)


SLOW = """
import time

def always(completion, record):
    time.sleep(0.4)
    return 1.0
"""


@pytest.mark.parametrize("strike", ["killed", "stopped", "all stopped"])
def test_a_signal_from_outside_gives_no_answer_the_worst_score(strike: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)

    async def do(verifier: Verifier) -> None:
        await verifier.verify("a", 1, {})
        server = (await verifier.start()).pid
        task = asyncio.create_task(verifier.verify("a", 1, {}))
        async with asyncio.timeout(10):
            while not (workers := children(server)):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        if strike == "all stopped":
            for pid in (server, *workers):
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(1.7)
            for pid in (*workers, server):
                os.kill(pid, signal.SIGCONT)
        else:
            number = signal.SIGKILL if strike == "killed" else signal.SIGSTOP
            for pid in workers:
                os.kill(pid, number)
        assert (await task)[:2] == (1.0, None)

    use(do, time_limit=1.0, reward=f"python:{tmp_path / 'slow.py'}:always")


def test_a_worker_that_is_killed_twice_gives_the_worst_score_and_is_replaced() -> None:
    async def do(verifier: Verifier) -> None:
        task, server, worker = await begin_to_hang(verifier)
        os.kill(worker, signal.SIGKILL)
        os.kill(await next_worker(server, worker), signal.SIGKILL)
        assert (await task)[:2] == (0.0, "regex: process ended: SIGKILL")
        assert (await verifier.verify(*AT_ONCE)).reward == 1.0

    use(do, reward=REGEX)


def test_a_fork_server_that_is_killed_is_replaced_and_its_verifications_fail() -> None:
    async def do(verifier: Verifier) -> None:
        task, server, worker = await begin_to_hang(verifier)
        os.kill(server, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="status -9"):
            await task
        wait_until_gone([worker], 2)
        assert (await verifier.verify(*AT_ONCE)).reward == 1.0

    use(do, reward=REGEX)


def test_a_fork_server_that_stands_still_is_given_up_long_before_one_that_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.executor.verifier.verifier.ANSWER_TIME", 0.1)

    async def do(verifier: Verifier) -> None:
        assert (await verifier.verify(*AT_ONCE)).reward == 1.0
        os.kill((await verifier.start()).pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="status -9"):
            await verifier.verify(*AT_ONCE)
        assert (await verifier.verify(*AT_ONCE)).reward == 1.0

    use(do, time_limit=1.0, reward=REGEX)


def test_closing_does_not_wait_for_a_scorer_that_hangs_and_leaves_no_process() -> None:
    async def do(verifier: Verifier) -> None:
        task, *processes = await begin_to_hang(verifier)
        verifier.close()
        wait_until_gone(processes, 0)
        with pytest.raises(RuntimeError, match="ended"):
            await task

    use(do, reward=REGEX)


CONTROLLER = """
import asyncio, os, sys
from streamrl.executor.verifier.verifier import Verifier
from tests.test_verifier import TOWERS, begin_to_hang
from tests.verifying import config

async def main():
    task, *processes = await begin_to_hang(Verifier(config("math-verify", time_limit=600)), TOWERS)
    print(*processes, os.readlink(f"/proc/{processes[0]}/cwd"), "math_verify" in sys.modules, flush=True)
    await task

asyncio.run(main())
"""


def test_a_controller_imports_no_scorer_and_its_workers_die_with_it() -> None:
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    *processes, directory, imported = controller.stdout.readline().split()
    assert imported == "False" and len(processes) == 2
    controller.kill()
    controller.communicate()
    wait_until_gone(map(int, processes), 2)
    assert not Path(directory).exists()
