"""The search space: every combination of replicas, trainer and mode that an offer allows, with its rent.

Every plan that an offer allows: replicas x trainer x mode, as indices into three lists.

What cannot be is cut where it shows, a side by itself or the pair of both, and the reason counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.engine.presets import System, choose_system
from streamrl.hardware.memory import ROOMY, kv_capacity
from streamrl.hardware.profiles import check_profiles, load_model, price_of
from streamrl.hardware.resolved import check_precision, longest_sequence, resolve
from streamrl.runfile.config import Run
from streamrl.runfile.gpu_pools import find_link, powers_of_two
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.planner.allocation import refuse_profile
from streamrl.sim.planner.layouts import (
    RECOMPUTES,
    Degrees,
    Replicas,
    TrainerRange,
    check_attention_ranks,
    fitting_replicas,
    fitting_trainers,
    sizes,
)
from streamrl.sim.planner.modes import Mode, find_modes
from streamrl.sim.planner.objective import within_rent
from streamrl.sim.planner.stage_times import FallingLengths, TrainTimes, train_times

Indices = NDArray[np.int32]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
MOST_PLANS = 10_000_000
"""Plans beyond which arrays outgrow a small machine's memory."""
LINK = "no link between the two pools"
POOL_SIZE = "both sides need more GPUs than their pool has"
SHARED = "colocated: sides in different pools, or of different size"


class Plans(NamedTuple):
    """What each plan is made of, as places in lists, and what it costs."""

    of_replicas: Indices
    of_trainer: Indices
    of_mode: Indices
    prices: Floats


def plans_of(
    run: Run,
    replicas: Sequence[Replicas],
    trainers: Sequence[Degrees],
    modes: Sequence[Mode],
    cut: Counter[str],
) -> Plans:
    """Return the plans that both sides make in every mode, and that keep to the budgets of an hour.

    Raises:
        ValueError: there are too many.
    """
    pairs = Pairs(run, replicas, trainers)
    parts = []
    for index, mode in enumerate(modes):
        first, second = np.nonzero(pairs.open_to(mode, cut))
        parts.append((first, second, np.full(len(first), index)))
    columns = (np.concatenate(column).astype(np.int32) for column in zip(*parts, strict=True))
    of_replicas, of_trainer, of_mode = columns
    if len(of_mode) > MOST_PLANS:
        raise ValueError(
            f"{len(of_mode)} plans are open, of which {MOST_PLANS} can be compared: name in [plan] "
            "what is open, such as unit, rollout_gpus or micro_batch"
        )
    is_shared = np.array([mode.system == "colocated" for mode in modes])[of_mode]
    prices = pairs.prices(is_shared, of_replicas, of_trainer)
    kept = within_rent(run.plan, prices, cut) if len(prices) else np.zeros(0, dtype=bool)
    return Plans(of_replicas[kept], of_trainer[kept], of_mode[kept], prices[kept])


