"""Divide GPUs between generation and training: Algorithm 1 of StreamRL (arXiv 2504.15930) and its stage times.

P_gen(x) and P_train(y) are the stage times on x and y GPUs with the best parallelism. Both are the
seconds of a single batch. Generation lasts from the first prompt to the last rollout. The run's
policies distribute the batch to simulated replicas. Training includes every command for the batch
and the optimizer. If batches overlap, a step is shorter than the generation of a single batch.

    one pool of n GPUs      over all x + y <= n: the smallest max(P_gen(x), P_train(y))
    two pools, m and n      the slower side keeps its whole pool; the other side uses the number of GPUs whose
                            stage time is nearest to that, and returns the rest

If steps do not overlap, one pool is divided for the shortest step. The step is generation plus
training. With streaming, it is generation plus the training that remains when generation ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from statistics import fmean
from typing import Literal, assert_never

from msgspec.structs import replace

from streamrl.engine.presets import choose_system
from streamrl.hardware.resolved import resolve
from streamrl.runfile.checks import check_run
from streamrl.runfile.cluster_config import ClusterConfig
from streamrl.runfile.config import CostsConfig, Run
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig
from streamrl.sim.batch_generation import Finish, StepBatch, generate_batch, step_batches
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.planner.layouts import (
    Degrees,
    Replicas,
    TrainerRange,
    fitting_replicas,
    fitting_trainers,
    holds_rollouts,
    sizes,
)
from streamrl.sim.planner.stage_times import FallingLengths, passes_time, times_of_trainer
from streamrl.workload.workload import SimulatedWorkload

FEWEST_LONGEST = 8
"""Rollouts of maximum length that a replica must hold at once for its tensor parallelism to count
as fitting. With fewer, the tail of a batch waits for memory. With this value Qwen2.5 7B, 32B and
72B fit 1, 2 and 4 H800.
"""

NEAR = 1.3
"""Trainers whose closed form is within this ratio of the best one have their passes computed one by
one. Closed forms are within 10 % for data, tensor and short pipeline parallelism. They are less
accurate for long pipelines, which are slow.
"""
TRAINED_BATCHES = 4
"""Batches over which training time is averaged. A few are enough, because the time depends on their
tokens.
"""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The fastest replicas on `num_gpus`."""

    num_gpus: int
    replicas: int
    tensor_parallel: int
    time: float
    """Seconds from the first prompt to the last rollout of a batch."""
    finishes: tuple[Finish, ...] = field(repr=False, compare=False)
    """Time at which each rollout of the first batch finishes, in rising order."""

    def change(self, own: RolloutConfig) -> RolloutConfig:
        """Return the section with these replicas. They keep expert parallelism if the section has it."""
        degree = self.tensor_parallel
        experts = degree * own.data_parallel if own.expert_parallel > 1 else 1
        changed: RolloutConfig = replace(
            own, replicas=self.replicas, tensor_parallel=degree, expert_parallel=experts
        )
        return changed


@dataclass(frozen=True, kw_only=True)
class Training:
    """The fastest trainer on `num_gpus`."""

    degrees: Degrees
    time: float
    """Seconds of all work that the trainer does for a step."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the trainer."""
        return self.degrees.num_gpus

    def change(self, trainer: TrainerConfig) -> TrainerConfig:
        """Return the section of a trainer with these degrees, in its own pool."""
        return self.degrees._replace(pool=trainer.pool).change(trainer)


