"""Hangs are noticed: of processes that are stopped, of work that never ends, and of whatever keeps Ctrl-C from its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.engine.messages import (
    Command,
    Event,
    Failed,
    Generate,
    Generated,
    LoadWeights,
    ReplicaLost,
    ReplicaStarted,
    SaveCheckpoint,
    Stepped,
    Train,
    Trained,
    TrainerLost,
    Verify,
    WakeAt,
    WeightsLoaded,
    Woke,
)
from streamrl.engine.state import State
from streamrl.engine.trace import Trace, replay
from streamrl.engine.world import RunInterruptedError
from streamrl.executor.execute import NAMES, Interruption
from streamrl.executor.launchers.handles import Handle, InProcess, LocalProcess, WorkerLostError
from streamrl.executor.roles import Scoring
from streamrl.executor.watchdog import FACTOR, FIRST_FACTOR, TICK, HangingCommand, Watchdog
from streamrl.executor.world import RealWorld
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.workload.prompt_records import Record
from tests.ray_actors import start_actor
from tests.scripted import BEGIN, REPLICA, ScriptedLauncher, ScriptedVerifier, make_world
from tests.test_execute import real_run
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for
from tests.verifying import wait_until_gone

COUNTER = "tests.small_roles:Counter"

# Processes ----------------------------------------------------------------------------------------


CONTROLLER = """
import asyncio
from streamrl.executor.environment.session import EnvironmentHost
from streamrl.executor.verifier.verifier import Verifier
from streamrl.runfile.environment_config import EnvironmentConfig
from tests.test_episodes_executed import GAME
from tests.test_verifier import config


async def main():
    environment = EnvironmentConfig(max_turns=4, max_context=100, implementation=GAME + "Odd")
    verifier = Verifier(config("math-verify"))
    await verifier.verify("1", None, {"answer": "1"})  # its server listens
    await EnvironmentHost(environment).start()
    print("ready", flush=True)
    await asyncio.sleep(60)


