"""Plan each job for each share of the pools, simulate every way of sharing, and choose one.

A deadline counts before the objective: the choice has the least time beyond deadlines, then the lowest objective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.runfile.config import Run
from streamrl.runfile.files import encode_run
from streamrl.runfile.jobs_config import ScheduleConfig, SharingName
from streamrl.runfile.jobs_file import Job, Jobs, cluster_of
from streamrl.sim.jobs.figures import (
    Rents,
    dollars_per_hour,
    figures_alone,
    figures_of,
    ranking,
)
from streamrl.sim.jobs.plan import (
    ClusterPlan,
    JobShare,
    PlannedJob,
    SeedCheck,
    SharingPlan,
)
from streamrl.sim.jobs.schedule import JobSpeed, ScheduledJob
from streamrl.sim.jobs.sharing import (
    NAMES,
    Sizes,
    best_sizes,
    equal_sizes,
    make_candidate,
)
from streamrl.sim.jobs.speeds import (
    PlannedShare,
    measured_speed,
    plan_share,
)
from streamrl.sim.parallel import answers, worker_pool

SEEDS_APART = 1000
"""Distance from the seed of a run file to the one that checks the choice."""
LEAST_SECONDS = 2.0
"""Least time for the plan of a job at one share."""


class PlannedCluster(NamedTuple):
    """The result of planning a cluster file."""

    plan: ClusterPlan
    runs: Mapping[tuple[int, int], Run]
    """The run file of each job at each share, by the place of the job and the share."""


def plan_jobs(jobs: Jobs, watch: Callable[[int, str], None] = lambda *_: None) -> PlannedCluster:
    """Plan the jobs of a cluster file on all cores.

    Args:
        jobs: what `load_jobs` returns.
        watch: called with the number of finished simulations and what is being planned.

    Raises:
        ValueError: a job fits on no share of the pools, or no way of sharing gives every job GPUs.
    """
    began = time.perf_counter()
    with worker_pool() as pool:
        planned = _plan_shares(jobs, pool, watch, began)
        plan = choose(jobs, planned.speeds, Rents.of(jobs.cluster, jobs.num_shares))
        watch(planned.num_simulated, "the choice with another seed")
        check = _check(jobs, plan, planned.plans, pool)
    described = [
        _planned_job(jobs, place, planned.plans, planned.misfits[place])
        for place in range(len(jobs.jobs))
    ]
    runs = {key: each.run for key, each in planned.plans.items()}
    return PlannedCluster(
        ClusterPlan(
            objective=jobs.schedule.objective,
            num_shares=jobs.num_shares,
            gpus={name: pool.num_gpus for name, pool in jobs.cluster.pools.items()},
            jobs=described,
            alone=plan.alone,
            options=plan.options,
            chosen=plan.chosen,
            left_out=plan.left_out,
            check=check,
            seconds=time.perf_counter() - began,
        ),
        runs,
    )


# Speeds -------------------------------------------------------------------------------------------


Plans = Mapping[tuple[int, int], PlannedShare]
Speeds = Sequence[Mapping[int, JobSpeed]]
"""Of each job, its speed by share."""


class _PlannedShares(NamedTuple):
    plans: Plans
    misfits: list[dict[str, str]]
    speeds: Speeds
    num_simulated: int


def _plan_shares(
    jobs: Jobs, pool: Executor, watch: Callable[[int, str], None], began: float
) -> _PlannedShares:
    """Plan each job for each share. Jobs with the same run file are planned once."""
    points = [(place, share) for place in range(len(jobs.jobs)) for share in _shares(jobs)]
    plans: dict[tuple[int, int], PlannedShare] = {}
    misfits: list[dict[str, str]] = [{} for _ in jobs.jobs]
    known: dict[tuple[bytes, int], PlannedShare | str] = {}
    num_done = 0
    for number, (place, share) in enumerate(points):
        job = jobs.jobs[place]
        what = f"{job.config.name} on share {share} of {jobs.num_shares}"

        def tell(what: str = what) -> None:
            nonlocal num_done
            num_done += 1
            watch(num_done, what)

        watch(num_done, what)
        left = jobs.schedule.time_limit - (time.perf_counter() - began)
        most = max(LEAST_SECONDS, left / (len(points) - number))
        key = encode_run(job.offer.run), share
        if key not in known:
            known[key] = _plan_or_reason(jobs, job, share, most, pool, tell)
        match known[key]:
            case str() as reason:
                misfits[place][str(share)] = reason
            case PlannedShare() as found:
                plans[place, share] = found
    speeds = [
        {share: each.speed for (at, share), each in plans.items() if at == place}
        for place in range(len(jobs.jobs))
    ]
    for job, own, reasons in zip(jobs.jobs, speeds, misfits, strict=True):
        if not own:
            raise ValueError(
                f"job {job.config.name} has no plan on any share of the pools: {reasons[str(jobs.num_shares)]}"
            )
    return _PlannedShares(plans, misfits, speeds, num_done)


def _plan_or_reason(
    jobs: Jobs, job: Job, share: int, most: float, pool: Executor, tell: Callable[[], None]
) -> PlannedShare | str:
    cluster = cluster_of(jobs.cluster, share, jobs.num_shares)
    try:
        return plan_share(job.offer.run, cluster, jobs.schedule, most, pool, tell)
    except BrokenExecutor:  # a worker was killed
        raise
    except (ValueError, RuntimeError) as error:
        return str(error)


def _shares(jobs: Jobs) -> range:
    return range(1, jobs.num_shares + 1)


def _planned_job(jobs: Jobs, place: int, plans: Plans, misfits: dict[str, str]) -> PlannedJob:
    """Describe a job with its plan at each share."""
    config, run = jobs.jobs[place].config, jobs.jobs[place].offer.run
    shares = []
    for (at, share), each in plans.items():
        if at == place:
            cluster = cluster_of(jobs.cluster, share, jobs.num_shares)
            gpus = {name: pool.num_gpus for name, pool in cluster.pools.items()}
            speed = each.speed
            shares.append(
                JobShare(
                    share=share,
                    gpus=gpus,
                    choice=each.choice,
                    settings=each.settings,
                    step_time=speed.step_time,
                    step_time_band=each.step_time_band,
                    utilisation=speed.busy / (sum(gpus.values()) * speed.step_time),
                    start_time=speed.start_time,
                    load_time=speed.load_time,
                    save_time=speed.save_time,
                    dollars_per_hour=dollars_per_hour(cluster),
                )
            )
    return PlannedJob(
        name=config.name,
        run=config.run,
        steps=run.algorithm.steps,
        priority=config.priority,
        deadline=None if config.deadline is None else float(config.deadline),
        submitted=float(config.submitted),
        shares=shares,
        misfits=misfits,
    )


# The choice ---------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """All ways of sharing with their figures, and the chosen one."""

    alone: list[SharingPlan]
    options: list[SharingPlan]
    chosen: SharingName
    left_out: dict[str, str]


def scheduled_jobs(jobs: Jobs, speeds: Speeds) -> list[ScheduledJob]:
    """Return the jobs as a schedule needs them, with the speeds of each."""
    return [
        ScheduledJob(
            name=job.config.name,
            steps=job.offer.run.algorithm.steps,
            speeds=dict(own),
            priority=job.config.priority,
            deadline=inf if job.config.deadline is None else float(job.config.deadline),
            submitted_at=float(job.config.submitted),
        )
        for job, own in zip(jobs.jobs, speeds, strict=True)
    ]


def choose(jobs: Jobs, speeds: Speeds, rents: Rents) -> Chosen:
    """Simulate all ways of sharing with the best sizes of each, and choose one.

    Raises:
        ValueError: no way of sharing gives every job GPUs on which it fits.
    """
    scheduled = scheduled_jobs(jobs, speeds)
    options, left_out = options_of(jobs.schedule, scheduled, jobs.num_shares, rents)
    if not options:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ValueError(f"no way of sharing gives every job GPUs: {reasons}")
    alone = [figures_alone(job, jobs.num_shares, rents) for job in scheduled]
    return Chosen(alone, options, best_of(jobs.schedule, options).name, left_out)


def options_of(
    schedule: ScheduleConfig, jobs: Sequence[ScheduledJob], num_shares: int, rents: Rents
) -> tuple[list[SharingPlan], dict[str, str]]:
    """Return each way of sharing with its best sizes, and the reasons of those that cannot be."""
    wanted = schedule.sharing or NAMES
    options: list[SharingPlan] = []
    left_out: dict[str, str] = {}
    for name in NAMES:
        if name not in wanted and name != "equal-split":
            continue
        found: SharingPlan | str | None = _candidate(schedule, jobs, name, num_shares, rents)
        match found:
            case str() as reason:
                left_out[name] = reason
            case None:
                left_out[name] = "a job never gets GPUs, or changes are too many"
            case _:
                options.append(found)
    return options, left_out


def best_of(schedule: ScheduleConfig, options: Sequence[SharingPlan]) -> SharingPlan:
    """Return the best of some ways of sharing, the first of equals."""
    return min(options, key=lambda option: ranking(schedule, option))


def _candidate(
    schedule: ScheduleConfig,
    jobs: Sequence[ScheduledJob],
    name: SharingName,
    num_shares: int,
    rents: Rents,
) -> SharingPlan | str | None:
    """Return a way of sharing with its best sizes, or why it cannot be."""

    def figures(sizes: Sizes) -> SharingPlan | None:
        candidate = make_candidate(name, sizes, num_shares, schedule.slice)
        return figures_of(jobs, candidate, num_shares, rents)

    def value(sizes: Sizes) -> tuple[float, ...] | None:
        found = figures(sizes)
        return None if found is None else ranking(schedule, found)

    if name == "time-slicing":
        return figures(())
    if name == "equal-split":
        sizes = equal_sizes(len(jobs), num_shares)
        pairs = zip(jobs, sizes, strict=True)
        if wrong := [job.name for job, size in pairs if size not in job.speeds]:
            return f"{', '.join(wrong)} has no plan on {sizes[0]} of {num_shares} shares"
        return figures(sizes)
    best = best_sizes(jobs, num_shares, value, exclusive=name != "preemption")
    return "the jobs do not fit side by side" if best is None else figures(best)


def _check(jobs: Jobs, plan: Chosen, plans: Plans, pool: Executor) -> SeedCheck | None:
    """Compare the choice with the equal split again, with new simulations of all shares that both use."""
    by_name = {option.name: option for option in plan.options}
    if plan.chosen == "equal-split" or "equal-split" not in by_name:
        return None
    chosen, equal = by_name[plan.chosen], by_name["equal-split"]
    both = chosen, equal
    held = {(each.job, each.share) for option in both for each in option.stretches}
    held |= {each for option in both for each in enumerate(option.sizes)}
    used = sorted(held & plans.keys())
    runs = (replace(plans[key].run, seed=plans[key].run.seed + SEEDS_APART) for key in used)
    work = [(encode_run(each), jobs.schedule) for each in runs]
    found = dict(zip(used, answers(pool, measured_speed, work), strict=True))
    speeds = [
        {share: speed for (at, share), speed in found.items() if at == place}
        for place in range(len(jobs.jobs))
    ]
    return compared(jobs, speeds, chosen, equal)


def compared(
    jobs: Jobs, speeds: Speeds, chosen: SharingPlan, equal: SharingPlan
) -> SeedCheck | None:
    """Return the ratio of two ways of sharing with other speeds; None if one of them needs a share without a speed."""
    scheduled, rents = scheduled_jobs(jobs, speeds), Rents.of(jobs.cluster, jobs.num_shares)
    values = []
    for option in (chosen, equal):
        candidate = make_candidate(
            option.name, tuple(option.sizes), jobs.num_shares, jobs.schedule.slice
        )
        again = figures_of(scheduled, candidate, jobs.num_shares, rents)
        if again is None:
            return None
        values.append([ranking(jobs.schedule, each)[1] for each in (again, option)])
    (new, planned), (new_equal, planned_equal) = values
    if not (new_equal and planned_equal):  # GPUs are free
        return None
    return SeedCheck(ratio=new / new_equal, planned_ratio=planned / planned_equal)