class Stages:
    """Stage times of a run's model, workload and system, each computed once."""

    def __init__(
        self, run: Run, *, smallest_tensor_parallel: bool = False, num_batches: int = 1
    ) -> None:
        """Prepare the stage times of a run. Its own replicas and degrees are ignored.

        Args:
            run: the run.
            smallest_tensor_parallel: generate with the smallest tensor parallelism that fits, not
                with the fastest. The paper's replicas seem to do the same.
            num_batches: batches over which generation time is averaged. Each batch has its own
                longest rollout, which limits it.

        Raises:
            ValueError: the costs were measured for one parallelism, or the trainer fits no GPUs of
                its pool.
        """
        refuse_profile(run.costs)
        policies = replace(run.policies, resize="keep")
        plan = replace(run.plan, speculative=None, rollout_tensor_parallel=None)
        self.run = replace(run, policies=policies, plan=plan)
        """The run with a fixed number of replicas, of any tensor parallelism."""
        self._smallest = smallest_tensor_parallel
        self._num_batches = num_batches
        self._generations: dict[int, Generation | None] = {}
        self._trainings: dict[int, Training | None] = {}
        self._costs: dict[int, tuple[Run, Costs]] = {}

    def generation(self, num_gpus: int) -> Generation | None:
        """Return the fastest replicas on `num_gpus`, or None if no replica of the model fits there."""
        if num_gpus not in self._generations:
            found = [self._generate(choice) for choice in self._choices(num_gpus)]
            self._generations[num_gpus] = min(found, key=lambda g: g.time, default=None)
        return self._generations[num_gpus]

    def training(self, num_gpus: int) -> Training | None:
        """Return the fastest trainer on `num_gpus`, or None if no trainer fits."""
        if num_gpus not in self._trainings:
            found = map(self._train, self._near_fastest(list(self._fitting(num_gpus))))
            self._trainings[num_gpus] = min(found, key=lambda t: t.time, default=None)
        return self._trainings[num_gpus]

    def with_fastest_replicas(self) -> Stages:
        """Return the same stages with replicas of any tensor parallelism. Training times already computed are kept."""
        other = copy(self)
        other._smallest, other._generations = False, {}
        return other

    # Generation -----------------------------------------------------------------------------------

    @cached_property
    def _batches(self) -> list[StepBatch]:
        """Return the first batches of the run."""
        most = max(self._num_batches, TRAINED_BATCHES)
        return list(islice(step_batches(self.run, SimulatedWorkload(self.run)), most))

    def _choices(self, num_gpus: int) -> list[Replicas]:
        """Return the replicas to simulate."""
        run, replica = self.run, resolve(self.run).replica
        least = FEWEST_LONGEST if self._smallest else 1
        own = (run.rollout.pipeline_parallel, run.rollout.data_parallel)
        fitting = [
            choice
            for choice in fitting_replicas(replica, run.plan, num_gpus, Counter())
            if (choice.pipeline_parallel, choice.data_parallel) == own
            and holds_rollouts(choice.place(replica, replica.pool), least)
        ]
        return fitting[:1] if self._smallest else fitting

    def _generate(self, choice: Replicas) -> Generation:
        run, costs = self._replica(choice)
        run = replace(run, rollout=choice.change(run.rollout))
        generate = partial(generate_batch, run, costs)
        steps = [batch.generate(generate) for batch in self._batches[: self._num_batches]]
        is_ahead = choose_system(run.policies).staleness_bound > 0
        batches = [ends.at_once if is_ahead else ends.in_turn for ends in steps]
        return Generation(
            num_gpus=choice.num_gpus,
            replicas=choice.replicas,
            tensor_parallel=choice.tensor_parallel,
            time=fmean(finishes[-1].time for finishes in batches),
            finishes=tuple(batches[0]),
        )

    def _replica(self, choice: Replicas) -> tuple[Run, Costs]:
        """Return a run with replicas of one tensor parallelism, and its costs. Any trainer that fits is used."""
        degree = choice.tensor_parallel
        if degree not in self._costs:
            one = choice._replace(replicas=1).change(self.run.rollout)
            run = replace(self.run, rollout=one, trainer=self._any_trainer)
            costs = Costs.load(run)
            self._costs[degree] = fill_policies(run, costs), costs
        return self._costs[degree]

    @cached_property
    def _any_trainer(self) -> TrainerConfig:
        own = self.run.trainer
        pool = self.run.cluster.pools[own.pool]
        for num_gpus in range(pool.num_gpus, 0, -1):
            for degrees in self._fitting(num_gpus):
                return degrees.change(own)
        raise ValueError(
            f"trainer: no parallelism fits the {pool.num_gpus} GPUs of pool {own.pool!r}; "
            "use a larger pool or a smaller model"
        )

    # Training -------------------------------------------------------------------------------------

    @cached_property
    def _lengths(self) -> list[list[int]]:
        """Prompt and output tokens of each rollout, by batch and in draw order."""
        return [
            [draw.drawn.prompt_tokens + n for draw in batch.trained for n in draw.lengths]
            for batch in self._batches[:TRAINED_BATCHES]
        ]

    def _fitting(self, num_gpus: int) -> Iterator[Degrees]:
        """Yield every trainer that fits, with the run's own micro-batch and ZeRO stage."""
        config = self.run.trainer
        among = TrainerRange(
            expert_parallel=(config.expert_parallel,),
            expert_tensor_parallel=(config.expert_tensor_parallel,),
            context_parallel=(config.context_parallel,),
            micro_batch=(config.micro_batch,),
            zero=(config.zero,),
            recompute=(config.recompute,),
            framework=self.run.framework.name,
        )
        yield from fitting_trainers(resolve(self.run).trainer, num_gpus, among, Counter())

    def _near_fastest(self, fitting: list[Degrees]) -> list[Degrees]:
        """Return the trainers whose closed form is near the fastest. Only computing their passes can order these."""
        estimates = [self._estimate(degrees) for degrees in fitting]
        most = NEAR * min(estimates, default=0.0)
        return [each for each, time in zip(fitting, estimates, strict=True) if time <= most]

    def _estimate(self, degrees: Degrees) -> float:
        trainer = degrees.change(self.run.trainer)
        times = times_of_trainer(self.run, trainer, self._falling)
        is_streamed = choose_system(self.run.policies).streaming == "stream"
        return (times.stream if is_streamed else times.whole) + times.optimizer

    @cached_property
    def _falling(self) -> list[FallingLengths]:
        return [FallingLengths(lengths) for lengths in self._lengths]

    def _train(self, degrees: Degrees) -> Training:
        run = replace(self.run, trainer=degrees.change(self.run.trainer))
        costs, streaming = TrainingCosts.load(resolve(run)), choose_system(run.policies).streaming
        passes = fmean(
            passes_time(costs, run.algorithm, batch, streaming) for batch in self._lengths
        )
        seconds = passes + costs.optimizer_time
        time = seconds / run.costs.training_factor + costs.overhead_time
        return Training(degrees=degrees, time=time)


