"""Replicas and trainer that share devices take turns: what computes has them alone, and the other side sleeps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.engine.messages import (
    Abort,
    Command,
    Generate,
    LoadWeights,
    Step,
    Train,
    Verify,
)
from streamrl.executor.colocation import ColocatedRole, DeviceSharing, Side, side_of
from streamrl.executor.trainer.torch_backend import TorchBackend
from streamrl.executor.trainer.trainer_worker import TrainerWorker
from tests.scripted_roles import ScriptedEngine, ScriptedTrainer
from tests.test_execute import execute, real_run
from tests.test_trainer import Weights, make_config, make_samples, model_path, weights

__all__ = ["model_path"]  # a fixture
GENERATE, LOAD = Generate(0, 0, 0), LoadWeights(0, 1, drain=False)
TRAIN, STEP = Train((0,), 0), Step(1, (0,), 0)


class Role:
    """Notes what it is told, and takes its time."""

    def __init__(self, name: str, told: list[str], fails_to: str = "") -> None:
        self._name, self._told, self._fails_to = name, told, fails_to

    async def sleep(self) -> None:
        await self._do("sleeps")

    async def wake(self) -> None:
        await self._do("wakes")

    def kill(self, reason: str) -> None:
        self._told.append(f"{self._name} killed")

    async def _do(self, what: str) -> None:
        await asyncio.sleep(0)
        if what == self._fails_to:
            raise OSError("no memory")
        self._told.append(f"{self._name} {what}")


def make_turns(told: list[str]) -> DeviceSharing:
    def members(side: Side) -> list[ColocatedRole]:
        names = ["trainer"] if side == "training" else ["first", "second"]
        return [ColocatedRole(Role(name, told), told.append) for name in names]

    return DeviceSharing(members, 10.0)


async def hold(
    turns: DeviceSharing, command: Command, told: list[str], seconds: float = 0.01
) -> None:
    side = side_of(command)
    async with turns.of(command):
        told.append(f"{side} begins")
        await asyncio.sleep(seconds)
        told.append(f"{side} ends")


def test_a_side_begins_once_the_other_has_ended_and_sleeps() -> None:
    told: list[str] = []

    async def go() -> None:
        turns = make_turns(told)
        commands = (GENERATE, LOAD, TRAIN, STEP, GENERATE)
        await asyncio.gather(*(hold(turns, command, told) for command in commands))

    asyncio.run(go())
    assert told == [
        *("trainer sleeps", "first wakes", "second wakes"),
        *("generation begins", "generation begins", "generation ends", "generation ends"),
        *("first sleeps", "second sleeps", "trainer wakes"),
        *("training begins", "training begins", "training ends", "training ends"),
        *("trainer sleeps", "first wakes", "second wakes", "generation begins", "generation ends"),
    ]


def test_who_waits_is_not_overtaken_by_the_side_that_has_the_turn() -> None:
    told: list[str] = []

    async def go() -> None:
        turns = make_turns(told)
        first = asyncio.create_task(hold(turns, GENERATE, told))
        await asyncio.sleep(0.005)
        others = [asyncio.create_task(hold(turns, each, told)) for each in (TRAIN, GENERATE)]
        await asyncio.gather(first, *others)

    asyncio.run(go())
    sides = [line.split()[0] for line in told if line.endswith("begins")]
    assert sides == ["generation", "training", "generation"]


def test_what_needs_no_device_waits_for_nobody() -> None:
    told: list[str] = []

    async def go() -> None:
        turns = make_turns(told)
        training = asyncio.create_task(hold(turns, TRAIN, told, 60.0))
        await asyncio.sleep(0.01)
        for each in (Abort(0, 0), Verify(0)):
            await asyncio.wait_for(hold(turns, each, told), 30.0)
        assert not training.done()
        training.cancel()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("fails_to", "limit", "why"),
    [("sleeps", 10.0, "OSError: no memory"), ("sleep", 0.05, "TimeoutError: ")],
)
def test_who_does_not_sleep_is_killed_and_lost_and_the_other_side_goes_on(
    fails_to: str, limit: float, why: str
) -> None:
    told: list[str] = []

    class Stuck(Role):
        async def sleep(self) -> None:
            if fails_to == "sleep":
                await asyncio.sleep(60)
            await super().sleep()

    async def go() -> None:
        replica = Stuck("first", told, fails_to)
        turns = DeviceSharing(
            lambda side: [ColocatedRole(replica, told.append)] if side == "generation" else [],
            limit,
        )
        await hold(turns, GENERATE, told)
        await hold(turns, TRAIN, told)

    asyncio.run(go())
    assert told[-4:] == [
        "first killed",
        f"did not sleep: {why}",
        "training begins",
        "training ends",
    ]


def test_a_change_that_broke_off_is_made_whole_by_the_next() -> None:
    told: list[str] = []

    async def go() -> None:
        turns = make_turns(told)
        await hold(turns, GENERATE, told)
        broken = asyncio.create_task(hold(turns, TRAIN, told))
        await asyncio.sleep(0)
        broken.cancel()
        await asyncio.gather(broken, return_exceptions=True)
        told.clear()
        await hold(turns, GENERATE, told)

    asyncio.run(go())
    assert told[:3] == ["trainer sleeps", "first wakes", "second wakes"]


# Roles --------------------------------------------------------------------------------------------


def test_all_that_a_trainer_holds_leaves_its_device(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        trainer = TrainerWorker(make_config(model_path, correction="decoupled", kl_coefficient=0.1))
        await trainer.start(None)
        samples = make_samples(0, 4)
        await trainer.score(samples)
        await trainer.train(samples[:2])
        learner = trainer._learner
        assert learner is not None
        backend = learner.backend
        assert isinstance(backend, TorchBackend)
        backend.optimizer.step()
        await trainer._run(lambda learner: learner.move("meta"))
        models: list[Any] = [backend.model, learner.reference]
        held: list[Any] = [parameter for model in models for parameter in model.parameters()]
        held += [parameter.grad for parameter in backend.model.parameters()]
        states = [*backend.optimizer.state.values(), *learner.scores.values()]
        assert learner.scores
        held += [tensor for state in states for tensor in state.values()]
        assert {tensor.device.type for tensor in held} == {"meta"}
        await trainer.stop()

    asyncio.run(go())


def test_a_batch_goes_on_after_its_trainer_slept(model_path: str, tmp_path: Path) -> None:
    async def step(sleeps: bool) -> Weights:
        trainer = TrainerWorker(make_config(model_path, correction="decoupled"))
        await trainer.start(None)
        for version in (1, 2):
            samples = make_samples(version, 8)
            await trainer.score(samples)
            for some in (samples[:4], samples[4:]):
                if sleeps:
                    await trainer.sleep()
                    await trainer.sleep()
                    await trainer.wake()
                await trainer.train(some)
            await trainer.step(version)
        try:
            return await weights(trainer, 2, tmp_path / str(sleeps))
        finally:
            await trainer.stop()

    slept, straight = (asyncio.run(step(sleeps)) for sleeps in (True, False))
    assert all(torch.equal(slept[name], tensor) for name, tensor in straight.items())


# Runs ---------------------------------------------------------------------------------------------


def note_awake(patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Let scripted roles count who is awake, and refuse to compute where the other side is; return the changes."""
    awake: dict[str, set[int]] = {"generation": set(), "training": set()}
    changes = {"sleep": 0, "wake": 0}

    def settles(name: str, side: str, role: Any) -> None:
        settle = getattr(role, name)

        async def noted(self: Any) -> None:
            await settle(self)
            (awake[side].discard if name == "sleep" else awake[side].add)(id(self))
            changes[name] += 1

        patch.setattr(role, name, noted)

    def computes(name: str, side: str, other: str, role: Any) -> None:
        compute = getattr(role, name)

        def checked(self: Any, *arguments: Any) -> Any:
            assert not awake[other], f"{name} while {other} is awake"
            awake[side].add(id(self))
            return compute(self, *arguments)

        patch.setattr(role, name, checked)

    for name in ("sleep", "wake"):
        settles(name, "generation", ScriptedEngine)
        settles(name, "training", ScriptedTrainer)
    for name in ("start", "submit", "read_weights"):
        computes(name, "generation", "training", ScriptedEngine)
    for name in ("start", "_work", "save"):
        computes(name, "training", "generation", ScriptedTrainer)
    return changes


@pytest.mark.parametrize("failure_rate", [0.0, 0.2])
def test_a_colocated_run_never_has_both_sides_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure_rate: float
) -> None:
    changes = note_awake(monkeypatch)
    settings = {"policies__system": "colocated", "policies__max_attempts": 9}
    run = real_run(tmp_path, **settings, execute__checkpoint_every=2)
    execute(run, failure_rate=failure_rate)
    assert changes["sleep"] >= 2 * run.algorithm.steps and changes["wake"] >= run.algorithm.steps


def test_other_runs_take_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="awake"):  # so that the test above can fail
        note_awake(monkeypatch)
        execute(real_run(tmp_path, policies__system="stream-async"))
