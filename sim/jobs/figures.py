"""Compute the figures of a schedule: when each job ends, what it costs, and the share of GPU time that works.

- Dollars of a job are those of the GPUs that it holds, and of the traffic and sandboxes of its steps.
- Idle dollars are those of your own GPUs that no job holds, from the start until the last job ends.
- Utilisation is GPU-seconds in which GPUs work, divided by GPU-seconds that are paid for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

from streamrl.hardware.profiles import price_of
from streamrl.runfile.cluster_config import ClusterConfig
from streamrl.runfile.jobs_config import ScheduleConfig
from streamrl.runfile.jobs_file import cluster_of
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.jobs.plan import JobOutcome, JobStretch, SharingPlan
from streamrl.sim.jobs.schedule import Schedule, ScheduledJob, run_schedule
from streamrl.sim.jobs.sharing import Candidate, make_candidate

SAME_LATENESS = 1.0
"""Seconds to which lateness is rounded where ways of sharing are compared."""


class Rents(NamedTuple):
    """What GPUs cost, by share: place 0 is no share, and the last place is all of every pool."""

    dollars: Sequence[float]
    """Dollars an hour."""
    gpus: Sequence[int]
    owned_dollars: Sequence[float]
    """Dollars an hour of the GPUs that you own."""
    owned_gpus: Sequence[int]

    @classmethod
    def of(cls, cluster: ClusterConfig, num_shares: int) -> Rents:
        """Return the rents of the pools of a cluster file."""
        parts = [cluster_of(cluster, share, num_shares) for share in range(1, num_shares + 1)]
        owned = {name for name, pool in cluster.pools.items() if pool.owned}
        return cls(
            [0.0, *map(dollars_per_hour, parts)],
            [0, *map(num_gpus, parts)],
            [0.0, *(dollars_per_hour(part, owned) for part in parts)],
            [0, *(num_gpus(part, owned) for part in parts)],
        )


def dollars_per_hour(cluster: ClusterConfig, names: Collection[str] | None = None) -> float:
    """Return the dollars an hour of all GPUs of some pools; of all pools by default."""
    pools = cluster.pools.items()
    return sum(price_of(p) * p.num_gpus for name, p in pools if names is None or name in names)


def num_gpus(cluster: ClusterConfig, names: Collection[str] | None = None) -> int:
    """Return the GPUs of some pools; of all pools by default."""
    pools = cluster.pools.items()
    return sum(pool.num_gpus for name, pool in pools if names is None or name in names)


def figures_of(
    jobs: Sequence[ScheduledJob], candidate: Candidate, num_shares: int, rents: Rents
) -> SharingPlan | None:
    """Simulate a way of sharing, and return its figures; None if a job never gets GPUs."""
    schedule = run_schedule(jobs, num_shares, candidate.make)
    if schedule is None:
        return None
    outcomes = [_outcome(place, job, schedule, rents) for place, job in enumerate(jobs)]
    end = max(schedule.ends)
    held = [(each.end - each.start, each.shares) for each in schedule.stretches]
    idle = rents.owned_dollars[-1] * end
    idle -= sum(time * rents.owned_dollars[share] for time, share in held)
    idle_dollars = max(0.0, idle) / SECONDS_PER_HOUR
    busy = sum(each.steps * jobs[each.job].speeds[each.shares].busy for each in schedule.stretches)
    unheld = rents.owned_gpus[-1] * end
    unheld -= sum(time * rents.owned_gpus[share] for time, share in held)
    paid = sum(time * rents.gpus[share] for time, share in held) + max(0.0, unheld)
    weights = [job.priority for job in jobs]
    waited = sum(w * each.seconds for w, each in zip(weights, outcomes, strict=True))
    return SharingPlan(
        name=candidate.name,
        sizes=list(candidate.sizes),
        jobs=outcomes,
        seconds=end,
        mean_seconds=waited / sum(weights),
        lateness=sum(each.lateness for each in outcomes),
        dollars=sum(each.dollars for each in outcomes) + idle_dollars,
        idle_dollars=idle_dollars,
        utilisation=busy / paid,
        stretches=[
            JobStretch(
                job=each.job,
                start=each.start,
                end=each.end,
                share=each.shares,
                kind=each.kind,
                steps=each.steps,
            )
            for each in schedule.stretches
        ],
    )


def _outcome(place: int, job: ScheduledJob, schedule: Schedule, rents: Rents) -> JobOutcome:
    own = [each for each in schedule.stretches if each.job == place]
    rent = sum((each.end - each.start) * rents.dollars[each.shares] for each in own)
    other = sum(each.steps * job.speeds[each.shares].other_dollars for each in own)
    end = schedule.ends[place]
    return JobOutcome(
        end=end,
        seconds=end - job.submitted_at,
        dollars=rent / SECONDS_PER_HOUR + other,
        lateness=max(0.0, end - job.deadline),
        restarts=max(0, sum(each.kind == "run" for each in own) - 1),
    )


def figures_alone(job: ScheduledJob, num_shares: int, rents: Rents) -> SharingPlan:
    """Return the figures of a job that has all GPUs from its submission on, and needs no other job to end."""
    sizes = (job.best_share(num_shares),)
    candidate = make_candidate("static-split", sizes, num_shares, inf)
    found = figures_of([job._replace(submitted_at=0.0, deadline=inf)], candidate, num_shares, rents)
    assert found is not None, "it has a share on which it fits"
    return found


def ranking(schedule: ScheduleConfig, option: SharingPlan) -> tuple[float, float, float]:
    """Return the key by which ways of sharing are compared: lateness, the objective, then the other objective."""
    values = option.mean_seconds, option.dollars
    first, second = values if schedule.objective == "completion" else values[::-1]
    return round(option.lateness / SAME_LATENESS), first, second
