"""Replicas of a reward model: who scores what, and what becomes of work whose replica is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.engine.messages import Failed, Verify
from streamrl.engine.trace import replay
from streamrl.executor.faults import read_struck
from streamrl.executor.launchers.handles import Handle, InProcess, LocalProcess
from streamrl.executor.roles import Exchange
from streamrl.executor.verifier.reward_pool import RewardPool
from streamrl.executor.verifier.verifier import Verifier
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from tests.engines import HANG
from tests.scripted import BEGIN, REWARD_MODEL, make_world
from tests.test_execute import real_run
from tests.test_faults import fault
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

Go = Callable[[RewardPool], Awaitable[Any]]
SLOWNESS = 0.05
"""Seconds of a call."""


def run(go: Go, log: Path | None = None, replicas: int = 1, **config: Any) -> Any:
    """Return what comes of a pool of scripted replicas, in processes where they have a log."""
    settings: dict[str, object] = {"seed": 0, "slowest": SLOWNESS, **config}

    async def start(number: int) -> Handle:
        if log is None:
            return InProcess(REWARD_MODEL, settings)
        return await LocalProcess.start(REWARD_MODEL, settings, log, {}, 1.0, BEGIN)

    async def whole() -> Any:
        pool = RewardPool(start, replicas, 4)
        pool.begin()
        try:
            return await go(pool)
        finally:
            pool.close()

    return asyncio.run(asyncio.wait_for(whole(), HANG))


async def score_all(pool: RewardPool, *lengths: int) -> list[Any]:
    asked = (pool.score(Exchange(prompt="p", completion="x" * length)) for length in lengths)
    return await asyncio.gather(*asked, return_exceptions=True)


def test_what_waits_is_scored_together_as_much_as_a_call_has_room_for() -> None:
    found = run(lambda pool: score_all(pool, *range(1, 10)))
    at_once = [round(score % 1 * 100) for score in found]
    assert [int(score) for score in found] == list(range(1, 10))
    assert at_once == [4] * 8 + [1]


def test_one_that_cannot_be_scored_is_an_error_of_its_own() -> None:
    first, none, last = run(lambda pool: score_all(pool, 1, 0, 2))
    assert (int(first), int(last)) == (1, 2)
    assert str(none) == "the reward model cannot score it: nothing to score"


def test_replicas_that_are_idle_score_at_the_same_time() -> None:
    async def go(pool: RewardPool) -> list[Any]:
        await score_all(pool, 1, 2)
        scoring = asyncio.ensure_future(score_all(pool, *[1] * 8))
        while len(pool._under_way) < 2:
            assert not scoring.done()
            await asyncio.sleep(0)
        return await scoring

    assert run(go, replicas=2) == [1.04] * 8


@pytest.mark.parametrize(
    ("number", "says"),
    [(signal.SIGKILL, "ended with status -9"), (signal.SIGSTOP, "no sign of life")],
)
def test_a_lost_replica_fails_what_it_had_and_another_takes_its_place(
    number: signal.Signals, says: str, tmp_path: Path
) -> None:
    async def go(pool: RewardPool) -> tuple[list[Any], list[Any]]:
        assert await score_all(pool, 1) == [1.01]
        (handle,) = pool.handles()
        assert isinstance(handle, LocalProcess)
        handle.send_signal(number)
        return await score_all(pool, 1, 2, 3, 4), await score_all(pool, 5)

    failed, after = run(go, tmp_path / "log")
    assert all(isinstance(each, RuntimeError) and says in str(each) for each in failed)
    assert after == [5.01]


def test_a_replica_that_dies_while_it_is_idle_fails_nothing(tmp_path: Path) -> None:
    async def go(pool: RewardPool) -> list[Any]:
        assert await score_all(pool, 1) == [1.01]
        (first,) = pool.handles()
        assert isinstance(first, LocalProcess)
        first.send_signal(signal.SIGKILL)
        while pool.handles() in ([], [first]):  # another one starts before anything waits for it
            await asyncio.sleep(0.01)
        return await score_all(pool, 2)

    assert run(go, tmp_path / "log") == [2.01]


def test_a_replica_that_dies_without_having_scored_is_replaced_when_there_is_work() -> None:
    async def after_death_of(pool: RewardPool, idle: Handle) -> list[Handle]:
        for _ in range(20):  # until it waits for exchanges
            await asyncio.sleep(0)
        idle.kill("for a test")
        for _ in range(20):
            await asyncio.sleep(0)
        return pool.handles()

    async def go(pool: RewardPool) -> None:
        assert await score_all(pool, 1) == [1.01]
        (first,) = pool.handles()
        (second,) = await after_death_of(pool, first)
        assert second is not first
        assert not await after_death_of(pool, second)
        assert await score_all(pool, 2) == [2.01]
        (third,) = pool.handles()
        third.kill("for a test")
        assert await score_all(pool, 3) == [3.01], "it waits for the replacement"

    run(go)


def test_a_replica_that_does_not_come_up_says_why_to_whoever_waits() -> None:
    found = run(lambda pool: score_all(pool, 1, 2), failure_rate=1.0)
    assert ["a scripted failure" in str(each) for each in found] == [True, True]


def test_a_pool_that_was_ended_fails_what_waits_and_begins_anew() -> None:
    async def go(pool: RewardPool) -> tuple[list[Any], list[Any]]:
        waiting = asyncio.ensure_future(score_all(pool, 1, 2, 3, 4, 5))
        while not pool._under_way:
            await asyncio.sleep(0)
        pool.close()
        pool.begin()
        return await waiting, await score_all(pool, 6)

    ended, after = run(go)
    assert [str(each) for each in ended] == ["reward model: the run ended before it was scored"] * 5
    assert after == [6.01]


# Whole runs ---------------------------------------------------------------------------------------


def run_with_model(directory: Path, *faults: dict[str, Any], **changes: Any) -> Run:
    """Return a run file with a reward model beside the scorer that its prompts know."""
    rewards = [
        {"scorer": "exact"},
        {"scorer": "reward-model", "model": str(directory), "weight": 0.5},
    ]
    keys: dict[str, Any] = {
        "cluster__pools__third": {"gpu": "h20", "gpus_per_node": 2},
        "verifier__scorer": None,
        "verifier__reward": rewards,
        "verifier__pool": "third",
        "verifier__gpus_per_worker": 1,
        "verifier__workers": 2,
        "verifier__time": "1 ms",
        "execute__patience": "1 s",
    }
    return real_run(directory, faults=[*faults], **keys, **changes)


def test_a_run_loses_no_rollout_to_reward_models_that_die_and_hang(tmp_path: Path) -> None:
    kinds = ["reward-model-dies", "reward-model-hangs"]
    plan = [fault(kind, step=2 + place) for place, kind in enumerate(kinds)]
    run_file = run_with_model(tmp_path, *plan, algorithm__steps=5)

    async def start(number: int) -> Handle:
        config: dict[str, object] = {"seed": 0, "slowest": 0.005}
        return await LocalProcess.start(REWARD_MODEL, config, tmp_path / "log", {}, 1.0, BEGIN)

    async def go() -> Any:
        world = make_world(
            run_file,
            {"is_local": True, "slowest": 0.02},
            verifier_class=lambda: Verifier(run_file.verifier, start_model=start),
        )
        try:
            return await world.run()
        finally:
            world._directory.close()

    trace = asyncio.run(asyncio.wait_for(go(), HANG))
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None and measure(trace).num_steps == 5
    failed = [e.event for e in trace.entries if isinstance(e.event, Failed)]
    assert failed and all(isinstance(event.command, Verify) for event in failed)
    assert [each.kind for each in read_struck(tmp_path / "run")] == kinds
