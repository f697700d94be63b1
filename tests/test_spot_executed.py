"""Notices in executed runs: from a request in the run directory to an empty replica and its replacement."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.notice import notice
from streamrl.engine.messages import (
    Event,
    Failed,
    Generate,
    MachineReplaced,
    ReplicaLeaving,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
)
from streamrl.engine.state import State
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.executor import world as world_module
from streamrl.executor.subscribers.attach_requests import Notice, ask
from streamrl.executor.world import RealWorld
from streamrl.runfile.config import Run
from tests.scripted import ScriptedLauncher, ScriptedTransfer, make_world
from tests.test_execute import real_run
from tests.traces import (
    check_every_command_ends_once,
    check_every_rollout_is_accounted_for,
)

Act = Callable[[RealWorld, Event, State], None]


def execute(run: Run, act: Act, parts: dict[str, Any] | None = None, **options: Any) -> Trace:
    """Run scripted roles to the end; `act` is told every event. `parts` are those of `make_world`."""

    async def go() -> Trace:
        def watch(event: Event, state: State, now: float) -> None:
            asyncio.get_running_loop().call_soon(act, world, event, state)

        world = make_world(run, {"slowest": 0.01, **options}, watch=watch, **(parts or {}))
        with contextlib.closing(world._directory):
            return await world.run()

    return asyncio.run(asyncio.wait_for(go(), timeout=120))


def check(trace: Trace, directory: Path) -> None:
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(read_trace(directory / "run" / "trace.jsonl"), checks_invariants=True) is None


def told(trace: Trace, kind: type) -> list[Any]:
    return [entry.event for entry in trace.entries if isinstance(entry.event, kind)]


class RandomNotices:
    """Gives notices to random replicas after random events, some to all of them."""

    def __init__(self, seed: int, share: float, most: int) -> None:
        self._random = random.Random(seed)
        self._share = share
        self.num_left = most

    def __call__(self, world: RealWorld, event: Event, state: State) -> None:
        source = self._random
        if state.is_stopping or not self.num_left or source.random() > self._share:
            return
        own = [number for number, kind in world._kinds.items() if kind == 0]
        chosen = own if source.random() < 0.1 else own[: source.randint(0, 1)]
        if chosen:
            notice = Notice(tuple(chosen), source.uniform(0, 0.05), source.uniform(0, 0.02))
            world.give_notices(notice)
            self.num_left = max(0, self.num_left - len(chosen))


@pytest.mark.parametrize(
    "changes",
    [
        {"policies__system": "stream-async"},
        {"policies__system": "stream-sync", "execute__checkpoint_every": 1},
        {
            "policies__system": "disaggregated",
            "evaluation": {"prompts": "", "every": 1},
            "rollout__replicas": 3,
        },
        {"lending": {"share": 1.0, "replicas": 1}, "policies__system": "stream-sync"},
    ],
)
def test_no_rollout_is_lost_or_trained_twice_whenever_machines_leave(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    if "evaluation" in changes:
        run = real_run(tmp_path, algorithm__steps=2)
        changes["evaluation"]["prompts"] = str(tmp_path / "prompts.jsonl")
    run = real_run(tmp_path, algorithm__steps=6, policies__max_restarts=0, **changes)
    trace = execute(run, RandomNotices(1, 0.1, 40))
    check(trace, tmp_path)
    assert len(told(trace, ReplicaLeaving)) >= 5


def test_a_replica_with_time_is_emptied_and_one_without_is_killed(tmp_path: Path) -> None:
    run = real_run(tmp_path, policies__max_restarts=0, algorithm__steps=8)
    given: list[float] = []

    def act(world: RealWorld, event: Event, state: State) -> None:
        is_time = isinstance(event, ReplicaStarted) or state.leader.version >= 2 * len(given)
        if len(given) < 2 and is_time and state.num_generating:
            given.append((20.0, 0.0)[len(given)])
            staying = world._replicas.keys() - world._leaving.keys()
            world.give_notices(Notice((min(staying),), given[-1], 0.0))

    trace = execute(run, act, slowest=0.05)
    check(trace, tmp_path)
    stopped, lost = told(trace, ReplicaStopped), told(trace, ReplicaLost)
    assert lost[0].reason.endswith("its machine was taken away")
    assert len(lost) == 1 and len(stopped) >= 1
    assert len(told(trace, MachineReplaced)) >= 1


def test_a_replica_with_an_early_notice_gets_rollouts_until_it_must_be_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world_module, "DRAIN_TIME", 0.05)
    run = real_run(tmp_path, policies__max_restarts=0, algorithm__steps=12)
    given: list[float] = []

    def act(world: RealWorld, event: Event, state: State) -> None:
        if not given and state.num_generating:
            given.append(world.now)
            said = world.give_notices(Notice((), 0.4, 0.0))
            assert "from 0.35 s on" in said

    trace = execute(run, act, slowest=0.02)
    check(trace, tmp_path)
    leaving = [entry for entry in trace.entries if isinstance(entry.event, ReplicaLeaving)]
    assert {entry.event.warning for entry in leaving} == {0.05}
    told_at = given[0]
    assert all(entry.time >= told_at + 0.35 for entry in leaving)
    sent = [
        entry for entry in trace.entries if any(isinstance(c, Generate) for c in entry.commands)
    ]
    assert any(told_at + 0.1 < entry.time < told_at + 0.35 for entry in sent)


def test_a_machine_that_takes_no_relay_for_its_replica_any_more_costs_no_restart(
    tmp_path: Path,
) -> None:
    run = real_run(tmp_path, policies__max_restarts=0, algorithm__steps=2)
    begun = asyncio.Event()

    class Draining(ScriptedLauncher):
        def leaving(self) -> dict[int, float]:
            begun.set()
            return {1: 20.0}

    class Relayed(ScriptedTransfer):
        async def reach(self, replica: int) -> None:
            if replica == 1:
                await begun.wait()
                await asyncio.sleep(0.05)
                raise ConnectionError("the relay does not start")

    parts = {"launcher_class": Draining, "make_transfer": Relayed}
    trace = execute(run, lambda world, event, state: None, parts)
    check(trace, tmp_path)
    failures = [failed.reason for failed in told(trace, Failed)]
    assert failures == ["ConnectionError: the relay does not start"]
    assert 1 in [event.replica for event in told(trace, ReplicaLeaving)]
    assert not told(trace, ReplicaLost)


def test_a_request_from_another_process_reaches_the_run_and_bad_ones_are_refused(
    tmp_path: Path,
) -> None:
    run = real_run(tmp_path, algorithm__steps=30)
    answers: list[str] = []

    async def go() -> Trace:
        world = make_world(run, {"slowest": 0.02})
        with contextlib.closing(world._directory):
            whole = asyncio.ensure_future(world.run())
            while not world._replicas:
                await asyncio.sleep(0.01)
            directory = tmp_path / "run"
            with pytest.raises(ValueError, match="replica 7 does not run; running are: 0, 1"):
                await asyncio.to_thread(ask, directory, Notice((7,), 1.0, 0.0))
            answers.append(await asyncio.to_thread(ask, directory, Notice((), 0.01, 0.0)))
            return await whole

    trace = asyncio.run(asyncio.wait_for(go(), timeout=120))
    check(trace, tmp_path)
    (answer,) = answers
    assert answer.startswith("replicas leave within 0.01 s: 0, 1; no other runs, so nothing is ")
    assert [event.replica for event in told(trace, ReplicaLeaving)] == [0, 1]


@pytest.mark.parametrize(
    ("warning", "replacement", "part"),
    [
        ("120", "0 s", "--warning: '120'"),
        ("30 s", "soon", "--replacement: 'soon'"),
        ("1e308 s", "0 s", r"--warning must be in \[0 s, 10000000 s\]"),
        ("30 s", "0 s", "no run goes on there"),
    ],
)
def test_the_command_refuses_times_without_a_unit_and_a_directory_without_a_run(
    tmp_path: Path, warning: str, replacement: str, part: str
) -> None:
    with pytest.raises(ValueError, match=part):
        notice(tmp_path, [0], warning, replacement)
