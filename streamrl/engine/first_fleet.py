"""The fleet that a run begins with, before its first event: what replicas there should be, and what they may have."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.engine.fleet import Fleet, Kind
from streamrl.engine.places import FinalLengths
from streamrl.runfile.config import Run


def make_fleet(run: Run) -> Fleet:
    """Make it.

    Raises:
        ValueError: nobody has filled in what share of rollouts replicas of another kind get.
    """
    kinds = list(_kinds(run))
    if not run.policies.follows_pressure:
        return Fleet(kinds=kinds)
    longest = run.workload.max_prompt_tokens + run.rollout.max_tokens
    final = FinalLengths(run.algorithm.rollouts_per_step, longest)
    return Fleet(kinds=kinds, final=final, most_places=run.rollout.max_running)


def _kinds(run: Run) -> Iterator[Kind]:
    """Yield what replicas there should be.

    Raises:
        ValueError: nobody has filled in what share of rollouts those of another kind get.
    """
    yield Kind(run.rollout.replicas)
    for other in run.rollout.others:
        if other.share is None:
            raise ValueError("rollout.others: share is missing, by which each kind gets rollouts")
        yield Kind(other.replicas, other.share)
