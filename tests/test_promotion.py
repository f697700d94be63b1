"""A trainer that follows takes the place of a leader that is lost: replicas load its weights, and the books balance."""

from __future__ import annotations

import asyncio
import contextlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import (
    CheckpointSaved,
    Event,
    LoadWeights,
    Promote,
    PushWeights,
    RunStarted,
    Skip,
    StartTrainer,
    Step,
    Stepped,
    Stop,
    StopTrainer,
    TrainerLost,
    TrainerStarted,
    TrainerStopped,
)
from streamrl.engine.policies.staleness import PROMOTED
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.state import State
from streamrl.engine.trace import Trace, replay
from streamrl.engine.trainer_side import LEADER
from streamrl.executor.subscribers.attach_requests import read_attached
from streamrl.executor.world import RealWorld
from streamrl.record.metrics import measure
from streamrl.record.restarts import ledger_of_run
from streamrl.record.run_directory import read_metrics
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from tests.runs import checked_world, lose_trainer_at, of, small_run
from tests.scripted import make_world
from tests.test_execute import real_run
from tests.test_ledger import balance_of
from tests.test_resume import DeathError

SECOND: dict[str, Any] = {
    "name": "second",
    "pool": "near",
    "tensor_parallel": 4,
    "algorithm": {"name": "rloo", "prompts_per_step": 1},
}
TWO: dict[str, Any] = {
    "model.name": "qwen2.5-1.5b",
    "cluster.pools.near.nodes": 2,
    "algorithm.steps": 12,
    "followers": [SECOND],
    "policies.promote": "second",
    "policies.on_leader_loss": "promote",
    "execute.checkpoint_every": 3,
}
APART = sorted(system for system in SYSTEMS if system != "colocated")


def commands_of(trace: Trace, kind: type[Any]) -> list[Any]:
    return [command for entry in trace.entries for command in of(kind, entry.commands)]


def place_of(trace: Trace, kind: type[Any], trainer: int = LEADER) -> list[int]:
    """Return at which entries an event of a trainer came."""
    return [
        n
        for n, e in enumerate(trace.entries)
        if isinstance(e.event, kind) and getattr(e.event, "trainer", None) == trainer
    ]


def check_promoted(trace: Trace) -> Promote:
    """Check the story of one promotion, and return its command."""
    assert replay(trace, checks_invariants=True) is None
    (promote,) = commands_of(trace, Promote)
    (stopped,), (lost, *_) = place_of(trace, TrainerStopped, 1), place_of(trace, TrainerLost)
    started = next(n for n in place_of(trace, TrainerStarted) if n > lost)
    assert lost < stopped < started, "both never hold the stream at once"
    begins = trace.entries[started].event
    assert isinstance(begins, TrainerStarted) and begins.version == promote.version
    after = [e for entry in trace.entries[stopped:] for e in entry.commands]
    assert of(PushWeights, after)[0].version == promote.version
    assert of(LoadWeights, after)[0].version == promote.version
    skips = [s for s in commands_of(trace, Skip) if s.trainer == 1 and s.reason == PROMOTED]
    assert skips or not any(isinstance(c, Step) and c.trainer == LEADER for c in after)
    return promote


@cache
def seconds_of(system: str = "stream-async") -> float:
    """Return how long the run takes that nothing goes wrong in."""
    world = checked_world(small_run({**TWO, "policies.system": system}))
    world.run()
    return world.now


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("system", APART)
def test_generation_goes_on_with_the_weights_of_the_one_that_is_promoted(
    system: str, share: float
) -> None:
    world = checked_world(small_run({**TWO, "policies.system": system}))
    lose_trainer_at(world, share * seconds_of(system), LEADER)
    trace = world.run()
    check_promoted(trace)
    assert world.engine.has_all_steps
    balance = balance_of(trace)
    assert balance.is_balanced, balance.faults
    assert measure(trace).trainers[1].lost[PROMOTED] == balance.trainers[1].dropped[PROMOTED]
    made = [e.event.version for e in trace.entries if _is_leaders(e.event)]
    assert made[-1] == 12 and set(made) == set(range(1, 13))


