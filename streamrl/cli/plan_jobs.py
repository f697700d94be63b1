"""`streamrl plan CLUSTER.toml`: several jobs on the GPUs of one set of pools."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from msgspec.structs import replace

from streamrl.cli.output import echo
from streamrl.cli.progress import plan_progress
from streamrl.cli.shared import print_json, simulating_on, sole_writer, stdout_console
from streamrl.export.job_scripts import (
    FILES,
    ExportedSchedule,
    ExportedStretch,
    SchedulerName,
    check_pool_names,
    scheduler_file,
    scheduler_name,
    waits_of,
)
from streamrl.report.figures import jobs_figure, png_of
from streamrl.report.jobs_report import decision_text, jobs_report
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import ExecuteConfig
from streamrl.runfile.files import run_text
from streamrl.runfile.jobs_file import Job, Jobs, cluster_of, load_jobs
from streamrl.runfile.paths import check_no_directory
from streamrl.runfile.result_files import write_file, write_results
from streamrl.sim.jobs.plan import (
    CLUSTER_JSON,
    ClusterPlan,
    JobStretch,
    PlannedJob,
    SharingPlan,
    plan_data,
)
from streamrl.sim.jobs.planner import PlannedCluster, plan_jobs

JOBS_PNG = "jobs.png"


def plan_cluster(
    path: Path,
    overrides: list[str],
    output: Path | None,
    export: str | None,
    ray: str | None,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Plan the jobs of a cluster file, print the result, and write it to a directory."""
    scheduler = None if export is None else scheduler_name(export)
    jobs = load_jobs(path, overrides)
    if scheduler is not None:
        check_pool_names(jobs.cluster.pools)
        output = output or Path()
    with nullcontext() if output is None else sole_writer(output):
        if output is not None:
            _claim(output, jobs, scheduler, force=force)
        with plan_progress() as watch, simulating_on(ray, plan_jobs.__module__):
            planned = plan_jobs(jobs, watch)
        if output is not None:
            _write(planned, jobs, output, path)
        if as_json:
            print_json(planned.plan)
        else:
            _print(planned.plan, output)
        if output is not None and scheduler is not None:
            _export(planned, jobs, output / FILES[scheduler], scheduler, as_json=as_json)


def _print(plan: ClusterPlan, output: Path | None) -> None:
    stdout_console().print(jobs_report(plan))
    if output is None:
        echo("nothing was written: -o DIR writes the plan, a run file for each job, and a picture")
    else:
        echo(
            f"written to {output}: {CLUSTER_JSON}, {JOBS_PNG} and a run file for each job and size"
        )


def _export(
    planned: PlannedCluster, jobs: Jobs, path: Path, scheduler: SchedulerName, *, as_json: bool
) -> None:
    """Write the file of a scheduler next to the plan, which is already written."""
    try:
        text = scheduler_file(scheduler, _exported(planned, jobs))
    except ValueError as error:
        raise RuntimeError(f"the plan was written, but {path} was not: {error}") from None
    write_file(path, text)
    if not as_json:
        start = "bash" if path.suffix == ".sh" else "kubectl apply -f"
        echo(f"written to {path}; in that directory: {start} {path.name}")


def _claim(output: Path, jobs: Jobs, scheduler: SchedulerName | None, *, force: bool) -> None:
    """Refuse to replace files of an earlier plan, and jobs with the same run directory, before any work."""
    owners: dict[str, str] = {}
    for place, job in enumerate(jobs.jobs):
        own = _own_output(job.offer.run.execute, job, output).output
        if (other := owners.setdefault(own, job.config.name)) != job.config.name:
            raise ValueError(
                f"jobs.{place} ({job.config.name}): execute.output is {own}, as that of job {other}; give each job its own: "
                f"jobs.{place}.set = ['execute.output=runs/{job.config.name}']"
            )
    names = [CLUSTER_JSON, JOBS_PNG]
    names += [
        run_file_name(job, jobs, share)
        for job in jobs.jobs
        for share in range(1, jobs.num_shares + 1)
    ]
    names += [] if scheduler is None else [FILES[scheduler]]
    for name in names:
        check_no_directory(output / name, "--output")
        if (output / name).exists() and not force:
            raise ValueError(f"{output / name} exists already; use --force to replace it")


