"""Which replicas go with which trainers in an offer, and what both rent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.hardware.profiles import price_of
from streamrl.runfile.config import Run
from streamrl.runfile.pools import find_link
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.planner.layouts import Degrees, Replicas
from streamrl.sim.planner.limits import within_rent
from streamrl.sim.planner.modes import Mode

Indices = NDArray[np.int32]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
MOST_PLANS = 10_000_000
"""Plans beyond which arrays outgrow a small machine's memory."""
LINK = "no link between the two pools"
POOL_SIZE = "both sides need more GPUs than their pool has"
SHARED = "colocated: sides in different pools, or of different size"


class Plans(NamedTuple):
    """What each plan is made of, as places in lists, and what it costs."""

    of_replicas: Indices
    of_trainer: Indices
    of_mode: Indices
    prices: Floats


def plans_of(
    run: Run,
    replicas: Sequence[Replicas],
    trainers: Sequence[Degrees],
    modes: Sequence[Mode],
    cut: Counter[str],
) -> Plans:
    """Return the plans that both sides make in every mode, and that keep to the budgets of an hour.

    Raises:
        ValueError: there are too many.
    """
    pairs = Pairs(run, replicas, trainers)
    parts = []
    for index, mode in enumerate(modes):
        first, second = np.nonzero(pairs.open_to(mode, cut))
        parts.append((first, second, np.full(len(first), index)))
    columns = (np.concatenate(column).astype(np.int32) for column in zip(*parts, strict=True))
    of_replicas, of_trainer, of_mode = columns
    if len(of_mode) > MOST_PLANS:
        raise ValueError(
            f"{len(of_mode)} plans are open, of which {MOST_PLANS} can be compared: name in [plan] "
            "what is open, such as unit, rollout_gpus or micro_batch"
        )
    is_shared = np.array([mode.system == "colocated" for mode in modes])[of_mode]
    prices = pairs.prices(is_shared, of_replicas, of_trainer)
    kept = within_rent(run.plan, prices, cut) if len(prices) else np.zeros(0, dtype=bool)
    return Plans(of_replicas[kept], of_trainer[kept], of_mode[kept], prices[kept])


class Pairs:
    """Which replicas go with which trainers."""

    def __init__(self, run: Run, replicas: Sequence[Replicas], trainers: Sequence[Degrees]) -> None:
        offer, names = run.cluster.pools, list(run.cluster.pools)
        self._generate = np.array([_gpus_by_pool(each.kinds, names) for each in replicas])
        self._train = np.array([_gpus_by_pool([each], names) for each in trainers])
        """GPUs of each side in each pool."""
        rent = [0.0 if p.owned else price_per_second(run, name) for name, p in offer.items()]
        self._prices = self._generate @ np.array(rent), self._train @ np.array(rent)
        self._owned = sum(
            p.num_gpus * price_per_second(run, name) for name, p in offer.items() if p.owned
        )
        """Dollars a second of pools that are owned, whatever a plan takes of them."""
        together = self._generate[:, None, :] + self._train[None, :, :]
        self._room = (together <= [pool.num_gpus for pool in offer.values()]).all(axis=2)
        apart = np.array([[a != b and not _has_link(run, a, b) for b in names] for a in names])
        self._unlinked = (self._generate > 0).astype(int) @ apart @ (self._train > 0).T > 0
        is_same = (self._generate[:, None, :] == self._train[None, :, :]).all(axis=2)
        self._shared: Mask = is_same & np.array([[each.beside is None] for each in replicas])

    def open_to(self, mode: Mode, cut: Counter[str]) -> Mask:
        """Say which pairs can run in a mode."""
        if mode.system == "colocated":
            cut[SHARED] += int((~self._shared).sum())
            return self._shared
        cut[LINK] += int(self._unlinked.sum())
        cut[POOL_SIZE] += int((~self._room).sum())
        is_open: Mask = ~self._unlinked & self._room
        return is_open

    def prices(self, is_shared: Mask, first: Indices, second: Indices) -> Floats:
        """Return the dollars a second of plans."""
        generate, train = self._prices[0][first], self._prices[1][second]
        rented = np.where(is_shared, np.maximum(generate, train), generate + train)
        found: Floats = rented + self._owned
        return found


def _gpus_by_pool(parts: Sequence[Replicas | Degrees], names: list[str]) -> list[int]:
    """Return the GPUs that the parts of a side have in each pool."""
    counts = dict.fromkeys(names, 0)
    for part in parts:
        counts[part.pool] += part.num_gpus
    return list(counts.values())


def _has_link(run: Run, first: str, second: str) -> bool:
    rollout, trainer = replace(run.rollout, pool=first), replace(run.trainer, pool=second)
    return find_link(replace(run, rollout=rollout, trainer=trainer)) is not None


def price_per_second(run: Run, pool: str) -> float:
    """Return the dollars of a pool's GPU for a second."""
    return price_of(run.cluster.pools[pool]) / SECONDS_PER_HOUR
