"""Write a schedule of several jobs for what runs it on a cluster: Slurm, Ray or Kueue.

A stretch is a time in which a job has the same GPUs. It is one Slurm job, one Ray job, or one admission by Kueue. It begins
with the run file of its GPUs, and later stretches resume from the checkpoint of the one before. `execute.deadline` ends
a stretch that ends before its job does: the run is saved and stopped in time.

- Slurm and Ray get the stretches in order. Each waits for the stretches whose GPUs it takes.
- Kueue decides itself who runs when, by quota and priority. It cannot change the GPUs of a job, so each job must have one size.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, assert_never, get_args

from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.errors import OneOf, RunError
from streamrl.runfile.escaping import visible
from streamrl.runfile.units import Duration, quantity_text

SchedulerName = Literal["slurm", "ray", "kueue"]
FILES: dict[SchedulerName, str] = {
    "slurm": "slurm.sh",
    "ray": "ray.sh",
    "kueue": "kueue.json",
}
"""File of each scheduler, in the directory of the plan."""
SLURM_SCRIPT = "examples/clusters/slurm.sh"
MOMENT = 1e-3
"""Seconds within which two instants are the same."""
KUEUE, QUEUE, GPU_RESOURCE = "kueue.x-k8s.io/v1beta1", "streamrl", "nvidia.com/gpu"
VALUE_OF_PRIORITY = 1000
"""Kueue's priorities are whole numbers."""
INSTEAD = "; export to slurm or ray, or plan with --set schedule.sharing=['static-split']"
IMAGE, VOLUME = "streamrl:latest", "streamrl"
"""Container image and volume claim of Kueue's pods, as in examples/clusters/kuberay.yaml."""

POOL_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")
"""Names of pools: values of labels in Kubernetes, and parts of words in a shell."""


class ExportedStretch(NamedTuple):
    """A time in which a job has the same GPUs."""

    job: str
    run_file: str
    """Its file in the directory of the plan."""
    pools: Mapping[str, PoolConfig]
    """The pools with the nodes that it has, the trainer's first."""
    start: float
    end: float
    """Seconds from the start of the schedule."""
    is_first: bool
    """Whether its job has no checkpoint yet."""
    is_last: bool
    """Whether its job ends with it."""
    waits_for: Sequence[int]
    """Places of the stretches that must have ended: the one before of its job, and those whose GPUs it takes."""
    priority: float
    submitted: float


def scheduler_name(name: str) -> SchedulerName:
    """Return the name of a scheduler, checked.

    Raises:
        RunError: it is no scheduler that a schedule can be written for.
    """
    for known in get_args(SchedulerName):
        if known == name:
            found: SchedulerName = known
            return found
    known_names = get_args(SchedulerName)
    text = f"--export must be one of {', '.join(known_names)} for a cluster file, got {name!r}"
    raise RunError("--export", name, OneOf(known_names), text)


class ExportedSchedule(NamedTuple):
    """A schedule to run on a cluster."""

    stretches: Sequence[ExportedStretch]
    """In the order of their starts."""
    pools: Mapping[str, PoolConfig]
    """All pools that the jobs share."""
    takes_turns: bool
    """Whether jobs take turns after a time slice."""


def scheduler_file(name: SchedulerName, schedule: ExportedSchedule) -> str:
    """Return the text of the file of a scheduler.

    Raises:
        ValueError: the scheduler cannot run this schedule.
    """
    match name:
        case "slurm":
            lines = _slurm(schedule.stretches)
        case "ray":
            lines = _ray(schedule.stretches)
        case "kueue":
            lines = _kueue(schedule)
        case _:
            assert_never(name)
    return "".join(f"{line}\n" for line in lines)


def check_pool_names(pools: Iterable[str]) -> None:
    """Check the names of the pools of a schedule that will be exported.

    Raises:
        RunError: a name is no part of a shell word or of a name in Kubernetes, or Kubernetes has two pools of that name.
    """
    seen: dict[str, str] = {}
    for pool in pools:
        if POOL_NAME.fullmatch(pool) is None:
            rule = "letters and digits, with - and _ between them, at most 63 in all"
            text = (
                f"cluster.pools.{visible(pool)}: --export needs a name of {rule}; rename the pool"
            )
            raise RunError(f"cluster.pools.{pool}", pool, text=text)
        other = seen.setdefault(_flavor(pool), pool)
        if other != pool:
            text = f"cluster.pools.{pool}: Kubernetes takes it for the pool {other}; rename one of them"
            raise RunError(f"cluster.pools.{pool}", pool, text=text)


