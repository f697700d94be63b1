"""Replicas of two kinds: GPUs of a second pool beside good ones, or some of a pool in other degrees.

What mixes is near what it is made of, so they are looked for around the best plans of replicas that are all alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from streamrl.runfile.config import Run
from streamrl.sim.planner.layouts import Degrees, Replicas, fitting_replicas, sizes

SHARES = (1.0, 0.75, 0.5)
"""How much of a good side stays when others come beside it, of a pool that may be needed for them."""
MOST_SIZES = 6
"""Sizes of the second kind that are tried in a pool, between its smallest and all that is left."""


def mixed_fleets(
    run: Run, replicas: Iterable[Replicas], trainers: Sequence[Degrees]
) -> list[Replicas]:
    """Return replicas of two kinds, each of which has one of `replicas`, or most of it, with others beside.

    Args:
        run: the offer.
        replicas: good ones.
        trainers: of which the smallest leaves room for what comes beside.
    """
    if not can_mix(run):
        return []
    found = dict.fromkeys(
        _together(each._replace(replicas=kept), beside)
        for each in replicas
        if each.beside is None
        for share in SHARES
        if (kept := int(each.replicas * share))
        for beside in _beside(run, each._replace(replicas=kept), trainers)
    )
    return list(found)


def _together(first: Replicas, second: Replicas) -> Replicas:
    """Return both kinds, in the same order whichever was there first."""
    kinds = sorted((first, second), key=lambda kind: (kind.pool, kind.tensor_parallel))
    return kinds[0]._replace(beside=kinds[1])


def can_mix(run: Run) -> bool:
    """Whether an offer leaves open what replicas there are, and no policy knows one kind alone."""
    policies, plan = run.policies, run.plan
    knows_one = (
        policies.migration != "none" or policies.learns_from_siblings or policies.follows_pressure
    )
    return plan.mixes_replicas and plan.rollout_gpus is None and not knows_one


def _beside(run: Run, kept: Replicas, trainers: Sequence[Degrees]) -> Iterator[Replicas]:
    """Yield what may come beside replicas on GPUs that are left."""
    plan = run.plan
    for pool in plan.rollout_pools or run.cluster.pools:
        taken = min(trainer.num_gpus if trainer.pool == pool else 0 for trainer in trainers)
        room = run.cluster.pools[pool].num_gpus - taken
        room -= kept.num_gpus if kept.pool == pool else 0
        open_sizes = [size for size in sizes(run.cluster.pools[pool], plan.unit) if size <= room]
        for size in _spread(open_sizes):
            degrees = plan.rollout_tensor_parallel
            for choice in fitting_replicas(run, pool, size, degrees, Counter()):
                is_other = (pool, choice.tensor_parallel) != (kept.pool, kept.tensor_parallel)
                if is_other and choice.drafted == kept.drafted:
                    yield choice._replace(max_running=kept.max_running)


def _spread(open_sizes: list[int]) -> list[int]:
    """Return a few of many sizes, the smallest and the largest among them."""
    if len(open_sizes) <= MOST_SIZES:
        return open_sizes
    last = len(open_sizes) - 1
    return [open_sizes[place * last // (MOST_SIZES - 1)] for place in range(MOST_SIZES)]
