"""Build the search space: all combinations of replicas, trainer and mode of an offer, with their rent.

A plan consists of three indices: into the lists of replicas, trainers and modes. Impossible sides
and pairs are left out, and their reasons are counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from functools import cached_property
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.engine.presets import System, choose_system
from streamrl.hardware.memory import ROOMY, kv_capacity
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import check_profiles, load_model, price_of
from streamrl.hardware.resolved import (
    ReplicaHardware,
    TrainerHardware,
    check_precision,
    resolve,
)
from streamrl.hardware.side_memory import trainer_side
from streamrl.record.billing import SANDBOXES
from streamrl.record.charges import sandbox_rent
from streamrl.runfile.checks import check_run
from streamrl.runfile.cluster_config import ClusterConfig, LinkConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.frameworks import keep_filled_in, load_framework, settings_of
from streamrl.runfile.gpu_pools import find_link, powers_of_two
from streamrl.runfile.plan_config import PlanConfig, TargetName, framework_of_target
from streamrl.runfile.roles_config import Logits, RolloutConfig, TrainerConfig
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.planner.allocation import refuse_profile
from streamrl.sim.planner.layouts import (
    RECOMPUTES,
    ROLLOUT_MEMORY,
    TRAINER_MEMORY,
    Degrees,
    Replicas,
    Sizes,
    TrainerRange,
    check_attention_ranks,
    fitting_replicas,
    fitting_trainers,
    holds_rollouts,
    in_pool,
    rents_whole_nodes,
    sizes,
    split_sizes,
)
from streamrl.sim.planner.modes import Mode, find_modes
from streamrl.sim.planner.objective import within_rent
from streamrl.sim.planner.reward_replicas import RewardReplicas
from streamrl.sim.planner.stage_times import BatchTimes, FallingLengths, times_of_trainer
from streamrl.sim.planner.target_rules import OneTarget, TargetRules, targets_of
from streamrl.targets.back_ends import for_target
from streamrl.targets.verdicts import check_target

Indices = NDArray[np.int32]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Ability = tuple[bool, ...]
"""Where a trainer can run, one place for each kind of target."""
MOST_PLANS = 10_000_000
"""Most plans of a space. The arrays of more plans exceed a small machine's memory."""
LINK = "no link between the two pools"
POOL_SIZE = "the sides need more GPUs than their pool has"
SHARED = "colocated: sides in different pools, or of different size"


class NoPlanError(ValueError):
    """No plan fits the offer, whatever it costs."""


class Plans(NamedTuple):
    """The parts of each plan, as indices into lists, and its price."""

    of_replicas: Indices
    of_trainer: Indices
    of_mode: Indices
    prices: Floats


def plans_of(
    cluster: ClusterConfig,
    plan: PlanConfig,
    replicas: Sequence[Replicas],
    trainers: Sequence[Degrees],
    modes: Sequence[Mode],
    cut: Counter[str],
    rules: TargetRules | None = None,
    environment: EnvironmentConfig | None = None,
) -> Plans:
    """Return every combination of both sides and a mode whose rent is within the hourly and daily budgets.

    Args:
        cluster: the offer.
        plan: the section `[plan]`.
        replicas: all replicas.
        trainers: all trainers.
        modes: all modes.
        cut: counts reasons.
        rules: leave out what no target of these rules can run.
        environment: has the price of sandboxes.

    Raises:
        ValueError: there are too many, or all exceed a budget.
    """
    pairs = Pairs(cluster, replicas, trainers, plan, environment)
    runnable = None if rules is None else rules.pairs(replicas, trainers)
    parts = []
    for index, mode in enumerate(modes):
        is_open = pairs.open_to(mode, cut)
        if runnable is not None:
            is_open = runnable.open_to(mode, is_open, cut)
        first, second = np.nonzero(is_open)
        parts.append((first, second, np.full(len(first), index)))
    columns = (np.concatenate(column).astype(np.int32) for column in zip(*parts, strict=True))
    of_replicas, of_trainer, of_mode = columns
    if len(of_mode) > MOST_PLANS:
        raise ValueError(
            f"{len(of_mode)} plans are open, but at most {MOST_PLANS} can be compared: set more "
            "keys of [plan], such as unit, rollout_gpus or micro_batch"
        )
    prices = pairs.prices(modes, of_replicas, of_trainer, of_mode)
    kept = within_rent(plan, prices, cut) if len(prices) else np.zeros(0, dtype=bool)
    return Plans(of_replicas[kept], of_trainer[kept], of_mode[kept], prices[kept])


