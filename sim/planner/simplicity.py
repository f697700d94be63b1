"""How much there is to set up for a plan: of plans that cost about the same the simplest is run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.planner.layouts import Degrees, Replicas
from sim.planner.modes import Mode
from sim.planner.space import Space
from streamrl.engine.systems import System

Counts = NDArray[np.int64]


def complexities(space: Space) -> Counts:
    """Count what there is to set up for each plan of a space.

    That is every parallel degree above one, ZeRO 3, offloading, a second pool, each step that generation is ahead,
    streaming, dispatch by a ranker, a delta instead of weights.
    """
    replicas = np.array([_of_replicas(each) for each in space.replicas])
    trainers = np.array([_of_trainer(each) for each in space.trainers])
    modes = np.array(list(map(_of_mode, space.modes, space.systems)))
    pools = {name: place for place, name in enumerate(space.run.cluster.pools)}
    generates, trains = (
        np.array([pools[side.pool] for side in sides]) for sides in (space.replicas, space.trainers)
    )
    differs = generates[space.of_replicas] != trains[space.of_trainer]
    counted: Counts = (
        replicas[space.of_replicas] + trainers[space.of_trainer] + modes[space.of_mode] + differs
    )
    return counted


def _of_replicas(replicas: Replicas) -> int:
    return (replicas.tensor_parallel > 1) + (replicas.expert_parallel > 1)


def _of_trainer(trainer: Degrees) -> int:
    degrees = (trainer.tensor_parallel, trainer.pipeline_parallel, trainer.expert_parallel)
    return sum(degree > 1 for degree in degrees) + (trainer.zero == 3) + trainer.offload


def _of_mode(mode: Mode, system: System) -> int:
    is_plain = mode.dispatch in (None, "least-loaded")
    streams = system.streaming == "stream"
    return system.max_staleness + streams + (not is_plain) + (mode.sync_mode == "delta")