def waits_of(
    stretches: Sequence[tuple[str, float, float, int]], num_shares: int
) -> list[list[int]]:
    """Return for each stretch the earlier ones that it waits for: its job's last one, and the last holders of its GPUs.

    A job keeps the GPUs that it had, and otherwise takes those that were free first.

    Args:
        stretches: job, start, end and shares of each, in the order of their starts.
        num_shares: equal parts of the pools.
    """
    holder: list[int | None] = [None] * num_shares
    free_at = [0.0] * num_shares
    latest: dict[str, int] = {}
    found = []
    for place, (job, start, end, shares) in enumerate(stretches):
        own = latest.get(job)
        free = [each for each in range(num_shares) if free_at[each] <= start + MOMENT]
        free.sort(key=lambda each: (own is None or holder[each] != own, free_at[each], each))
        waits = {holder[each] for each in free[:shares]} | {own}
        found.append(sorted(each for each in waits if each is not None))
        for each in free[:shares]:
            holder[each], free_at[each] = place, end
        latest[job] = place
    return found


def _head(what: str) -> Iterator[str]:
    yield "#!/usr/bin/env bash"
    yield f"# {what}"
    yield "# Run it in its own directory. Run files and checkpoints must be on storage that all nodes share."
    yield "set -euo pipefail"


def _limit(stretch: ExportedStretch) -> list[str]:
    """Return the settings that end a stretch before its job ends, and those that resume it."""
    found = [] if stretch.is_first else ["--resume"]
    if not stretch.is_last:
        seconds = Duration(max(1, round(stretch.end - stretch.start)))
        found += ["--set", f"execute.deadline={quantity_text(seconds)}"]
    return found


def _earliest(stretch: ExportedStretch) -> int:
    """Return the seconds from the start of the schedule before which a stretch may not begin."""
    if not stretch.waits_for:
        return round(stretch.start)
    return round(stretch.submitted) if stretch.is_first else 0


def _slurm(stretches: Sequence[ExportedStretch]) -> Iterator[str]:
    """Yield a script that submits each stretch as a Slurm job, with the jobs that it waits for."""
    yield from _head(
        "Submits the schedule to Slurm: one job for each time in which a job has the same GPUs."
    )
    yield f"script=${{SCRIPT:-{SLURM_SCRIPT}}}  # starts a Ray cluster on the nodes of a job, and executes"
    yield "ids=()"
    for place, stretch in enumerate(stretches):
        waits = [f"${{ids[{at}]}}" for at in stretch.waits_for]
        options = [f"--job-name={stretch.job}"]
        options += [f"--dependency=afterany:{':'.join(waits)}"] if waits else []
        if begin := _earliest(stretch):
            options.append(f"--begin=now+{begin}")
        nodes = [
            f"--nodes={pool.nodes} --gpus-per-node={pool.gpus_per_node}"
            for pool in stretch.pools.values()
        ]
        names = " ".join(stretch.pools)
        arguments = shlex.join([stretch.run_file, *_limit(stretch)])
        yield ""
        yield f"# {place}: {stretch.job} from {_hours(stretch.start)} to {_hours(stretch.end)}"
        yield (
            f'ids+=("$(POOLS={shlex.quote(names)} sbatch --parsable {_quoted(options)} {" : ".join(nodes)} '
            f'"$script" {arguments})")'
        )
    yield ""
    yield 'echo "submitted: ${ids[*]}"'


def _quoted(options: Iterable[str]) -> str:
    """Quote options in which a shell must still replace variables."""
    return " ".join(f'"{option}"' if "$" in option else shlex.quote(option) for option in options)


def _ray(stretches: Sequence[ExportedStretch]) -> Iterator[str]:
    """Yield a script that runs each stretch as a Ray job once those that it waits for have ended."""
    yield from _head(
        "Runs the schedule on a Ray cluster whose nodes name their pool by a resource pool-NAME."
    )
    yield "pids=()"
    yield "sleep_until() { ((SECONDS >= $1)) || sleep $(($1 - SECONDS)); }  # seconds from the start of this script"
    yield 'await() { for place; do wait "${pids[$place]}" || true; done; }'
    yield 'run() { ray job submit --working-dir . -- streamrl execute "$@" --set execute.launcher=ray; }'
    for place, stretch in enumerate(stretches):
        arguments = shlex.join([stretch.run_file, *_limit(stretch)])
        yield ""
        yield f"# {place}: {stretch.job} from {_hours(stretch.start)} to {_hours(stretch.end)}"
        if stretch.waits_for:
            yield f"await {' '.join(map(str, stretch.waits_for))}"
        if begin := _earliest(stretch):
            yield f"sleep_until {begin}"
        yield f"run {arguments} &"
        yield "pids+=($!)"
    yield ""
    yield "wait"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h"