class Pairs:
    """Which replicas go with which trainers."""

    def __init__(self, run: Run, replicas: Sequence[Replicas], trainers: Sequence[Degrees]) -> None:
        offer, names = run.cluster.pools, list(run.cluster.pools)
        self._generate = np.array([_gpus_by_pool(each.kinds, names) for each in replicas])
        self._train = np.array([_gpus_by_pool([each], names) for each in trainers])
        """GPUs of each side in each pool."""
        rent = [0.0 if p.owned else price_per_second(run, name) for name, p in offer.items()]
        self._prices = self._generate @ np.array(rent), self._train @ np.array(rent)
        self._owned = sum(
            p.num_gpus * price_per_second(run, name) for name, p in offer.items() if p.owned
        )
        """Dollars a second of pools that are owned, whatever a plan takes of them."""
        together = self._generate[:, None, :] + self._train[None, :, :]
        self._room = (together <= [pool.num_gpus for pool in offer.values()]).all(axis=2)
        apart = np.array([[a != b and not _has_link(run, a, b) for b in names] for a in names])
        self._unlinked = (self._generate > 0).astype(int) @ apart @ (self._train > 0).T > 0
        is_same = (self._generate[:, None, :] == self._train[None, :, :]).all(axis=2)
        self._shared: Mask = is_same & np.array([[each.beside is None] for each in replicas])

    def open_to(self, mode: Mode, cut: Counter[str]) -> Mask:
        """Say which pairs can run in a mode."""
        if mode.system == "colocated":
            cut[SHARED] += int((~self._shared).sum())
            return self._shared
        cut[LINK] += int(self._unlinked.sum())
        cut[POOL_SIZE] += int((~self._room).sum())
        is_open: Mask = ~self._unlinked & self._room
        return is_open

    def prices(self, is_shared: Mask, first: Indices, second: Indices) -> Floats:
        """Return the dollars a second of plans."""
        generate, train = self._prices[0][first], self._prices[1][second]
        rented = np.where(is_shared, np.maximum(generate, train), generate + train)
        found: Floats = rented + self._owned
        return found


def _gpus_by_pool(parts: Sequence[Replicas | Degrees], names: list[str]) -> list[int]:
    """Return the GPUs that the parts of a side have in each pool."""
    counts = dict.fromkeys(names, 0)
    for part in parts:
        counts[part.pool] += part.num_gpus
    return list(counts.values())


def _has_link(run: Run, first: str, second: str) -> bool:
    return find_link(run.cluster.links, first, second) is not None


def price_per_second(run: Run, pool: str) -> float:
    """Return the dollars of a pool's GPU for a second."""
    return price_of(run.cluster.pools[pool]) / SECONDS_PER_HOUR


