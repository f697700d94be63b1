"""Find in a rehearsal whether a run finishes, and why not, with fixes to try."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from streamrl.doctor.diagnosis import diagnose
from streamrl.engine.presets import SYSTEMS, choose_system
from streamrl.hardware.resolved import resolve
from streamrl.record.attribution import UNDERFILLED
from streamrl.record.metrics import Metrics
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.failure_rates import (
    Losses,
    expected_losses,
    replica_gpu_failures_per_day,
    trainer_gpu_failures_per_day,
)
from streamrl.runfile.findings import Changes, Finding, Fix, Level, is_error
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig
from streamrl.runfile.simulation_config import FailuresConfig
from streamrl.sim.checkup.rehearsal import Rehearsal
from streamrl.workload.replica_batch import ReplicaBatch, mean_lengths, replica_batch

POLICIES = (
    *("consumption", "weight_sync", "streaming", "max_staleness", "waits_for_whole_batches"),
    *("dispatch", "migration", "resize", "tail_batching", "learns_from_siblings"),
    *("over_staleness", "oversampling", "left_over", "sync_every"),
    "concurrency",
)
"""Policies that are set to the value of their system, one at a time, if a run makes no progress."""
MUCH_UNDERFILLED = 0.5
"""Share of decode seconds above which a finding reports underfilled batches."""
MOST_RECOMPUTING = 0.05
"""Maximum share of replicas' seconds for recomputing preempted rollouts. Above it there is a warning."""
LESS = (1.0, 0.8, 0.6, 0.4)
"""Shares of the rollouts that fit a replica's memory, which are tried as `rollout.max_running` if it preempts."""
MOST_TRIALS = 6
"""Number of values that are tried for a key. Each is four times the one before, or a quarter of it."""


def find(run: Run, rehearsal: Rehearsal, metrics: Metrics | None) -> Iterator[Finding]:
    """Yield findings on whether the run finishes: rejected, stuck, stopped early, or too few restarts."""
    if rehearsal.refusal and _should_be_simulated(run):
        text = f"streamrl simulate rejects this run: {rehearsal.refusal}"
        yield Finding(level="error", topic="run file", name="refused", text=text)
    what = f"a rehearsal of {rehearsal.steps} steps"
    if rehearsal.is_stand_in:
        what += " with a small model and tiny outputs"
    if rehearsal.problem:
        name = "stops-early" if rehearsal.stopped else "no-progress"
        yield _finding("error", name, f"{what} does not finish: {rehearsal.problem}")
        return
    reached = "" if metrics is None else f"; {_staleness(metrics)}"
    if metrics is not None and not rehearsal.is_stand_in:
        reached += _underfilled(metrics)
    yield _finding("ok", "progress", f"{what} finishes{reached}")
    if metrics is not None and not rehearsal.is_stand_in:
        yield from _find_preempted(
            rehearsal, run.rollout.max_running, run.algorithm.rollouts_per_step
        )
        losses = expected_losses(run, metrics.step_time)
        rate = _highest_rate(run.failures, run.rollout.kinds, run.trainer, run.cluster.pools)
        yield from _find_losses(losses, rate, run.policies.max_restarts, run.algorithm.steps)
        yield from _find_stale(run.policies, metrics)


def _underfilled(metrics: Metrics) -> str:
    """Return a text if replicas mostly decode batches that are far from full; else ""."""
    lost, decode = metrics.busy.get(UNDERFILLED, 0.0), metrics.busy["decode"]
    if lost < MUCH_UNDERFILLED * (lost + decode):
        return ""
    return "; batches of replicas are far from full: most of their decode seconds are underfilled"


def _should_be_simulated(run: Run) -> bool:
    """Return whether no other finding, on memory, lengths or files, explains why a simulation is rejected."""
    lengths = run.workload.lengths
    files = (run.costs.profile, lengths and lengths.ranker_scores)
    has_files = all(Path(file).is_file() for file in files if file)
    return has_files and mean_lengths(run) is not None and not any(map(is_error, diagnose(run)))