def refuse_profile(costs: CostsConfig) -> None:
    """Raise `ValueError` if costs were measured at one parallelism only."""
    if costs.profile is not None:
        raise ValueError(
            f"costs.profile {costs.profile!r} was measured at one parallelism, but an allocation "
            "compares many: remove costs.profile"
        )


Objective = Literal["max", "overlap", "sum"]
"""How a step time combines both stages: `max` is the slower stage, `sum` adds both. `overlap` is
generation plus the training that remains when generation ends.
"""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """GPUs and parallelism of both sides."""

    generation: Generation
    training: Training
    step_time: float
    """Seconds of a step, by the objective."""

    @property
    def num_gpus(self) -> int:
        """GPUs of both sides."""
        return self.generation.num_gpus + self.training.num_gpus


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The chosen allocation and all allocations it was compared with."""

    chosen: Allocation
    table: list[Allocation]
    """Every pair that fits the pools, ordered by GPUs for generation, then by GPUs for training."""


def allocate(run: Run, *, smallest_tensor_parallel: bool = False) -> Run:
    """Return the run with the allocation that Algorithm 1 chooses for its pools.

    Pools shrink to the nodes that are used, unless the run adds replicas while it runs.

    Raises:
        ValueError: the model fits no division of the pools.
    """
    stages = Stages(run, smallest_tensor_parallel=smallest_tensor_parallel)
    chosen = search(stages).chosen
    rollout = chosen.generation.change(run.rollout)
    trainer, cluster = chosen.training.change(run.trainer), run.cluster
    if run.policies.resize == "keep":
        cluster = without_surplus(cluster, rollout, trainer)
    allocated: Run = replace(run, rollout=rollout, trainer=trainer, cluster=cluster)
    check_run(allocated)
    return allocated


def search(
    stages: Stages, *, objective: Objective | None = None, unit: int | None = None
) -> Comparison:
    """Compare every division of a run's pools and choose one by Algorithm 1.

    Args:
        stages: stage times of the run. The run's pools are the budgets.
        objective: how a step time combines both stages; by default the run's system decides. It
            chooses the division within one pool.
        unit: GPUs by which two sizes of a side differ. The default is a node, or one GPU in a pool
            with a single node.

    Raises:
        ValueError: generation and training share their GPUs, or the model fits no division of the
            pools.
    """
    run = stages.run
    if run.policies.shares_gpus:
        raise ValueError(
            "policies.system 'colocated' has nothing to divide: both sides use all GPUs; "
            "choose another system"
        )
    objective = objective or objective_of(run.policies)
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


def objective_of(policies: PoliciesConfig) -> Objective:
    """Return how a step of a run's system combines its stage times."""
    system = choose_system(policies)
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
    """Return the seconds of a step whose trainer works on rollouts as they finish.

    A trainer that is never idle while work waits ends at the maximum, over all rollouts, of: the
    finish time plus the work that remains from then on. Training seconds are divided among rollouts
    by tokens.
    """
    per_token = training.time / sum(finish.tokens for finish in generation.finishes)
    done_at = left = 0.0
    for finish in reversed(generation.finishes):
        left += finish.tokens * per_token
        done_at = max(done_at, finish.time + left)
    return done_at


def _balance(table: list[Allocation]) -> Allocation:
    """Keep the slower of two pools whole, and choose the size of the other whose stage time is nearest to it."""
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


def without_surplus(
    cluster: ClusterConfig, rollout: RolloutConfig, trainer: TrainerConfig
) -> ClusterConfig:
    """Return the cluster with only the nodes that both sides use in their pools."""
    pools = dict(cluster.pools)
    for name in {rollout.pool: 0, trainer.pool: 0}:
        sides = [side for side in (rollout, trainer) if side.pool == name]
        num_gpus = sum(side.num_gpus for side in sides)
        pools[name] = replace(pools[name], nodes=-(-num_gpus // pools[name].gpus_per_node))
    changed: ClusterConfig = replace(cluster, pools=pools)
    return changed
