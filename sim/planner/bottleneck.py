"""Find the stage and resource that a step of a plan waits for, by simulating it with one limit relaxed at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Literal, NamedTuple

from msgspec.structs import replace

from streamrl.hardware.resolved import resolve
from streamrl.record.metrics import Metrics
from streamrl.runfile.config import Run
from streamrl.runfile.formatting import format_duration, listing
from streamrl.runfile.roles_config import TrainerConfig, VerifierConfig
from streamrl.sim.planner.episode_worth import episode_binding
from streamrl.sim.planner.estimates import Estimates
from streamrl.sim.planner.layouts import Replicas
from streamrl.sim.planner.plan import Binding, Worth
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Candidate
from streamrl.sim.planner.trial import Trial, Unfinished, shortened
from streamrl.workload.replica_batch import replica_batch, rollouts_under_way

RelaxedLimit = Literal["generation", "training", "max_running", "max_staleness"]
STAGES: tuple[Literal["generation", "training"], ...] = ("generation", "training")
SHOWN = 0.005
"""Share of the longest stage below which a stage is not mentioned."""
FASTER = 1.1
"""Factor by which a stage is made faster."""
NEAR = 0.7
"""If stages overlap, the shorter one may also be the bottleneck from this share of the longer
stage's seconds.
"""
TIME_SHARE = 0.1
"""Share of `plan.time_limit` after which no further simulation with a relaxed limit starts."""


class RelaxedRun(NamedTuple):
    """A plan with one limit relaxed."""

    what: RelaxedLimit
    run: Run
    candidate: Candidate


def find_gains(
    race: Race, index: int, pool: Executor, watch: Callable[[], None] = lambda: None
) -> dict[RelaxedLimit, float]:
    """Return the share of a step that each relaxed limit saves, over the few steps of the search.

    Only limits that may bind are relaxed: first both stages, if they overlap and have similar
    times. The caps of generation follow, unless faster training saves more than faster generation.
    Simulations that do not finish, or do not start in time, are left out.
    """
    run = race.search.space.run
    until = time.perf_counter() + TIME_SHARE * run.plan.time_limit
    search = race.search
    before, portions = search.speeds[index].step_time, search.portions[index]

    def gains_of(reliefs: Iterable[RelaxedRun]) -> dict[RelaxedLimit, float]:
        trials = {each.what: _trial(each, portions) for each in reliefs}
        speeds = search.speeds_of(pool, trials, watch, until)
        return {
            what: 1 - speed.step_time / before
            for what, speed in speeds.items()
            if not isinstance(speed, Unfinished)
        }

    found = gains_of(_of_stages(search, index))
    if found.get("generation", 0.0) < found.get("training", 0.0):
        return found
    return {**found, **gains_of(_of_caps(search, index))}


def _trial(relief: RelaxedRun, portions: int) -> Trial:
    base = shortened(relief.run, relief.run.seed)
    return Trial(base, relief.candidate, portions=portions)


def _of_stages(search: Search, index: int) -> Iterator[RelaxedRun]:
    """Yield the plan with each stage made faster, if stages overlap and either may bind."""
    run, candidate = search.space.run, search.space.candidate(index)
    stages, costs = search.estimates.estimate(), run.costs
    shorter, longer = sorted((float(stages.generation[index]), float(stages.training[index])))
    if search.space.system(index).staleness_bound and shorter >= NEAR * longer:
        faster = replace(costs, generation_factor=FASTER * costs.generation_factor)
        yield RelaxedRun("generation", replace(run, costs=faster), candidate)
        faster = replace(costs, training_factor=FASTER * costs.training_factor)
        yield RelaxedRun("training", replace(run, costs=faster), candidate)


def _of_caps(search: Search, index: int) -> Iterator[RelaxedRun]:
    """Yield the plan with each cap on concurrent rollouts raised, if it has that cap."""
    run, candidate = search.space.run, search.space.candidate(index)
    if bound := search.space.system(index).staleness_bound:
        mode = candidate.mode._replace(max_staleness=bound + 1)
        yield RelaxedRun("max_staleness", run, candidate._replace(mode=mode))
    batch = replica_batch(resolve(candidate.apply(run)))
    wider = candidate._replace(replicas=_twice_running(candidate.replicas))
    if batch is None or batch.limit != "max_running":
        return
    if wider.replicas.fits(resolve(run).replica, run.cluster.pools):
        yield RelaxedRun("max_running", run, wider)


def _twice_running(replicas: Replicas) -> Replicas:
    beside = None if replicas.beside is None else _twice_running(replicas.beside)
    return replicas._replace(max_running=2 * replicas.max_running, beside=beside)


ARITHMETIC = 0.75
"""Share of the trainer's seconds above which FLOP/s bind it. Below, it waits for something else."""

SAVES = 0.01
"""Smallest share of a step that relaxing a limit must save for the limit to bind."""