def with_rent(run: Run) -> Run:
    """Return the run with as many nodes as both sides use of pools that are rented, and all of those that are owned.

    Nothing is open any more; where not all GPUs of these nodes are rented, `[plan]` says how many are.
    """
    needs: Counter[str] = Counter()
    sides: list[RolloutConfig | TrainerConfig] = [*run.rollout.kinds, run.trainer]
    for side in sides:
        taken = needs[side.pool]
        needs[side.pool] = (
            max(taken, side.num_gpus) if run.policies.shares_gpus else taken + side.num_gpus
        )
    pools = {
        name: pool if pool.owned else replace(pool, nodes=-(-needs[name] // pool.gpus_per_node))
        for name, pool in run.cluster.pools.items()
        if needs[name] or pool.owned
    }
    links = [link for link in run.cluster.links if set(link.between) <= set(pools)]
    plan = PlanConfig(staleness_cost=run.plan.staleness_cost)
    rented = {name: pool.num_gpus for name, pool in pools.items() if not pool.owned}
    if any(num_gpus > needs[name] for name, num_gpus in rented.items()):  # a part of a node
        generate = sum(kind.num_gpus for kind in run.rollout.kinds)
        gpus = {"rollout_gpus": [generate], "trainer_gpus": [run.trainer.num_gpus]}
        plan = replace(plan, **gpus)
    return replace(run, cluster=replace(run.cluster, pools=pools, links=links), plan=plan)


MICRO_BATCHES = (1, 2, 4, 8)
MOST_RUNNING = 1024
"""Rollouts that a replica may be told to decode at once, unasked."""
NEAR_BEST, MOST_ALIKE = 1.3, 8
"""Of trainers on the same GPUs those are compared whose closed form is so near the best's, and so many."""
MOST_EXPERT_RANKS = 64
LEAST_PART, LONG_IN_PARTS, MOST_CONTEXT_RANKS = 8192, 4, 16
"""Tokens of a rank below which context ranks are not tried: products of fewer are slow, and passes of 8K fit a GPU."""
SLOW = "trainer: another on the same GPUs is faster by its closed form"


class Candidate(NamedTuple):
    """One plan."""

    replicas: Replicas
    trainer: Degrees
    mode: Mode

    def apply(self, run: Run) -> Run:
        """Return the run file of the plan, with the nodes that it rents."""
        run = self.mode.apply(self.trainer.apply(self.replicas.apply(run)))
        return with_rent(run)


Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class Space:
    """All plans that fit; `of_*` say of which replicas, trainer and mode each is."""

    run: Run
    replicas: list[Replicas]
    trainers: list[Degrees]
    modes: list[Mode]
    of_replicas: Indices
    of_trainer: Indices
    of_mode: Indices
    prices: Floats
    """Dollars a second."""
    cut: Counter[str]
    """Reasons, each with the sides or pairs of sides that it ruled out."""

    def __len__(self) -> int:
        return len(self.of_mode)

    def candidate(self, index: int) -> Candidate:
        """Return a plan by its index."""
        return Candidate(
            self.replicas[self.of_replicas[index]],
            self.trainers[self.of_trainer[index]],
            self.modes[self.of_mode[index]],
        )

    @cached_property
    def systems(self) -> list[System]:
        """The policies of each mode."""
        return [choose_system(mode.apply(self.run).policies) for mode in self.modes]

    def system(self, index: int) -> System:
        """Return the policies of a plan by its index."""
        return self.systems[int(self.of_mode[index])]

    def find(self, candidate: Candidate) -> int | None:
        """Return the index of a plan, whatever its trainer has to do here to fit; None where it does not."""
        replicas, trainer, mode = candidate
        if replicas not in self.replicas or mode not in self.modes:
            return None
        is_it = (self.of_replicas == self.replicas.index(replicas)) & (
            self.of_mode == self.modes.index(mode)
        )
        for place in self._alike(trainer):
            found = is_it & (self.of_trainer == place)
            if found.any():
                return int(np.argmax(found))
        return None

    def _alike(self, trainer: Degrees) -> list[int]:
        """Return the places of trainers that split as one does: first those that offload, or do not, as it does."""
        alike = [place for place, each in enumerate(self.trainers) if each.split == trainer.split]
        return sorted(alike, key=lambda place: self.trainers[place].offload != trainer.offload)

    def priced(self, run: Run) -> Space:
        """Return the same plans with the prices of another offer."""
        pairs = Pairs(run, self.replicas, self.trainers)
        is_shared = np.array([mode.system == "colocated" for mode in self.modes])[self.of_mode]
        prices = pairs.prices(is_shared, self.of_replicas, self.of_trainer)
        return replace_fields(self, run=run, prices=prices)

    @classmethod
    def open(
        cls, run: Run, batches: Sequence[FallingLengths] = (), *, tight: bool = False
    ) -> Space:
        """Find the plans that a run's offer and its section `[plan]` leave open.

        Args:
            run: the run file.
            batches: what is trained on. Where given, trainers that others on the same GPUs leave behind are cut.
            tight: only with trainers that plans have not, as they leave too little room.

        Raises:
            ValueError: there are none; the constraint that rules out the last is named.
        """
        check_profiles(run)
        check_precision(run)
        check_attention_ranks(run)
        refuse_profile(run)
        if run.policies.resize != "keep":
            raise ValueError(
                f"policies.resize {run.policies.resize!r} changes what a plan decides: leave it out"
            )
        cut: Counter[str] = Counter()
        replicas, trainers = find_replicas(run, cut), find_trainers(run, cut, tight=tight)
        modes = find_modes(run)
        if batches:
            trainers = _near_best(run, trainers, batches, cut)
            mean_tokens = sum(batch.all.tokens / batch.all.num_rollouts for batch in batches)
            replicas += _with_more_running(run, replicas, mean_tokens / len(batches))
        return cls._combine(run, replicas, trainers, modes, cut)

    @classmethod
    def _combine(
        cls,
        run: Run,
        replicas: list[Replicas],
        trainers: list[Degrees],
        modes: list[Mode],
        cut: Counter[str],
    ) -> Space:
        plans = plans_of(run, replicas, trainers, modes, cut)
        if not len(plans.of_mode):
            raise ValueError(f"no plan is left: {_why(cut)}")
        replicas, of_replicas = _used(replicas, plans.of_replicas)
        trainers, of_trainer = _used(trainers, plans.of_trainer)
        modes, of_mode = _used(modes, plans.of_mode)
        return cls(
            run=run,
            replicas=replicas,
            trainers=trainers,
            modes=modes,
            of_replicas=of_replicas,
            of_trainer=of_trainer,
            of_mode=of_mode,
            prices=plans.prices,
            cut=cut,
        )

    def widened(
        self, more: Sequence[Replicas], trainers: Sequence[int], modes: Sequence[int]
    ) -> Space:
        """Return the space with further replicas, each with some of the trainers in some of the modes.

        Plans that were there keep their indices.
        """
        plans = plans_of(
            self.run,
            more,
            [self.trainers[each] for each in trainers],
            [self.modes[each] for each in modes],
            Counter(),
        )
        added = (
            plans.of_replicas + len(self.replicas),
            np.array(trainers)[plans.of_trainer],
            np.array(modes)[plans.of_mode],
        )
        ours = (self.of_replicas, self.of_trainer, self.of_mode)
        columns = (np.concatenate(pair).astype(np.int32) for pair in zip(ours, added, strict=True))
        of_replicas, of_trainer, of_mode = columns
        return replace_fields(
            self,
            replicas=[*self.replicas, *more],
            of_replicas=of_replicas,
            of_trainer=of_trainer,
            of_mode=of_mode,
            prices=np.concatenate([self.prices, plans.prices]),
        )


# The sides ------------------------------------------------------------------------------------


def find_replicas(run: Run, cut: Counter[str]) -> list[Replicas]:
    """Return every way to generate.

    Raises:
        ValueError: there is none.
    """
    plan = run.plan
    found = [
        choice
        for pool in plan.rollout_pools or run.cluster.pools
        for num_gpus in _sizes(run, pool, plan.rollout_gpus)
        for choice in fitting_replicas(run, pool, num_gpus, plan.rollout_tensor_parallel, cut)
    ]
    if load_model(run.model).experts is not None:
        found += [
            choice._replace(expert_parallel=experts)
            for choice in found
            if (experts := choice.tensor_parallel) > 1 and choice.expert_parallel == 1
        ]
    if not found:
        offer = ", ".join(plan.rollout_pools or run.cluster.pools)
        raise ValueError(f"no replica can generate in pools {offer}: {_why(cut)}")
    return found


def find_trainers(run: Run, cut: Counter[str], *, tight: bool = False) -> list[Degrees]:
    """Return every way to train, with room on its GPUs where there is one.

    Args:
        run: the run file.
        cut: reasons are counted there.
        tight: return the others instead, which fit but leave less room.

    Raises:
        ValueError: there is none.
    """
    plan = run.plan
    among = TrainerRange(
        tensor_parallel=plan.trainer_tensor_parallel,
        pipeline_parallel=plan.pipeline_parallel,
        expert_parallel=_expert_degrees(run),
        expert_tensor_parallel=run.plan.expert_tensor_parallel
        or [run.trainer.expert_tensor_parallel],
        context_parallel=_context_degrees(run),
        micro_batch=plan.micro_batch or MICRO_BATCHES,
        zero=plan.zero or sorted({1, 3, run.trainer.zero}),
        recompute=[each for each in RECOMPUTES if each in (plan.recompute or RECOMPUTES)],
    )
    before = cut.copy()
    roomy = replace_fields(among, most_memory=ROOMY)
    found = _fitting(run, roomy, cut) or _fitting(run, among, Counter())
    if tight:
        roomier = set(found)
        found = [each for each in _fitting(run, among, Counter()) if each not in roomier]
    if not found:
        offer = ", ".join(plan.trainer_pools or run.cluster.pools)
        raise ValueError(f"no trainer can train in pools {offer}: {_why(cut - before)}")
    return found


def _fitting(run: Run, among: TrainerRange, cut: Counter[str]) -> list[Degrees]:
    plan = run.plan
    return [
        choice
        for pool in plan.trainer_pools or run.cluster.pools
        for num_gpus in _sizes(run, pool, plan.trainer_gpus)
        for choice in fitting_trainers(run, pool, num_gpus, among, cut)
    ]


def _near_best(
    run: Run, trainers: list[Degrees], batches: Sequence[FallingLengths], cut: Counter[str]
) -> list[Degrees]:
    """Leave out the trainers that are slower than others on the same GPUs, whether batches are whole or stream."""
    by_gpus: dict[tuple[str, int], list[tuple[Degrees, TrainTimes]]] = defaultdict(list)
    for trainer in trainers:
        split = trainer.apply(run)
        times = train_times(split, TrainingCosts.load(split), batches[:1])
        by_gpus[trainer.pool, trainer.num_gpus].append((trainer, times))
    kept: dict[Degrees, None] = {}
    for alike in by_gpus.values():
        for kind in ("whole", "stream"):
            order = sorted((getattr(times, kind) + times.optimizer, one) for one, times in alike)
            near = [one for seconds, one in order if seconds <= NEAR_BEST * order[0][0]]
            kept |= dict.fromkeys(near[:MOST_ALIKE])
    cut[SLOW] += len(trainers) - len(kept)
    return [trainer for trainer in trainers if trainer in kept]


def _with_more_running(run: Run, replicas: list[Replicas], mean_tokens: float) -> list[Replicas]:
    """Return replicas that decode more at once, where more wait for them and their memory holds more."""
    wanted = run.plan.max_running
    found = []
    for each in replicas:
        share = run.algorithm.rollouts_per_step / each.replicas
        held = kv_capacity(resolve(each.apply(run)).replica) / mean_tokens
        for most in wanted or powers_of_two(MOST_RUNNING):
            if most > each.max_running and (wanted or most < 2 * min(share, held)):
                found.append(each._replace(max_running=most))
    return found


def _sizes(run: Run, pool: str, wanted: Sequence[int] | None) -> Sequence[int]:
    config = run.cluster.pools[pool]
    if wanted is None:
        return sizes(config, run.plan.unit)
    return [num_gpus for num_gpus in wanted if num_gpus <= config.num_gpus]


def _expert_degrees(run: Run) -> Sequence[int]:
    own, experts = run.trainer.expert_parallel, load_model(run.model).experts
    usual = [1] if experts is None else [1, 2, 4, 8, 16, 32, MOST_EXPERT_RANKS]
    return run.plan.expert_parallel or sorted({own, *usual})


def _context_degrees(run: Run) -> Sequence[int]:
    """Return the degrees that leave each rank of the longest rollout a part worth having; 1 and the run's own else."""
    parts = longest_sequence(run.rollout, run.workload) // LEAST_PART
    usual = powers_of_two(min(parts, MOST_CONTEXT_RANKS)) if parts >= LONG_IN_PARTS else [1]
    return run.plan.context_parallel or sorted({1, run.trainer.context_parallel, *usual})


# What several ask ---------------------------------------------------------------------------------


def _used(parts: list[Part], places: Indices) -> tuple[list[Part], Indices]:
    """Leave out the parts that no plan has."""
    kept, renumbered = np.unique(places, return_inverse=True)
    return [parts[place] for place in kept], renumbered.astype(np.int32)


def _why(cut: Counter[str]) -> str:
    reasons = [f"{reason} ({count} times)" for reason, count in cut.most_common() if count]
    return "; ".join(reasons) or "plan names GPUs that no pool has"
