"""Which stage, and which resource in it, a step of a plan waits for."""

from __future__ import annotations

from typing import assert_never

from sim.planner.bound import Estimates
from sim.planner.space import Candidate
from streamrl.doctor.replica_batch import replica_batch
from streamrl.record.speed import Speed
from streamrl.report.plan import Binding
from streamrl.runfile.config import Run

ARITHMETIC = 0.75
"""Share of the trainer's seconds above which its arithmetic binds, not what it waits for."""


def find_binding(estimates: Estimates, index: int, speed: Speed) -> Binding:
    """Say what binds a simulated plan: of stages that overlap the longest, else the one with most of the step."""
    stages = estimates.estimate()
    candidate = estimates.space.candidate(index)
    run = candidate.apply(estimates.space.run)
    seconds = {
        "generation": float(stages.generation[index]),
        "training": float(stages.training[index]),
        "sync": float(stages.sync[index]),
    }
    stage = max(seconds, key=lambda name: seconds[name])
    resources = {
        "generation": lambda: _of_generation(estimates, index, run),
        "training": lambda: _of_training(estimates, index),
        "sync": lambda: _of_sync(candidate),
    }
    resource = resources[stage]()
    overlap = "beside" if estimates.space.system(index).staleness_bound else "before"
    return Binding(
        stage=stage,
        resource=resource,
        seconds={**seconds, "step": speed.step_time},
        text=(
            f"{stage} binds, by {resource}: generation {seconds['generation']:.1f} s {overlap} training "
            f"{seconds['training']:.1f} s, sync {seconds['sync']:.1f} s, a step {speed.step_time:.1f} s"
        ),
    )


def _of_generation(estimates: Estimates, index: int, run: Run) -> str:
    """Say why generation takes what it takes: its longest rollout, a cap on its batches, or the work."""
    least = estimates.least(index)
    if least.longest >= least.work:
        return "the longest rollout, token by token"
    batch = replica_batch(run)
    assert batch is not None, "it was simulated"
    match batch.limit:
        case "memory":
            return f"GPU memory for KV cache, of {batch.held:.0f} rollouts a replica"
        case "max_running":
            return f"rollout.max_running {run.rollout.max_running}"
        case "share":
            return "GPU memory bandwidth"
        case _:
            assert_never(batch.limit)


def _of_training(estimates: Estimates, index: int) -> str:
    """Return whether the trainer computes all the time, or its ranks wait for bubbles, host memory and each other."""
    least, whole = estimates.training_parts(index)
    if least >= ARITHMETIC * whole:
        return "FLOP/s of the trainer's GPUs"
    return "what its ranks wait for: offloading, pipeline bubbles, collectives of the optimizer"


def _of_sync(candidate: Candidate) -> str:
    if candidate.mode.system == "colocated":
        return "host memory, to and from which phases change"
    if candidate.replicas.pools == (candidate.trainer.pool,):
        return "the network between nodes"
    return "the link between both pools"