def _is_leaders(event: Event) -> bool:
    return isinstance(event, Stepped) and event.trainer == LEADER


def test_a_leader_is_restarted_as_often_as_it_may_be_before_another_takes_its_place() -> None:
    changes = {"policies.on_leader_loss": "restart", "policies.max_restarts": 1}
    world = checked_world(small_run({**TWO, **changes}))
    for share in (0.3, 0.5, 0.9):
        lose_trainer_at(world, share * seconds_of(), LEADER)
    trace = world.run()
    (promoted,) = (n for n, e in enumerate(trace.entries) if of(Promote, e.commands))
    losses = place_of(trace, TrainerLost)
    assert sum(place <= promoted for place in losses) == 2
    starts = [c for c in commands_of(trace, StartTrainer) if c.trainer == LEADER]
    assert len(starts) == 1 + len(losses)
    assert balance_of(trace).is_balanced and replay(trace) is None
    never = {**TWO, **changes, "policies.promote": None}
    world = checked_world(small_run({k: v for k, v in never.items() if v is not None}))
    for share in (0.3, 0.5):
        lose_trainer_at(world, share * seconds_of(), LEADER)
    assert any("was restarted 1 times" in stop.reason for stop in commands_of(world.run(), Stop))


def test_who_is_away_or_has_died_too_often_is_not_promoted() -> None:
    world = checked_world(small_run({**TWO, "policies.max_restarts": 0}))
    lose_trainer_at(world, 0.3 * seconds_of(), 1)
    lose_trainer_at(world, 0.5 * seconds_of(), LEADER)
    trace = world.run()
    assert commands_of(trace, Stop) and not commands_of(trace, Promote)
    assert balance_of(trace).is_balanced


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(APART),
    st.lists(st.tuples(st.floats(0.0, 1.2), st.integers(0, 1)), min_size=1, max_size=4),
    st.booleans(),
)
def test_whoever_dies_whenever_the_books_balance(
    system: str, losses: list[tuple[float, int]], at_once: bool
) -> None:
    how = {"policies.on_leader_loss": "promote" if at_once else "restart"}
    run = small_run({**TWO, **how, "policies.system": system, "policies.max_restarts": 2})
    world = checked_world(run)
    for when, trainer in losses:
        lose_trainer_at(world, when * seconds_of(system), trainer)
    trace = world.run()
    assert replay(trace) is None
    balance = balance_of(trace)
    assert balance.is_balanced, balance.faults
    assert world.engine.has_all_steps or commands_of(trace, Stop)


# Executed -----------------------------------------------------------------------------------------


def real(directory: Path, **changes: Any) -> Run:
    given = {
        "followers": [{**SECOND, "tensor_parallel": 1}],
        "trainer.tensor_parallel": 1,
        "policies.promote": "second",
        "policies.on_leader_loss": "promote",
        "execute.checkpoint_every": 3,
        "algorithm__steps": 12,
    }
    return real_run(directory, **{**given, **changes})


IN_A_STEP: Event = Stepped(5, LEADER)
AFTER_A_CHECKPOINT: Event = CheckpointSaved(3, LEADER)
"""With what is taken for the fourth step, of which nothing is made yet, and no step to roll back."""


def execute(
    run: Run,
    resume: bool = False,
    dies_at: int | None = None,
    kills: bool = True,
    killed_by: Event = IN_A_STEP,
) -> Trace:
    """Run scripted roles, kill the leader after an event, and the run itself after a later step."""
    done: list[str] = []

    async def go() -> Trace:
        def watch(event: Event, state: State, now: float) -> None:
            if kills and event == killed_by and not done:
                done.append("killed")
                asyncio.get_running_loop().call_soon(
                    world._trainers.kill, LEADER, "was killed by a test"
                )
            if event == Stepped(dies_at or 0, LEADER) and (done or not kills):
                world._error = DeathError()
                world._over.set()

        world: RealWorld = make_world(run, {"slowest": 0.01}, resume, watch=watch)
        with contextlib.closing(world._directory), contextlib.closing(world.members._records):
            return await world.run()

    return asyncio.run(asyncio.wait_for(go(), timeout=60))