# Kueue --------------------------------------------------------------------------------------------


def _kueue(schedule: ExportedSchedule) -> Iterator[str]:
    """Yield a list of Kubernetes objects: one queue for all GPUs, and for each job its priority class and its RayJob.

    Raises:
        ValueError: jobs take turns, or a job changes its GPUs.
    """
    if schedule.takes_turns:
        raise ValueError(f"Kueue has no time slices{INSTEAD}")
    firsts: dict[str, ExportedStretch] = {}
    for stretch in schedule.stretches:
        first = firsts.setdefault(stretch.job, stretch)
        if first.run_file != stretch.run_file:
            raise ValueError(f"Kueue cannot change the GPUs of job {stretch.job}{INSTEAD}")
    flavors = [
        _object("ResourceFlavor", _flavor(pool), {"nodeLabels": {"streamrl/pool": pool}})
        for pool in schedule.pools
    ]
    items = [*flavors, _cluster_queue(schedule.pools)]
    for job, first in firsts.items():
        items.append(_object("LocalQueue", job, {"clusterQueue": QUEUE}))
        value = round(VALUE_OF_PRIORITY * first.priority)
        items.append({**_object("WorkloadPriorityClass", job), "value": value})
        items.append(_ray_job(job, first))
    yield json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2)


def _object(kind: str, name: str, spec: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return an object of Kueue."""
    head = {"apiVersion": KUEUE, "kind": kind, "metadata": {"name": name}}
    return head if spec is None else {**head, "spec": dict(spec)}


def _flavor(pool: str) -> str:
    """Return the name of a pool as Kubernetes allows it."""
    return pool.lower().replace("_", "-")


def _cluster_queue(pools: Mapping[str, PoolConfig]) -> dict[str, Any]:
    """Return the queue of all GPUs, in which a job preempts those of lower priority."""
    flavors = [
        {
            "name": _flavor(name),
            "resources": [{"name": GPU_RESOURCE, "nominalQuota": pool.num_gpus}],
        }
        for name, pool in pools.items()
    ]
    return _object(
        "ClusterQueue",
        QUEUE,
        {
            "namespaceSelector": {},
            "resourceGroups": [{"coveredResources": [GPU_RESOURCE], "flavors": flavors}],
            "preemption": {"withinClusterQueue": "LowerPriority"},
        },
    )


def _ray_job(job: str, first: ExportedStretch) -> dict[str, Any]:
    """Return the RayJob of a job, as examples/clusters/kuberay.yaml has it. Kueue starts, suspends and resumes it."""
    (head, pool), *others = first.pools.items()
    groups = [(head, pool, pool.nodes - 1), *((name, each, each.nodes) for name, each in others)]
    workers = [
        {
            "groupName": name,
            "replicas": count,
            "minReplicas": count,
            "maxReplicas": count,
            "rayStartParams": {"resources": _resource(name)},
            "template": _pod(name, each.gpus_per_node),
        }
        for name, each, count in groups
        if count
    ]
    execute = f"streamrl execute {first.run_file} --set execute.launcher=ray"
    resumes = f"sh -c 'cd /work && ({execute} --resume || {execute})'"
    spec = {
        "entrypoint": resumes,
        "suspend": True,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": {
            "headGroupSpec": {
                "rayStartParams": {"resources": _resource(head), "include-dashboard": "true"},
                "template": _pod(head, pool.gpus_per_node),
            },
            "workerGroupSpecs": workers,
        },
    }
    labels = {"kueue.x-k8s.io/queue-name": job, "kueue.x-k8s.io/priority-class": job}
    notes = {"streamrl/submitted": _hours(first.submitted)}
    metadata = {"name": job, "labels": labels, "annotations": notes}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _resource(pool: str) -> str:
    return json.dumps(json.dumps({f"pool-{pool}": 1}))


def _pod(pool: str, gpus: int) -> dict[str, Any]:
    mounts = [{"name": "work", "mountPath": "/work"}, {"name": "shm", "mountPath": "/dev/shm"}]
    container = {
        "name": "ray",
        "image": IMAGE,
        "resources": {"limits": {GPU_RESOURCE: str(gpus)}},
        "volumeMounts": mounts,
    }
    volumes = [
        {"name": "work", "persistentVolumeClaim": {"claimName": VOLUME}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    spec = {
        "nodeSelector": {"streamrl/pool": pool},
        "containers": [container],
        "volumes": volumes,
    }
    return {"spec": spec}
