"""Compute bounds and estimates of the step time for every plan in a search space, as arrays.

Bounds always hold; estimates only rank plans. The stages of a plan are separable:

- Generation depends on the replicas and the dispatch policy.
- Training depends on the trainer.
- Weight sync depends on a class of pairs of replicas and trainers.
- Rewards depend on the mode, which has the GPUs that compute them.

Each is computed once and combined for all plans.

| system                     | step time                                                        |
|----------------------------|------------------------------------------------------------------|
| colocated, disaggregated   | generation + training + phase change or sync                     |
| stream-sync                | until the trainer has processed the generated rollouts, + sync   |
| one-step-async             | the longer of generation and training, + sync; or rewards        |
| batches one after another  | the longest of generation, training and rewards                  |
| steps that overlap         | the same; a replica starts a batch when it ends the one before   |

In the synchronous systems, training begins when the last reward of the batch is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace as replace_fields
from statistics import median
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.engine.presets import System
from streamrl.engine.systems import rollouts_that_fill
from streamrl.hardware.resolved import resolve
from streamrl.record.billing import adds_nothing, billing_ratios, rented_time
from streamrl.record.charges import egress_dollars
from streamrl.record.whole_run import steps_for_one
from streamrl.runfile.cluster_config import ClusterConfig
from streamrl.runfile.config import CostsConfig
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.policies_config import StreamingName
from streamrl.sim.batch_generation import StepBatch
from streamrl.sim.costs.colocation import sync_costs
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.reward_model import reward_costs
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.planner.layouts import Degrees, Replicas
from streamrl.sim.planner.modes import EpisodeLimits, Mode
from streamrl.sim.planner.objective import values_of
from streamrl.sim.planner.reward_replicas import RewardReplicas, RewardTimes, reward_times
from streamrl.sim.planner.space import Candidate, Space
from streamrl.sim.planner.stage_times import (
    DealtBatch,
    FallingLengths,
    GenerationTime,
    LeastTimes,
    TrainTimes,
    least_times,
    train_times,
)
from streamrl.workload.replica_batch import rollouts_under_way

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
PlanIndices = NDArray[np.intp]


class SyncTimes(NamedTuple):
    """Times and egress cost of the weight sync of every plan.

    For colocated plans they are those of the phase change.
    """

    push: Floats
    load: Floats
    egress: Floats
    """Dollars of a push for traffic between pools."""


def sync_times(space: Space, first: int = 0) -> SyncTimes:
    """Return push seconds, load seconds and egress dollars of every plan from index `first` on."""
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
    found = [_sync(space, first + int(place)) for place in firsts]
    push, load, egress = np.array(found).T[:, inverse]
    return SyncTimes(push, load, egress)


def _sender(trainer: Degrees) -> Hashable:
    """Return the properties of a trainer that a push depends on.

    These are the pool and the number of ranks over which one copy is sharded. The number of copies
    has little effect.
    """
    return trainer.pool, trainer.tensor_parallel * trainer.pipeline_parallel


def _shares(trainer: Degrees) -> Hashable:
    """Return the properties of a trainer that a phase change depends on."""
    return trainer._replace(micro_batch=1)


def _classes(trainers: list[Degrees], key: Callable[[Degrees], Hashable]) -> PlanIndices:
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key(trainer), len(seen)) for trainer in trainers])


def _sync(space: Space, index: int) -> tuple[float, float, float]:
    run = space.candidate(index).apply(space.run)
    costs = sync_costs(resolve(run))
    return (
        costs.push_time,
        costs.load_time,
        egress_dollars(run.cluster.links, run.rollout.kinds, run.trainer.pool, costs.wire_bytes),
    )


Indices = NDArray[np.signedinteger]
CAREFUL = 0.97
"""Factor on a simulated generation time before it bounds another number of the same replicas. One
batch differs from the next.
"""
OVERLAP = 1.0
"""Default ratio of generation seconds with overlapping steps to those of replicas that generate one
share after the other. Simulations replace it.
"""
IN_FLIGHT = 1.1
"""The same ratio to the bound if replicas load weights without a pause, so that they never drain.
"""
BINDS = 0.97
"""Share of a simulated step above which training, not generation, limited it."""
Degree = Replicas
"""Identifies one replica. Replicas of one kind are equal up to their number; a side with several
kinds equals only itself.
"""


class Asked(NamedTuple):
    """Key of a generation time: the replicas, and how rollouts are distributed to them."""

    replicas: int
    dispatch: str | None
    order: str | None
    episodes: EpisodeLimits | None = None
    under_way: int = 0
    """Episodes that admission lets run at once; 0 without an environment."""


class Passes(NamedTuple):
    """Key of a trainer's passes: the trainer, and the streaming mode, which decides the size of a command."""

    trainer: int
    streaming: StreamingName


