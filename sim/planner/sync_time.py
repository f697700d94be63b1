"""Seconds of the weight sync of every plan of a space, computed once for plans that send alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamrl.record.rent import egress_dollars
from streamrl.runfile.config import Run
from streamrl.sim.costs.colocation import sync_costs
from streamrl.sim.planner.layouts import Degrees
from streamrl.sim.planner.space import Candidate, Space

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class SyncTimes(NamedTuple):
    """The weight sync of every plan; colocated ones change their phase instead."""

    push: Floats
    load: Floats
    egress: Floats
    """Dollars of a push."""


def sync_times(space: Space, first: int = 0) -> SyncTimes:
    """Return seconds of push and of load, and dollars of what crosses links, of every plan from the first on."""
    of_mode, of_trainer = space.of_mode[first:], space.of_trainer[first:]
    is_shared = np.array([mode.system == "colocated" for mode in space.modes])[of_mode]
    names = {name: i for i, name in enumerate(dict.fromkeys(m.sync_mode for m in space.modes))}
    sent = np.array([names[mode.sync_mode] for mode in space.modes])[of_mode]
    senders = _classes(space.trainers, _sender)[of_trainer]
    shares = _classes(space.trainers, _shares)[of_trainer]
    size = len(space.trainers)
    trainers = np.where(is_shared, size + shares, senders)
    codes = (space.of_replicas[first:].astype(np.int64) * 2 * size + trainers) * len(names) + sent
    _, firsts, inverse = np.unique(codes, return_index=True, return_inverse=True)
    found = [_sync(space.run, space.candidate(first + int(place))) for place in firsts]
    push, load, egress = np.array(found).T[:, inverse]
    return SyncTimes(push, load, egress)


def _sender(trainer: Degrees) -> Hashable:
    """What of a trainer a push depends on: over how many ranks a copy is split; how many copies matters little."""
    return trainer.pool, trainer.tensor_parallel * trainer.pipeline_parallel


def _shares(trainer: Degrees) -> Hashable:
    """What of a trainer a phase change depends on."""
    return trainer._replace(micro_batch=1)


def _classes(trainers: list[Degrees], key: Callable[[Degrees], Hashable]) -> Indices:
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key(trainer), len(seen)) for trainer in trainers])


def _sync(run: Run, candidate: Candidate) -> tuple[float, float, float]:
    run = candidate.apply(run)
    costs = sync_costs(run)
    return costs.push_time, costs.load_time, egress_dollars(run, costs.wire_bytes)