asyncio.run(main())
"""


def test_stopped_servers_of_scorers_and_environments_end_with_their_controller() -> None:
    with subprocess.Popen([sys.executable, "-c", CONTROLLER], stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None and controller.stdout.readline() == b"ready\n"
        servers = psutil.Process(controller.pid).children()
        for server in servers:
            server.suspend()
        controller.kill()
    assert len(servers) == 2
    wait_until_gone((server.pid for server in servers), 60)


def test_a_stopped_process_is_killed_once_it_gave_no_sign_of_life_for_too_long(
    tmp_path: Path,
) -> None:
    async def go() -> LocalProcess:
        handle = await LocalProcess.start(COUNTER, {"first": 0}, tmp_path / "log", {}, 2.0, BEGIN)
        await handle.call("count", returns=int)
        await asyncio.sleep(1.5)  # it answers a ping
        os.kill(handle.pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        with pytest.raises(WorkerLostError, match=r"no sign of life for \d+ s and was killed"):
            await asyncio.wait_for(handle.call("count", returns=int), timeout=20)
        assert time.monotonic() - stopped_at > 2.0
        with pytest.raises(WorkerLostError):
            await handle.call("count", returns=int)
        await handle.close()
        return handle

    assert asyncio.run(go()).exit_status == -signal.SIGKILL


def test_a_process_that_computes_lives_though_it_answers_nobody(tmp_path: Path) -> None:
    async def go() -> None:
        handle = await LocalProcess.start(COUNTER, {"first": 7}, tmp_path / "log", {}, 1.0, BEGIN)
        assert await handle.call("count", returns=int) == 7
        await asyncio.sleep(1.5)
        await handle.call("compute_alone", 3.5, returns=type(None))
        assert await handle.call("count", returns=int) == 8
        await handle.close()

    asyncio.run(asyncio.wait_for(go(), timeout=60))


@pytest.mark.parametrize(
    "start",
    [LocalProcess.start, pytest.param(start_actor, marks=pytest.mark.ray)],
    ids=["local", "ray"],
)
def test_a_start_may_take_longer_than_a_silence_later(start: Any, tmp_path: Path) -> None:
    async def go() -> None:
        path, log = "tests.small_roles:SlowStarter", tmp_path / "log"
        more = {"environment": {}, "begin": BEGIN} if start == LocalProcess.start else {}
        handle = await start(path, {"first": 7}, log, patience=1.0, **more)
        assert await handle.call("count", returns=int) == 7
        await asyncio.sleep(1.5)
        handle.send_signal(signal.SIGSTOP)
        with pytest.raises(WorkerLostError, match=r"no sign of life for \d+ s and was killed"):
            await asyncio.wait_for(handle.call("count", returns=int), timeout=20)
        await handle.close()

    asyncio.run(asyncio.wait_for(go(), timeout=60))


def stop_at(run: Run, moment: Callable[[Event], bool], who: str) -> Trace:
    """Run scripted roles in processes of their own, and stop one of them at a moment."""

    async def go() -> Trace:
        is_stopped = False

        def watch(event: Event, state: State, now: float) -> None:
            nonlocal is_stopped
            if moment(event) and not is_stopped:
                is_stopped = True
                launcher: Any = world._launcher
                found = [*launcher.replicas.values()] if who == "replica" else launcher.trainers
                os.kill(found[-1].pid, signal.SIGSTOP)

        world: RealWorld = make_world(run, {"is_local": True, "slowest": 0.03}, watch=watch)
        return await world.run()

    return asyncio.run(asyncio.wait_for(go(), timeout=120))


@pytest.mark.parametrize(("who", "loss"), [("replica", ReplicaLost), ("trainer", TrainerLost)])
def test_a_stopped_worker_is_replaced_as_a_dead_one_is(
    tmp_path: Path, who: str, loss: type[Event]
) -> None:
    run = real_run(tmp_path, algorithm__steps=6, execute__patience="1 s")
    trace = stop_at(run, lambda event: isinstance(event, Stepped) and event.version == 2, who)
    (lost,) = [entry.event for entry in trace.entries if isinstance(entry.event, loss)]
    assert "no sign of life" in lost.reason
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert measure(trace).num_steps == 6
    assert replay(trace) is None


# Commands -----------------------------------------------------------------------------------------


def ticks(watchdog: Watchdog, seconds: float) -> list[Command]:
    """Let time pass; return what hangs at its end."""
    found: list[HangingCommand] = []
    for _ in range(round(seconds / TICK)):
        found = watchdog.tick()
    return [each.command for each in found]


def generated(tokens: int, run_time: float) -> Generated:
    return Generated(0, tokens, "stop", 0, run_time, 0.0)


def test_a_command_may_take_ten_times_the_slowest_of_its_kind_by_units_and_never_too_little() -> (
    None
):
    watchdog = Watchdog(patience=3.0, max_tokens=100)
    assert watchdog.limit(Generate(0, 0, 0)) == FIRST_FACTOR * 3.0
    watchdog.end(watchdog.begin(Generate(0, 0, 0), 0.0), generated(10, 4.0), 6.0)
    watchdog.end(watchdog.begin(Generate(1, 0, 0), 0.0), generated(50, 5.0), 6.0)
    assert watchdog.limit(Generate(2, 0, 0)) == pytest.approx(FACTOR * (2.0 + 0.4 * 100))
    watchdog.end(watchdog.begin(Train((0, 1), 0), 0.0), Trained((0, 1), 0), 8.0)
    assert watchdog.limit(Train((2,), 0)) == pytest.approx(FACTOR * 4.0)
    watchdog.end(watchdog.begin(SaveCheckpoint(1, 1, 0), 0.0), Stepped(1, 0), 0.1)
    assert watchdog.limit(SaveCheckpoint(2, 1, 0)) == FACTOR * 3.0
    watchdog.end(watchdog.begin(LoadWeights(0, 1, True), 0.0), WeightsLoaded(0, 1, 0.1), 5.0)
    assert watchdog.limit(LoadWeights(0, 2, False)) == pytest.approx(FACTOR * 5.0)
    assert watchdog.limit(LoadWeights(0, 2, True)) == pytest.approx(FACTOR * 47.0)


def test_what_failed_or_waits_for_the_clock_says_nothing_of_how_long_its_kind_takes() -> None:
    watchdog = Watchdog(patience=3.0, max_tokens=100)
    watchdog.end(watchdog.begin(Train((0,), 0), 0.0), None, 8.0)
    watchdog.end(watchdog.begin(WakeAt(9.0), 0.0), Woke(9.0), 9.0)
    assert (
        watchdog.limit(Train((0,), 0)) == FIRST_FACTOR * 3.0 and watchdog.limit(WakeAt(99.0)) == inf
    )


def test_a_controller_that_was_stopped_itself_finds_nobody_late() -> None:
    watchdog = Watchdog(patience=3.0, max_tokens=100)
    watchdog.end(watchdog.begin(Train((0,), 0), 0.0), Trained((0,), 0), 1.0)
    watchdog.begin(Train((1,), 0), 1.0)
    assert ticks(watchdog, FACTOR * 3.0) == []  # however late the clock says that it is
    assert ticks(watchdog, TICK) == [Train((1,), 0)]


class StuckReplica(InProcess):
    """A replica of which one call never ends."""

    num_calls = 0

    async def call(self, method: str, *arguments: object, returns: Any) -> Any:
        StuckReplica.num_calls += method == "generate"
        if method == "generate" and StuckReplica.num_calls == 20:
            arguments = (*arguments, "no such argument")
            method = "hang"
            self._role.hang = lambda *_: asyncio.sleep(3600)
        return await super().call(method, *arguments, returns=returns)


class StuckLauncher(ScriptedLauncher):
    """Starts such replicas."""

    async def _start(self, role: str, number: int) -> Handle:
        kind = StuckReplica if role == REPLICA else InProcess
        return kind(role, {"seed": number, "slowest": 0.002})


def test_a_generation_that_never_ends_costs_its_replica_and_not_the_run(tmp_path: Path) -> None:
    run = real_run(tmp_path, execute__patience="200 ms", rollout__max_tokens=40)
    StuckReplica.num_calls = 0

    async def go() -> Trace:
        return await make_world(run, {}, launcher_class=StuckLauncher).run()

    trace = asyncio.run(asyncio.wait_for(go(), timeout=60))
    (lost,) = [entry.event for entry in trace.entries if isinstance(entry.event, ReplicaLost)]
    # ten times the patience, or more after slow generations
    assert re.search(r"Generate took more than \d+ s", lost.reason), lost.reason
    check_every_rollout_is_accounted_for(trace)
    assert measure(trace).num_steps == 4


class StuckVerifier(ScriptedVerifier):
    """Comes to no end with one completion, until it is closed."""

    def __init__(self) -> None:
        self._num_asked = 0
        self._closed = asyncio.Event()

    async def verify(self, completion: str, num_tokens: int, record: Record) -> Scoring:
        self._num_asked += 1
        if self._num_asked == 10:
            await self._closed.wait()
            raise RuntimeError("the verifier was closed")
        return Scoring(1.0, None)

    def close(self) -> None:
        self._closed.set()


def test_a_reward_that_never_comes_is_asked_for_again(tmp_path: Path) -> None:
    run = real_run(tmp_path, execute__patience="200 ms")

    async def go() -> Trace:
        return await make_world(run, {}, verifier_class=StuckVerifier).run()

    trace = asyncio.run(asyncio.wait_for(go(), timeout=60))
    (failed,) = [entry.event for entry in trace.entries if isinstance(entry.event, Failed)]
    assert isinstance(failed.command, Verify) and "was closed" in failed.reason
    assert measure(trace).num_steps == 4


class DyingLauncher(ScriptedLauncher):
    """Starts a first replica whose engine ends after a while."""

    async def replica(self, replica_id: int, kind: int, model: str) -> Handle:
        handle = await super().replica(replica_id, kind, model)
        if replica_id == 0:
            assert isinstance(handle, InProcess)
            stop = handle._role._engine.stop
            asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(stop()))
        return handle


def test_a_replica_whose_engine_died_is_replaced_though_its_process_lives(tmp_path: Path) -> None:
    run = real_run(tmp_path, algorithm__steps=8)

    async def go() -> Trace:
        return await make_world(run, {"slowest": 0.02}, launcher_class=DyingLauncher).run()

    trace = asyncio.run(asyncio.wait_for(go(), timeout=60))
    events = [entry.event for entry in trace.entries]
    (lost,) = [event for event in events if isinstance(event, ReplicaLost)]
    assert lost.replica == 0 and "the replica was stopped" in lost.reason
    assert sum(isinstance(event, Failed) for event in events) <= 12
    assert {event.replica for event in events if isinstance(event, ReplicaStarted)} == {0, 1, 2}
    assert measure(trace).num_steps == 8


@pytest.mark.parametrize(("number", "name"), NAMES.items())
def test_a_signal_before_a_run_has_begun_ends_it_at_once(number: signal.Signals, name: str) -> None:
    before = signal.getsignal(number)
    with (
        pytest.raises(RunInterruptedError, match=re.escape(f"{name}: nothing was begun")),
        Interruption(),
    ):
        os.kill(os.getpid(), number)
        time.sleep(5.0)
    assert signal.getsignal(number) is before
