"""The watts that the GPUs of a run draw on average, from what they do and what was measured of their kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

from streamrl.hardware.profiles import load_gpu
from streamrl.record.attribution import SHARED, Attribution, SidesAttribution
from streamrl.record.rent import gpus_of_sides
from streamrl.runfile.config import Run

Work: TypeAlias = Literal["generating", "training", "idle"]
WORK_OF: dict[str, Work] = {
    "prefill": "generating",
    "decode": "generating",
    "underfilled": "generating",
    "verify": "generating",
    "score": "training",
    "train": "training",
}
"""Whose watts stand for an activity: a reward model reads rollouts as prefill does, and scores are passes of the trainer."""


class Energy(NamedTuple):
    """Watts of all GPUs that are paid for."""

    watts: dict[str, float | None]
    """By pool; None where they are not known."""
    unknown: list[str]
    """GPUs whose watts are not known for what they do."""


def read_energy(
    run: Run, shares: SidesAttribution, paid: Mapping[str, float], num_replicas: float
) -> Energy:
    """Return the mean watts of every pool that is paid for.

    Args:
        run: the run file.
        shares: what each side does, of its own GPU-seconds.
        paid: GPUs by pool; those that no side uses stand idle.
        num_replicas: replicas that there were on average.
    """
    watts: dict[str, float | None] = {}
    unknown: dict[str, None] = {}
    for pool, count in paid.items():
        gpu = run.cluster.pools[pool].gpu
        works = list(_works(run, shares, pool, count, num_replicas))
        power = load_gpu(gpu).power
        needed = {work: power.watts(work) if power is not None else None for work, _ in works}
        if None in needed.values():
            unknown[gpu] = None
            watts[pool] = None
        else:
            watts[pool] = sum((needed[work] or 0.0) * gpus for work, gpus in works)
    return Energy(watts, list(unknown))


def _works(
    run: Run, shares: SidesAttribution, pool: str, paid: float, num_replicas: float
) -> Iterator[tuple[Work, float]]:
    """Yield what how many GPUs of a pool do on average."""
    unused = paid
    for side, count in gpus_of_sides(run, num_replicas):
        if side.pool == pool:
            unused -= count
            takes_turns = run.shares_gpus and side.kind != "verifier" and not side.trainer
            yield from _of_side(shares.sides[SHARED if takes_turns else side.name], count)
    if unused > 0:
        yield "idle", unused


def _of_side(shares: Attribution, count: float) -> Iterator[tuple[Work, float]]:
    for activity, share in shares.busy.items():
        if share:
            yield WORK_OF[activity], share * count
    if idle := sum(shares.idle.values()):
        yield "idle", idle * count
