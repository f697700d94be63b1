"""Roles that share the cores of a host: how fast each goes, when each is done, and nothing of it where none share."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from streamrl.engine.messages import Generated, PushWeights, Verified, WeightsPushed
from streamrl.hardware.measured_profile import (
    Host,
    ModelOperation,
    SharingRow,
    read_measured,
    write_measured,
)
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.cpu_contention import ALONE, CoreLosses, CoreSharing
from streamrl.sim.cpu_contention import Cores, OwnTime, RoleKind, WorkTime
from streamrl.sim.world import SimWorld, simulate
from streamrl.workload.workload import SimulatedWorkload
from tests.measured_profile import make_profile, measured_run, model_directory
from tests.runs import small_run
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

TWO_CORES = Host(cpu="a pencil", cores=2, threads=1, device="a pencil")


LOSSES = CoreLosses(
    generating_by_generating=0.1,
    generating_by_training=0.2,
    generating_in_turns=0.4,
    training_by_generating=0.3,
    training_in_turns=0.6,
)


def fair(cores: float) -> CoreSharing:
    """Return cores that roles share evenly, and lose nothing by it."""
    return CoreSharing(cores)


def work_off(sharing: CoreSharing | None, jobs: list[tuple[RoleKind, float, float]]) -> list[float]:
    """Return when each of several roles is done, which begins at an instant with so many seconds of work."""
    env = simpy.Environment()
    cores = Cores(env, sharing)
    ends = [0.0] * len(jobs)

    def role(
        number: int, time: WorkTime, begins: float, seconds: float
    ) -> Generator[simpy.Event, Any, None]:
        yield env.timeout(begins)
        yield time.work(seconds)
        ends[number] = env.now

    for number, (kind, begins, seconds) in enumerate(jobs):
        env.process(role(number, cores.time_of(kind), begins, seconds))
    env.run()
    return ends


# Speeds -------------------------------------------------------------------------------------------


def test_one_alone_has_its_own_speed_whoever_it_is() -> None:
    for generating, training in ((1, 0), (0, 1), (0, 0)):
        assert fair(1.0).speeds(generating, training)["generating"] == 1.0


def test_more_roles_than_were_measured_divide_the_cores_that_there_are() -> None:
    assert fair(2.0).speeds(6, 0)["generating"] == pytest.approx(2 / 6)
    assert fair(2.0).speeds(7, 1)["training"] == pytest.approx(2 / 8)
    assert fair(16.0).speeds(12, 1) == ALONE
    assert fair(16.0).speeds(31, 1)["generating"] == pytest.approx(16 / 32)


def test_who_handles_rollouts_is_one_thread_more() -> None:
    two = fair(2.0)
    assert two.speeds(1, 0, 1) == ALONE
    assert two.speeds(1, 1, 1) == pytest.approx(dict.fromkeys(two.speeds(1, 1, 1), 2 / 3))
    assert two.speeds(3, 0, 1)["generating"] == pytest.approx(2 / 4)
    assert two.speeds(0, 0, 4)["handling"] == pytest.approx(2 / 4)
    many = CoreSharing(2.0, threads=2)  # which fill both cores alone
    assert many.speeds(1, 0, 1) == pytest.approx(dict.fromkeys(ALONE, 2 / 3))


def test_a_second_trainer_takes_as_much_as_a_replica() -> None:
    lossy = CoreSharing(2.0, losses=LOSSES)
    assert lossy.speeds(1, 2) == lossy.speeds(2, 1)


def test_a_role_loses_to_each_that_runs_beside_it_for_as_long_as_it_does() -> None:
    losses = LOSSES._replace(generating_in_turns=0.0, training_in_turns=0.0)
    lossy = CoreSharing(2.0, losses=losses)
    assert lossy.speeds(1, 1) == pytest.approx(
        {**ALONE, "generating": 1 / 1.2, "training": 1 / 1.3}
    )
    assert lossy.speeds(2, 0)["generating"] == pytest.approx(1 / 1.1)
    three = lossy.speeds(2, 1)  # each of the others runs half the time that one does
    assert three["generating"] == pytest.approx(2 / 3 / (1 + (0.1 + 0.2) / 2))
    assert three["training"] == pytest.approx(2 / 3 / (1 + 2 * 0.3 / 2))
    with_handling = lossy.speeds(1, 1, 1)
    assert with_handling["generating"] == pytest.approx(2 / 3 / (1 + 0.2 / 2))
    assert CoreSharing(1.0, losses=lossy.losses).speeds(1, 1)["generating"] == 1 / 2
    roomy = CoreSharing(16.0, threads=4, losses=lossy.losses)  # four roles run at the same time
    assert roomy.speeds(3, 1)["training"] == pytest.approx(1 / (1 + 3 * 0.3))
    assert roomy.speeds(4, 1)["training"] == pytest.approx(4 / 5 / (1 + 4 * 0.3 * 12 / 16))


def companies(
    losses: CoreLosses, off: dict[tuple[int, int], float], cores: int = 2
) -> list[SharingRow]:
    """Return what a profile of two cores measures of companies, some of it off by a factor."""
    made = CoreSharing(cores, losses=losses)
    found = []
    for key in ((1, 1), (2, 0), (2, 1), (3, 0), (3, 1)):
        speeds = made.speeds(*key)
        generates, learns = (off.get(key, 1.0) * speeds[of] for of in ("generating", "training"))
        shares = (generates,) * 3, (learns,) * 3 if key[1] else None
        found.append(
            SharingRow(generating=key[0], training=key[1], generation=shares[0], train=shares[1])
        )
    return found


def test_losses_are_found_again_and_one_company_that_is_off_moves_them_little() -> None:
    found = CoreSharing.of(companies(LOSSES, {}), TWO_CORES)
    assert found is not None and found.losses == pytest.approx(LOSSES)
    noisy = CoreSharing.of(companies(LOSSES, {(3, 1): 0.85}), TWO_CORES)
    assert noisy is not None
    for kind in ("generating", "training"):
        left = noisy.speeds(3, 1)[kind] / found.speeds(3, 1)[kind]
        assert 0.88 < left < 0.99


def test_an_environment_is_one_thread_more_and_roles_lose_to_it() -> None:
    lossy = CoreSharing(2.0, losses=CoreLosses(generating_by_acting=0.3, training_by_acting=0.4))
    assert lossy.speeds(1, 0, 0, 1) == pytest.approx(
        {**ALONE, "generating": 1 / 1.3, "training": 1 / 1.4}
    )
    assert lossy.speeds(1, 0, 1, 0) == ALONE
    both = lossy.speeds(1, 1, 0, 1)  # each of the others runs half the time that one does
    assert both["generating"] == pytest.approx(2 / 3 / (1 + 0.3 / 2))
    assert both["training"] == pytest.approx(2 / 3 / (1 + 0.4 / 2))
    assert both["acting"] == pytest.approx(2 / 3)
    assert CoreSharing(16.0, threads=4, losses=lossy.losses).speeds(2, 1, 1, 3)["generating"] == (
        pytest.approx(1 / (1 + 3 * 0.3))
    )


@pytest.mark.parametrize("cores", [2, 16])
@pytest.mark.parametrize("acting", [0.5, 1.0])
def test_losses_to_environments_are_found_beside_roles_with_the_cores_that_they_took(
    acting: float, cores: int
) -> None:
    losses = LOSSES._replace(generating_by_acting=0.3, training_by_acting=0.5)
    if cores == 2:  # of 16 cores nobody waits
        losses = losses._replace(acting_in_turns=0.8, generating_after_acting=0.9)
    made, host = CoreSharing(cores, losses=losses), with_fields(TWO_CORES, cores=cores)
    rows = companies(losses, {}, cores)
    for training in (0, 1):
        speeds = made.speeds(1, training, 0, acting)
        generation, train = (speeds["generating"],) * 3, (speeds["training"],) * 3
        taken, action = acting * speeds["handling"], speeds["acting"] / speeds["handling"]
        row = SharingRow(generating=1, training=training, acting=taken, generation=generation)
        rows.append(with_fields(row, train=train if training else None, action=(action,) * 3))
    found = CoreSharing.of(rows, host)
    assert found is not None
    assert found.losses.generating_by_acting == pytest.approx(0.3)
    assert found.losses.training_by_acting == pytest.approx(0.5)
    assert found.losses.acting_in_turns == pytest.approx(losses.acting_in_turns)
    assert found.losses.generating_after_acting == pytest.approx(losses.generating_after_acting)
    without = CoreSharing.of(companies(losses, {}, cores), host)
    assert without is not None and without.losses.generating_by_acting == 0.0
    assert without.speeds(1, 1) == pytest.approx(found.speeds(1, 1)), "single turns are as before"


@pytest.mark.parametrize(("cores", "waits"), [(1, 1 / 2 - 1 / 3), (2, 1 / 3), (3, 0.0)])
def test_an_environment_loses_by_how_much_longer_it_waits_than_beside_a_replica(
    cores: int, waits: float
) -> None:
    lossy = CoreSharing(cores, losses=CoreLosses(acting_in_turns=0.6))
    share = min(1.0, cores / 3)
    assert lossy.speeds(1, 1, 0, 1)["acting"] == pytest.approx(share / (1 + 0.6 * waits))
    assert lossy.speeds(1, 0, 0, 1)["acting"] == min(1.0, cores / 2), "as measured"
    assert lossy.speeds(1, 1, 0, 1)["generating"] == share


def test_who_waits_for_its_turn_loses_by_how_long_it_waited() -> None:
    lossy = CoreSharing(2.0, losses=CoreLosses(generating_in_turns=0.4, training_in_turns=0.6))
    assert lossy.speeds(1, 1) == ALONE
    assert lossy.speeds(3, 1)["generating"] == pytest.approx(0.5 / (1 + 0.5 * 0.4))
    assert lossy.speeds(3, 1)["training"] == pytest.approx(0.5 / (1 + 0.5 * 0.6))


def test_a_replica_that_waits_loses_more_to_environments_than_to_other_roles() -> None:
    losses = CoreLosses(generating_in_turns=0.4, generating_after_acting=0.9)
    lossy = CoreSharing(2.0, losses=losses)
    waits = 1 / 3  # of its time, in two companies of three threads
    assert lossy.speeds(3, 0)["generating"] == pytest.approx(2 / 3 / (1 + waits * 0.4))
    mixed = waits / 2 * 0.4 + waits / 2 * 0.9
    assert lossy.speeds(1, 1, 0, 1)["generating"] == pytest.approx(2 / 3 / (1 + mixed))
    handled = lossy.speeds(1, 1, 1, 0)["generating"]
    assert handled == pytest.approx(2 / 3 / (1 + waits * 0.4)), "the controller is no environment"


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 8)])
def test_where_one_role_fills_the_cores_companies_lose_what_was_measured(
    cores: int, threads: int
) -> None:
    rows = [
        SharingRow(generating=1, training=1, generation=(0.4,) * 3, train=(0.3,) * 3),
        SharingRow(generating=2, training=0, generation=(0.4,) * 3),
        SharingRow(generating=2, training=1, generation=(0.25,) * 3, train=(0.2,) * 3),
    ]
    host = with_fields(TWO_CORES, cores=cores, threads=threads)
    found = CoreSharing.of(rows, host)
    assert found is not None and found.speeds(1, 0) == ALONE
    assert found.speeds(1, 1) == pytest.approx(
        {"generating": 0.4, "training": 0.3, "handling": 0.5, "acting": 0.5}, rel=0.08
    )
    assert found.speeds(2, 1)["generating"] == pytest.approx(0.25, rel=0.08)


@pytest.mark.parametrize(
    ("measured", "losses"),
    [
        ({(2, 0): 1.2, (3, 0): 1.2}, CoreLosses()),
        ({(1, 1): 0.8, (2, 0): 1.2, (3, 0): 1.2}, None),
    ],
)
def test_nobody_is_faster_in_company_than_alone(
    measured: dict[tuple[int, int], float], losses: CoreLosses | None
) -> None:
    found = CoreSharing.of(companies(CoreLosses(), measured), TWO_CORES)
    assert found is not None and found.losses.generating_by_generating == 0.0
    assert min(found.losses) >= 0
    speeds = found.speeds(2, 1)
    assert 2 * speeds["generating"] + speeds["training"] <= 2 + 1e-9
    assert losses is None or found.losses == losses
    assert losses is not None or found.losses.generating_by_training > 0.05


# Time ---------------------------------------------------------------------------------------------


def test_two_on_one_core_end_as_processor_sharing_has_it() -> None:
    ends = work_off(fair(1.0), [("generating", 0.0, 4.0), ("training", 1.0, 1.0)])
    assert ends == pytest.approx([5.0, 3.0])  # both at half speed from 1 to 3


def test_roles_are_slower_only_while_there_are_more_than_cores() -> None:
    jobs: list[tuple[RoleKind, float, float]] = [("generating", 0.0, 3.0)] * 3
    assert work_off(fair(2.0), jobs) == pytest.approx([4.5, 4.5, 4.5])
    assert work_off(fair(3.0), jobs) == pytest.approx([3.0, 3.0, 3.0])
    jobs[2] = ("training", 0.0, 1.0)
    assert work_off(fair(2.0), jobs) == pytest.approx([3.5, 3.5, 1.5])


JOBS = st.lists(
    st.tuples(st.sampled_from(tuple(ALONE)), st.floats(0, 9), st.floats(0.01, 9)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(jobs=JOBS)
def test_a_core_is_never_idle_while_there_is_work_and_never_does_two_things(
    jobs: list[tuple[RoleKind, float, float]],
) -> None:
    """On one core the last is done when a queue would be, whatever the order: processor sharing loses no second."""
    busy_until = 0.0
    for _, begins, seconds in sorted(jobs, key=lambda job: job[1]):
        busy_until = max(busy_until, begins) + seconds
    ends = work_off(fair(1.0), jobs)
    assert max(ends) == pytest.approx(busy_until)
    assert all(
        end >= begins + seconds - 1e-9 for end, (_, begins, seconds) in zip(ends, jobs, strict=True)
    )


def test_work_that_is_broken_off_says_how_much_of_it_is_done() -> None:
    env = simpy.Environment()
    cores = Cores(env, fair(1.0))
    one, other = cores.time_of("generating"), cores.time_of("training")
    one.work(4.0)
    other.work(8.0)
    env.run(until=3.0)
    assert one.leave() == pytest.approx(1.5)
    env.run(until=4.0)
    assert other.leave() == pytest.approx(2.5)


# Runs ---------------------------------------------------------------------------------------------


def shared_run(directory: Path, **changes: Any) -> Run:
    """Return a small run on two cores whose loss by sharing is measured."""
    model = model_directory(directory / "model")
    rows = tuple(
        SharingRow(
            generating=n, training=t, generation=around(share), train=around(share) if t else None
        )
        for (n, t), share in {
            (2, 0): 0.85,
            (3, 0): 0.57,
            (1, 1): 0.8,
            (2, 1): 0.5,
            (3, 1): 0.4,
        }.items()
    )
    path = directory / "profile.toml"
    write_measured(make_profile(model, host=TWO_CORES, sharing=rows), path)
    assert read_measured(path).sharing == rows
    return measured_run(model, path, **changes)


def around(share: float) -> tuple[float, float, float]:
    """Return quartiles about a median that keep their digits in a file."""
    return round(share - 0.1, 3), share, round(share + 0.1, 3)


@pytest.mark.parametrize("system", ["stream-async", "disaggregated", "fully-async", "colocated"])
def test_a_run_on_shared_cores_loses_time_and_nothing_else(system: str, tmp_path: Path) -> None:
    changes = {
        "algorithm__steps": 5,
        "rollout__replicas": 2,
        "cluster__pools__local__gpus_per_node": 3,
    }
    if system == "colocated":
        changes |= {"rollout__replicas": 1}
    run = shared_run(tmp_path, policies__system=system, **changes)
    costs = Costs.load(run)
    shared, alone = (
        SimWorld(run, each, SimulatedWorkload(run)).run() for each in (costs, _unshared(costs))
    )
    check_every_command_ends_once(shared)
    check_every_rollout_is_accounted_for(shared)
    assert simulate(run).encode() == shared.encode()
    ratio = measure(shared).total_time / measure(alone).total_time
    if system == "colocated":
        assert ratio == pytest.approx(1.0)  # one at a time
    else:
        assert 1.05 < ratio <= 1 / 0.5


def _unshared(costs: Costs) -> Costs:
    return replace(costs, sharing=None)


def test_sharing_at_full_speed_changes_no_time(tmp_path: Path) -> None:
    run = shared_run(tmp_path, algorithm__steps=5)
    costs = Costs.load(run)
    free = replace(costs, sharing=fair(4.0))
    times = [
        measure(SimWorld(run, each, SimulatedWorkload(run)).run()).step_times
        for each in (free, _unshared(costs))
    ]
    assert times[0] == pytest.approx(times[1])


def test_rollouts_are_handled_one_after_the_other_and_that_slows_the_roles_down(
    tmp_path: Path,
) -> None:
    run = shared_run(tmp_path, algorithm__steps=5)
    path = Path(str(run.costs.profile))
    without = measure(simulate(run)).step_time
    handling_time = 0.01
    seconds = (handling_time / 2, handling_time, 2 * handling_time)
    write_measured(with_fields(read_measured(path), handling=ModelOperation(seconds=seconds)), path)
    trace = simulate(run)
    ended = [time for time, event, _ in trace.entries if isinstance(event, Generated)]
    known = [time for time, event, _ in trace.entries if isinstance(event, Verified)]
    for number, time in enumerate(known):  # in the order of their ends, none before its own
        assert time >= ended[number] + handling_time - 1e-9
        assert not number or time >= known[number - 1] + handling_time - 1e-9
    assert measure(trace).step_time > 1.05 * without
    check_every_rollout_is_accounted_for(trace)


@pytest.mark.parametrize("part", ["fill_time", "unpack_time"])
def test_a_push_is_prepared_and_unpacked_on_the_cores_that_generation_goes_on_with(
    tmp_path: Path, part: str
) -> None:
    run = shared_run(
        tmp_path,
        algorithm__steps=5,
        rollout__replicas=2,
        cluster__pools__local__gpus_per_node=3,
        policies__system="fully-async",
    )
    costs, push_time = Costs.load(run), 0.01
    seconds = dict.fromkeys(("fill_time", "wire_time", "drain_time"), 0.0) | {part: push_time}
    sync = replace(costs.sync, **seconds)
    world = SimWorld(run, replace(costs, sync=sync), SimulatedWorkload(run))
    took: list[float] = []
    began: dict[int, float] = {}
    for time, event, commands in world.run().entries:
        if isinstance(event, WeightsPushed):
            took.append(time - began[event.version])
        began |= {c.version: time for c in commands if isinstance(c, PushWeights)}
    assert len(took) >= 4 and min(took) >= push_time - 1e-9
    assert max(took) > 1.2 * push_time
    assert max(took) <= 2 * push_time + 1e-9, "four threads on two cores"


def test_a_profile_that_does_not_say_what_handling_takes_is_said_not_to(tmp_path: Path) -> None:
    run = shared_run(tmp_path)
    path = Path(str(run.costs.profile))
    assert any("decide and reward" in s for s in Costs.load(run).provenance["decode"].sources)
    write_measured(
        with_fields(read_measured(path), handling=ModelOperation(seconds=around(0.5))), path
    )
    assert not any("decide and reward" in s for s in Costs.load(run).provenance["decode"].sources)


@pytest.mark.parametrize("part", ["handling_time", "environment_action_time"])
@pytest.mark.parametrize("has_turns", [False, True])
def test_passes_lose_to_environments_and_to_a_controller_that_calls_them(
    tmp_path: Path, has_turns: bool, part: str
) -> None:
    turns = {"max_turns": 2, "turns": "2", "max_context": 128, "observation_tokens": "4"}
    times = {"action_time": "0 s", "start_time": "0 s"}
    run = shared_run(
        tmp_path, algorithm__steps=3, **({"environment": {**turns, **times}} if has_turns else {})
    )
    costs = replace(Costs.load(run), **{part: 0.005})
    losses = CoreLosses(generating_by_acting=1.0, training_by_acting=1.0)
    step_times = [
        measure(SimWorld(run, replace(costs, sharing=each), SimulatedWorkload(run)).run()).step_time
        for each in (fair(8.0), CoreSharing(8.0, losses=losses))
    ]
    if has_turns:
        assert step_times[1] > 1.02 * step_times[0]
    else:
        assert step_times[1] == step_times[0]


def test_who_shares_no_cores_waits_with_nothing_but_the_clock() -> None:
    run = small_run()
    costs = Costs.load(run)
    world = SimWorld(run, costs, SimulatedWorkload(run))
    assert costs.sharing is None and isinstance(world.cores.time_of("generating"), OwnTime)
    env = simpy.Environment()
    assert isinstance(Cores(env).time_of("training").work(2.0), simpy.Timeout)
    assert env.peek() == 2.0


def test_a_profile_that_does_not_say_shares_nothing_and_that_is_said(tmp_path: Path) -> None:
    run = shared_run(tmp_path)
    path = Path(str(run.costs.profile))
    sources = Costs.load(run).provenance["decode"].sources
    assert not any("slowed another" in source for source in sources)
    write_measured(with_fields(read_measured(path), sharing=()), path)
    costs = Costs.load(run)
    assert costs.sharing is None
    assert any("as if none slowed another down" in s for s in costs.provenance["decode"].sources)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"generating": 0}, "sharing row 1: generating must be at least 1, got 0"),
        ({"training": 2}, "sharing row 1: training must be 0 or 1, got 2"),
        ({"training": 1}, "sharing row 1: train must be there"),
        ({"generation": (0.9, 0.5, 0.6)}, "sharing row 1: generation must be quartiles"),
        (
            {"acting": 2.0},
            "sharing row 1: acting must be at least 0 and below host.cores=2, got 2.0",
        ),
        ({"acting": 0.5}, "sharing row 1: action must be there if acting is positive, and only"),
        ({"action": (1.0, 1.0, 1.0)}, "sharing row 1: action must be there if acting is positive"),
    ],
)
def test_speeds_that_cannot_be_are_refused_with_their_row(
    row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    run = shared_run(tmp_path)
    path = Path(str(run.costs.profile))
    wrong = SharingRow(**{"generating": 2, "generation": around(0.5), **row})
    write_measured(with_fields(read_measured(path), sharing=(wrong,)), path)
    with pytest.raises(ValueError, match=words):
        read_measured(path)