class Paced(NamedTuple):
    """Key of a pace: the replicas, and a mode in which steps overlap."""

    replicas: Replicas
    mode: Mode


class StageSeconds(NamedTuple):
    """Seconds of each stage and of a step, for every plan."""

    generation: Floats
    training: Floats
    sync: Floats
    step: Floats
    rewards: Floats


class Estimates:
    """Estimates and bounds of the step time of every plan in a space."""

    def __init__(
        self, space: Space, batches: Sequence[StepBatch], sync: SyncTimes | None = None
    ) -> None:
        """Compute everything that needs no simulation.

        Args:
            space: the plans.
            batches: the batches that steps generate and train on.
            sync: times of the weight sync of every plan; computed if None.

        Raises:
            ValueError: costs of the run's model or GPUs are missing.
        """
        self.space = space
        self._works = [DealtBatch.of(batch.drawn) for batch in batches]
        trained_on = [DealtBatch.of(batch.trained) for batch in batches]
        self.trained_on = [FallingLengths(work.lengths) for work in trained_on]
        """The lengths that each step trains on."""
        self.tokens = float(np.mean([work.outputs.sum() for work in trained_on]))
        """Output tokens that a step trains on."""
        self._overlaps = [_overlaps(system) for system in space.systems]
        self._has_episodes = space.run.environment is not None
        self._times: dict[Asked, GenerationTime] = {}
        self._paces: dict[Paced, float] = {}
        self._alike: dict[Degree, list[int]] = defaultdict(list)
        """Indices of replicas that differ only in their number."""
        self._least: list[LeastTimes] = []
        self._shards: dict[Degree, list[LeastTimes]] = {}
        self._counts: Floats = np.zeros(0)
        """Number of replicas of each side."""
        self._places: dict[int, dict[int, Indices]] = {}
        """Where each replicas are among the plans of a mode, by mode."""
        self._bounds: dict[int, Floats] = {}
        """Lower bounds of the generation time of all replicas, by mode."""
        self._bound_replicas()
        self._stream_ends_of: dict[tuple[int, int], _StreamEnds] = {}
        """When trainers end that stream, by mode and simulated replicas."""
        self._train()
        self._checked: dict[Passes, float] = {}
        """Per trainer and streaming mode: the ratio of passes computed one by one to their closed
        form.
        """
        self._push, self._load, self._egress = sync = sync or sync_times(space)
        self._syncs = {tuple(space.run.cluster.links): sync}
        """Times of the weight sync of every plan, by the links of the offer."""
        self._rewards = list(self._find_rewards())
        """Seconds of the rewards of a step, by mode."""
        self._estimated: StageSeconds | None = None
        """The estimate of every plan, until something is learned."""

    @property
    def _sync(self) -> SyncTimes:
        return SyncTimes(self._push, self._load, self._egress)

    def _find_rewards(self) -> Iterator[RewardTimes]:
        """Yield the seconds of the rewards of a step, for each mode."""
        known: dict[RewardReplicas | None, RewardTimes] = {}
        for mode in self.space.modes:
            if mode.rewards not in known:
                run = mode.apply(self.space.run)
                costs = reward_costs(resolve(run).reward, run.costs)
                known[mode.rewards] = reward_times(costs, run.verifier, self._works)
            yield known[mode.rewards]

    def widen(self, space: Space) -> None:
        """Replace the space by one with more replicas, whose new plans come after the existing ones."""
        first, self.space, self._estimated, self._places = len(self.space), space, None, {}
        self._stream_ends_of = {}
        self._bound_replicas()
        more = sync_times(space, first)
        self._push = np.concatenate([self._push, more.push])
        self._load = np.concatenate([self._load, more.load])
        self._egress = np.concatenate([self._egress, more.egress])
        self._syncs = {tuple(space.run.cluster.links): self._sync}

    def _train(self) -> None:
        """Compute the closed forms of all trainers."""
        self._stream_ends_of = {}
        run = self.space.run
        factor, trained, fills = run.costs.training_factor, [], []
        for trainer in self.space.trainers:
            costs = TrainingCosts.load(resolve(replace(run, trainer=trainer.change(run.trainer))))
            fills.append(rollouts_that_fill(costs.trainer))
            trained.append(train_times(costs, run.framework, factor, self.trained_on))
        self._trained = {
            name: np.array(column)
            for name, column in zip(TrainTimes._fields, zip(*trained, strict=True), strict=True)
        }
        self._fills = np.array(fills)
        """Rollouts that a streamed command of each trainer waits for."""

    # Generation -----------------------------------------------------------------------------------

    def _bound_replicas(self) -> None:
        """Compute the bounds of all replicas that have none yet, on every batch."""
        space = self.space
        for place, each in enumerate(space.replicas[len(self._least) :], start=len(self._least)):
            self._alike[_degree(each)].append(place)
            candidate = space.candidate(int(np.argmax(space.of_replicas == place)))
            kinds = [(own.replicas, self._shard(own, candidate)) for own in each.kinds]
            self._least.append(_together(kinds))
        self._counts = np.array([float(each.num_replicas) for each in space.replicas])
        self._bounds = {}

    def _shard(self, replicas: Replicas, candidate: Candidate) -> list[LeastTimes]:
        """Return the bounds of one kind of replica on every batch. They depend only on pool and degrees."""
        shard = _degree(replicas)
        if shard not in self._shards:
            costs = Costs.load(candidate._replace(replicas=replicas).apply(self.space.run))
            self._shards[shard] = [
                least_times(costs.decode, costs.kv_capacity, work) for work in self._works
            ]
        return self._shards[shard]

    def asked(self, indices: Iterable[int], num_batches: int) -> dict[Asked, int]:
        """Return the missing generation times of some plans in their order, each with a plan that needs it."""
        space, wanted = self.space, dict[Asked, int]()
        for index in indices:
            asked = self._asked_for(int(space.of_replicas[index]), int(space.of_mode[index]))
            known = self._times.get(asked)
            if known is not None and len(known.seconds) >= num_batches:
                continue
            if self._has_episodes or not _never_drains(space.system(index)):
                wanted.setdefault(asked, index)
        return wanted

    def _asked_for(self, replicas: int, mode: int) -> Asked:
        how = self.space.modes[mode]
        return Asked(replicas, how.dispatch, how.order, how.episodes, self._under_way(mode))

    def _under_way(self, mode: int) -> int:
        run = self.space.run
        if not self._has_episodes:
            return 0
        return rollouts_under_way(self.space.modes[mode].apply(run).policies, run.algorithm)

    def _found(self, mode: int) -> Iterator[tuple[int, GenerationTime]]:
        """Yield the replicas whose generation was simulated with a mode's dispatch, and its time."""
        own = self._asked_for(0, mode)
        for asked, found in self._times.items():
            if asked._replace(replicas=0) == own:
                yield asked.replicas, found

    def has_generation(self) -> Mask:
        """Return which plans have more than a lower bound of their generation: a simulation, or closed forms alone."""
        found = np.zeros(len(self.space), dtype=bool)
        for mode, system in enumerate(self.space.systems):
            in_mode = self.space.of_mode == mode
            if _never_drains(system) and not self._has_episodes:
                found |= in_mode
                continue
            known = [replicas for replicas, _ in self._found(mode)]
            found |= in_mode & np.isin(self.space.of_replicas, known)
        return found

    def _places_of(self, mode: int, replicas: int) -> Indices:
        """Return where some replicas are among the plans of a mode."""
        if mode not in self._places:
            of_each = self.space.of_replicas[self.space.of_mode == mode]
            order = np.argsort(of_each, kind="stable")
            found, firsts = np.unique(of_each[order], return_index=True)
            parts = np.split(order, firsts[1:])
            self._places[mode] = dict(zip(found.tolist(), parts, strict=True))
        return self._places[mode].get(replicas, np.zeros(0, dtype=np.intp))

    def learn(self, asked: Asked, found: GenerationTime) -> None:
        """Store a simulated generation time."""
        self._times[asked], self._estimated = found, None

    def learn_step(self, index: int, step_time: float) -> None:
        """Update the pace of a simulated plan's replicas.

        Only plans whose steps overlap have a pace. It is known only if neither training nor rewards
        limit the step.
        """
        mode, replicas = int(self.space.of_mode[index]), int(self.space.of_replicas[index])
        _, training = self.training_parts(index)
        others = max(training, self._rewards_of(mode))
        if self._overlaps[mode] and others < BINDS * step_time:
            paced = Paced(self.space.replicas[replicas], self.space.modes[mode])
            self._paces[paced] = step_time / float(self._unpaced(mode)[replicas])
            self._estimated = None

    def unchecked(self, indices: Iterable[int]) -> dict[Passes, int]:
        """Return the passes of some plans that were not computed one by one, each with a plan that has them."""
        space, wanted = self.space, dict[Passes, int]()
        for index in indices:
            passes = Passes(int(space.of_trainer[index]), space.system(index).streaming)
            if passes not in self._checked:
                wanted.setdefault(passes, index)
        return wanted

    def learn_passes(self, passes: Passes, error: float) -> None:
        """Correct a closed form by the ratio of passes computed one by one to it."""
        self._checked[passes], self._estimated = error, None
        part = "stream" if passes.streaming == "stream" else "whole"
        self._trained[part][passes.trainer] *= error

    def take_paces(self, other: Estimates) -> None:
        """Copy the paces that were learned for another workload."""
        self._paces, self._estimated = dict(other._paces), None

    def take_learned(self, other: Estimates) -> None:
        """Copy what was learned of the same replicas and trainers in other plans, from the same batches."""
        self.take_paces(other)
        replicas = {each: place for place, each in enumerate(self.space.replicas)}
        for asked, found in other._times.items():
            place = replicas.get(other.space.replicas[asked.replicas])
            if place is not None:
                self.learn(asked._replace(replicas=place), found)
        trainers = {each: place for place, each in enumerate(self.space.trainers)}
        for passes, error in other._checked.items():
            place = trainers.get(other.space.trainers[passes.trainer])
            if place is not None:
                self.learn_passes(passes._replace(trainer=place), error)

    def with_costs(self, costs: CostsConfig) -> Estimates:
        """Return estimates of the same plans and batches for another speed of training."""
        other = copy(self)
        other._take_space(replace_fields(self.space, run=replace(self.space.run, costs=costs)))
        other._train()
        other._correct(self._checked)
        return other

    def with_batches(self, batches: Sequence[StepBatch]) -> Estimates:
        """Return estimates of the same plans for other lengths.

        Learned ratios of simulated times to closed forms and bounds are kept.
        """
        other = Estimates(self.space, batches, self._sync)
        other.take_paces(self)
        other._correct(self._checked)
        for asked, found in self._times.items():
            before = self._least_alone(asked.replicas)
            longer = other._least_alone(asked.replicas) / before if before else 1.0
            other.learn(asked, found.scaled(longer))
        return other

    def _least_alone(self, replicas: int) -> float:
        """Return the lower bound of generation for replicas that are idle before each batch."""
        least = self._least[replicas]
        return max(least.longest, least.work / self.space.replicas[replicas].num_replicas)

    def _correct(self, errors: Mapping[Passes, float]) -> None:
        self._checked = {}
        for passes, error in errors.items():
            self.learn_passes(passes, error)

    def training_parts(self, index: int) -> tuple[float, float]:
        """Return a plan's seconds of arithmetic in training, and of all work of its trainer."""
        trainer = self.space.of_trainer[index]
        streams = self.space.system(index).streaming == "stream"
        part = self._trained["stream" if streams else "whole"]
        whole = part[trainer] + self._trained["optimizer"][trainer]
        return float(self._trained["least"][trainer]), float(whole)

    def shifted(self, cluster: ClusterConfig) -> Estimates:
        """Return estimates for other prices or links, with the same workload and the same plans."""
        other = copy(self)
        other._take_space(self.space.priced(cluster))
        return other

    def with_sync(self, sync: SyncTimes) -> Estimates:
        """Return estimates with other times of the weight sync, with the same workload and the same plans."""
        other = copy(self)
        other._take_sync(sync)
        return other

    def _take_space(self, space: Space) -> None:
        """Replace the space by one with the same plans, perhaps with other prices, links or costs."""
        self.space, self._estimated, links = space, None, tuple(space.run.cluster.links)
        if links not in self._syncs:
            self._syncs[links] = sync_times(space)
        self._take_sync(self._syncs[links])

    def _take_sync(self, sync: SyncTimes) -> None:
        self._syncs = {**self._syncs, tuple(self.space.run.cluster.links): sync}
        (self._push, self._load, self._egress), self._estimated = sync, None

    # Steps ----------------------------------------------------------------------------------------

    def estimate(self) -> StageSeconds:
        """Return the seconds of every plan. Generation that was not simulated has its lower bound."""
        if self._estimated is None:
            self._estimated = self._put_together(is_bound=False)
        return self._estimated

    def bound(self) -> Floats:
        """Return a lower bound on the seconds of a steady step of each plan."""
        return self._put_together(is_bound=True).step

    def values(
        self, steps: Floats, lags: Floats | None = None, plan: PlanConfig | None = None
    ) -> Floats:
        """Return the objective of every plan.

        Args:
            steps: seconds of a step of each plan.
            lags: mean staleness of each plan in versions; zero by default.
            plan: the section with the objective; by default that of the run file.
        """
        plan, prices, egress = plan or self.space.run.plan, self.space.prices, self.egress(steps)
        lags = np.zeros(len(steps)) if lags is None else lags
        billed = self.billed(steps, lags, plan)
        rented = self._rented(steps, lags, plan)
        return values_of(plan, steps, prices, self.tokens, lags, egress, billed, rented)

    def billed(self, steps: Floats, lags: Floats, plan: PlanConfig) -> Floats | float:
        """Return the bill of every plan's whole run, relative to what its steps cost; see `billing_ratio`.

        Args:
            steps: seconds of a step of each plan.
            lags: mean staleness of each plan in versions.
            plan: the section with the cost of staleness.
        """
        cluster = self.space.run.cluster
        if adds_nothing(cluster):
            return 1.0
        num_steps = self.space.run.algorithm.steps * steps_for_one(plan, lags)
        egress = num_steps * self.egress(steps)
        return billing_ratios(cluster, self.space.rents(), egress, num_steps * steps)

    def _rented(self, steps: Floats, lags: Floats, plan: PlanConfig) -> Floats | float:
        """Return the time until the end of every plan's whole run, relative to its steps; see `billed`."""
        cluster = self.space.run.cluster
        if adds_nothing(cluster):
            return 1.0
        seconds = self.space.run.algorithm.steps * steps_for_one(plan, lags) * steps
        return rented_time(cluster.billing, seconds) / seconds

    def egress(self, steps: Floats) -> Floats:
        """Return the dollars of a step for traffic between pools.

        It is the cost of one push. In a step shorter than a push, it is the share that fits.
        """
        found: Floats = self._egress * np.minimum(1.0, steps / np.maximum(self._push, 1e-9))
        return found

    def least(self, index: int) -> LeastTimes:
        """Return the lower bounds of a plan's generation in a step.

        One is the step's share of the longest rollout. The other is its work on the plan's
        replicas.
        """
        return self._least_of(int(self.space.of_replicas[index]), int(self.space.of_mode[index]))

    def _put_together(self, *, is_bound: bool) -> StageSeconds:
        columns = [np.zeros(len(self.space)) for _ in StageSeconds._fields]
        for mode, system in enumerate(self.space.systems):
            places = np.nonzero(self.space.of_mode == mode)[0]
            found = self._stages(places, mode, system, is_bound=is_bound)
            for column, values in zip(columns, found, strict=True):
                column[places] = values
        return StageSeconds(*columns)

    def _stages(
        self, places: Indices, mode: int, system: System, *, is_bound: bool
    ) -> StageSeconds:
        trainer, trained = self.space.of_trainer[places], self._trained
        push, load = (each[places] / system.sync_every for each in (self._push, self._load))
        streams = system.streaming == "stream"
        part = "least" if is_bound else "stream" if streams else "whole"
        training = trained[part][trainer] + trained["optimizer"][trainer]
        generation = self._generation(self.space.of_replicas[places], mode, is_bound=is_bound)
        scored = self._scored_ends(places, mode, generation, is_bound=is_bound)
        rewards = self._rewards_of(mode, is_bound=is_bound)
        if system.staleness_bound == 0:
            ends = scored + training
            if streams:
                ends = self._stream_ends(places, mode, scored, training, is_bound=is_bound)
            step = ends + push + load
        elif system.halts_for_sync:
            trained = training if is_bound else training + scored - generation
            step = np.maximum(np.maximum(generation, trained) + push + load, rewards)
        else:
            step = np.maximum(np.maximum(generation + load, training), rewards)
        return StageSeconds(generation, training, push + load, step, np.full(len(places), rewards))

    def _scored_ends(
        self, places: Indices, mode: int, generation: Floats, *, is_bound: bool
    ) -> Floats:
        """Return when the last reward of a batch is computed, if its rollouts begin together."""
        rewards = self._rewards[mode]
        if not rewards.sorted:
            return generation
        if is_bound:
            return np.maximum(generation, rewards.sorted)
        ends: Floats = np.maximum(generation + rewards.last, rewards.sorted)
        for replicas, found in self._found(mode):
            mine = self._places_of(mode, replicas)
            ends[mine] = np.maximum(ends[mine], found.scored_end(rewards.sorted))
        return ends

    def _rewards_of(self, mode: int, *, is_bound: bool = False) -> float:
        """Return the seconds of the rewards of a step in a mode."""
        bound = self.space.systems[mode].staleness_bound if self._overlaps[mode] else 0
        return self._rewards[mode].of_batches(1 if is_bound else 1 + bound)

    def _generation(self, replicas: Indices, mode: int, *, is_bound: bool) -> Floats:
        """Return the seconds of generation: simulated if known, else a lower bound."""
        if is_bound:
            table = self._bounds_of(mode)
        elif self._overlaps[mode]:
            table = self._unpaced(mode) * self._paces_of(mode)
        else:
            table = self._unpaced(mode)
        values: Floats = table[replicas]
        return values

    def _unpaced(self, mode: int) -> Floats:
        """Return the generation time of a batch for all replicas, in one mode.

        If steps overlap, each replica starts its next share when it ends the one before.
        """
        table, system = self._bounds_of(mode), self.space.systems[mode]
        if _never_drains(system) and not self._has_episodes:
            return table
        seen: dict[Degree, list[tuple[int, float]]] = defaultdict(list)
        for replicas, found in self._found(mode):
            seconds = found.mean
            if self._overlaps[mode]:
                seconds = found.overlapping(1 + system.staleness_bound)
            seen[_degree(self.space.replicas[replicas])].append((replicas, seconds))
        return self._filled(table, seen)

    def _filled(self, bounds: Floats, seen: Mapping[Degree, list[tuple[int, float]]]) -> Floats:
        """Return bounds with the simulated times filled in. Simulations also raise bounds of the same degree.

        Fewer replicas take longer for a batch. N times as many replicas are at most N times as
        fast.
        """
        counts, table = self._counts, bounds.copy()
        for degree, known in seen.items():
            places = np.array(self._alike[degree])
            for replicas, seconds in known:
                least = CAREFUL * seconds * np.minimum(1.0, counts[replicas] / counts[places])
                table[places] = np.maximum(table[places], least)
        for known in seen.values():
            for replicas, seconds in known:
                table[replicas] = seconds
        return table

    def _bounds_of(self, mode: int) -> Floats:
        if mode not in self._bounds:
            longest, work = np.array(self._least).T
            work = work / self._counts
            if not self._leaves_stragglers(mode):
                work = np.maximum(longest / self._batches_under_way(mode), work)
            self._bounds[mode] = work
        return self._bounds[mode]

    def _least_of(self, replicas: int, mode: int) -> LeastTimes:
        """Return the lower bounds for replicas in a mode.

        If steps overlap, several of them share the seconds of the longest rollout. Each step takes
        at least the time of all its tokens.
        """
        least, num_replicas = self._least[replicas], float(self._counts[replicas])
        return LeastTimes(least.longest / self._batches_under_way(mode), least.work / num_replicas)

    def _batches_under_way(self, mode: int) -> int:
        return 1 + self.space.systems[mode].staleness_bound if self._overlaps[mode] else 1

    def _leaves_stragglers(self, mode: int) -> bool:
        """Whether a step may complete without its longest rollouts."""
        policies = self.space.run.policies
        return policies.oversampling > 1 and policies.system == self.space.modes[mode].system

    def _paces_of(self, mode: int) -> Floats:
        """Return the pace of all replicas in a mode whose steps overlap.

        The pace is the ratio of simulated to unpaced generation time. Replicas without a simulation
        use the median of those with the same degree.
        """
        wanted = self.space.modes[mode]
        usual = IN_FLIGHT if _never_drains(self.space.systems[mode]) else OVERLAP
        by_degree: dict[Degree, list[float]] = defaultdict(list)
        for paced, pace in self._paces.items():
            alike = paced.mode._replace(sync_mode=wanted.sync_mode, rewards=wanted.rewards)
            if alike == wanted:
                by_degree[_degree(paced.replicas)].append(pace)
        return np.array(
            [
                self._paces.get(Paced(each, wanted), median(by_degree.get(_degree(each), [usual])))
                for each in self.space.replicas
            ]
        )

    def _stream_ends(
        self, places: Indices, mode: int, generation: Floats, training: Floats, *, is_bound: bool
    ) -> Floats:
        """Return when a trainer ends that works on rollouts as they finish.

        `generation` ends with the last reward.
        """
        trainer, trained = self.space.of_trainer[places], self._trained
        optimizer = trained["optimizer"][trainer]
        ends: Floats = np.maximum(generation + optimizer, training)
        if is_bound:
            return ends
        ends = np.maximum(ends, generation + trained["last"][trainer] + optimizer)
        for replicas, found in self._found(mode):
            mine = self._places_of(mode, replicas)
            work, fills = (training - optimizer)[mine], self._fills[trainer[mine]]
            known = self._stream_ends_of.get((mode, replicas))
            if known is None or known.found is not found or not np.array_equal(known.fills, fills):
                known = _StreamEnds(found, fills, np.full(len(mine), np.nan), np.zeros(len(mine)))
                self._stream_ends_of[mode, replicas] = known
            ends[mine] = np.maximum(ends[mine], known.after(work) + optimizer[mine])
        return ends


