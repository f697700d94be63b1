"""Schedules of several jobs: exact times, GPUs that never overlap, and the choice between ways of sharing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.record.band import Band
from streamrl.runfile.jobs_config import JobConfig, ScheduleConfig, SharingName
from streamrl.runfile.units import Duration
from streamrl.sim.jobs import sharing
from streamrl.sim.jobs.figures import Rents, figures_of, ranking
from streamrl.sim.jobs.plan import (
    ClusterPlan,
    JobShare,
    PlannedJob,
    SeedCheck,
    SharingPlan,
)
from streamrl.sim.jobs.planner import best_of, options_of
from streamrl.sim.jobs.schedule import JobSpeed, Schedule, ScheduledJob, Sharing, run_schedule
from streamrl.sim.jobs.sharing import NAMES, best_sizes, make_candidate

SHARES = 4
GPUS = (0, 8, 16, 24, 32)
RENTED = Rents(GPUS, GPUS, [0.0] * 5, [0] * 5)
"""Four nodes of eight GPUs at a dollar an hour."""
OWNED = RENTED._replace(owned_dollars=GPUS, owned_gpus=GPUS)


def speed(step_time: float, busy: float = 0.0, start: float = 10.0) -> JobSpeed:
    """Return a speed whose restart takes 5 s to save, 5 s to load, and `start`."""
    return JobSpeed(step_time, start, 5.0, 5.0, busy)


def job(name: str, steps: int, work: float = 400.0, **more: Any) -> ScheduledJob:
    """Return a job whose steps take `work` / share seconds, on which half of the GPU time works."""
    speeds = {share: speed(work / share, busy=4 * work) for share in range(1, SHARES + 1)}
    return ScheduledJob(name, steps, more.pop("speeds", speeds), **more)


def scheduled(
    name: SharingName, sizes: tuple[int, ...], *jobs: ScheduledJob, time_slice: float = 1000.0
) -> Schedule:
    found = run_schedule(jobs, SHARES, make_candidate(name, sizes, SHARES, time_slice).make)
    assert found is not None
    return found


def runs(schedule: Schedule, number: int) -> list[tuple[float, float, int, int]]:
    """Return start, end, shares and steps of the stretches in which a job makes steps."""
    return [
        (each.start, each.end, each.shares, each.steps)
        for each in schedule.stretches
        if each.job == number and each.kind == "run"
    ]


# Exact times --------------------------------------------------------------------------------------


def test_a_job_on_a_constant_part_ends_after_its_start_and_its_steps() -> None:
    found = scheduled("static-split", (1, 3), job("a", 3), job("b", 6, submitted_at=50.0))
    assert found.ends == pytest.approx([10 + 3 * 400, 50 + 10 + 6 * 400 / 3])
    assert [each.kind for each in found.stretches] == ["switch", "run", "switch", "run"]


def test_gpus_of_a_job_that_ends_are_lent_at_the_next_step_boundary_with_a_restart() -> None:
    found = scheduled("lending", (2, 2), job("a", 2), job("b", 10))
    # a: 2 steps of 200 s end at 410; b is then at the end of its second step
    assert runs(found, 0) == [(10, 410, 2, 2)]
    # b saves 5 s, loads 5 s, starts 10 s, and makes 8 steps of 100 s
    assert runs(found, 1) == [(10, 410, 2, 2), (430, 1230, 4, 8)]


def test_a_borrower_finishes_its_step_first() -> None:
    found = scheduled("lending", (2, 2), job("a", 1, work=100.0), job("b", 10))
    assert found.ends[0] == 10 + 50
    assert runs(found, 1) == [(10, 210, 2, 1), (230, 1130, 4, 9)]


def test_gpus_are_not_lent_if_the_restart_takes_longer_than_it_saves() -> None:
    slow = {share: speed(400 / share, start=300.0) for share in range(1, 5)}
    found = scheduled("lending", (2, 2), job("a", 2), job("b", 4, speeds=slow))
    assert [each[2] for each in runs(found, 1)] == [2]


def test_a_preempted_job_keeps_its_gpus_if_more_of_them_do_not_pay() -> None:
    slow = {share: speed(400 / share, start=300.0) for share in range(1, 5)}
    found = scheduled("preemption", (2, 4), job("a", 3, priority=2.0), job("b", 4, speeds=slow))
    assert runs(found, 1) == [(300, 1100, 2, 4)]


class Swap:
    """Gives most GPUs to the second job, and from 100 s on to the first."""

    has_swapped = False

    def targets(self, now: float, states: Sequence[Any]) -> list[int]:
        """Return the shares of both."""
        self.has_swapped = now >= 100
        return [3, 1] if self.has_swapped else [1, 3]

    def look_at(self, states: Sequence[Any]) -> float:
        """Return the time of the swap."""
        return inf if self.has_swapped else 100.0


def test_a_job_runs_until_the_gpus_that_it_will_get_are_free() -> None:
    found = run_schedule([job("a", 20, work=50.0), job("b", 4, work=900.0)], SHARES, Swap)
    assert found is not None
    # b leaves at the end of its step at 310, and has saved at 315; a leaves at the end of its step then
    assert runs(found, 0)[0] == (10, 360, 1, 7)
    assert runs(found, 1)[0] == (10, 310, 3, 1)


def test_gpus_that_wait_for_a_job_are_lent_until_it_comes() -> None:
    late = job("b", 2, submitted_at=350.0)
    found = scheduled("lending", (2, 2), job("a", 10), late)
    # a has all GPUs, and leaves at the end of the step that runs at 350
    first, second, third = runs(found, 0)
    assert first == (10, 410, 4, 4)
    # it saves 5 s; then b starts, and a loads and starts beside it
    assert runs(found, 1) == [(425, 825, 2, 2)] and second == (430, 830, 2, 2)
    # when b has ended, a has all GPUs again
    assert third == (850, 1250, 4, 4)


def test_a_job_of_higher_priority_takes_gpus_at_the_end_of_a_step() -> None:
    low, high = job("low", 10), job("high", 3, priority=5.0, submitted_at=230.0)
    found = scheduled("preemption", (4, 4), low, high)
    # low leaves at 310, and has saved at 315; high then starts; low resumes when it has ended
    assert runs(found, 1) == [(325, 625, 4, 3)]
    assert runs(found, 0) == [(10, 310, 4, 3), (640, 1340, 4, 7)]


def test_deadlines_are_served_first_then_priorities_then_shorter_jobs() -> None:
    long, short = job("long", 10), job("short", 2)
    due, high = job("due", 20, deadline=1e6), job("high", 30, priority=2.0)
    assert sharing.service_order([long, short, high, due], SHARES) == [3, 2, 1, 0]
    sooner = job("sooner", 50, deadline=1e5)
    assert sharing.service_order([due, sooner], SHARES) == [1, 0]


def test_jobs_take_turns_for_a_time_slice() -> None:
    found = scheduled("time-slicing", (), job("a", 5), job("b", 5), time_slice=250.0)
    # a's slice ends at 250, in its third step; it then saves for 5 s
    assert runs(found, 0)[0] == (10, 310, 4, 3)
    assert runs(found, 1)[0] == (325, 525 + 100, 4, 3)
    assert sum(each[3] for each in runs(found, 0)) == sum(each[3] for each in runs(found, 1)) == 5


def test_a_job_that_comes_does_not_end_the_slice_of_another() -> None:
    jobs = job("a", 5), job("b", 5), job("c", 5, submitted_at=400.0)
    found = scheduled("time-slicing", (), *jobs, time_slice=250.0)
    # b has GPUs from 315 on, and its slice ends at 565
    assert runs(found, 1)[0] == (325, 625, 4, 3)
    assert runs(found, 2)[0][0] == 640


def test_a_slice_shorter_than_a_restart_still_makes_a_step() -> None:
    found = scheduled("time-slicing", (), job("a", 3), job("b", 3), time_slice=1.0)
    assert [each[3] for each in runs(found, 0)] == [1, 1, 1]


def test_a_job_that_fits_nowhere_has_no_schedule() -> None:
    nowhere = job("a", 3, speeds={})
    assert run_schedule([nowhere], SHARES, make_candidate("time-slicing", (), 4, 9.0).make) is None


# Figures ------------------------------------------------------------------------------------------


def figures(
    name: SharingName, sizes: tuple[int, ...], rents: Rents, *jobs: ScheduledJob
) -> SharingPlan:
    found = figures_of(jobs, make_candidate(name, sizes, SHARES, 1000.0), SHARES, rents)
    assert found is not None
    return found


def test_rented_gpus_cost_while_a_job_holds_them_and_own_gpus_until_all_jobs_end() -> None:
    jobs = job("a", 2), job("b", 8)
    rented, owned = (figures("static-split", (2, 2), rents, *jobs) for rents in (RENTED, OWNED))
    ends = [410.0, 1610.0]
    assert rented.dollars == pytest.approx(16 / 3600 * sum(ends)) and rented.idle_dollars == 0
    assert owned.dollars == pytest.approx(32 / 3600 * 1610)
    assert owned.idle_dollars == pytest.approx(16 / 3600 * (1610 - 410))
    assert [each.dollars for each in rented.jobs] == [each.dollars for each in owned.jobs]
    busy = 4 * 400 * 10
    assert rented.utilisation == pytest.approx(busy / (16 * sum(ends)))
    assert owned.utilisation == pytest.approx(busy / (32 * 1610))


def test_the_mean_time_is_weighted_by_priority_and_starts_at_submission() -> None:
    jobs = job("a", 2, priority=3.0), job("b", 2, submitted_at=100.0)
    found = figures("static-split", (2, 2), RENTED, *jobs)
    assert [each.seconds for each in found.jobs] == [410, 410]
    assert figures("static-split", (1, 3), RENTED, *jobs).mean_seconds == pytest.approx(
        (3 * 810 + 10 + 2 * 400 / 3) / 4
    )


def best(jobs: Sequence[ScheduledJob], rents: Rents = OWNED, **schedule: Any) -> SharingPlan:
    config = ScheduleConfig(slice=Duration(1000.0), **schedule)
    options, _ = options_of(config, jobs, SHARES, rents)
    return best_of(config, options)


def test_a_deadline_counts_before_the_objective() -> None:
    jobs = [job("a", 20), job("b", 20, priority=50.0)]
    free = best(jobs)
    due = best([jobs[0]._replace(deadline=2050.0), jobs[1]])
    assert free.jobs[0].end > 2050 and due.jobs[0].end <= 2050
    assert due.lateness == 0 and due.mean_seconds > free.mean_seconds
    impossible = best([each._replace(deadline=100.0) for each in jobs])
    assert impossible.lateness > 0


def test_the_objective_decides_between_dollars_and_time() -> None:
    """Rented GPUs cost least in small parts if a job on twice the GPUs is not twice as fast."""
    speeds = {share: speed(400 / share**0.5, busy=100.0) for share in range(1, 5)}
    jobs = [job("a", 9, speeds=speeds), job("b", 9, speeds=speeds)]
    cheap, quick = (best(jobs, RENTED, objective=goal) for goal in ("dollars", "completion"))
    assert cheap.sizes == [1, 1] and cheap.dollars < quick.dollars
    assert quick.mean_seconds < cheap.mean_seconds


def test_shares_on_which_a_job_does_not_fit_are_not_given() -> None:
    large = {share: speed(400 / share) for share in (3, 4)}
    jobs = [job("a", 5, speeds=large), job("b", 5)]
    options, left_out = options_of(ScheduleConfig(), jobs, SHARES, OWNED)
    assert left_out == {"equal-split": "a has no plan on 2 of 4 shares"}
    assert all(each.share >= 3 for o in options for each in o.stretches if each.job == 0)


def test_many_jobs_are_shared_as_well_as_by_trying_all_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = [job("a", 9), job("b", 3, priority=4.0), job("c", 5, work=100.0)]

    def value(sizes: tuple[int, ...]) -> tuple[float, ...]:
        found = figures("static-split", sizes, OWNED, *jobs)
        return ranking(ScheduleConfig(), found)

    every = best_sizes(jobs, SHARES, value, exclusive=True)
    monkeypatch.setattr(sharing, "MOST_TRIED", 0)
    found = best_sizes(jobs, SHARES, value, exclusive=True)
    assert every is not None and found is not None
    assert value(found) <= value(every)


def made_plan() -> ClusterPlan:
    """Return the plan of two jobs whose speeds are not simulated."""
    jobs = [job("a", 9, deadline=1e5), job("b", 3, priority=4.0, submitted_at=100.0)]
    config = ScheduleConfig(slice=Duration(1000.0))
    options, left_out = options_of(config, jobs, SHARES, OWNED)
    described = [
        PlannedJob(
            name=each.name,
            run=f"{each.name}.toml",
            steps=each.steps,
            priority=each.priority,
            deadline=None if each.deadline == inf else each.deadline,
            submitted=each.submitted_at,
            shares=[
                JobShare(
                    share=share,
                    gpus={"h800": 8 * share},
                    choice="8 h800 generate and train",
                    settings={"rollout.replicas": share},
                    step_time=own.step_time,
                    step_time_band=Band(low=0.8 * own.step_time, high=1.25 * own.step_time),
                    utilisation=0.5,
                    start_time=own.start_time,
                    load_time=own.load_time,
                    save_time=own.save_time,
                    dollars_per_hour=8.0 * share,
                )
                for share, own in each.speeds.items()
            ],
        )
        for each in jobs
    ]
    alone = [figures("static-split", (SHARES,), OWNED, each) for each in jobs]
    return ClusterPlan(
        objective="completion",
        num_shares=SHARES,
        gpus={"h800": 32},
        jobs=described,
        alone=alone,
        options=options,
        chosen=best_of(config, options).name,
        left_out=left_out,
        check=SeedCheck(ratio=0.9, planned_ratio=0.91),
        seconds=1.0,
    )


# Any jobs -----------------------------------------------------------------------------------------


@st.composite
def any_job(draw: st.DrawFn) -> ScheduledJob:
    """Return a job with any curve of speeds, also one that is not monotonic, and maybe not at every share."""
    shares = draw(st.sets(st.integers(1, SHARES), min_size=1))
    seconds = st.floats(1.0, 500.0)
    speeds = {
        share: JobSpeed(
            *(draw(seconds) for _ in range(4)), busy=8.0 * share * draw(st.floats(0, 1))
        )
        for share in sorted(shares)
    }
    speeds = {
        share: each._replace(busy=each.busy * each.step_time) for share, each in speeds.items()
    }
    return ScheduledJob(
        "j",
        draw(st.integers(1, 30)),
        speeds,
        draw(st.sampled_from([0.5, 1.0, 4.0])),
        draw(st.sampled_from([inf, 500.0, 5000.0])),
        draw(st.sampled_from([0.0, 300.0, 4000.0])),
    )


def check_schedule(jobs: Sequence[ScheduledJob], option: SharingPlan) -> None:
    """Assert that jobs make all their steps, one thing at a time, on GPUs that nobody else has."""
    for place, each in enumerate(jobs):
        own = [s for s in option.stretches if s.job == place]
        assert sum(s.steps for s in own) == each.steps
        assert all(one.end <= other.start + 1e-6 for one, other in pairwise(own))
        assert own[0].start >= each.submitted_at - 1e-6
        assert option.jobs[place].end == pytest.approx(own[-1].end)
        for s in own:
            if s.kind == "run":
                expected = s.steps * each.speeds[s.share].step_time
                assert s.end - s.start == pytest.approx(expected, abs=1e-3)
    for instant in sorted({s.start for s in option.stretches}):
        held = [s.share for s in option.stretches if s.start <= instant < s.end - 1e-6]
        assert sum(held) <= SHARES


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(any_job(), min_size=1, max_size=3), st.sampled_from([RENTED, OWNED]))
def test_every_way_of_sharing_serves_any_jobs_and_none_is_worse_than_an_equal_split(
    jobs: list[ScheduledJob], rents: Rents
) -> None:
    config = ScheduleConfig(slice=Duration(600.0))
    options, left_out = options_of(config, jobs, SHARES, rents)
    assert {option.name for option in options} | set(left_out) == set(NAMES)
    assert "preemption" in {option.name for option in options}
    for option in options:
        check_schedule(jobs, option)
        assert 0 <= option.utilisation <= 1 + 1e-9
        total = sum(each.dollars for each in option.jobs) + option.idle_dollars
        assert option.dollars == pytest.approx(total)
    equal = [option for option in options if option.name == "equal-split"]
    chosen = best_of(config, options)
    assert all(ranking(config, chosen) <= ranking(config, option) for option in equal)


def test_a_way_of_sharing_that_never_settles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Restless:
        def targets(self, now: float, states: Sequence[Any]) -> list[int]:
            return [1 + int(now) % 2]

        def look_at(self, states: Sequence[Any]) -> float:
            return 0.0

    make: Callable[[], Sharing] = Restless
    monkeypatch.setattr("streamrl.sim.jobs.schedule.MOST_CHANGES", 50)
    assert run_schedule([job("a", 10**6)], SHARES, make) is None


def test_the_config_of_a_job_has_a_weight_of_one() -> None:
    assert JobConfig(name="a", run="a.toml").priority == ScheduledJob("a", 1, {}).priority