@pytest.mark.parametrize("killed_by", [IN_A_STEP, AFTER_A_CHECKPOINT])
@pytest.mark.parametrize("system", ["stream-async", "stream-sync", "fully-async"])
def test_a_killed_leader_is_followed_by_the_one_promoted_with_its_weights_and_its_algorithm(
    tmp_path: Path, system: str, killed_by: Event
) -> None:
    trace = execute(real(tmp_path, policies__system=system), killed_by=killed_by)
    promote = check_promoted(trace)
    balance = ledger_of_run(trace, tmp_path / "run")
    assert balance.is_balanced, balance.faults
    lines = [line for line in read_metrics(tmp_path / "run") if "origin" in line]
    origins = {line["step"]: line["origin"] for line in lines}
    assert {origins[n] for n in origins if n <= promote.version} == {-1}
    assert {origins[n] for n in origins if n > promote.version} == {-2}
    saved = next(
        e.event.version
        for e in reversed(trace.entries)
        if isinstance(e.event, CheckpointSaved) and e.event.trainer == 1
    )
    stops = [c for c in commands_of(trace, StopTrainer) if c.trainer == 1]
    assert len(stops) == 1 and saved > 0
    attached = read_attached(tmp_path / "run")
    assert (attached.promoted, attached.leads_from) == ("second", promote.version)
    assert attached.away == ("second",)


@pytest.mark.parametrize("killed_by", [IN_A_STEP, AFTER_A_CHECKPOINT])
@pytest.mark.parametrize(("dies_at", "leads"), [(11, True), (4, False)])
def test_a_resume_goes_on_with_whoever_made_the_checkpoint(
    tmp_path: Path, dies_at: int, leads: bool, killed_by: Event
) -> None:
    run = real(tmp_path, policies__system="stream-async")
    with pytest.raises(DeathError):
        execute(run, dies_at=dies_at, killed_by=killed_by)
    before = read_attached(tmp_path / "run")
    assert before.promoted == "second"
    trace = execute(run, resume=True, kills=False)
    begun = trace.entries[0].event
    assert isinstance(begun, RunStarted)
    assert begun.promoted == (1 if begun.version > before.leads_from else None)
    assert (begun.promoted is not None) == leads
    assert replay(trace, checks_invariants=True) is None
    balance = ledger_of_run(trace, tmp_path / "run")
    assert balance.is_balanced, balance.faults
    last = [line for line in read_metrics(tmp_path / "run") if "origin" in line][-1]
    assert last["step"] == 12 and last["origin"] == (-2 if leads else -1)
    assert read_attached(tmp_path / "run").away == (("second",) if leads else ())


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policies.promote": "third"}, "policies.promote must be 'second', got 'third'"),
        (
            {"followers": [], "policies.promote": "second"},
            "policies.promote must be absent without secondary trainers, got 'second'",
        ),
        (
            {"followers": [{**SECOND, "counts_only": True, "tensor_parallel": 1}]},
            "policies.promote cannot be 'second', which only counts and has no weights",
        ),
        (
            {"followers": [{**SECOND, "pool": "far"}], "cluster.pools.far.nodes": 2},
            "policies.promote cannot be 'second', which is not in the primary trainer's pool 'near'",
        ),
        (
            {"framework.optimizer_steps": 2},
            "policies.promote cannot be 'second', because a batch has several optimizer steps",
        ),
    ],
)
def test_who_cannot_lead_is_refused_in_a_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RunError) as error:
        small_run({**TWO, **changes})
    assert str(error.value) == said


def test_a_promotion_of_nobody_is_refused() -> None:
    with pytest.raises(RunError, match=r"policies\.promote is missing: policies\.on_leader_loss"):
        small_run({"policies.on_leader_loss": "promote"})
