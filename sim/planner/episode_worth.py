"""Find what one more sandbox, one more replica, faster tools and a faster trainer are worth to a plan with episodes.

Each is changed alone, and the plan is simulated with the change for as many steps as without, on the
same prompts and episodes. The largest gain for the same relative change tells what binds the plan.

Nobody must use all sandboxes. So more of them are simulated twice: with as many episodes in flight as
before, and with more. The better one counts.
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
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.formatting import format_duration
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.planner.modes import EpisodeLimits
from streamrl.sim.planner.plan import Binding, Crowding, Resource, Worth
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Candidate
from streamrl.sim.planner.trial import (
    Trial,
    Unfinished,
    Watched,
    run_all,
    shortened,
    watched_speed_of,
)
from streamrl.workload.replica_batch import rollouts_under_way

MORE_SANDBOXES = 0.25
"""Share of sandboxes that is added. The effect of a single one would be lost in chance."""
FASTER = 1.25
"""Factor on the speed of tools and of training."""
BINDS = 0.1
"""Smallest gain of a step, relative to the change, of something that binds. Less may be chance."""
TIME_SHARE = 0.2
"""Share of `plan.time_limit` after which no further change is simulated."""
SLOWER = 1.02
"""Ratio of steps above which more episodes in flight slow a plan down. Less may be chance."""
LOSES = 0.05
"""Growth of the share of recomputed contexts above which KV memory is what more episodes in flight lack."""
AND_EPISODES = " and episodes in flight"
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
    crowds: int | None = None
    """Episodes in flight, if the change lets more of them run."""


def find_worths(
    search: Search,
    chosen: int,
    metrics: Metrics,
    pool: Executor,
    watch: Callable[[], None] = lambda: None,
) -> list[Worth]:
    """Return the simulated effect of each change; those that do not finish in time are left out.

    Args:
        search: the finished search.
        chosen: the recommended plan.
        metrics: its steady state.
        pool: simulates.
        watch: called after each simulation.
    """
    run, candidate = search.space.run, search.space.candidate(chosen)
    changes = list(_changes(search, candidate))
    trials = [
        (place, Trial(shortened(each.run, run.seed), each.candidate))
        for place, each in enumerate(changes)
    ]
    until = time.perf_counter() + TIME_SHARE * run.plan.time_limit
    unchanged = {chosen: Trial(shortened(run, run.seed), candidate)}
    before = search.speeds_of(pool, unchanged, watch, until)[chosen]
    if isinstance(before, Unfinished):
        return []
    found = run_all(pool, watched_speed_of, trials, watch, until)
    recomputed = _recomputed_share(metrics)
    rents = _Rents(PaidGpus.of(candidate.apply(run)).dollars_per_second, run.environment)
    worths = [
        (change, found[place], _worth(change, before, found[place].speed, rents))
        for place, change in enumerate(changes)
        if place in found
    ]
    return list(_better_of_sandboxes(worths, recomputed, rents))


class _Rents(NamedTuple):
    plan: float
    """Dollars a second of all GPUs and sandboxes."""
    environment: EnvironmentConfig | None

    def of_unit(self, change: _Change) -> float:
        """Return the dollars an hour of one added unit."""
        if change.resource == "sandboxes" and self.environment is not None:
            return self.environment.sandbox_price
        if not change.units:
            return 0.0
        after = PaidGpus.of(change.candidate.apply(change.run)).dollars_per_second
        return max(0.0, after - self.plan) * SECONDS_PER_HOUR / change.units


def _better_of_sandboxes(
    found: Sequence[tuple[_Change, Watched, Worth | None]], recomputed: float, rents: _Rents
) -> Iterator[Worth]:
    """Yield the effects; of more sandboxes, those of the better number of episodes in flight.

    Sandboxes that help with neither stay unused, and a step takes as long as before.
    """
    of_sandboxes = [each for each in found if each[0].resource == "sandboxes"]
    worths = [worth for *_, worth in of_sandboxes if worth is not None]
    best = min(worths, key=lambda each: each.step_time_ratio, default=None)
    if best is not None:
        yield _with_crowding(_unused_if_slower(best, rents), of_sandboxes, recomputed)
    for change, _, worth in found:
        if worth is not None and change.resource != "sandboxes":
            yield worth if change.units else without_loss(worth)


def without_loss(worth: Worth) -> Worth:
    """Return an effect of faster tools or training, which can wait: where a step takes longer with them, this is chance."""
    none: Worth = replace(worth, step_time_ratio=1.0, half_width=None, cost_ratio=1.0, gain=0.0)
    return none if worth.step_time_ratio > 1 else worth


def _unused_if_slower(worth: Worth, rents: _Rents) -> Worth:
    if worth.step_time_ratio <= 1:
        return worth
    dollars = worth.units * worth.price / SECONDS_PER_HOUR
    cost_ratio = 1 + dollars / rents.plan if rents.plan else 1.0
    unused: Worth = replace(
        worth, step_time_ratio=1.0, half_width=None, cost_ratio=cost_ratio, gain=0.0, break_even=0.0
    )
    return unused


def _with_crowding(
    worth: Worth, found: Sequence[tuple[_Change, Watched, Worth | None]], recomputed: float
) -> Worth:
    """Return an effect of sandboxes, with that of more episodes in flight if they slow the plan down."""
    for change, watched, crowded in found:
        if change.crowds is None or (crowded is not None and crowded.step_time_ratio <= SLOWER):
            continue
        crowding = Crowding(
            episodes=change.crowds,
            step_time_ratio=None if crowded is None else crowded.step_time_ratio,
            recomputed=watched.recomputed,
            recomputed_before=recomputed,
        )
        what = worth.what.removesuffix(AND_EPISODES)
        with_it: Worth = replace(worth, what=what, crowding=crowding)
        return with_it
    return worth


def _changes(search: Search, candidate: Candidate) -> Iterator[_Change]:
    run, mode = search.space.run, candidate.mode
    environment = run.environment
    assert mode.episodes is not None and environment is not None, "only episodes have sandboxes"
    planned = candidate.apply(run)
    sandboxes = mode.episodes.sandboxes
    if sandboxes is not None:
        most = rollouts_under_way(planned.policies, run.algorithm)
        for more in _more_sandboxes(mode.episodes, sandboxes, most):
            wider = candidate._replace(mode=mode._replace(episodes=more.limits))
            share = more.added / sandboxes
            yield _Change("sandboxes", more.what, more.added, share, run, wider, more.crowds)
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


class _MoreSandboxes(NamedTuple):
    what: str
    added: int
    limits: EpisodeLimits
    crowds: int | None
    """Episodes in flight, if there are more of them."""


def _more_sandboxes(limits: EpisodeLimits, sandboxes: int, most: int) -> Iterator[_MoreSandboxes]:
    """Yield more sandboxes with as many episodes in flight, and more of both, if at most `most` may be in flight."""
    in_flight = min(sandboxes, limits.max_episodes or sandboxes)
    more = min(max(1, round(MORE_SANDBOXES * sandboxes)), most - sandboxes)
    if more <= 0:
        return
    what = f"{more} more {'sandbox' if more == 1 else 'sandboxes'}"
    yield _MoreSandboxes(what, more, EpisodeLimits(sandboxes + more, in_flight), None)
    crowds = in_flight + more
    yield _MoreSandboxes(what + AND_EPISODES, more, EpisodeLimits(sandboxes + more, crowds), crowds)


def _worth(
    change: _Change, before: Speed, after: Speed | Unfinished, rents: _Rents
) -> Worth | None:
    """Return the effect of a change; None if the plan does not finish with it."""
    if isinstance(after, Unfinished):
        return None
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
        break_even=rents.plan * SECONDS_PER_HOUR * (1 / ratio - 1) / units if units else None,
        price=rents.of_unit(change),
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
    is_crowded = any(_loses_contexts(each.crowding) for each in worths)
    if stage == "generation" and (is_crowded or (first is not None and recomputed >= RECOMPUTED)):
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


def _loses_contexts(crowding: Crowding | None) -> bool:
    """Return whether more episodes in flight are slower because the KV cache loses their contexts."""
    return crowding is not None and crowding.recomputed - crowding.recomputed_before >= LOSES


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
