"""How long a step of each system takes, in closed form: StreamRL's figure 5 on a toy of two phases.

Every rollout takes given seconds however many run beside it, and the trainer a second for each of them.
G: seconds of generation; T: seconds of score, train and step; P: push and load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import (
    DrawnGroup,
    Generate,
    Generated,
    LoadWeights,
    PushWeights,
    Stepped,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trace import Trace
from streamrl.record.timeline import read_timeline
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.training.pipeline import SerialSchedule, TrainerSchedule
from streamrl.sim.costs.weight_sync import SyncCosts
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import Draw
from tests.runs import of, small_run

STEPS = 14
SETTLED = 6
"""Steps after which only the steady state is left."""


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Seconds of each operation."""

    generation: tuple[float, ...]
    """Of each rollout of a step, whole seconds."""
    score: float = 0.0
    """A rollout."""
    train: float = 0.0
    """A rollout."""
    optimizer: float = 0.0
    push: float = 0.0
    load: float = 0.0

    @property
    def training(self) -> float:
        """Seconds of score, train and step of a whole batch: T."""
        return len(self.generation) * (self.score + self.train) + self.optimizer

    @property
    def sync(self) -> float:
        """Seconds of push and load: P."""
        return self.push + self.load

    def draw(self, first_group: int, num_groups: int) -> list[Draw]:
        """Return the same rollouts for every step; a token takes a second, and prefill makes the first."""
        drawn = []
        for group in range(first_group, first_group + num_groups):
            length = 1 + int(self.generation[group % len(self.generation)])
            drawn.append(Draw(DrawnGroup(group, (group,), 1, (length,)), (length,)))
        return drawn

    def learn(self, event: Generated) -> None:
        """Learn nothing: all is known."""

    def forget(self, group: int) -> None:
        """Forget nothing."""


class FreePrefill:
    """Prefill in no time."""

    def time(self, *numbers: float) -> float:
        """Return nothing."""
        return 0.0


@dataclass(frozen=True)
class ToyTraining:
    """A trainer that takes the same seconds for each rollout."""

    toy: Toy
    overhead_time: float = 0.0

    @property
    def optimizer_time(self) -> float:
        return self.toy.optimizer

    def line(self) -> TrainerSchedule:
        return SerialSchedule(
            score_time=lambda lengths: self.toy.score * len(lengths),
            train_time=lambda lengths: self.toy.train * len(lengths),
        )


def simulate(toy: Toy, system: str, **changes: Any) -> Trace:
    """Simulate steps of the toy; `__` stands for the dot of a key."""
    keys: dict[str, Any] = {
        "policies__system": system,
        "algorithm__name": "ppo",
        "algorithm__group_size": 1,
        "algorithm__prompts_per_step": len(toy.generation),
        "algorithm__steps": STEPS,
        "rollout__replicas": 1,
        "rollout__max_running": 64,
        "trainer__micro_batch": 1,
        **changes,
    }
    run = small_run({key.replace("__", "."): value for key, value in keys.items()})
    costs = Costs.load(run)
    costs = replace(
        costs,
        message_time=0.0,
        decode=replace(costs.decode, base=[1.0] * 65, per_context_token=[0.0] * 65),
        prefill=FreePrefill(),  # type: ignore[arg-type]
        training=ToyTraining(toy),  # type: ignore[arg-type]
        sync=SyncCosts(
            wire_bytes=1,
            fill_time=0.0,
            wire_time=toy.push,
            drain_time=0.0,
            load_time=toy.load,
            tier="roofline",
            sources=(),
        ),
    )
    return SimWorld(run, costs, toy).run()


def step_time(toy: Toy, system: str, **changes: Any) -> float:
    """Return the mean seconds of a step in the steady state, over an even number of steps."""
    trace = simulate(toy, system, **changes)
    stepped = [entry.time for entry in trace.entries if isinstance(entry.event, Stepped)]
    return (stepped[-1] - stepped[SETTLED - 1]) / (STEPS - SETTLED)


seconds = st.integers(0, 12).map(float)
lengths = st.lists(st.integers(1, 40).map(float), min_size=1, max_size=8).map(tuple)
toys = st.builds(
    Toy,
    generation=lengths,
    score=seconds,
    train=seconds,
    optimizer=seconds,
    push=seconds,
    load=seconds,
)
some_toys = settings(max_examples=60, deadline=None)

EXAMPLE = Toy(
    generation=(10.0, 40.0, 25.0), score=1.0, train=3.0, optimizer=2.0, push=4.0, load=1.0
)


def test_the_systems_of_one_example_take_what_pencil_and_paper_say() -> None:
    times = {
        "colocated": 40 + 14 + 5,
        "disaggregated": 40 + 14 + 5,
        "stream-sync": 40 + (4 + 2) + 5,  # the last rollout and the step are exposed
        "one-step-async": 40 + 5,
        "stream-async": 40 + 1,
    }
    assert {system: step_time(EXAMPLE, system) for system in times} == pytest.approx(times)


