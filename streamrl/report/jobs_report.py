"""Show the plan of several jobs on a terminal: the ways of sharing, and each job beside the same job alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.runfile.formatting import format_share, listing, long_dollars, long_time
from streamrl.sim.jobs.plan import ClusterPlan, JobOutcome, JobShare, PlannedJob, SharingPlan

MEANINGS = {
    "equal-split": "each job has the same constant part",
    "static-split": "each job has a constant part",
    "time-slicing": "jobs take turns on all GPUs",
    "lending": "each job has its part, and those of absent jobs are lent to others",
    "preemption": "jobs are served by deadline, priority and length; what is left over is lent",
}
"""What the ways of sharing mean, in the order of the tables."""


def jobs_report(plan: ClusterPlan) -> RenderableType:
    """Lay out the plan of a cluster file for a terminal."""
    parts: list[RenderableType] = [Text(decision_text(plan), style="bold"), Text()]
    parts += [_ways(plan), Text(), _jobs(plan), Text()]
    return Group(*parts, *map(Text, note_lines(plan)))


def decision_text(plan: ClusterPlan) -> str:
    """Return the chosen way of sharing in a sentence: "Share 64 h800 by lending: math 16, code 48 GPUs"."""
    gpus = listing([f"{count} {pool}" for pool, count in plan.gpus.items()])
    sizes = sizes_text(plan, plan.choice)
    return f"Share {gpus} by {plan.chosen}: {sizes or MEANINGS[plan.chosen]}."


def sizes_text(plan: ClusterPlan, option: SharingPlan) -> str:
    """Return the GPUs that each job owns or wants: "math 16, code 48 GPUs"; empty without sizes."""
    pairs = zip(plan.jobs, option.sizes, strict=False)
    told = [f"{job.name} {_gpus_of(job, size)}" for job, size in pairs]
    return f"{', '.join(told)} GPUs" if told else ""


def _gpus_of(job: PlannedJob, share: int) -> int:
    return next((sum(each.gpus.values()) for each in job.shares if each.share == share), 0)


def _ways(plan: ClusterPlan) -> Table:
    table = Table(title="ways of sharing", title_justify="left")
    for name in ("sharing", "all end after", "mean time", "cost", "GPUs busy", "late by"):
        table.add_column(name, justify="left" if name == "sharing" else "right")
    table.add_column("GPUs of each job")
    for option in plan.options:
        is_chosen = option.name == plan.chosen
        table.add_row(
            option.name,
            long_time(option.seconds),
            long_time(option.mean_seconds),
            long_dollars(option.dollars),
            format_share(option.utilisation, 0),
            long_time(option.lateness) if option.lateness else "",
            sizes_text(plan, option),
            style="bold" if is_chosen else "",
        )
    return table


def _jobs(plan: ClusterPlan) -> Table:
    table = Table(title=f"jobs by {plan.chosen}, and alone on all GPUs", title_justify="left")
    for name in ("job", "takes", "cost", "restarts", "deadline"):
        table.add_column(name, justify="left" if name == "job" else "right")
    for name in ("alone", "cost alone", "GPUs busy alone", "times as long"):
        table.add_column(name, justify="right")
    for job, own, alone in zip(plan.jobs, plan.choice.jobs, plan.alone, strict=True):
        table.add_row(
            job.name,
            long_time(own.seconds),
            long_dollars(own.dollars),
            str(own.restarts),
            _deadline_text(job, own),
            long_time(alone.seconds),
            long_dollars(alone.dollars),
            format_share(alone.utilisation, 0),
            f"{own.seconds / alone.seconds:.2f}",
        )
    return table


def _deadline_text(job: PlannedJob, own: JobOutcome) -> str:
    if job.deadline is None:
        return ""
    return f"{long_time(own.lateness)} late" if own.lateness else "met"


def note_lines(plan: ClusterPlan) -> Iterator[str]:
    """Yield what the choice rests on, one line each."""
    chosen = plan.choice
    goal = "mean time, weighted by priority" if plan.objective == "completion" else "cost"
    yield f"chosen: the least time beyond deadlines, then the least {goal}"
    if plan.check is not None:
        change = plan.check.ratio - 1
        planned = plan.check.planned_ratio - 1
        yield (
            f"against equal-split: {planned * 100:+.1f} % in {goal}; simulated again with another seed: "
            f"{change * 100:+.1f} %"
        )
    if chosen.idle_dollars:
        yield f"idle GPUs that you own cost {long_dollars(chosen.idle_dollars)} of the total"
    low, high = _model_range(plan)
    yield (
        f"range of every time and cost with sampling and model error: {(low - 1) * 100:+.0f} to {(high - 1) * 100:+.0f} %; "
        "it is about the same in all rows"
    )
    if switch := _switch_text(plan):
        yield switch
    for name, reason in plan.left_out.items():
        yield f"not possible: {name}: {reason}"
    for job in plan.jobs:
        for share, reason in job.misfits.items():
            yield f"no plan for {job.name} on {share} of {plan.num_shares} shares: {reason}"


def _model_range(plan: ClusterPlan) -> tuple[float, float]:
    """Return the lowest and highest ratio of true to simulated seconds, over all shares that jobs may have."""
    low, high = inf, 0.0
    for each in _every_share(plan):
        middle = max(0.0, each.step_time_band.low * each.step_time_band.high) ** 0.5
        spread = each.step_time_band.high / middle if middle else 1.0
        low, high = min(low, 1 / spread), max(high, spread)
    return low, high


def _every_share(plan: ClusterPlan) -> Iterator[JobShare]:
    return (share for job in plan.jobs for share in job.shares)


def _switch_text(plan: ClusterPlan) -> str:
    """Return what a change of GPUs costs, as a range over all shares; empty without restarts."""
    if not any(own.restarts for option in plan.options for own in option.jobs):
        return ""
    costs = [each.save_time + each.load_time + each.start_time for each in _every_share(plan)]
    least, most = long_time(min(costs)), long_time(max(costs))
    text = least if least == most else f"{least} to {most}"
    return f"a restart takes {text}: save, load, start, and fill the pipeline"