def run_file_name(job: Job, jobs: Jobs, share: int) -> str:
    """Return the name of the run file of a job at a share: `math-16-gpus.toml`."""
    pools = cluster_of(jobs.cluster, share, jobs.num_shares).pools.values()
    return f"{job.config.name}-{sum(pool.num_gpus for pool in pools)}-gpus.toml"


def _write(planned: PlannedCluster, jobs: Jobs, output: Path, path: Path) -> None:
    """Write the plan, its picture and the run files of the chosen schedule, together."""
    plan = planned.plan
    files: dict[str, bytes | str | None] = {CLUSTER_JSON: plan_data(plan)}
    files[JOBS_PNG] = png_of(jobs_figure(plan))
    used = sorted({(each.job, each.share) for each in plan.choice.stretches})
    for place, share in used:
        job = jobs.jobs[place]
        name = run_file_name(job, jobs, share)
        notes = [
            f"Chosen by `streamrl plan {shlex.quote(str(path))}` for job {job.config.name}:",
            decision_text(plan),
        ]
        run = planned.runs[place, share]
        run = replace(run, execute=_own_output(run.execute, job, output))
        settings = next(s.settings for s in plan.jobs[place].shares if s.share == share)
        files[name] = run_text(run, output / name, notes, settings, job.path.parent)
    write_results(output, files)


def _own_output(execute: ExecuteConfig, job: Job, output: Path) -> ExecuteConfig:
    """Return the section with a run directory for the job, unless its file names one: all sizes share it."""
    default = os.path.normpath(job.path.parent / ExecuteConfig().output)
    if execute.output != default:
        return execute
    own = os.path.normpath(output / "runs" / job.config.name)
    changed: ExecuteConfig = replace(execute, output=own)
    return changed


# The schedule for a cluster -----------------------------------------------------------------------


def _exported(planned: PlannedCluster, jobs: Jobs) -> ExportedSchedule:
    """Return the chosen schedule as the exports need it."""
    option = planned.plan.choice
    holdings = _holdings(option)
    names = [job.config.name for job in jobs.jobs]
    rows = [(names[each.job], each.start, each.end, each.share) for each in holdings]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, each in enumerate(holdings):
        first.setdefault(each.job, place)
        last[each.job] = place
    stretches = [
        ExportedStretch(
            job=names[each.job],
            run_file=run_file_name(jobs.jobs[each.job], jobs, each.share),
            pools=_pools_of(planned.plan.jobs[each.job], each.share, jobs),
            start=each.start,
            end=each.end,
            is_first=first[each.job] == place,
            is_last=last[each.job] == place,
            waits_for=waits,
            priority=jobs.jobs[each.job].config.priority,
            submitted=jobs.jobs[each.job].config.submitted,
        )
        for place, (each, waits) in enumerate(
            zip(holdings, waits_of(rows, jobs.num_shares), strict=True)
        )
    ]
    return ExportedSchedule(stretches, jobs.cluster.pools, takes_turns=not option.sizes)


def _pools_of(job: PlannedJob, share: int, jobs: Jobs) -> Mapping[str, PoolConfig]:
    """Return the pools of a share that the job's plan uses, the trainer's first."""
    settings = next(each.settings for each in job.shares if each.share == share)
    used = [str(value) for key, value in settings.items() if key.endswith(".pool")]
    pools = cluster_of(jobs.cluster, share, jobs.num_shares).pools
    names = [str(settings["trainer.pool"]), *used]
    return {name: pools[name] for name in dict.fromkeys(names) if name in pools}


def _holdings(option: SharingPlan) -> list[JobStretch]:
    """Join the stretches in which a job holds the same GPUs without a break, in the order of their starts."""
    joined: list[JobStretch] = []
    latest: dict[int, int] = {}
    for each in sorted(option.stretches, key=lambda stretch: (stretch.job, stretch.start)):
        at = latest.get(each.job)
        before = None if at is None else joined[at]
        if before is not None and at is not None and _goes_on(before, each):
            joined[at] = replace(before, end=each.end, steps=before.steps + each.steps)
        else:
            latest[each.job] = len(joined)
            joined.append(each)
    return sorted(joined, key=lambda stretch: (stretch.start, stretch.job))


def _goes_on(before: JobStretch, each: JobStretch) -> bool:
    return before.share == each.share and each.start - before.end < 1e-3
