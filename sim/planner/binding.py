"""Which stage, and which resource in it, a step of a plan waits for."""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.doctor.replica_batch import replica_batch, rollouts_under_way
from streamrl.record.speed import Speed
from streamrl.report.plan import Binding
from streamrl.runfile.config import Run
from streamrl.sim.planner.bound import Estimates
from streamrl.sim.planner.relief import FASTER, Relieved
from streamrl.sim.planner.space import Candidate

ARITHMETIC = 0.75
"""Share of the trainer's seconds above which its arithmetic binds, not what it waits for."""

SAVES = 0.01
"""Share of a step that the relief of what binds saves at least."""


def find_binding(
    estimates: Estimates, index: int, speed: Speed, gains: Mapping[Relieved, float] | None = None
) -> Binding:
    """Say what binds a simulated plan: the stage, and what in it, whose relief shortens a step.

    Args:
        estimates: of the stages of every plan.
        index: the plan.
        speed: what was simulated of it.
        gains: what its reliefs save; where none was tried, the longest stage binds, by what limits its batches.
    """
    gains = gains or {}
    stages = estimates.estimate()
    candidate = estimates.space.candidate(index)
    run = candidate.apply(estimates.space.run)
    seconds = {
        "generation": float(stages.generation[index]),
        "training": float(stages.training[index]),
        "sync": float(stages.sync[index]),
    }
    stage = max(seconds, key=lambda name: seconds[name])
    if stage != "sync" and "generation" in gains and "training" in gains:
        stage = "generation" if gains["generation"] >= gains["training"] else "training"
    resources = {
        "generation": lambda: _of_generation(estimates, index, run, gains),
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
            f"{seconds['training']:.1f} s, sync {seconds['sync']:.1f} s, a step {speed.step_time:.1f} s{_told(gains)}"
        ),
    )


def _told(gains: Mapping[Relieved, float]) -> str:
    """Say what was tried of stages that are about as long."""
    if "generation" not in gains or "training" not in gains:
        return ""
    return (
        f"; {FASTER - 1:.0%} faster generation saves {max(0.0, gains['generation']):.1%} of it, "
        f"training {max(0.0, gains['training']):.1%}"
    )


def _of_generation(
    estimates: Estimates, index: int, run: Run, gains: Mapping[Relieved, float]
) -> str:
    """Say why generation takes what it takes: its longest rollout, a cap whose relief saves seconds, or the work."""
    batch = replica_batch(run)
    assert batch is not None, "it was simulated"
    cap = f"rollout.max_running {run.rollout.max_running}"
    if gains.get("max_running", 0.0) >= max(SAVES, gains.get("max_staleness", 0.0)):
        return cap
    if not gains and batch.limit == "max_running":
        return f"{cap}, which nobody tried to raise"
    is_of_memory = batch.limit == "memory"
    if gains.get("max_staleness", 0.0) >= SAVES and not is_of_memory:
        bound = estimates.space.system(index).staleness_bound
        return (
            f"policies.max_staleness {bound:g}, of {rollouts_under_way(run):,} rollouts at once, "
            "and GPU memory bandwidth"
        )
    least = estimates.least(index)
    if least.longest >= least.work:
        return "the longest rollout, token by token"
    if is_of_memory:
        return f"GPU memory for KV cache, of {batch.held:.0f} rollouts a replica"
    return "GPU memory bandwidth"


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
