"""What room costs: plans leave a tenth of a trainer's memory free, and one that does not may be cheaper."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
from msgspec.structs import replace

from sim.planner.found import describe, settings_of
from sim.planner.search import ALIKE, Search
from streamrl.doctor.memory import trainer_side
from streamrl.report.plan import Tighter


def find_tighter(
    search: Search, chosen: int, pool: Executor, watch: Callable[[], None]
) -> Tighter | None:
    """Return the best plan of the chosen one's system and pools whose trainer leaves less room, where it is notably better.

    The best by estimate is simulated on the prompts of the search. None too where no time is left.
    """
    run, (replicas, trainer, mode) = search.space.run, search.space.candidate(chosen)
    alike = replace(
        run.plan,
        systems=[mode.system],
        rollout_pools=list(replicas.pools),
        trainer_pools=[trainer.pool],
    )
    if search.is_late:
        return None
    try:
        other = Search.open(replace(run, plan=alike), search.deadline, tight=True)
    except ValueError:  # none is open
        return None
    other.estimates.take_paces(search.estimates)
    other.settle(pool, [])
    scores, value = other.scores(), search.value(chosen)
    best = int(np.argmin(scores))
    if scores[best] >= value:
        return None
    other.simulate(pool, [best], watch)
    if best not in other.ranking():  # it breaks a budget, or does not finish
        return None
    gain = 1 - other.value(best) / value
    if gain <= ALIKE:
        return None
    candidate = other.space.candidate(best)
    side = trainer_side(candidate.apply(run))
    return Tighter(
        choice=describe(run, candidate),
        settings=settings_of(candidate),
        gain=gain,
        memory=side.need / side.capacity,
    )
