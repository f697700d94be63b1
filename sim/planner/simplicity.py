"""How much there is to set up for a plan: of plans that cost about the same the simplest is run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamrl.engine.presets import System
from streamrl.sim.planner.layouts import Degrees, Replicas
from streamrl.sim.planner.modes import Mode
from streamrl.sim.planner.space import Space

Counts = NDArray[np.int64]


def complexities(space: Space) -> Counts:
    """Count what there is to set up for each plan of a space.

    That is every parallel degree above one, ZeRO 3, offloading, every pool and every kind of replica beyond one, each
    step that generation is ahead, streaming, dispatch by a ranker, a delta instead of weights, tokens that are drafted.
    """
    replicas = np.array([_of_replicas(each) for each in space.replicas])
    trainers = np.array([_of_trainer(each) for each in space.trainers])
    modes = np.array(list(map(_of_mode, space.modes, space.systems)))
    pools = np.array(
        [
            [len({*generate.pools, train.pool}) for train in space.trainers]
            for generate in space.replicas
        ]
    )
    sides = replicas[space.of_replicas] + trainers[space.of_trainer]
    apart = pools[space.of_replicas, space.of_trainer] - 1
    counted: Counts = sides + modes[space.of_mode] + apart
    return counted


def _of_replicas(replicas: Replicas) -> int:
    degrees = [
        degree
        for kind in replicas.kinds
        for degree in (
            *(kind.tensor_parallel, kind.expert_parallel),
            *(kind.pipeline_parallel, kind.data_parallel),
        )
    ]
    drafts = bool(replicas.drafted)
    return sum(degree > 1 for degree in degrees) + len(replicas.kinds) - 1 + drafts


def _of_trainer(trainer: Degrees) -> int:
    degrees = (
        *(trainer.tensor_parallel, trainer.pipeline_parallel),
        *(trainer.expert_parallel, trainer.expert_tensor_parallel or 1),
        trainer.context_parallel,
    )
    return sum(degree > 1 for degree in degrees) + (trainer.zero == 3) + trainer.offload


def _of_mode(mode: Mode, system: System) -> int:
    is_plain = mode.dispatch in (None, "least-loaded")
    streams = system.streaming == "stream"
    return system.staleness_bound + streams + (not is_plain) + (mode.sync_mode == "delta")
