"""Run all checks on a valid run file, and try a fix for each finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from streamrl.doctor import (
    batch,
    divisibility,
    every_side,
    files,
    framework,
    idle_gpus,
    memory,
    planned_faults,
    spot,
    staleness,
)
from streamrl.hardware.profiles import load_model
from streamrl.hardware.resolved import longest_sequence, resolve
from streamrl.runfile.config import Run
from streamrl.runfile.findings import Finding, Fix, Topic, propose_fix
from streamrl.runfile.gpu_pools import sides_of
from streamrl.workload.replica_batch import mean_lengths, rollouts_under_way

PARTS: tuple[tuple[Topic, Callable[[Run], Iterator[Finding]]], ...] = (
    ("memory", lambda run: memory.find(resolve(run))),
    (
        "divisibility",
        lambda run: divisibility.find(load_model(run.model), run.rollout, run.trainer),
    ),
    (
        "divisibility",
        lambda run: idle_gpus.find(
            run.cluster.pools,
            sides_of(replace(run, trainer=run.trainer.largest)),
            run.plan,
            run.rollout.pool if run.policies.resize == "adjust" else None,
        ),
    ),
    ("batch", lambda run: batch.report_step(run.algorithm, run.rollout, run.trainer)),
    (
        "batch",
        lambda run: batch.find_trainer(
            run.algorithm.rollouts_per_step,
            run.trainer,
            mean_lengths(run),
            longest_sequence(run.rollout, run.workload, run.environment),
        ),
    ),
    (
        "batch",
        lambda run: batch.find_replicas(
            run.rollout.num_decode_replicas, rollouts_under_way(run.policies, run.algorithm)
        ),
    ),
    ("batch", lambda run: batch.find_cut_off(mean_lengths(run), run.rollout.max_tokens)),
    (
        "batch",
        lambda run: batch.find_left_out(run.algorithm, run.workload.informative_share),
    ),
    ("batch", every_side.find_secondary_trainers),
    ("memory", lambda run: every_side.find_replica_kinds(resolve(run))),
    ("staleness", lambda run: staleness.find(run.policies, run.algorithm)),
    ("staleness", staleness.find_idle_clips),
    ("run file", lambda run: planned_faults.find(run.faults, run.policies.max_restarts)),
    (
        "run file",
        lambda run: spot.find(
            run.cluster.pools,
            [own.pool for own in run.rollout.kinds],
            [own.pool for own in run.trainers],
        ),
    ),
    ("run file", framework.find),
    ("files", lambda run: files.find_assumptions(run.model, run.rollout.dtype)),
)
"""Each check with what it reads of a run file."""
FIXES = {
    **memory.MEMORY_FIXES,
    **divisibility.FIXES,
    **batch.FIXES,
    **staleness.FIXES,
    **staleness.CLIP_FIXES,
    **planned_faults.FIXES,
    **spot.FIXES,
    **framework.FIXES,
}


def diagnose(run: Run) -> list[Finding]:
    """Return all findings of a run, without fixes. A check that raises becomes an error with its reason."""
    found: list[Finding] = []
    for topic, find in PARTS:
        try:
            found += find(run)
        except ValueError as error:
            name = f"{topic}-unexamined"
            found.append(Finding(level="error", topic=topic, name=name, text=str(error)))
    return found


def examine(run: Run) -> list[Finding]:
    """Return all findings of a run, each with a fix that was tried."""
    return [
        finding if finding.level == "ok" else propose_fix(run, finding, _fix_of(finding), diagnose)
        for finding in diagnose(run)
    ]


def _fix_of(finding: Finding) -> Fix:
    if finding.name.startswith("pool-"):
        return idle_gpus.fix_of(finding.name.removeprefix("pool-"))
    if finding.name.endswith("-unexamined"):
        return Fix(lambda run: iter(()), "fix the other findings first")
    of_one = every_side.fix_of_secondary_trainer(
        finding.name, FIXES
    ) or every_side.fix_of_replica_kind(finding.name, FIXES)
    return of_one or FIXES[finding.name]
