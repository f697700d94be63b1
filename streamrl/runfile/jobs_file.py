"""Read a cluster file: several jobs, each with a run file, on one set of pools.

A cluster file has the key `jobs`, which no run file has. Each job's run file gets the `[cluster]` of the cluster file, so
all keys of pools and links are checked as in a run file.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streamrl.runfile.cluster_config import ClusterConfig, PoolConfig
from streamrl.runfile.errors import Bounds, OneOf, RunError, raise_all
from streamrl.runfile.field_checks import (
    check_bounds,
    check_filled,
    find_section_errors,
    sections_in,
)
from streamrl.runfile.files import Offer, make_offer, read_any_table, read_table
from streamrl.runfile.formatting import format_duration
from streamrl.runfile.jobs_config import JOBS, ClusterFile, JobConfig, ScheduleConfig
from streamrl.runfile.keys import join_key, pool_key
from streamrl.runfile.python_values import Changes
from streamrl.runfile.reading import read_toml
from streamrl.runfile.section import Section, fields_of
from streamrl.runfile.short_forms import in_full
from streamrl.runfile.units import read_quantity

MOST_JOBS = 8
"""Maximum jobs of a cluster file. The number of ways to share GPUs grows with its power."""
USUAL_SHARES = 8
"""Most shares if `schedule.shares` is absent."""
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
"""Names of jobs: parts of file names, of shell commands and of Kubernetes objects."""


class Job(NamedTuple):
    """One job of a cluster file, with its run file on the whole cluster."""

    config: JobConfig
    offer: Offer
    path: Path
    """Its run file."""


class Jobs(NamedTuple):
    """A cluster file that was read."""

    cluster: ClusterConfig
    jobs: tuple[Job, ...]
    schedule: ScheduleConfig
    num_shares: int
    """Equal parts of each pool, of which a job gets one or more."""


def is_cluster_file(path: Path) -> bool:
    """Return whether a file is a cluster file, not a run file; False for an unreadable file."""
    try:
        return JOBS in read_toml(path)
    except (OSError, ValueError, RecursionError):
        return False


def load_jobs(path: Path | str, overrides: Changes = ()) -> Jobs:
    """Read a cluster file and the run files of its jobs, with changes applied to the cluster file.

    Raises:
        RunError: one line that names the key, its value and what would be right.
        ValueError: a file is missing or no TOML, or the run file of a job is wrong. The error names the job.
    """
    path = Path(path)
    table = in_full(read_any_table(path, overrides))
    raise_all(_errors(table))
    file = msgspec.convert(table, ClusterFile, dec_hook=read_quantity)
    check_bounds(sections_in(file))
    check_filled("schedule.sharing", file.schedule.sharing, "the ways of sharing to compare")
    _check_names(file.jobs)
    _check_bill(file.cluster)
    _check_times(file.jobs)
    _check_changes(file.jobs)
    jobs = tuple(_job(place, job, table, path.parent) for place, job in enumerate(file.jobs))
    cluster = jobs[0].offer.run.cluster  # as a run file has it
    return Jobs(cluster, jobs, file.schedule, _num_shares(cluster, file.schedule))


def _errors(table: dict[str, Any]) -> Iterator[RunError]:
    """Yield all errors in keys and types of a cluster file."""
    for error in find_section_errors(table, ClusterFile):
        yield _unknown(error) if error.problem == "unknown key" else error


def _unknown(error: RunError) -> RunError:
    """Return the error of an unknown key with the nearest key of a cluster file."""
    section, _, name = error.key.rpartition(".")
    if section.startswith("cluster"):
        return error
    kinds = {"": ClusterFile, "schedule": ScheduleConfig}
    near = difflib.get_close_matches(name, kinds.get(section, JobConfig).__struct_fields__, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    text = f"{error.key} is not a key of a cluster file{hint}"
    meant = OneOf([join_key(section, each) for each in near])
    return RunError(error.key, error.value, meant, text, problem="unknown key")


def _check_names(jobs: tuple[JobConfig, ...]) -> None:
    """Raise `RunError` unless there are one to `MOST_JOBS` jobs with different names."""
    if not 1 <= len(jobs) <= MOST_JOBS:
        text = f"jobs must have 1 to {MOST_JOBS} entries, got {len(jobs)}"
        raise RunError(JOBS, len(jobs), Bounds(1, MOST_JOBS), text)
    names = [job.name for job in jobs]
    for place, name in enumerate(names):
        if not NAME.fullmatch(name):
            text = f"jobs.{place}.name is {name!r}; write up to 40 small letters, digits and hyphens, such as 'math'"
            raise RunError(f"jobs.{place}.name", name, text=text)
        if name in names[:place]:
            text = f"jobs.{place}.name is {name!r}, as that of another job; give each job its own"
            raise RunError(f"jobs.{place}.name", name, text=text)


def _check_times(jobs: tuple[JobConfig, ...]) -> None:
    """Refuse a job that must end before it may start."""
    for place, job in enumerate(jobs):
        if job.deadline is not None and job.deadline <= job.submitted:
            key = f"jobs.{place}.deadline"
            end, start = format_duration(job.deadline), format_duration(job.submitted)
            text = f"{key} is {end}, which is not after jobs.{place}.submitted ({start}); both are from the start of the schedule"
            raise RunError(key, job.deadline, text=text)


DECIDED = {
    "cluster": "the cluster file has the cluster of all jobs",
    **dict.fromkeys(
        ("plan.deadline", "plan.objective", "plan.value_of_hour"),
        "a job has jobs.deadline and jobs.priority, and schedule.objective is that of all jobs",
    ),
    "plan.budget": "jobs have no budgets",
}
"""Beginnings of keys that have no effect on a job, with the reason."""


def _check_changes(jobs: tuple[JobConfig, ...]) -> None:
    """Refuse changes of a job's run file that have no effect on a schedule."""
    for place, job in enumerate(jobs):
        for change in job.set:
            name = change.partition("=")[0].strip()
            why = next((why for key, why in DECIDED.items() if name.startswith(key)), None)
            if why is not None:
                key = f"jobs.{place}.set"
                text = f"{key} names {name}, which has no effect: {why}; remove it"
                raise RunError(key, change, text=text, problem="unused key")


