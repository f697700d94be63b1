"""What each stage takes on a number of GPUs, with the parallelism that is best there.

StreamRL (arXiv 2504.15930) calls these P_gen(x) and P_train(y). Both are seconds of one batch, alone: from the
first prompt to the last rollout, dealt out by the run's own policies to replicas as they are simulated; and of
every command that trains on it, optimizer included. Where a batch starts before the one before is done, steps
follow each other faster than a batch alone is generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from statistics import fmean

from msgspec.structs import replace

from streamrl.engine.presets import choose_system
from streamrl.runfile.config import Run
from streamrl.sim.batch_time import Finish
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.fill import fill_latency
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.planner.layouts import (
    Degrees,
    Replicas,
    TrainerRange,
    fitting_replicas,
    fitting_trainers,
    holds_rollouts,
)
from streamrl.sim.planner.train_time import FallingLengths, passes_time, train_times
from streamrl.sim.step_batches import StepBatch, step_batches
from streamrl.workload.workload import SimulatedWorkload

FEWEST_LONGEST = 8
"""Rollouts of the longest kind that a replica must hold at once for its tensor parallelism to count as fitting:
with fewer, the tail of a batch waits for memory. Qwen2.5 7B, 32B and 72B then fit 1, 2 and 4 H800."""

NEAR = 1.3
"""Closed form of a trainer over that of the best one up to which its passes are computed one by one: closed forms of
data, tensor and short pipelines lie within 10 % of that, and of long pipelines, which are slow, above it."""
TRAINED_BATCHES = 4
"""Batches over which training time is averaged: it goes with their tokens, and is quickly computed."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The best way to generate on `num_gpus`."""

    num_gpus: int
    replicas: int
    tensor_parallel: int
    time: float
    """Seconds to the last rollout of a batch."""
    finishes: tuple[Finish, ...] = field(repr=False, compare=False)
    """When each rollout of the first batch was finished, the first first."""

    def apply(self, run: Run) -> Run:
        """Return the run with these replicas."""
        return _with_replicas(run, self.replicas, self.tensor_parallel)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The best way to train on `num_gpus`."""

    degrees: Degrees
    time: float
    """Seconds of everything that the trainer does for a step."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the trainer."""
        return self.degrees.num_gpus

    def apply(self, run: Run) -> Run:
        """Return the run with these degrees, in its own pool."""
        return self.degrees._replace(pool=run.trainer.pool).apply(run)