def find_binding(
    estimates: Estimates,
    index: int,
    speed: Metrics,
    gains: Mapping[RelaxedLimit, float] | None = None,
    worths: Sequence[Worth] = (),
) -> Binding:
    """Return the stage and the resource that limit the step time of a simulated plan.

    Args:
        estimates: stage times of every plan.
        index: the plan.
        speed: the simulated speed of the plan.
        gains: the share of a step that each relaxed limit saves. Without them, the longest stage
            binds, and the limit on its batches is the resource.
        worths: simulated effects of the resources of episodes.
    """
    gains = gains or {}
    stages = estimates.estimate()
    seconds = {
        "generation": float(stages.generation[index]),
        "training": float(stages.training[index]),
        "sync": float(stages.sync[index]),
    }
    if rewards := float(stages.rewards[index]):
        seconds["rewards"] = rewards
    if worths:
        return episode_binding(worths, speed, seconds)
    stage = max(seconds, key=lambda name: seconds[name])
    if stage in ("generation", "training") and "generation" in gains and "training" in gains:
        stage = "generation" if gains["generation"] >= gains["training"] else "training"
    resources = {
        "generation": lambda: _of_generation(estimates, index, gains),
        "training": lambda: _of_training(estimates, index),
        "sync": lambda: _of_sync(estimates.space.candidate(index)),
        "rewards": lambda: _of_rewards(
            estimates.space.candidate(index).apply(estimates.space.run).verifier
        ),
    }
    resource = resources[stage]()
    overlap = bool(estimates.space.system(index).staleness_bound)
    verb = "are" if stage == "rewards" else "is"
    alone = _alone_text(seconds, speed.step_time, overlap=overlap)
    return Binding(
        stage=stage,
        resource=resource,
        seconds={**seconds, "step": speed.step_time},
        text=f"{stage} {verb} the bottleneck: {resource}; {alone}{_gains_text(gains)}",
    )


def _alone_text(seconds: Mapping[str, float], step_time: float, *, overlap: bool) -> str:
    """Return what each stage would take alone, and the step that they make together."""
    least = SHOWN * max(seconds.values())
    parts = [f"{stage} {format_duration(each)}" for stage, each in seconds.items() if each >= least]
    how = "side by side" if overlap else "in turn"
    return f"alone {listing(parts)}, {how} a step of {format_duration(step_time)}"


def _gains_text(gains: Mapping[RelaxedLimit, float]) -> str:
    """Return the effect of faster stages, if both stages were made faster."""
    if "generation" not in gains or "training" not in gains:
        return ""
    saved = [
        f"{FASTER - 1:.0%} faster {stage} saves {max(0.0, gains[stage]):.1%}" for stage in STAGES
    ]
    return f"; {' of a step, '.join(saved)}"


def _of_generation(estimates: Estimates, index: int, gains: Mapping[RelaxedLimit, float]) -> str:
    """Return the resource that limits generation.

    It is the longest rollout, a cap that saves time when raised, GPU memory or its bandwidth.
    """
    run = estimates.space.candidate(index).apply(estimates.space.run)
    batch = replica_batch(resolve(run))
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
            f"the bound on the age of rollouts (policies.max_staleness {bound:g}), which allows "
            f"{rollouts_under_way(run.policies, run.algorithm):,} at once, and GPU memory bandwidth"
        )
    least = estimates.least(index)
    if least.longest >= least.work:
        return "the longest rollout, token by token"
    if is_of_memory:
        return f"GPU memory for KV cache, room for {batch.held:.0f} rollouts a replica"
    return "GPU memory bandwidth"


def _of_training(estimates: Estimates, index: int) -> str:
    """Return whether arithmetic limits the trainer, or else what it also does."""
    least, whole = estimates.training_parts(index)
    if least >= ARITHMETIC * whole:
        return "FLOP/s of the trainer's GPUs"
    trainer = estimates.space.candidate(index).apply(estimates.space.run).trainer
    return f"{besides_arithmetic(trainer)}, more than FLOP/s"


def besides_arithmetic(trainer: TrainerConfig) -> str:
    """Return what takes a trainer time besides arithmetic."""
    waits = [
        ("optimizer steps on NVMe", trainer.steps_on_nvme),
        ("offload to host memory", trainer.offload and not trainer.steps_on_nvme),
        ("pipeline bubbles", trainer.pipeline_parallel > 1),
        ("communication between its GPUs", trainer.num_gpus > 1),
    ]
    names = [name for name, is_there in waits if is_there]
    return listing(names or ["memory traffic of its GPU"])


def _of_rewards(verifier: VerifierConfig) -> str:
    """Return the workers that compute rewards."""
    if verifier.pool is None:
        return f"verifier.workers {verifier.workers} on CPUs"
    return f"verifier.workers {verifier.workers} on {verifier.num_gpus} {verifier.pool}"


def _of_sync(candidate: Candidate) -> str:
    if candidate.mode.system == "colocated":
        return "copies to and from host memory between generation and training"
    if candidate.replicas.pools == (candidate.trainer.pool,):
        return "the network between nodes"
    return "the link between both pools"