def _check_bill(cluster: ClusterConfig) -> None:
    """Refuse keys of a bill that is of one run: a schedule is charged by GPU-hours."""
    keys = [f"cluster.billing.{key}" for key in _stated(cluster.billing)]
    for name, pool in cluster.pools.items():
        keys += [
            pool_key(name, key)
            for key in ("billing_unit", "minimum_term", "on_demand_price")
            if getattr(pool, key)
        ]
    if keys:
        text = (
            f"{keys[0]} has no effect on several jobs, which are charged by GPU-hours; remove it, and set it in the run "
            "files that `plan -o` writes"
        )
        raise RunError(keys[0], None, text=text, problem="unused key")


def _stated(section: Section) -> Iterator[str]:
    """Yield the keys of a section that have another value than their default."""
    for field in fields_of(type(section)):
        if getattr(section, field.name) != field.default:
            yield field.name


def _job(place: int, config: JobConfig, table: dict[str, Any], base: Path) -> Job:
    """Return a job with its run file on the cluster of the cluster file.

    Raises:
        ValueError: the run file is missing or wrong. The error names the job.
    """
    path = Path(os.path.normpath(base / config.run))
    try:
        own = read_table(path, config.set)
        own["cluster"] = copy.deepcopy(table["cluster"])
        return Job(config, make_offer(own, path.parent), path)
    except ValueError as error:
        raise ValueError(f"jobs.{place} ({config.name}): {error}") from None


def _num_shares(cluster: ClusterConfig, schedule: ScheduleConfig) -> int:
    """Return the number of equal parts of each pool.

    Raises:
        RunError: a pool has fewer nodes, or GPUs if it has one node.
    """
    most = min(map(units_of, cluster.pools.values()))
    if schedule.shares is None:
        return min(most, USUAL_SHARES)
    if schedule.shares > most:
        key, allowed = "schedule.shares", Bounds(1, most)
        text = (
            f"{key} is {schedule.shares}, and the smallest pool has {most} nodes (or GPUs, if it has one node); write at "
            f"most {most}"
        )
        raise RunError(key, schedule.shares, allowed, text)
    return schedule.shares


def units_of(pool: PoolConfig) -> int:
    """Return the parts of a pool that a job can have: its nodes, or the GPUs of a single node."""
    return pool.nodes if pool.nodes > 1 else pool.gpus_per_node


def cluster_of(cluster: ClusterConfig, share: int, num_shares: int) -> ClusterConfig:
    """Return the pools of which a job has `share` of `num_shares` equal parts, rounded down to nodes."""
    pools = {}
    for name, pool in cluster.pools.items():
        units = units_of(pool) * share // num_shares
        size = {"nodes": units} if pool.nodes > 1 else {"gpus_per_node": units}
        pools[name] = msgspec.structs.replace(pool, **size)
    found: ClusterConfig = msgspec.structs.replace(cluster, pools=pools)
    return found
