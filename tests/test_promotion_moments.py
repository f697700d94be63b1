"""Whenever in a step a leader dies, whoever takes its place goes on with what lay ahead of it, and nothing is lost unsaid."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest

from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    Event,
    Promote,
    SaveCheckpoint,
    Skip,
    Step,
    Stepped,
    StopTrainer,
    Take,
    Train,
    Trained,
    TrainerStarted,
)
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.state import State
from streamrl.engine.trace import Trace, replay
from streamrl.engine.trainer_side import LEADER, UNIFORM
from streamrl.runfile.config import Run
from tests.runs import call_at, checked_world, of, small_run
from tests.test_ledger import balance_of
from tests.test_promotion import APART, SECOND, TWO, commands_of

STEPS = 5
PROMOTED = 2
FOLLOWERS: list[dict[str, Any]] = [
    {**SECOND, "name": "odd", "tensor_parallel": 1, "every": 2},
    {**SECOND, "tensor_parallel": 1, "max_staleness": 2},
    {**SECOND, "name": "late", "tensor_parallel": 1, "backlog": 1},
]
PASSES_OVER = {
    "algorithm.name": "grpo",
    "algorithm.dynamic_sampling": True,
    "workload.informative_share": 0.6,
}
MOMENTS: tuple[type[Event | Command], ...] = (
    *(TrainerStarted, Stepped, Take, Train, Trained, Step),
    *(SaveCheckpoint, CheckpointSaved),
)
"""What the leader is told, or has done, as it dies."""


class Case(NamedTuple):
    """A run, and when its leader dies."""

    system: str
    checkpoint_every: int
    passes_over: bool
    version: int
    moment: type[Event | Command]

    @property
    def is_met(self) -> bool:
        """Whether a leader of that version comes to that moment."""
        if self.moment is TrainerStarted:
            return not self.version
        if self.moment in (SaveCheckpoint, CheckpointSaved):
            return self.version > 0 and not self.version % self.checkpoint_every
        return self.version > 0 or self.moment is not Stepped


ALL = product(APART, (1, 2, 3, 4), (False, True), range(STEPS), MOMENTS)
CASES = [case for case in map(Case._make, ALL) if case.is_met][::11]
"""Every eleventh: of a prime number each value meets each other, all of them take a minute."""


def run_of(case: Case) -> Run:
    *others, late = FOLLOWERS
    if SYSTEMS[case.system].staleness_bound:
        late = {**late, "min_staleness": 1}
    changes = {
        **TWO,
        "followers": [*others, late],
        "trainer.tensor_parallel": 2,
        "algorithm.name": "rloo",
        "algorithm.steps": STEPS,
        "execute.checkpoint_every": case.checkpoint_every,
        "policies.system": case.system,
    }
    return small_run({**changes, **(PASSES_OVER if case.passes_over else {})})


def simulate(run: Run, losses: dict[int, Callable[[State, list[Any]], bool]]) -> Trace:
    """Simulate a run each of whose trainers is lost at the first instant of which that is said; it has to end well."""
    world = checked_world(run)
    handle = world.engine.handle
    to_lose = dict(losses)

    def watch(event: Event, now: float) -> list[Command]:
        commands = handle(event, now)
        for trainer, is_now in list(to_lose.items()):
            if trainer in world.trainers and is_now(world.engine.state, [event, *commands]):
                del to_lose[trainer]
                call_at(world, 0.0, partial(world.lose_trainer, trainer, "pulled the plug"))
        return commands

    world.engine.handle = watch  # type: ignore[method-assign]
    trace = world.run()
    assert not to_lose and world.engine.has_all_steps
    assert replay(trace) is None
    balance = balance_of(trace)
    assert balance.is_balanced, balance.faults
    return trace


def leader_is_at(version: int, moment: type[Event | Command]) -> Callable[..., bool]:
    """Return what tells whether the leader, at `version`, comes to a moment."""

    def is_now(state: State, said: list[Any]) -> bool:
        own = (each for each in of(moment, said) if getattr(each, "trainer", LEADER) == LEADER)
        return state.leader.version == version and next(own, None) is not None

    return is_now


@pytest.mark.parametrize("system", APART)
def test_in_whatever_moment_of_whatever_step_a_leader_dies_nothing_that_lay_ahead_of_it_is_lost(
    system: str,
) -> None:
    for case in [case for case in CASES if case.system == system]:
        trace = simulate(run_of(case), {LEADER: leader_is_at(case.version, case.moment)})
        promoted = [command.trainer for command in commands_of(trace, Promote)]
        assert promoted == [PROMOTED], case


@pytest.mark.parametrize("passes_over", [True, False])
def test_whoever_leads_passes_over_groups_of_one_reward_where_its_own_algorithm_says_so(
    passes_over: bool,
) -> None:
    own = {"name": "rloo", "dynamic_sampling": not passes_over}
    changes = {
        **TWO,
        **PASSES_OVER,
        "algorithm.dynamic_sampling": passes_over,
        "followers": [{**SECOND, "algorithm": own}],
    }
    trace = simulate(small_run(changes), {LEADER: leader_is_at(6, Trained)})
    (promoted,) = (n for n, entry in enumerate(trace.entries) if of(Promote, entry.commands))
    skips = (
        (n, skip) for n, entry in enumerate(trace.entries) for skip in of(Skip, entry.commands)
    )
    when = {n for n, skip in skips if skip.trainer == LEADER and skip.reason == UNIFORM}
    assert {n < promoted for n in when} == {passes_over}
    assert (promoted in when) == (not passes_over), "what lay there is passed over at once"


def test_who_is_promoted_may_be_lost_in_the_instant_in_which_it_is_to_end() -> None:
    case = Case("stream-async", 3, False, 3, Train)

    def is_to_end(_: State, said: list[Any]) -> bool:
        return StopTrainer(PROMOTED) in said

    losses = {LEADER: leader_is_at(case.version, case.moment), PROMOTED: is_to_end}
    assert commands_of(simulate(run_of(case), losses), Promote)