@pytest.mark.parametrize("system", ["colocated", "disaggregated"])
@some_toys
@given(toys)
def test_batch_after_batch_a_step_takes_every_phase_in_turn(system: str, toy: Toy) -> None:
    expected = max(toy.generation) + toy.training + toy.sync
    assert step_time(toy, system) == pytest.approx(expected)


@some_toys
@given(toys)
def test_one_step_off_with_a_barrier_takes_the_longer_phase_and_the_sync(toy: Toy) -> None:
    expected = max(max(toy.generation), toy.training) + toy.sync
    assert step_time(toy, "one-step-async") == pytest.approx(expected)


@some_toys
@given(toys)
def test_a_synchronous_stream_exposes_only_the_tail_of_training(toy: Toy) -> None:
    arrived = sorted(toy.generation)
    work = toy.score + toy.train
    left = [end + work * (len(arrived) - before) for before, end in enumerate(arrived)]
    expected = max(left) + toy.optimizer + toy.sync
    assert step_time(toy, "stream-sync") == pytest.approx(expected)


@some_toys
@given(toys, st.integers(25, 60).map(float))
def test_an_asynchronous_stream_takes_the_longer_phase_and_hides_the_push(
    toy: Toy, generation: float
) -> None:
    """With rollouts of one length that fill the replica the step is the slowest of three rounds.

    Generation waits for itself; training waits for itself; and rollouts wait for the weights that were
    trained on those of two steps before, which takes generation, training and sync in two steps. That is
    the slowest only where the two phases are less than the push apart.
    """
    generations = (generation,) * len(toy.generation)
    toy = replace(toy, generation=generations)
    assume(toy.training + toy.push > 0)  # else weights are loaded while the next batch runs already
    busy = generation + toy.load
    expected = max(busy, toy.training, (busy + toy.training + toy.push) / 2)
    places = len(toy.generation)
    assert step_time(toy, "stream-async", rollout__max_running=places) == pytest.approx(expected)


@some_toys
@given(toys)
def test_no_system_is_slower_than_the_one_that_overlaps_less(toy: Toy) -> None:
    times = [
        step_time(toy, system)
        for system in ("stream-async", "stream-sync", "disaggregated", "colocated")
    ]
    assert times == pytest.approx(sorted(times))


# What overlaps what -------------------------------------------------------------------------------


def test_weights_are_pushed_while_the_trainer_begins_the_next_batch() -> None:
    toy = Toy(generation=(10.0,) * 4, train=5.0, push=8.0)
    timeline = read_timeline(simulate(toy, "stream-async"))
    training = [span for span in timeline.trainers[0] if span.activity == "train"]
    pushes = timeline.link[1:-1]
    assert pushes
    for push in pushes:
        assert any(min(span.end, push.end) - max(span.start, push.start) > 0 for span in training)


def test_a_replica_goes_on_with_newer_weights_while_another_still_generates_under_older() -> None:
    toy = Toy(generation=(5.0, 20.0), train=1.0, push=1.0)
    trace = simulate(toy, "stream-async", rollout__replicas=2, policies__dispatch="round-robin")
    ahead = 0
    versions = {0: 0, 1: 0}
    for entry in trace.entries:
        if isinstance(entry.event, WeightsLoaded):
            versions[entry.event.replica] = entry.event.version
        elif isinstance(entry.event, Generated):
            ahead += entry.event.version < max(versions.values())
    assert ahead > STEPS / 2


def test_with_a_barrier_no_rollout_ends_under_older_weights_than_anyone_has() -> None:
    toy = Toy(generation=(5.0, 20.0), train=1.0, push=1.0)
    changes = {"rollout__replicas": 2, "policies__dispatch": "round-robin"}
    for system in ("colocated", "disaggregated", "one-step-async"):
        newest = 0
        for entry in simulate(toy, system, **changes).entries:
            if isinstance(entry.event, WeightsLoaded):
                newest = max(newest, entry.event.version)
            elif isinstance(entry.event, Generated):
                assert entry.event.version == newest


def test_a_drain_that_comes_within_a_batch_leaves_places_empty() -> None:
    """Where a replica has more rollouts than places, weights that arrive amid a batch cost a second tail."""
    toy = Toy(generation=(30.0, *(10.0,) * 6), train=0.1, push=1.0)
    drained = step_time(toy, "stream-async", rollout__max_running=2)
    in_flight = step_time(
        toy, "stream-async", rollout__max_running=2, policies__weight_sync="load-in-flight"
    )
    assert in_flight == pytest.approx((30 + 6 * 10) / 2)
    assert drained > in_flight


def test_a_stream_trains_before_generation_ends_and_a_batch_does_not() -> None:
    for system, begins_early in (("stream-sync", True), ("disaggregated", False)):
        trace = simulate(EXAMPLE, system)
        timeline = read_timeline(trace)
        first_end = min(span.end for span in timeline.rollouts[0])
        first_work = min(span.start for span in timeline.trainers[0] if span.activity == "score")
        assert (first_work == first_end) == begins_early
    commands = [c for entry in trace.entries for c in entry.commands]
    assert of(PushWeights, commands) and of(LoadWeights, commands) and of(Generate, commands)
    assert sum(isinstance(e.event, WeightsPushed) for e in trace.entries) == STEPS - 1
