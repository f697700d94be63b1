"""Find what one more sandbox, one more replica, faster tools and a faster trainer are worth to a plan with episodes.

Each is changed alone, and the plan is simulated with the change for as many steps as without, on the
same prompts and episodes. The largest gain for the same relative change tells what binds the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.record.charges import PaidGpus
from streamrl.record.metrics import Metrics
from streamrl.record.run_comparison import ratio_half_width
from streamrl.record.steady_state import Speed
from streamrl.runfile.config import Run
from streamrl.runfile.formatting import format_duration
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.planner.plan import Binding, Resource, Worth
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Candidate
from streamrl.sim.planner.trial import Trial, Unfinished, run_all, short_speed_of, shortened
from streamrl.workload.replica_batch import rollouts_under_way

MORE_SANDBOXES = 0.25
"""Share of sandboxes that is added. The effect of a single one would be lost in chance."""
FASTER = 1.25
"""Factor on the speed of tools and of training."""
BINDS = 0.1
"""Smallest gain of a step, relative to the change, of something that binds. Less may be chance."""
TIME_SHARE = 0.2
"""Share of `plan.time_limit` after which no further change is simulated."""
RECOMPUTED = 0.15
"""Share of the busy seconds of replicas in recomputed prefixes above which KV memory binds generation."""


class _Change(NamedTuple):
    resource: Resource
    what: str
    units: float
    """Units that are added; 0 if they cannot be counted."""
    share: float
    """Relative change."""
    run: Run
    candidate: Candidate


def find_worths(
    search: Search, chosen: int, pool: Executor, watch: Callable[[], None] = lambda: None
) -> list[Worth]:
    """Return the simulated effect of each change; those that do not finish in time are left out.

    Args:
        search: the finished search.
        chosen: the recommended plan.
        pool: simulates.
        watch: called after each simulation.
    """
    run, candidate = search.space.run, search.space.candidate(chosen)
    changes = list(_changes(search, candidate))
    trials: list[tuple[Resource | None, Trial]] = [
        (None, Trial(shortened(run, run.seed), candidate)),
        *(
            (each.resource, Trial(shortened(each.run, run.seed), each.candidate))
            for each in changes
        ),
    ]
    until = time.perf_counter() + TIME_SHARE * run.plan.time_limit
    speeds = run_all(pool, short_speed_of, trials, watch, until)
    before = speeds[None]
    if isinstance(before, Unfinished):
        return []
    found = [(each, speeds.get(each.resource)) for each in changes]
    return [
        _worth(each, before, after, PaidGpus.of(candidate.apply(run)).dollars_per_second)
        for each, after in found
        if isinstance(after, Speed)
    ]


def _changes(search: Search, candidate: Candidate) -> Iterator[_Change]:
    run, mode = search.space.run, candidate.mode
    environment = run.environment
    assert mode.episodes is not None and environment is not None, "only episodes have sandboxes"
    sandboxes = mode.episodes.sandboxes
    planned = candidate.apply(run)
    if sandboxes is not None:
        most = rollouts_under_way(planned.policies, run.algorithm)
        more = min(max(1, round(MORE_SANDBOXES * sandboxes)), most - sandboxes)
        if more > 0:
            wider = mode._replace(episodes=mode.episodes._replace(sandboxes=sandboxes + more))
            with_more = candidate._replace(mode=wider)
            name = "sandbox" if more == 1 else "sandboxes"
            what = f"{more} more {name}"
            yield _Change("sandboxes", what, more, more / sandboxes, run, with_more)
    replicas = candidate.replicas
    if mode.system != "colocated":
        one_more = candidate._replace(replicas=replicas._replace(replicas=replicas.replicas + 1))
        what = f"one more replica of {replicas.gpus_per_replica} {replicas.pool}"
        yield _Change("replica", what, 1, 1 / replicas.num_replicas, run, one_more)
    factor = environment.action_time_factor / FASTER
    faster = replace(run, environment=replace(environment, action_time_factor=factor))
    yield _Change("tools", f"tools {FASTER:g} times as fast", 0, FASTER - 1, faster, candidate)
    costs = replace(run.costs, training_factor=FASTER * run.costs.training_factor)
    trained = replace(run, costs=costs)
    what = f"training {FASTER:g} times as fast"
    yield _Change("training", what, 0, FASTER - 1, trained, candidate)


def _worth(change: _Change, before: Speed, after: Speed, rent: float) -> Worth:
    ratio = after.step_time / before.step_time
    units = change.units
    return Worth(
        resource=change.resource,
        what=change.what,
        units=units,
        step_time_ratio=ratio,
        half_width=ratio_half_width(after, before),
        cost_ratio=after.cost_per_step / before.cost_per_step if before.cost_per_step else 1.0,
        gain=(1 - ratio) / change.share,
        break_even=rent * SECONDS_PER_HOUR * (1 / ratio - 1) / units if units else None,
    )


def episode_binding(
    worths: Sequence[Worth], metrics: Metrics, seconds: Mapping[str, float]
) -> Binding:
    """Return what limits the step of a plan with episodes.

    Args:
        worths: the simulated effects.
        metrics: the steady state of the plan.
        seconds: seconds of each stage alone.
    """
    by_gain = sorted(worths, key=lambda each: -each.gain)
    recomputed = _recomputed_share(metrics)
    first = by_gain[0] if by_gain and by_gain[0].gain >= BINDS else None
    stage, resource = "generation", "nothing alone: no single change saves much"
    if first is not None:
        stage = "training" if first.resource == "training" else "generation"
        resource = RESOURCES[first.resource]
        if stage == "generation" and recomputed >= RECOMPUTED:
            resource = "GPU memory for KV cache"
    shares = "; ".join(
        f"{each.what}: {1 - each.step_time_ratio:+.1%} of a step saved" for each in by_gain
    )
    told = f", which recomputes {recomputed:.0%} of its seconds" if recomputed else ""
    alone = f"generation alone {format_duration(seconds['generation'])}{told}, training alone {format_duration(seconds['training'])}"
    return Binding(
        stage=stage,
        resource=resource,
        seconds={**seconds, "step": metrics.step_time},
        text=f"{stage} is the bottleneck: {resource}; {alone}; {shares}",
    )


RESOURCES: dict[Resource, str] = {
    "sandboxes": "the number of sandboxes",
    "replica": "the GPUs that generate",
    "tools": "the time of tools",
    "training": "the GPUs that train",
}


def _recomputed_share(metrics: Metrics) -> float:
    """Return the share of the busy seconds of the replicas in which lost contexts are computed again."""
    side = metrics.sides.get("rollout") or metrics.sides.get("shared")
    busy = {} if side is None else side.busy
    total = sum(busy.values())
    return busy.get("recomputed-prefix", 0.0) / total if total else 0.0