def _find_preempted(
    rehearsal: Rehearsal, max_running: int, rollouts_per_step: int
) -> Iterator[Finding]:
    """Yield a warning if replicas run more rollouts than fit their memory."""
    if rehearsal.recomputing > MOST_RECOMPUTING:
        times = rehearsal.num_preempted / (rehearsal.version * rollouts_per_step)
        text = (
            f"replicas run out of KV memory: a rollout is preempted {times:.1f} times on average, and its "
            f"recomputation takes {rehearsal.recomputing:.0%} of their time "
            f"(rollout.max_running={max_running})"
        )
        yield Finding(level="warning", topic="memory", name="preempted", text=text)


def _find_losses(expected: Losses, rate: float, most: int, steps: int) -> Iterator[Finding]:
    losses, what = expected
    if losses > most:
        text = (
            f"at {rate:g} failures of a GPU in a day {steps} steps lose "
            f"{losses:,.3g} {what}, but policies.max_restarts={most} stops the run at about step "
            f"{int(steps * most / losses):,}"
        )
        yield _finding("warning", "restarts", text)


def _highest_rate(
    failures: FailuresConfig,
    kinds: Iterable[RolloutConfig],
    trainer: TrainerConfig,
    pools: dict[str, PoolConfig],
) -> float:
    """Return the failures per GPU and day of the side with the highest rate."""
    of_kinds = (replica_gpu_failures_per_day(failures, pools[kind.pool]) for kind in kinds)
    return max(trainer_gpu_failures_per_day(failures, pools[trainer.pool]), *of_kinds)


def _find_stale(policies: PoliciesConfig, metrics: Metrics) -> Iterator[Finding]:
    system, reached = choose_system(policies), max(metrics.staleness, default=0)
    if reached > system.staleness_bound and system.keeps_bound:
        text = (
            f"rollouts were {reached} versions stale, but at most {system.staleness_bound} are allowed "
            "(policies.max_staleness)"
        )
        yield _finding("error", "bound-broken", text)


def _staleness(metrics: Metrics) -> str:
    """Return the maximum staleness as text. It does not depend on the number of steps."""
    return f"rollouts are at most {max(metrics.staleness, default=0)} versions stale in it"


def _finding(level: Level, name: str, text: str) -> Finding:
    return Finding(level=level, topic="staleness", name=name, text=text)


def _unstuck(policies: PoliciesConfig, failures_per_gpu_day: float) -> Iterator[Changes]:
    """Yield changes to try: each changed policy set to the value of its system, and then lower failure rates."""
    own = SYSTEMS[policies.system]
    for key in POLICIES:
        usual = getattr(own, key, getattr(PoliciesConfig(), key))
        now = getattr(policies, key)
        if now is not None and now != usual:
            yield {f"policies.{key}": usual}
    if rate := failures_per_gpu_day:
        yield from ({"failures.per_gpu_day": rate / 4**n} for n in range(1, MOST_TRIALS))


def _less_crowded(batch: ReplicaBatch | None) -> Iterator[Changes]:
    assert batch is not None, "a simulated run has lengths"
    yield {"policies.concurrency": "kv-pressure"}
    for share in LESS:
        yield {"rollout.max_running": max(1, int(share * batch.held))}


def _more_restarts(now: int) -> Iterator[Changes]:
    for power in range(1, MOST_TRIALS):
        yield {"policies.max_restarts": (1 + now) * 4**power}


def fixes(metrics: Metrics | None) -> dict[str, Fix]:
    """Return the fix to try for each kind of finding."""
    step_time = 0.0 if metrics is None else metrics.step_time
    return {
        "preempted": Fix(
            lambda run: _less_crowded(replica_batch(resolve(run))),
            "set policies.concurrency to 'kv-pressure', or lower rollout.max_running",
        ),
        "no-progress": Fix(
            lambda run: _unstuck(run.policies, run.failures.per_gpu_day),
            "remove single policies and keep policies.system alone",
        ),
        "stops-early": Fix(
            lambda run: _more_restarts(run.policies.max_restarts),
            "find out why replicas are lost; more restarts do not help",
        ),
        "restarts": Fix(
            lambda run: iter([{"policies.max_restarts": expected_losses(run, step_time).most}]),
            "raise policies.max_restarts",
        ),
        "refused": Fix(lambda run: iter(()), "change the key in the message"),
        "bound-broken": Fix(
            lambda run: iter(()), "this is a defect of the policies: please report it"
        ),
    }
