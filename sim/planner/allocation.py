"""How many GPUs generate and how many train: Algorithm 1 of StreamRL (arXiv 2504.15930).

    one pool of n GPUs      over all x + y <= n: the least max(P_gen(x), P_train(y))
    two pools, m and n      the slower side keeps its pool; the other gets as many GPUs as bring its stage nearest
                            to that, and gives the rest back

P_gen and P_train are those of `streamrl.sim.planner.stages`. Where steps do not overlap, one pool is divided so that a step is
shortest: generation, then training, or with streaming whatever of training is left when generation ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

from msgspec.structs import replace

from streamrl.engine.presets import choose_system
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.sim.planner.layouts import sizes
from streamrl.sim.planner.stages import Generation, Stages, Training

Objective = Literal["max", "overlap", "sum"]
"""Seconds of a step: of the slower stage; of generation and what training takes longer; of both stages."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """GPUs and parallelism of both sides."""

    generation: Generation
    training: Training
    step_time: float
    """Seconds of a step by the objective."""

    @property
    def num_gpus(self) -> int:
        """GPUs of both sides."""
        return self.generation.num_gpus + self.training.num_gpus


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was chosen, and everything that was compared."""

    chosen: Allocation
    table: list[Allocation]
    """Every pair that fits the pools, by GPUs that generate, then by GPUs that train."""


def allocate(run: Run, *, smallest_tensor_parallel: bool = False) -> Run:
    """Return the run with the allocation that Algorithm 1 chooses for its pools.

    Pools shrink to the nodes that are used, except where replicas are added while the run goes on.

    Raises:
        ValueError: the model fits no division of the pools.
    """
    stages = Stages(run, smallest_tensor_parallel=smallest_tensor_parallel)
    chosen = search(run, stages).chosen
    run = chosen.training.apply(chosen.generation.apply(run))
    if run.policies.resize == "keep":
        run = without_surplus(run)
    check_run(run)
    return run


def search(
    run: Run, stages: Stages, *, objective: Objective | None = None, unit: int | None = None
) -> Comparison:
    """Compare every division of a run's pools and choose one by Algorithm 1.

    Args:
        run: its pools are the budgets; its system decides the objective where none is given.
        stages: stage times of this run.
        objective: what a step takes; it decides within one pool.
        unit: GPUs that sides differ by; a node where absent, one GPU where the pool is a single node.

    Raises:
        ValueError: generation and training share their GPUs, or the model fits no division of the pools.
    """
    if run.shares_gpus:
        raise ValueError(
            "policies.system 'colocated' has nothing to divide: both sides use all GPUs"
        )
    objective = objective or objective_of(run)
    pools = run.cluster.pools
    rollout, trainer = pools[run.rollout.pool], pools[run.trainer.pool]
    is_one_pool = run.rollout.pool == run.trainer.pool
    table = [
        Allocation(generation=g, training=t, step_time=step_time(g, t, objective))
        for x in sizes(rollout, unit)
        for y in sizes(trainer, unit)
        if not is_one_pool or x + y <= rollout.num_gpus
        if (g := stages.generation(x)) is not None and (t := stages.training(y)) is not None
    ]
    if not table:
        raise ValueError(
            f"no division of pool {run.rollout.pool!r} ({rollout.num_gpus} GPUs) and pool "
            f"{run.trainer.pool!r} ({trainer.num_gpus} GPUs) fits both sides of the model"
        )
    if is_one_pool:
        return Comparison(chosen=min(table, key=lambda a: (a.step_time, a.num_gpus)), table=table)
    return Comparison(chosen=_balance(table), table=table)


def objective_of(run: Run) -> Objective:
    """Return what a step of the run's system takes."""
    system = choose_system(run.policies)
    if system.staleness_bound:
        return "max"
    return "overlap" if system.streaming == "stream" else "sum"


def step_time(generation: Generation, training: Training, objective: Objective) -> float:
    """Return the seconds of a step."""
    match objective:
        case "max":
            return max(generation.time, training.time)
        case "sum":
            return generation.time + training.time
        case "overlap":
            return _streamed_time(generation, training)
        case _:
            assert_never(objective)


def _streamed_time(generation: Generation, training: Training) -> float:
    """Seconds of a step whose trainer works on rollouts as they finish, for as long as their tokens take.

    A server that is never idle while work waits is done at the latest of: an arrival, and all work from
    then on.
    """
    per_token = training.time / sum(finish.tokens for finish in generation.finishes)
    done_at = left = 0.0
    for finish in reversed(generation.finishes):
        left += finish.tokens * per_token
        done_at = max(done_at, finish.time + left)
    return done_at


def _balance(table: list[Allocation]) -> Allocation:
    """Let the slower of two whole pools stay whole, and bring the other side nearest to it."""
    whole = max(table, key=lambda a: (a.generation.num_gpus, a.training.num_gpus))
    if whole.generation.time < whole.training.time:
        return min(
            (a for a in table if a.training == whole.training),
            key=lambda a: (abs(a.generation.time - whole.training.time), a.num_gpus),
        )
    return min(
        (a for a in table if a.generation == whole.generation),
        key=lambda a: (abs(a.training.time - whole.generation.time), a.num_gpus),
    )


def without_surplus(run: Run) -> Run:
    """Return the run with as many nodes in the pools of both sides as they use."""
    pools = dict(run.cluster.pools)
    for name in {run.rollout.pool: 0, run.trainer.pool: 0}:
        sides = [side for side in (run.rollout, run.trainer) if side.pool == name]
        num_gpus = sum(side.num_gpus for side in sides)
        pools[name] = replace(pools[name], nodes=-(-num_gpus // pools[name].gpus_per_node))
    return replace(run, cluster=replace(run.cluster, pools=pools))
