"""What shortens a step of a plan: it is simulated again with one thing relieved at a time, on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import Literal, NamedTuple

from msgspec.structs import replace

from streamrl.doctor.replica_batch import replica_batch
from streamrl.runfile.config import Run
from streamrl.sim.planner.layouts import Replicas, holds_rollouts
from streamrl.sim.planner.race import FINAL_STEPS, Race
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Candidate
from streamrl.sim.planner.trial import Trial, Unfinished, run_all, short_speed_of, shortened

Relieved = Literal["generation", "training", "max_running", "max_staleness"]
FASTER = 1.1
"""Times as fast as it is a stage is made."""
NEAR = 0.7
"""Share of the longer stage's seconds from which on the shorter one may bind too, where both overlap."""
TIME_SHARE = 0.1
"""Of `plan.time_limit` that may pass before no further relief is begun."""


class Relief(NamedTuple):
    """One thing relieved."""

    what: Relieved
    run: Run
    candidate: Candidate


def find_gains(
    race: Race, index: int, pool: Executor, watch: Callable[[], None] = lambda: None
) -> dict[Relieved, float]:
    """Return the share of a step that each relief saves a finalist, over as many steps as finalists have.

    Only what may bind is relieved: stages of about the same length that overlap, then caps of generation where that
    binds. What does not finish, or has not begun in time, is left out.
    """
    run = race.search.space.run
    until = time.perf_counter() + TIME_SHARE * run.plan.time_limit
    before = race.finals[index][0].step_time

    def gains_of(reliefs: Iterable[Relief]) -> dict[Relieved, float]:
        trials = [(each.what, _trial(each)) for each in reliefs]
        speeds = run_all(pool, short_speed_of, trials, watch, until)
        return {
            what: 1 - speed.step_time / before
            for what, speed in speeds.items()
            if not isinstance(speed, Unfinished)
        }

    found = gains_of(_of_stages(race.search, index))
    if found.get("generation", 0.0) < found.get("training", 0.0):
        return found
    return {**found, **gains_of(_of_caps(race.search, index))}


def _trial(relief: Relief) -> Trial:
    return Trial(shortened(relief.run, relief.run.seed, FINAL_STEPS), relief.candidate)


def _of_stages(search: Search, index: int) -> Iterator[Relief]:
    """Yield both stages of a plan made faster, where they overlap and either may bind."""
    run, candidate = search.space.run, search.space.candidate(index)
    stages, costs = search.estimates.estimate(), run.costs
    shorter, longer = sorted((float(stages.generation[index]), float(stages.training[index])))
    if search.space.system(index).staleness_bound and shorter >= NEAR * longer:
        faster = replace(costs, generation_factor=FASTER * costs.generation_factor)
        yield Relief("generation", replace(run, costs=faster), candidate)
        faster = replace(costs, training_factor=FASTER * costs.training_factor)
        yield Relief("training", replace(run, costs=faster), candidate)


def _of_caps(search: Search, index: int) -> Iterator[Relief]:
    """Yield a plan with each cap on how many rollouts are generated at once raised, where it is one."""
    run, candidate = search.space.run, search.space.candidate(index)
    if bound := search.space.system(index).staleness_bound:
        mode = candidate.mode._replace(max_staleness=bound + 1)
        yield Relief("max_staleness", run, candidate._replace(mode=mode))
    batch = replica_batch(candidate.apply(run))
    wider = candidate._replace(replicas=_twice_running(candidate.replicas))
    if batch is not None and batch.limit == "max_running" and _holds(wider.replicas, run):
        yield Relief("max_running", run, wider)


def _twice_running(replicas: Replicas) -> Replicas:
    beside = None if replicas.beside is None else _twice_running(replicas.beside)
    return replicas._replace(max_running=2 * replicas.max_running, beside=beside)


def _holds(replicas: Replicas, run: Run) -> bool:
    return all(holds_rollouts(kind.apply(run)) for kind in replicas.kinds)