class _StreamEnds(NamedTuple):
    """When trainers end that work on the rollouts of some replicas as they finish. Each learned fact changes few of them."""

    found: GenerationTime
    fills: Indices
    """Rollouts that a command of each trainer waits for."""
    work: Floats
    """Seconds of training of each trainer, without the optimizer."""
    ends: Floats

    def after(self, work: Floats) -> Floats:
        """Return the ends for other seconds of training, computed only where they changed."""
        is_new = self.work != work
        for fill in np.unique(self.fills[is_new]):
            some = is_new & (self.fills == fill)
            self.ends[some] = self.found.stream_end(work[some], int(fill))
        self.work[is_new] = work[is_new]
        return self.ends


def _degree(replicas: Replicas) -> Degree:
    return replicas._replace(replicas=1) if replicas.beside is None else replicas


def _overlaps(system: System) -> bool:
    """Whether replicas start a batch before the previous one is generated."""
    is_ahead = system.staleness_bound > 0 and not system.waits_for_whole_batches
    return is_ahead and not system.halts_for_sync


def _never_drains(system: System) -> bool:
    """Whether replicas continue their rollouts when they load weights, so that batches merge."""
    return _overlaps(system) and system.weight_sync in ("load-in-flight", "abort-and-resume")


def _together(kinds: Sequence[tuple[int, list[LeastTimes]]]) -> LeastTimes:
    """Return the joint bounds of several kinds of replicas, with a number of each.

    Bounds are the smallest over all batches. The work is that of an average replica.
    """
    alone = [
        (number, LeastTimes(*(min(column) for column in zip(*batches, strict=True))))
        for number, batches in kinds
    ]
    longest = min(least.longest for _, least in alone)
    if not all(least.work for _, least in alone):
        return LeastTimes(longest, 0.0)  # outputs of one token need no decode step
    a_second = sum(number / least.work for number, least in alone)
    return LeastTimes(longest, sum(number for number, _ in alone) / a_second)
