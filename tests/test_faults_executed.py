"""Fault plans in real time: what strikes processes is noticed, mended, and written down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.engine.messages import (
    Event,
    Failed,
    Generate,
    PushWeights,
    ReplicaLost,
    SaveCheckpoint,
    Stepped,
    TrainerLost,
)
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.executor.checkpoints import Checkpoints
from streamrl.executor.execute import check_executable
from streamrl.executor.faults import read_struck
from streamrl.executor.launchers.handles import LocalProcess, WorkerLostError
from streamrl.executor.roles import Completion, Manifest, Request
from streamrl.executor.rollout.replica import check_completion
from streamrl.executor.tokens import TokenBlock, TokenSegment, encode_ids, write_block
from streamrl.executor.transfer.transfer import Transfer
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from tests.patients import local_table
from tests.scripted import BEGIN, make_world
from tests.test_execute import real_run
from tests.test_faults import fault
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

STEPS = 8


def faulty(directory: Path, *faults: dict[str, Any], **changes: Any) -> Run:
    keys = {"algorithm__steps": STEPS, "execute__checkpoint_every": 2, **changes}
    return real_run(directory, faults=[*faults], **keys)


def execute(run: Run, resume: bool = False) -> Trace:
    """Execute a run with scripted roles in processes of their own, and look at its books."""

    async def go() -> Trace:
        world = make_world(run, {"is_local": True, "slowest": 0.02}, resume)
        with contextlib.closing(world._directory):
            return await world.run()

    trace = asyncio.run(asyncio.wait_for(go(), timeout=60))
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    assert measure(trace).num_steps == STEPS
    return trace


def events(trace: Trace, kind: type[Event]) -> list[Any]:
    return [entry.event for entry in trace.entries if isinstance(entry.event, kind)]


def failures(trace: Trace, kind: type) -> list[str]:
    found = [event for event in events(trace, Failed) if isinstance(event.command, kind)]
    return [event.reason for event in found]


# Whole runs ---------------------------------------------------------------------------------------


def test_replicas_that_die_hang_or_garble_are_replaced_or_asked_again(tmp_path: Path) -> None:
    kinds = ["replica-dies", "replica-hangs", *["replica-garbles"] * 5]
    plan = [fault(kind, step=2 + place) for place, kind in enumerate(kinds)]
    trace = execute(faulty(tmp_path, *plan, execute__patience="1 s"))
    died, hung = [event.reason for event in events(trace, ReplicaLost)]
    assert "ended with status -9" in died and "gave no sign of life" in hung
    refused = [
        reason for reason in failures(trace, Generate) if "the replica answered with" in reason
    ]
    assert len(refused) == 5
    assert [each.kind for each in read_struck(tmp_path / "run")] == kinds


def test_a_trainer_that_dies_at_any_of_its_works_makes_its_steps_again(tmp_path: Path) -> None:
    kinds = ["trainer-dies-training", "trainer-dies-pushing", "trainer-dies-saving"]
    plan = [fault(kind, step=1 + 3 * place) for place, kind in enumerate(kinds)]
    trace = execute(faulty(tmp_path, *plan))
    assert len(events(trace, TrainerLost)) == 3
    assert len(failures(trace, PushWeights)) == len(failures(trace, SaveCheckpoint)) == 1
    made = [event.version for event in events(trace, Stepped)]
    assert {*made} == {*range(1, STEPS + 1)} and made[-1] == STEPS
    newest = Checkpoints(tmp_path / "run" / "checkpoints").newest_whole()
    assert newest is not None and newest.version == STEPS


def test_a_lost_push_and_a_full_disk_cost_no_step(tmp_path: Path) -> None:
    plan = [fault("link-drops", step=2), fault("disk-full", step=3), fault("disk-full", step=8)]
    trace = execute(faulty(tmp_path, *plan))
    assert failures(trace, PushWeights) == ["ConnectionError: a fault: the link dropped it"]
    assert len(failures(trace, SaveCheckpoint)) == 2
    assert all("No space left on device" in each for each in failures(trace, SaveCheckpoint))
    assert [event.version for event in events(trace, Stepped)] == list(range(1, STEPS + 1))


def test_a_slow_link_takes_the_time_that_it_takes(tmp_path: Path) -> None:
    plan = fault("link-slows", step=2) | {"factor": 40.0, "duration": "20 s"}
    trace = execute(faulty(tmp_path, plan, policies__system="stream-sync"))
    assert trace.entries[-1].time > read_struck(tmp_path / "run")[0].time + 1.0


RUN_AND_RESUME = """
import sys
from pathlib import Path
from tests.test_faults_executed import execute, faulty, fault
execute(faulty(Path(sys.argv[1]), fault("driver-dies", step=4), fault("replica-dies", step=6)), len(sys.argv) > 2)
"""


def test_a_driver_that_was_killed_resumes_and_is_not_killed_again(tmp_path: Path) -> None:
    def run(*more: str) -> int:
        words = [sys.executable, "-c", RUN_AND_RESUME, str(tmp_path), *more]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        return subprocess.run(words, env=environment, timeout=60, check=False).returncode

    assert run() == -signal.SIGKILL
    assert run("--resume") != -signal.SIGKILL
    struck = read_struck(tmp_path / "run")
    assert [(each.kind, each.leg) for each in struck] == [("driver-dies", 1), ("replica-dies", 2)]
    made = [event.version for event in events(read_trace(tmp_path / "run/trace.jsonl"), Stepped)]
    assert made == list(range(3, STEPS + 1))


# What is noticed ----------------------------------------------------------------------------------


SPEAKER = "tests.small_roles:Speaker"


def test_a_process_that_sends_what_is_no_message_is_lost_at_once(tmp_path: Path) -> None:
    async def go() -> None:
        handle = await LocalProcess.start(SPEAKER, {}, tmp_path / "log", {}, begin=BEGIN)
        with pytest.raises(WorkerLostError, match="sent what is no answer and was killed"):
            await asyncio.wait_for(handle.call("babble", returns=type(None)), timeout=20)
        await handle.close()

    asyncio.run(go())


def test_a_worker_whose_log_is_full_still_says_what_went_wrong() -> None:
    async def go() -> None:
        handle = await LocalProcess.start(SPEAKER, {}, Path("/dev/full"), {}, begin=BEGIN)
        with pytest.raises(RuntimeError, match="nothing there"):
            await asyncio.wait_for(handle.call("fail", returns=type(None)), timeout=20)
        await handle.close()

    asyncio.run(go())


REQUEST = Request(
    rollout=3,
    prompt=encode_ids([1]),
    priority=0,
    max_tokens=6,
    prefix=(TokenBlock(2, None, bytes(16)),),
)


def answer(**changes: Any) -> Completion:
    told: dict[str, Any] = {
        "rollout": 3,
        "output": write_block([5, 6, 7], [-1.0] * 3, None),
        "segments": (TokenSegment(3, is_policy=True),),
        "text": "abc",
        "versions": [(0, 0), (1, 2)],
        "finish": "stop",
        "run_time": 1.0,
        "prefill_time": 0.1,
    }
    return Completion(**{**told, **changes})


NOTHING: dict[str, Any] = {
    "output": write_block([], [], None),
    "segments": (),
    "versions": [],
}


def test_an_answer_is_taken_where_it_is_one() -> None:
    check_completion(REQUEST, answer())
    check_completion(REQUEST, answer(**NOTHING, finish="aborted"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rollout": 4}, "rollout 3: the replica answered with rollout 4"),
        (NOTHING, "0 tokens, expected 1 to 4"),
        ({"output": TokenBlock(5, None, bytes(40))}, "5 tokens, expected 1 to 4"),
        ({"segments": (TokenSegment(2, is_policy=True),)}, "3 tokens but segments of 2"),
        ({"versions": []}, "versions"),
        ({"versions": [(0, 1)]}, "versions"),
        ({"versions": [(0, 0), (1, 0)]}, "versions"),
        ({"versions": [(0, 0), (1, 3)]}, "versions"),
        ({"output": TokenBlock(3, None, bytes(23))}, "another file, or shorter"),
        ({"output": TokenBlock(3, "/dev/null")}, "missing tokens: /dev/null is another file"),
    ],
)
def test_an_answer_that_is_none_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        check_completion(REQUEST, answer(**changes))


def test_what_a_push_that_failed_has_written_is_gone() -> None:
    async def go() -> None:
        async def write(version: int, directory: Path) -> Manifest:
            (directory / f"v{version:06d}").mkdir()
            raise RuntimeError("broke off")

        transfer = Transfer(write)
        try:
            with pytest.raises(RuntimeError, match="broke off"):
                await transfer.push(PushWeights(4, 0))
            assert not list(transfer._directory.path.glob("v*"))
        finally:
            transfer.stop()

    asyncio.run(go())


def test_faults_are_executed_in_processes_only(tmp_path: Path) -> None:
    run = make_run(
        local_table(
            tmp_path,
            {"faults": [fault("replica-dies", step=1)], "execute.launcher": "in-process"},
        )
    )
    with pytest.raises(
        ValueError, match=r"execute\.launcher must be 'local' or 'ray' for planned f"
    ):
        check_executable(run)