class Pairs:
    """Pairs of replicas and trainers: which fit the pools and links beside the reward model, and their prices."""

    def __init__(
        self,
        cluster: ClusterConfig,
        replicas: Sequence[Replicas],
        trainers: Sequence[Degrees],
        plan: PlanConfig | None = None,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        """Compare all replicas with all trainers.

        Args:
            cluster: the offer.
            replicas: all replicas.
            trainers: all trainers.
            plan: decides whether both sides fill whole nodes together.
            environment: has the price of sandboxes.
        """
        self._environment = environment
        offer, links, names = cluster.pools, cluster.links, list(cluster.pools)
        self._names, self._room = names, np.array([pool.num_gpus for pool in offer.values()])
        self._generate = np.array([gpus_by_pool(each.kinds, names) for each in replicas])
        self._train = np.array([gpus_by_pool([each], names) for each in trainers])
        """GPUs of each side in each pool."""
        self._rented_by = np.array(
            [
                pool.gpus_per_node if plan is not None and rents_whole_nodes(plan, pool) else 1
                for pool in offer.values()
            ]
        )
        """GPUs of which a plan rents a multiple, by pool."""
        self._rent = np.array(
            [0.0 if pool.owned else price_per_second(pool) for pool in offer.values()]
        )
        """Dollars a second of one GPU of each pool, if it is rented."""
        self._owned_rents = np.array(
            [pool.num_gpus * price_per_second(pool) * pool.owned for pool in offer.values()]
        )
        """Dollars a second of each pool that is owned. Every plan includes them."""
        self._owned = self._owned_rents.sum()
        self._together = self._generate[:, None, :] + self._train[None, :, :]
        apart = np.array([[a != b and not _has_link(links, a, b) for b in names] for a in names])
        self._unlinked = (self._generate > 0).astype(int) @ apart @ (self._train > 0).T > 0
        is_same = (self._generate[:, None, :] == self._train[None, :, :]).all(axis=2)
        self._shared: Mask = is_same & np.array([[each.beside is None] for each in replicas])

    def open_to(self, mode: Mode, cut: Counter[str]) -> Mask:
        """Return which pairs can run in a mode."""
        left = self._room - self._rewards_of(mode)
        if mode.system == "colocated":
            has_room = (self._generate[:, None, :] <= left).all(axis=2)
            is_whole = (self._generate[:, None, :] % self._rented_by == 0).all(axis=2)
            cut[SHARED] += int((~self._shared & is_whole).sum())
            cut[POOL_SIZE] += int((self._shared & is_whole & ~has_room).sum())
            shared: Mask = self._shared & is_whole & has_room
            return shared
        has_room = (self._together <= left).all(axis=2)
        is_whole = (self._together % self._rented_by == 0).all(axis=2)
        cut[LINK] += int((self._unlinked & is_whole).sum())
        cut[POOL_SIZE] += int((is_whole & ~has_room).sum())
        is_open: Mask = ~self._unlinked & is_whole & has_room
        return is_open

    def prices(
        self, modes: Sequence[Mode], first: Indices, second: Indices, of_mode: Indices
    ) -> Floats:
        """Return the price of each plan in dollars a second."""
        is_shared = np.array([mode.system == "colocated" for mode in modes])[of_mode]
        generate, train = (self._generate @ self._rent)[first], (self._train @ self._rent)[second]
        rewards = np.array([self._rewards_of(mode) @ self._rent for mode in modes])[of_mode]
        rented = np.where(is_shared, np.maximum(generate, train), generate + train)
        found: Floats = rented + rewards + self._owned + self._sandboxes_of(modes)[of_mode]
        return found

    def rents(
        self, modes: Sequence[Mode], first: Indices, second: Indices, of_mode: Indices
    ) -> dict[str, Floats]:
        """Return the price of each plan in dollars a second, by pool."""
        is_shared = np.array([mode.system == "colocated" for mode in modes])[of_mode]
        generate, train = self._generate[first], self._train[second]
        rewards = np.array([self._rewards_of(mode) for mode in modes])[of_mode]
        apart = generate + train
        gpus = np.where(is_shared[:, None], np.maximum(generate, train), apart) + rewards
        rents = gpus * self._rent + self._owned_rents
        found = {name: rents[:, place] for place, name in enumerate(self._names)}
        sandboxes = self._sandboxes_of(modes)
        return found | ({SANDBOXES: sandboxes[of_mode]} if sandboxes.any() else {})

    def _sandboxes_of(self, modes: Sequence[Mode]) -> Floats:
        """Return the price of the sandboxes of each mode in dollars a second."""
        own = self._environment
        limits = [None if own is None else mode.episodes for mode in modes]
        rented = [own if each is None or own is None else each.change(own) for each in limits]
        return np.array([sandbox_rent(each) for each in rented])

    def _rewards_of(self, mode: Mode) -> Indices:
        """Return the GPUs of each pool that compute rewards."""
        return np.array(gpus_by_pool([mode.rewards] if mode.rewards else [], self._names))


def gpus_by_pool(
    parts: Sequence[Replicas | Degrees | RewardReplicas], names: list[str]
) -> list[int]:
    """Return the GPUs that the parts of a side have in each pool."""
    counts = dict.fromkeys(names, 0)
    for part in parts:
        counts[part.pool] += part.num_gpus
    return list(counts.values())


def _has_link(links: list[LinkConfig], first: str, second: str) -> bool:
    return find_link(links, first, second) is not None


def price_per_second(pool: PoolConfig) -> float:
    """Return the price of one GPU of a pool in dollars a second."""
    return price_of(pool) / SECONDS_PER_HOUR


def with_rent(run: Run) -> Run:
    """Return the run with the nodes that all sides use of rented pools, and all nodes of owned pools.

    Section `[plan]` keeps no open choice. It has the GPUs of each side if they use only a part of
    the rented nodes.
    """
    needs: Counter[str] = Counter()
    sides: list[RolloutConfig | TrainerConfig] = [*run.rollout.kinds, run.trainer]
    for side in sides:
        taken = needs[side.pool]
        needs[side.pool] = (
            max(taken, side.num_gpus) if run.policies.shares_gpus else taken + side.num_gpus
        )
    if run.verifier.pool is not None:
        needs[run.verifier.pool] += run.verifier.num_gpus
    pools = {
        name: pool if pool.owned else replace(pool, nodes=-(-needs[name] // pool.gpus_per_node))
        for name, pool in run.cluster.pools.items()
        if needs[name] or pool.owned
    }
    links = [link for link in run.cluster.links if set(link.between) <= set(pools)]
    plan = PlanConfig(staleness_cost=run.plan.staleness_cost)
    rented = {name: pool.num_gpus for name, pool in pools.items() if not pool.owned}
    if any(num_gpus > needs[name] for name, num_gpus in rented.items()):  # part of a node
        generate = sum(kind.num_gpus for kind in run.rollout.kinds)
        gpus = {"rollout_gpus": [generate], "trainer_gpus": [run.trainer.num_gpus]}
        gpus |= {"reward_gpus": [run.verifier.num_gpus]} if run.verifier.pool is not None else {}
        plan = replace(plan, **gpus)
    return replace(run, cluster=replace(run.cluster, pools=pools, links=links), plan=plan)


MICRO_BATCHES = (1, 2, 4, 8)
MOST_RUNNING = 1024
"""Highest `max_running` of a replica that is tried by default."""
NEAR_BEST, MOST_ALIKE = 1.3, 8
"""Trainers on the same GPUs are kept if the ratio of their closed form to the best is at most this.
The second value is the most trainers kept.
"""
MOST_EXPERT_RANKS = 64
LEAST_PART, LONG_IN_PARTS, MOST_CONTEXT_RANKS = 8192, 4, 16
"""Fewest tokens of a context-parallel rank that are tried, because smaller matrix products are slow
and passes of 8K tokens fit a GPU. The second value is the fewest such parts of the longest
sequence, and the third the highest degree.
"""
SLOW = "trainer: another on the same GPUs is faster by its closed form"


class Candidate(NamedTuple):
    """One plan."""

    replicas: Replicas
    trainer: Degrees
    mode: Mode

    @property
    def pools(self) -> set[str]:
        """Pools of all sides."""
        rewards = self.mode.rewards
        return {*self.replicas.pools, self.trainer.pool, *([rewards.pool] if rewards else [])}

    def apply(self, run: Run) -> Run:
        """Return the run file of the plan, with the nodes that it rents."""
        rollout, trainer = self.replicas.change(run.rollout), self.trainer.change(run.trainer)
        laid_out = self.mode.apply(replace(run, rollout=rollout, trainer=trainer))
        return with_rent(for_target(laid_out, run.plan.target))


Part = TypeVar("Part", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Space:
    """All plans that fit; `of_*` are the indices of each plan's replicas, trainer and mode."""

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
    """Number of sides or pairs that each reason ruled out."""
    rules: TargetRules | None = None
    """What the targets of the plan can run; None if plans that none of them can run are here too."""

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
        """Return the index of a plan with the same layout, or None.

        Settings that depend on memory and lengths may differ: recomputation, offloading,
        micro-batches, `max_running`.
        """
        replicas, trainer, mode = candidate
        if mode not in self.modes:
            return None
        in_mode = self.of_mode == self.modes.index(mode)
        for fleet, place in product(self._alike_replicas(replicas), self._alike(trainer)):
            found = in_mode & (self.of_replicas == fleet) & (self.of_trainer == place)
            if found.any():
                return int(np.argmax(found))
        return None

    def index_of(self, candidate: Candidate) -> int | None:
        """Return the index of exactly this plan, or None."""
        replicas, trainer, mode = candidate
        if replicas not in self.replicas or trainer not in self.trainers or mode not in self.modes:
            return None
        found = self.of_replicas == self.replicas.index(replicas)
        found &= self.of_trainer == self.trainers.index(trainer)
        found &= self.of_mode == self.modes.index(mode)
        return int(np.argmax(found)) if found.any() else None

    def _alike_replicas(self, replicas: Replicas) -> list[int]:
        """Return the indices of replicas with the same layout, ordered by how near their `max_running` is."""
        alike = [p for p, each in enumerate(self.replicas) if each.layout == replicas.layout]
        return sorted(
            alike, key=lambda place: abs(self.replicas[place].max_running - replicas.max_running)
        )

    def _alike(self, trainer: Degrees) -> list[int]:
        """Return the indices of trainers with the same layout.

        Trainers with the same split come first, and among them those with the same offloading.
        """
        alike = [p for p, each in enumerate(self.trainers) if each.layout == trainer.layout]

        def differences(place: int) -> tuple[bool, bool]:
            each = self.trainers[place]
            return each.split != trainer.split, each.offload != trainer.offload

        return sorted(alike, key=differences)

    def rents(self) -> dict[str, Floats]:
        """Return the price of each plan in dollars a second, by pool."""
        pairs = Pairs(
            self.run.cluster, self.replicas, self.trainers, environment=self.run.environment
        )
        return pairs.rents(self.modes, self.of_replicas, self.of_trainer, self.of_mode)

    def priced(self, cluster: ClusterConfig) -> Space:
        """Return the same plans with the prices and links of another offer."""
        own = self.run.environment
        pairs = Pairs(cluster, self.replicas, self.trainers, environment=own)
        prices = pairs.prices(self.modes, self.of_replicas, self.of_trainer, self.of_mode)
        return replace_fields(self, run=replace(self.run, cluster=cluster), prices=prices)

    @classmethod
    def open(
        cls,
        run: Run,
        batches: Sequence[FallingLengths] = (),
        *,
        tight: bool = False,
        kept: Degrees | None = None,
        runnable: bool | None = None,
        rules: TargetRules | None = None,
    ) -> Space:
        """Find the plans that a run's offer and its section `[plan]` allow.

        Args:
            run: the run file.
            batches: batches to train on. If given, trainers much slower than others on the same
                GPUs are left out.
            tight: use only the trainers that plans usually leave out because too little GPU memory
                remains.
            kept: a trainer whose layout is kept even if others on the same GPUs are faster.
            runnable: leave out plans that no target can run. By default, they are left out if any
                target can run a plan, or if the run file names a target.
            rules: what targets can run, as another search of the same run file found it. It only saves time.

        Raises:
            ValueError: no plan fits. The error lists the constraints that rule plans out.
        """
        if runnable is None:
            try:
                return cls.open(run, batches, tight=tight, kept=kept, runnable=True)
            except (NoPlanError, RunError):
                if run.plan.target is not None:
                    raise
            return cls.open(run, batches, tight=tight, kept=kept, runnable=False)
        check_profiles(run)
        check_precision(resolve(run))
        check_attention_ranks(run.plan, load_model(run.model))
        refuse_profile(run.costs)
        if run.policies.resize != "keep":
            raise ValueError(
                f"policies.resize {run.policies.resize!r} changes the plan while it runs: remove it"
            )
        cut: Counter[str] = Counter()
        replica, pools = resolve(run).replica, run.cluster.pools
        modes = find_modes(run)
        targets = targets_of(run.plan.target, run.framework.name) if runnable else []
        if rules is None or not rules.rests_on(targets, modes):
            rules = TargetRules([OneTarget(run, each) for each in targets]) if targets else None
        modes = modes if rules is None else rules.keep_modes(modes, cut)
        replicas = find_replicas(replica, pools, run.plan, cut, rules)
        trainers = find_trainers(run, cut, tight=tight, rules=rules)
        if batches:
            own = (each.change(run.trainer) for each in trainers)
            times = [times_of_trainer(run, trainer, batches[:1]) for trainer in own]
            trainers = _near_best(trainers, times, kept, cut, rules)
            mean_tokens = _mean_tokens(batches)
            held = [
                kv_capacity(each.place(replica, pools[each.pool])) / mean_tokens
                for each in replicas
            ]
            num_rollouts = run.algorithm.rollouts_per_step
            wanted = run.plan.max_running
            replicas += [
                each
                for each in _with_more_running(replicas, held, num_rollouts, wanted)
                if wanted or holds_rollouts(each.place(replica, pools[each.pool]))
            ]
        offer, turns = (run.cluster, run.plan), run.environment
        plans = plans_of(*offer, replicas, trainers, modes, cut, rules, turns)
        if not len(plans.of_mode):
            raise NoPlanError(f"no plan is left: {_why(cut)}{_way_out(run.plan.target)}")
        space = cls(
            run=run,
            replicas=replicas,
            trainers=trainers,
            modes=modes,
            cut=cut,
            rules=rules,
            **plans._asdict(),
        )
        return space._without_unused()

    def only(self, candidates: Sequence[Candidate]) -> Space:
        """Return a space with these plans alone, which `[plan]` may exclude."""
        replicas, of_replicas = _numbered(candidate.replicas for candidate in candidates)
        trainers, of_trainer = _numbered(candidate.trainer for candidate in candidates)
        modes, of_mode = _numbered(candidate.mode for candidate in candidates)
        own = self.run.environment
        pairs = Pairs(self.run.cluster, replicas, trainers, environment=own)
        return Space(
            run=self.run,
            replicas=replicas,
            trainers=trainers,
            modes=modes,
            of_replicas=of_replicas,
            of_trainer=of_trainer,
            of_mode=of_mode,
            prices=pairs.prices(modes, of_replicas, of_trainer, of_mode),
            cut=Counter(),
        )

    def refusal_of(self, candidate: Candidate) -> str:
        """Return why a plan, which `[plan]` may exclude, cannot run on the offer; empty if it can."""
        try:
            planned = candidate.apply(self.run)
            check_run(planned)
            if self.run.plan.target is not None:
                check_target(planned, self.run.plan.target)
            trainer = trainer_side(resolve(planned).trainer)
            if not candidate.replicas.fits(resolve(self.run).replica, self.run.cluster.pools):
                return ROLLOUT_MEMORY
        except ValueError as error:
            return str(error)
        return TRAINER_MEMORY if trainer.need > trainer.capacity else ""

    def _without_unused(self) -> Space:
        """Return the same plans without sides and modes that no plan uses."""
        replicas, of_replicas = _used(self.replicas, self.of_replicas)
        trainers, of_trainer = _used(self.trainers, self.of_trainer)
        modes, of_mode = _used(self.modes, self.of_mode)
        return replace_fields(
            self,
            replicas=replicas,
            trainers=trainers,
            modes=modes,
            of_replicas=of_replicas,
            of_trainer=of_trainer,
            of_mode=of_mode,
        )

    def widened(
        self, more: Sequence[Replicas], trainers: Sequence[int], modes: Sequence[int]
    ) -> Space:
        """Return the space with more replicas, each with some of the trainers in some of the modes.

        Existing plans keep their indices.
        """
        plans = plans_of(
            self.run.cluster,
            self.run.plan,
            more,
            [self.trainers[each] for each in trainers],
            [self.modes[each] for each in modes],
            Counter(),
            self.rules,
            self.run.environment,
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


def find_replicas(
    replica: ReplicaHardware,
    pools: Mapping[str, PoolConfig],
    plan: PlanConfig,
    cut: Counter[str],
    rules: TargetRules | None = None,
) -> list[Replicas]:
    """Return every layout of replicas that fits.

    Args:
        replica: a replica of the run file.
        pools: the offer.
        plan: the section `[plan]`.
        cut: counts reasons.
        rules: what the targets of the plan can run.

    Raises:
        NoPlanError: no layout fits.
    """
    found = [
        choice
        for pool in plan.rollout_pools or pools
        for num_gpus in _sizes(plan, pool, pools[pool]).generate
        for choice in fitting_replicas(in_pool(replica, pool, pools), plan, num_gpus, cut)
    ]
    if replica.model.experts is not None:
        found += [
            choice._replace(expert_parallel=experts)
            for choice in found
            if (experts := choice.tensor_parallel) > 1 and choice.expert_parallel == 1
        ]
    if rules is not None:
        found = _runnable(found, rules, cut)
    if not found:
        offer = ", ".join(plan.rollout_pools or pools)
        raise NoPlanError(
            f"no replica can generate in pools {offer}: {_why(cut)}{_way_out(plan.target)}"
        )
    return found


def _runnable(replicas: list[Replicas], rules: TargetRules, cut: Counter[str]) -> list[Replicas]:
    """Return the replicas that a target of the plan can run."""
    reasons = [rules.refuses_replicas(each) for each in replicas]
    cut.update(reason for reason in reasons if reason)
    return [each for each, reason in zip(replicas, reasons, strict=True) if not reason]


def find_trainers(
    run: Run, cut: Counter[str], *, tight: bool = False, rules: TargetRules | None = None
) -> list[Degrees]:
    """Return every trainer that fits and leaves GPU memory free; if there is none, every trainer that fits.

    Args:
        run: the run file.
        cut: counts reasons.
        tight: return the other trainers instead, which fit but leave less memory free.
        rules: what the targets of the plan can run.

    Raises:
        NoPlanError: no trainer fits.
    """
    plan, pools, trainer = run.plan, run.cluster.pools, resolve(run).trainer
    own = trainer.config
    zero = plan.zero or _zero_stages(() if rules is None else rules.targets, own)
    filled_in = {setting.key: setting.value for setting, _ in settings_of(run)}
    at_stage = {stage: replace(run, trainer=replace(own, zero=stage)) for stage in zero}
    kernels = {stage: keep_filled_in(run, at).trainer.kernels for stage, at in at_stage.items()}
    other_kernels = {stage: each for stage, each in kernels.items() if each != own.kernels}
    among = TrainerRange(
        tensor_parallel=plan.trainer_tensor_parallel,
        pipeline_parallel=plan.pipeline_parallel,
        expert_parallel=plan.expert_parallel or _expert_degrees(own, trainer.model),
        expert_tensor_parallel=plan.expert_tensor_parallel or [own.expert_tensor_parallel],
        context_parallel=plan.context_parallel or _context_degrees(own, trainer.longest_sequence),
        micro_batch=plan.micro_batch or MICRO_BATCHES,
        zero=zero,
        recompute=[each for each in RECOMPUTES if each in (plan.recompute or RECOMPUTES)],
        logits=_logits(own.logits, filled_in.get("trainer.logits")),
        kernels=other_kernels,
        framework=run.framework.name,
    )
    if rules is not None:
        among = replace_fields(among, refusal=rules.refuses_trainer)
    places = [
        (in_pool(trainer, pool, pools), num_gpus)
        for pool in plan.trainer_pools or pools
        for num_gpus in _sizes(plan, pool, pools[pool]).train
    ]
    before = cut.copy()
    roomy = replace_fields(among, most_memory=ROOMY)
    found = _fitting(places, roomy, cut) or _fitting(places, among, Counter())
    if tight:
        roomier = set(found)
        found = [each for each in _fitting(places, among, Counter()) if each not in roomier]
    if not found:
        offer = ", ".join(plan.trainer_pools or pools)
        why = f"{_why(cut - before)}{_way_out(plan.target)}"
        raise NoPlanError(f"no trainer can train in pools {offer}: {why}")
    return found


def _fitting(
    places: Iterable[tuple[TrainerHardware, int]], among: TrainerRange, cut: Counter[str]
) -> list[Degrees]:
    """Return the trainers that fit, given a trainer in each pool and its number of GPUs."""
    return [
        choice
        for trainer, num_gpus in places
        for choice in fitting_trainers(trainer, num_gpus, among, cut)
    ]


def _near_best(
    trainers: list[Degrees],
    all_times: Sequence[BatchTimes],
    always: Degrees | None,
    cut: Counter[str],
    rules: TargetRules | None,
) -> list[Degrees]:
    """Remove trainers that are slower than others on the same GPUs, both with whole batches and streaming.

    The others can run where the removed one can: see `TargetRules.ability`. Trainers with the layout
    of `always` are kept.
    """
    by_gpus: dict[tuple[str, int], list[tuple[Ability, Degrees, BatchTimes]]] = defaultdict(list)
    for trainer, times in zip(trainers, all_times, strict=True):
        able = () if rules is None else rules.ability(trainer)
        by_gpus[trainer.pool, trainer.num_gpus].append((able, trainer, times))
    kept: dict[Degrees, None] = {}
    for alike in by_gpus.values():
        for where, kind in product({able for able, *_ in alike}, ("whole", "stream")):
            order = sorted(
                (getattr(times, kind) + times.optimizer, one)
                for able, one, times in alike
                if all(ours >= theirs for ours, theirs in zip(able, where, strict=True))
            )
            near = [one for seconds, one in order if seconds <= NEAR_BEST * order[0][0]]
            kept |= dict.fromkeys(near[:MOST_ALIKE])
    cut[SLOW] += len(trainers) - len(kept)
    if always is not None:
        kept |= dict.fromkeys(each for each in trainers if each.layout == always.layout)
    return [trainer for trainer in trainers if trainer in kept]


def _mean_tokens(batches: Sequence[FallingLengths]) -> float:
    """Return the mean tokens of a rollout."""
    means = (batch.all.tokens / batch.all.num_rollouts for batch in batches)
    return sum(means) / len(batches)


def _with_more_running(
    replicas: list[Replicas],
    capacities: Sequence[float],
    rollouts_per_step: int,
    wanted: Sequence[int] | None,
) -> list[Replicas]:
    """Return replicas that decode more rollouts at once, if enough rollouts wait and memory holds them.

    Args:
        replicas: layouts that fit.
        capacities: mean number of rollouts that the memory of one replica of each layout holds.
        rollouts_per_step: rollouts that all replicas share.
        wanted: `plan.max_running`. Its values are tried even if memory holds fewer rollouts.
    """
    found = []
    for each, held in zip(replicas, capacities, strict=True):
        share = rollouts_per_step / each.replicas
        for most in wanted or powers_of_two(MOST_RUNNING):
            if most > each.max_running and (wanted or most < 2 * min(share, held)):
                found.append(each._replace(max_running=most))
    return found


def _sizes(plan: PlanConfig, name: str, pool: PoolConfig) -> Sizes:
    """Return the numbers of GPUs of each side in a pool: those of `[plan]`, or else the usual ones."""
    alone, split = sizes(pool, plan.unit), split_sizes(plan, name, pool)
    generate, train = (
        alone if wanted is None else [size for size in wanted if size <= pool.num_gpus]
        for wanted in (plan.rollout_gpus, plan.trainer_gpus)
    )
    return Sizes([*generate, *split.generate], [*train, *split.train])


def _logits(own: Logits | None, filled_in: object) -> Sequence[Logits | None]:
    """Return the ways to hold logits: only that of the run file if it is not what the framework fills in."""
    return (own, "chunked") if own == filled_in else (own,)


def _zero_stages(targets: Sequence[TargetName], trainer: TrainerConfig) -> Sequence[int]:
    """Return the ZeRO stages to try: all that the targets of the plan have, else 1, 3 and the trainer's own."""
    if not targets:
        return sorted({1, 3, trainer.zero})
    frameworks = (load_framework(framework_of_target(target)) for target in targets)
    layouts = (layout for framework in frameworks for layout in framework.layouts)
    return sorted({stage for layout in layouts for stage in layout.zero})


def _expert_degrees(trainer: TrainerConfig, model: ModelShape) -> Sequence[int]:
    usual = [1] if model.experts is None else [1, 2, 4, 8, 16, 32, MOST_EXPERT_RANKS]
    return sorted({trainer.expert_parallel, *usual})


def _context_degrees(trainer: TrainerConfig, longest: int) -> Sequence[int]:
    """Return 1, the trainer's own degree, and those that leave each rank at least `LEAST_PART` tokens."""
    parts = longest // LEAST_PART
    usual = powers_of_two(min(parts, MOST_CONTEXT_RANKS)) if parts >= LONG_IN_PARTS else [1]
    return sorted({1, trainer.context_parallel, *usual})


# Shared helpers -----------------------------------------------------------------------------------


def _numbered(parts: Iterable[Part]) -> tuple[list[Part], Indices]:
    """Return the distinct parts, and the place of each part among them."""
    places: dict[Part, int] = {}
    of_each = [places.setdefault(part, len(places)) for part in parts]
    return list(places), np.array(of_each, dtype=np.int32)


def _used(parts: list[Part], places: Indices) -> tuple[list[Part], Indices]:
    """Return the parts that plans use, and each plan's index among them."""
    kept, renumbered = np.unique(places, return_inverse=True)
    return [parts[place] for place in kept], renumbered.astype(np.int32)


def _way_out(target: TargetName | None) -> str:
    """Return what to change where the target of a plan may be the reason that none is left."""
    return "" if target is None else f"; without plan.target = {target!r}, other plans may fit"


def _why(cut: Counter[str]) -> str:
    reasons = [f"{reason} ({count} times)" for reason, count in cut.most_common() if count]
    return "; ".join(reasons) or "plan names GPUs that no pool has"
