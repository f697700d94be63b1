"""The sections of a cluster file: jobs that share the GPUs of its pools, and how they may share them."""

from __future__ import annotations

from typing import Literal

from streamrl.runfile.cluster_config import ClusterConfig
from streamrl.runfile.section import Section
from streamrl.runfile.units import Bandwidth, Duration

SharingName = Literal["equal-split", "static-split", "time-slicing", "lending", "preemption"]
"""How jobs share GPUs. Each has its function in `sim/jobs/sharing.py`."""


JOBS = "jobs"
"""The key that tells a cluster file from a run file."""
MOST_SHARES = 16
"""Maximum parts of a pool. Each job is planned once for each number of shares."""


class JobConfig(Section, frozen=True, kw_only=True):
    """One job: a run file whose `[cluster]` is replaced by that of the cluster file."""

    name: str
    """Its name in tables and file names, such as "math"."""
    run: str
    """Path of its run file, as seen from the cluster file, such as "../plan-7b.toml". Its objective, deadline and
    budgets (section plan) do not count.
    """
    set: tuple[str, ...] = ()
    """Changes of its run file, each as `--set` takes it: `["algorithm.steps=500"]`."""
    priority: float = 1.0
    """Weight of its end in the objective. With preemption, it takes GPUs from jobs with a lower priority, unless those
    have an earlier deadline.
    """
    deadline: Duration | None = None
    """Latest end, from the start of the schedule, such as "3 days"."""
    submitted: Duration = Duration(0.0)
    """Time at which it may start, from the start of the schedule, such as "6 h"."""


class ScheduleConfig(Section, frozen=True, kw_only=True):
    """How `streamrl plan` shares the GPUs between jobs."""

    objective: Literal["completion", "dollars"] = "completion"
    """What to minimise once all deadlines are met. completion: the mean time from submission to end, weighted
    by `priority`. dollars: the dollars of all jobs and of idle GPUs that you own.
    """
    sharing: tuple[SharingName, ...] | None = None
    """The ways of sharing to compare; all where absent. equal-split is always compared."""
    shares: int | None = None
    """Equal parts into which each pool is divided; a job gets one or more of them. Where absent, one for each
    node, or for each GPU of a pool with one node, and at most 8. A job has the same part of every pool.
    """
    slice: Duration = Duration(4 * 3600.0)
    """Time-slicing: time for which a job has all GPUs before the next one has its turn."""
    storage_bandwidth: Bandwidth = Bandwidth(1e9)
    """Rate at which one node writes and reads checkpoints. The default is that of Llama 3's training: 2 TB/s for
    the 2,000 nodes of 16,000 GPUs (arXiv 2407.21783, section 3.3.1).
    """
    start_time: Duration = Duration(180.0)
    """Time until the engines and the trainer of a job have started, in addition to reading its checkpoint. It
    counts only if its run file has no `rollout.start_time` and no `trainer.start_time`. The default is an
    assumption.
    """
    time_limit: Duration = Duration(300.0)
    """Time for planning the jobs at all numbers of GPUs. Each of these plans gets an equal part of what is left."""


class ClusterFile(Section, frozen=True, kw_only=True):
    """A cluster file: several jobs on one set of pools, for `streamrl plan`."""

    cluster: ClusterConfig
    """The pools that all jobs share, and the links between them. Keys are those of a run file."""
    jobs: tuple[JobConfig, ...]
    schedule: ScheduleConfig = ScheduleConfig()
