"""The result of planning several jobs: each way of sharing with its figures, written as cluster.json."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from streamrl.record.band import Band
from streamrl.runfile.jobs_config import SharingName
from streamrl.runfile.reading import decode_json
from streamrl.runfile.recorded_numbers import Count, NotNegative, Number, Ordinal, Positive, Setting
from streamrl.runfile.result_files import check_results

CLUSTER_JSON = "cluster.json"


class JobShare(msgspec.Struct, frozen=True, kw_only=True):
    """A job at one number of shares: its plan there, and its simulated speed."""

    share: Ordinal
    gpus: dict[str, Count]
    """GPUs that it has of each pool."""
    choice: str
    """Its plan in one line."""
    settings: dict[str, Setting]
    """All keys of the run file that the plan sets."""
    step_time: Positive
    """Mean seconds of a step, with its part of checkpoints and evaluations."""
    step_time_band: Band
    """Range in which they may truly be: sampling error and model error."""
    utilisation: NotNegative
    """Share of the GPU-seconds of a step in which its GPUs work."""
    start_time: NotNegative
    """Seconds from its GPUs to its first step at full pace."""
    load_time: NotNegative
    save_time: NotNegative
    """Seconds to read and to write a checkpoint."""
    dollars_per_hour: NotNegative


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job of the cluster file."""

    name: str
    run: str
    """Its run file, as the cluster file has it."""
    steps: Ordinal
    priority: Positive
    deadline: NotNegative | None
    """Seconds from the start of the schedule."""
    submitted: NotNegative
    shares: list[JobShare]
    """The shares at which it fits, in rising order."""
    misfits: dict[str, str] = {}
    """The reason why it has no plan, by share."""


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a way of sharing means for one job."""

    end: Positive
    """Seconds from the start of the schedule."""
    seconds: Positive
    """Seconds from its submission to its end."""
    dollars: NotNegative
    """For the GPUs that it holds, and its traffic and sandboxes."""
    lateness: NotNegative = 0.0
    """Seconds by which it misses its deadline."""
    restarts: Count = 0
    """Times that it saves, stops and starts again."""


class JobStretch(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which a job holds the same GPUs and does one thing."""

    job: Count
    """Its place in the list of jobs, from 0."""
    start: NotNegative
    end: NotNegative
    share: Ordinal
    kind: Literal["switch", "run"]
    """switch: it starts, reads or writes a checkpoint. run: it makes steps."""
    steps: Count = 0


class SharingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One way of sharing, with its best sizes, simulated."""

    name: SharingName
    sizes: list[Count]
    """Shares of each job: those that it owns, or, with preemption, those that it wants. Empty for time-slicing."""
    jobs: list[JobOutcome]
    seconds: Positive
    """Until the last job ends."""
    mean_seconds: Positive
    """From submission to end, weighted by priority."""
    lateness: NotNegative
    """Seconds by which jobs miss their deadlines, added up."""
    dollars: NotNegative
    """Of all jobs, and of idle GPUs that you own."""
    idle_dollars: NotNegative
    """The part of it for GPUs that you own and that no job holds."""
    utilisation: NotNegative
    """GPU-seconds in which GPUs work, as a share of those that are paid for."""
    stretches: list[JobStretch]


class SeedCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen way of sharing against the equal split, with simulations of another seed."""

    ratio: Positive
    """Objective of the chosen way, divided by that of the equal split."""
    planned_ratio: Positive
    """The same by the figures that the choice was made by."""


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The complete result of `streamrl plan` for a cluster file."""

    objective: Literal["completion", "dollars"]
    num_shares: Ordinal
    gpus: dict[str, Count]
    """GPUs of each pool."""
    jobs: list[PlannedJob]
    alone: list[SharingPlan]
    """Each job alone on all GPUs, in the order of the jobs; the other jobs are absent."""
    options: list[SharingPlan]
    """The ways of sharing that were compared, in the order of the docs."""
    chosen: SharingName
    left_out: dict[str, str] = {}
    """Ways of sharing that cannot be, each with the reason."""
    check: SeedCheck | None = None
    """None if the equal split was chosen or cannot be."""
    seconds: NotNegative
    """Seconds that planning took."""

    @property
    def choice(self) -> SharingPlan:
        """Return the chosen way of sharing."""
        return next(option for option in self.options if option.name == self.chosen)

    def value_of(self, option: SharingPlan) -> Number:
        """Return the objective of a way of sharing: seconds or dollars."""
        return option.mean_seconds if self.objective == "completion" else option.dollars


def plan_data(plan: ClusterPlan) -> bytes:
    """Return the bytes of cluster.json."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n"


def read_cluster_plan(path: Path | str) -> ClusterPlan:
    """Read the file cluster.json of a plan.

    Raises:
        ValueError: the file is missing or is no such plan, or its directory mixes the results of two commands.
    """
    check_results(Path(path))
    try:
        plan = decode_json(path, ClusterPlan)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{path}: not a plan of a cluster file: {error}") from None
    named = [stretch.job for option in plan.options for stretch in option.stretches]
    if max(named, default=-1) >= len(plan.jobs):
        raise ValueError(
            f"{path}: not a plan of a cluster file: it names job {max(named)} of {len(plan.jobs)}"
        )
    if plan.chosen not in {option.name for option in plan.options}:
        raise ValueError(
            f"{path}: not a plan of a cluster file: its choice {plan.chosen!r} has no figures"
        )
    return plan