class Stages:
    """Stage times of a run's model, workload and system, each computed once."""

    def __init__(
        self, run: Run, *, smallest_tensor_parallel: bool = False, num_batches: int = 1
    ) -> None:
        """Take the run whose sides are to be sized; what it says of replicas and degrees does not matter.

        Args:
            run: the run.
            smallest_tensor_parallel: generate with the smallest degree that fits, as the paper's replicas
                seem to, and not with the fastest.
            num_batches: batches over which generation time is averaged: each is bound by a longest rollout
                of its own.

        Raises:
            ValueError: its costs were measured for one parallelism, or the trainer fits no GPUs of its pool.
        """
        refuse_profile(run)
        policies, plan = replace(run.policies, resize="keep"), replace(run.plan, speculative=None)
        self._run = replace(run, policies=policies, plan=plan)
        self._smallest = smallest_tensor_parallel
        self._num_batches = num_batches
        self._generations: dict[int, Generation | None] = {}
        self._trainings: dict[int, Training | None] = {}
        self._costs: dict[int, tuple[Run, Costs]] = {}

    def generation(self, num_gpus: int) -> Generation | None:
        """Return the fastest replicas on `num_gpus`; None where the model fits no replica there."""
        if num_gpus not in self._generations:
            found = [self._generate(choice) for choice in self._choices(num_gpus)]
            self._generations[num_gpus] = min(found, key=lambda g: g.time, default=None)
        return self._generations[num_gpus]

    def training(self, num_gpus: int) -> Training | None:
        """Return the fastest trainer on `num_gpus`; None where none fits."""
        if num_gpus not in self._trainings:
            found = map(self._train, self._near_fastest(list(self._fitting(num_gpus))))
            self._trainings[num_gpus] = min(found, key=lambda t: t.time, default=None)
        return self._trainings[num_gpus]

    def with_fastest_replicas(self) -> Stages:
        """Return the same stages with replicas of any degree; what is known of training stays known."""
        other = copy(self)
        other._smallest, other._generations = False, {}
        return other

    # Generation -----------------------------------------------------------------------------------

    @cached_property
    def _batches(self) -> list[StepBatch]:
        """Return the first batches of the run."""
        most = max(self._num_batches, TRAINED_BATCHES)
        return list(islice(step_batches(self._run, SimulatedWorkload(self._run)), most))

    def _choices(self, num_gpus: int) -> list[Replicas]:
        """Return the replicas to try."""
        run, pool = self._run, self._run.rollout.pool
        least = FEWEST_LONGEST if self._smallest else 1
        own = (run.rollout.pipeline_parallel, run.rollout.data_parallel)
        fitting = [
            choice
            for choice in fitting_replicas(run, pool, num_gpus, None, Counter())
            if (choice.pipeline_parallel, choice.data_parallel) == own
            and holds_rollouts(choice.apply(run), least)
        ]
        return fitting[:1] if self._smallest else fitting

    def _generate(self, choice: Replicas) -> Generation:
        run, costs = self._replica(choice)
        run = choice.apply(run)
        steps = [batch.generate(run, costs) for batch in self._batches[: self._num_batches]]
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
        """Return a run with replicas of a degree, and its costs; the trainer is any that fits."""
        degree = choice.tensor_parallel
        if degree not in self._costs:
            run = choice._replace(replicas=1).apply(self._any_trainer)
            costs = Costs.load(run)
            self._costs[degree] = fill_latency(run, costs), costs
        return self._costs[degree]

    @cached_property
    def _any_trainer(self) -> Run:
        pool = self._run.cluster.pools[self._run.trainer.pool]
        for num_gpus in range(pool.num_gpus, 0, -1):
            for degrees in self._fitting(num_gpus):
                return degrees.apply(self._run)
        raise ValueError(
            f"trainer: no parallelism fits the {pool.num_gpus} GPUs of pool {self._run.trainer.pool!r}"
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
        config = self._run.trainer
        among = TrainerRange(
            expert_parallel=(config.expert_parallel,),
            expert_tensor_parallel=(config.expert_tensor_parallel,),
            context_parallel=(config.context_parallel,),
            micro_batch=(config.micro_batch,),
            zero=(config.zero,),
            recompute=(config.recompute,),
        )
        yield from fitting_trainers(self._run, config.pool, num_gpus, among, Counter())

    def _near_fastest(self, fitting: list[Degrees]) -> list[Degrees]:
        """Return the trainers that closed forms put so near the fastest that only the passes themselves decide."""
        estimates = [self._estimate(degrees) for degrees in fitting]
        most = NEAR * min(estimates, default=0.0)
        return [each for each, time in zip(fitting, estimates, strict=True) if time <= most]

    def _estimate(self, degrees: Degrees) -> float:
        run = degrees.apply(self._run)
        times = train_times(run, TrainingCosts.load(run), self._falling)
        is_streamed = choose_system(run.policies).streaming == "stream"
        return (times.stream if is_streamed else times.whole) + times.optimizer

    @cached_property
    def _falling(self) -> list[FallingLengths]:
        return [FallingLengths(lengths) for lengths in self._lengths]

    def _train(self, degrees: Degrees) -> Training:
        run = degrees.apply(self._run)
        costs, streaming = TrainingCosts.load(run), choose_system(run.policies).streaming
        passes = fmean(passes_time(run, costs, batch, streaming) for batch in self._lengths)
        seconds = passes + costs.optimizer_time
        time = seconds / run.costs.training_factor + costs.overhead_time
        return Training(degrees=degrees, time=time)


def _with_replicas(run: Run, replicas: int, degree: int) -> Run:
    """Return the run with other replicas; those of a mixture that deals experts out go on doing so."""
    rollout = replace(
        run.rollout,
        replicas=replicas,
        tensor_parallel=degree,
        expert_parallel=degree * run.rollout.data_parallel
        if run.rollout.expert_parallel > 1
        else 1,
    )
    return replace(run, rollout=rollout)


def refuse_profile(run: Run) -> None:
    """Raise `ValueError` where costs were measured at one parallelism only."""
    if run.costs.profile is not None:
        raise ValueError(
            f"costs.profile {run.costs.profile!r} was measured at one parallelism, and an allocation "
            "compares many: leave it out"
        )
