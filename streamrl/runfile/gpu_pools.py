"""Which GPUs the rollout, trainer and verifier sides of a run use, and whether the pools and links allow it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from streamrl.runfile.cluster_config import ClusterConfig, LinkConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, OneOf, RunError
from streamrl.runfile.formatting import listing
from streamrl.runfile.keys import join_key, pool_key, trainer_key
from streamrl.runfile.policies_config import PoliciesConfig, SyncConfig
from streamrl.runfile.roles_config import (
    OF_REPLICAS,
    LendingConfig,
    ReplicasConfig,
    RolloutConfig,
    SecondaryTrainerConfig,
    TrainerConfig,
    VerifierConfig,
)
from streamrl.runfile.units import quantity_text

OWN_KEYS = re.compile(rf"\brollout\.(?=(?:{'|'.join(OF_REPLICAS)})\b)")
"""Matches keys in a text that each kind of replica has of its own."""

MORE_RANKS = ("pipeline_parallel", "data_parallel")
"""Degrees of a replica that most replicas do not use."""

SideKind: TypeAlias = Literal["rollout", "trainer", "verifier", "shared"]


class Side(NamedTuple):
    """GPUs of one pool with one role; "shared" GPUs of a colocated run have two."""

    name: str
    """Its name in reports: its kind, and for a secondary trainer that trainer's name."""
    kind: SideKind
    pool: str
    num_gpus: int
    trainer: int = 0
    """Index of the trainer; 0 is the primary trainer."""
    of_kind: int = 0
    """Of which kind its replicas are."""


def device_of(device: str, pool: PoolConfig) -> str:
    """Return the torch device of the roles in `pool`."""
    if device != "auto":
        return device
    return "cpu" if pool.gpu == "cpu" else "cuda"


class Claim(NamedTuple):
    """A section of a run file whose keys decide how many GPUs of a pool it uses."""

    key: str
    section: RolloutConfig | TrainerConfig | VerifierConfig
    pool: str
    factors: tuple[str, ...]
    """Keys whose product is the number of GPUs."""

    @property
    def keys(self) -> list[str]:
        """The dotted keys of its factors."""
        return [join_key(self.key, factor) for factor in self.factors]


def kind_key(kind: int) -> str:
    """Return the key of the section of a kind of replicas."""
    return f"rollout.others.{kind - 1}" if kind else "rollout"


def kind_name(kind: int) -> str:
    """Return the name of a kind of replicas in reports."""
    return f"rollout-{kind + 1}" if kind else "rollout"


def of_kind(error: RunError, kind: int) -> RunError:
    """Return an error of a run that has one kind of replicas alone, with the keys that these have in the whole run."""
    key, text, *others = (own_keys(t, kind) for t in (error.key, str(error), *error.others))
    return RunError(key, error.value, error.allowed, text, tuple(others))


def of_lent(error: RunError) -> RunError:
    """Return an error of a run that has lent replicas alone, with the key of the section that describes them."""
    text = f"[lending]: {error}"
    return RunError("lending", error.value, error.allowed, text, (error.key, *error.others))


def own_keys(text: str, kind: int) -> str:
    """Return a text with the keys that replicas of a kind have for those of the kind that is named first."""
    return OWN_KEYS.sub(f"{kind_key(kind)}.", text)


def claims_of(
    kinds: tuple[RolloutConfig, ...], trainers: tuple[TrainerConfig, ...], verifier: VerifierConfig
) -> Iterator[Claim]:
    """Yield every section that uses GPUs."""
    for kind, rollout in enumerate(kinds):
        more = [key for key in MORE_RANKS if getattr(rollout, key) > 1]
        factors = ("replicas", "tensor_parallel", *more)
        yield Claim(kind_key(kind), rollout, rollout.pool, factors)
    for number, trainer in enumerate(trainers):
        shared = ("context_parallel",) if trainer.context_parallel > 1 else ()
        factors = ("data_parallel", *shared, "tensor_parallel", "pipeline_parallel")
        yield Claim(trainer_key(number), trainer, trainer.pool, factors)
    if verifier.pool is not None:
        yield Claim("verifier", verifier, verifier.pool, ("workers", "gpus_per_worker"))


def sides_of(run: Run) -> list[Side]:
    """Return the sides of a run; each GPU is in one side, and sides without GPUs are left out."""
    rollout, trainer = run.rollout.num_gpus, run.trainer.num_gpus
    shared = min(rollout, trainer) if run.policies.shares_gpus else 0
    found = [
        Side("shared", "shared", run.rollout.pool, shared),
        Side("rollout", "rollout", run.rollout.pool, rollout - shared),
        Side("trainer", "trainer", run.trainer.pool, trainer - shared),
    ]
    for kind, other in enumerate(run.rollout.kinds[1:], start=1):
        found.append(Side(kind_name(kind), "rollout", other.pool, other.num_gpus, of_kind=kind))
    for number, follower in enumerate(run.followers, start=1):
        found.append(Side(follower.name, "trainer", follower.pool, follower.num_gpus, number))
    if run.verifier.pool is not None:
        found.append(Side("verifier", "verifier", run.verifier.pool, run.verifier.num_gpus))
    return [side for side in found if side.num_gpus]


def trainer_names(followers: tuple[SecondaryTrainerConfig, ...]) -> list[str]:
    """Return the names of the trainers in reports, the primary trainer first."""
    return ["trainer", *(follower.name for follower in followers)]


def gpus_used(sides: Iterable[Side], pool: str) -> int:
    """Return the number of GPUs of a pool that a run uses."""
    return sum(side.num_gpus for side in sides if side.pool == pool)


MOST_GPUS = 10**5
"""Maximum GPUs of one pool: a simulation has a process for every replica, and no known job uses
more.
"""
MOST_DEGREE = 4096
"""Largest divisor that is searched: no parallelism has a higher degree."""


def find_link(links: list[LinkConfig], first: str, second: str) -> int | None:
    """Return the index of the link between two pools; None where there is none, or they are the same pool."""
    wanted = {first, second}
    for index, link in enumerate(links):
        if set(link.between) == wanted and len(wanted) == 2:
            return index
    return None


def replicas_per_node(rollout: RolloutConfig, pools: dict[str, PoolConfig]) -> int:
    """Return the number of replicas that fill a node of the rollout pool; 1 if a replica spans nodes."""
    per_node = pools[rollout.pool].gpus_per_node
    return max(1, per_node // rollout.gpus_per_replica)


def most_replicas(run: Run) -> int:
    """Return the maximum number of replicas in the rollout pool, beside the other sides there."""
    pool = run.rollout.pool
    num_gpus = run.cluster.pools[pool].num_gpus
    for side in sides_of(run):
        takes_turns = side.kind == "trainer" and not side.trainer and run.policies.shares_gpus
        is_theirs = side.kind in ("rollout", "shared") and not side.of_kind
        if side.pool == pool and not is_theirs and not takes_turns:
            is_primary = side.kind == "trainer" and not side.trainer
            num_gpus -= run.trainer.largest.num_gpus if is_primary else side.num_gpus
    return num_gpus // run.rollout.gpus_per_replica


def _check_names(claims: Iterable[Claim], cluster: ClusterConfig) -> None:
    pools = OneOf(sorted(cluster.pools))
    if not pools:
        raise RunError("cluster.pools", {}, dict, "cluster.pools is empty, got {}: name a pool")
    for claim in claims:
        key, name = join_key(claim.key, "pool"), claim.pool
        if name not in pools:
            raise RunError(
                key, name, pools, f"{key} {name!r} is not one of the pools {list(pools)}"
            )
    for index, link in enumerate(cluster.links):
        for name in link.between:
            if name not in pools:
                key = f"cluster.links.{index}.between"
                text = f"{key} names {name!r}, which is not one of the pools {list(pools)}"
                raise RunError(key, link.between, pools, text)


def _check_links(links: list[LinkConfig]) -> None:
    """Reject a link from a pool to itself, and a second link between two pools: they would be unused."""
    seen: dict[frozenset[str], int] = {}
    for index, link in enumerate(links):
        key, pair = f"cluster.links.{index}.between", frozenset(link.between)
        first = seen.setdefault(pair, index)
        if len(pair) == 1:
            text = f"{key} must name two pools, got {link.between[0]!r} twice"
            raise RunError(key, link.between, None, text)
        if first != index:
            names = " and ".join(map(repr, link.between))
            text = f"{key} names {names}, which cluster.links.{first} already joins"
            raise RunError(key, link.between, None, text, (f"cluster.links.{first}.between",))


def _check_lines(pools: dict[str, PoolConfig]) -> None:
    """Refuse names with line breaks or tabulators, which would begin a line of their own in scripts and reports."""
    for name in pools:
        if any(letter.isspace() and letter != " " for letter in name):
            text = f"cluster.pools: a name has one line and no tabulator, got {name!r}"
            raise RunError("cluster.pools", name, str, text)


def _check_sizes(pools: dict[str, PoolConfig]) -> None:
    for name, pool in pools.items():
        if pool.num_gpus > MOST_GPUS:
            key = pool_key(name, "nodes")
            most = max(1, MOST_GPUS // pool.gpus_per_node)
            text = f"{key}={pool.nodes} x gpus_per_node={pool.gpus_per_node} must be at most {MOST_GPUS} GPUs"
            others = (pool_key(name, "gpus_per_node"),)
            raise RunError(key, pool.nodes, Bounds(1, most), text, others)


def _check_owned(pools: dict[str, PoolConfig]) -> None:
    for name, pool in pools.items():
        if pool.owned and pool.spot_failures_per_gpu_day:
            key, rate = pool_key(name, "spot_failures_per_gpu_day"), pool.spot_failures_per_gpu_day
            text = f"{key}={rate:g} applies to rented GPUs, but the pool is owned; set failures.per_gpu_day, which applies to both"
            raise RunError(key, rate, Bounds(0, 0), text, (pool_key(name, "owned"),))
        for key in ("billing_unit", "minimum_term"):
            _check_rented(name, pool, key)


SPOT_KEYS = ("spot_warning", "spot_replacement_time", "on_demand_price")


def _check_spot(pools: dict[str, PoolConfig], shared: str | None) -> None:
    """Reject keys of spot machines in a pool without them, and notices in the pool that the trainer shares."""
    for name, pool in pools.items():
        if pool.spot_warning and name == shared:
            key = pool_key(name, "spot_warning")
            text = (
                f"{key}={quantity_text(pool.spot_warning)}: replicas share their machines with the trainer, which gets "
                "no notice; remove the key, or set policies.system to a system that is not colocated"
            )
            raise RunError(key, pool.spot_warning, Bounds(0, 0), text, ("policies.system",))
        rate = "spot_failures_per_gpu_day"
        if not pool.spot_failures_per_gpu_day:
            for key in (pool_key(name, field) for field in SPOT_KEYS if getattr(pool, field)):
                text = f"{key} applies to spot machines; set cluster.pools.{name}.{rate}, or remove the key"
                raise RunError(
                    key, getattr(pool, key.rpartition(".")[2]), None, text, (pool_key(name, rate),)
                )
        elif pool.spot_replacement_time and not pool.spot_warning:
            key, warning = pool_key(name, "spot_replacement_time"), pool_key(name, "spot_warning")
            text = f"{key}={quantity_text(pool.spot_replacement_time)} applies to machines with a notice; set {warning}"
            raise RunError(key, pool.spot_replacement_time, None, text, (warning,))


def _check_rented(name: str, pool: PoolConfig, field: str) -> None:
    if pool.owned and (seconds := getattr(pool, field)):
        key = pool_key(name, field)
        text = f"{key}={quantity_text(seconds)} applies to rented GPUs, but the pool is owned; remove the key"
        raise RunError(key, seconds, Bounds(0, 0), text, (pool_key(name, "owned"),))


def _check_domains(pools: dict[str, PoolConfig]) -> None:
    for name, pool in pools.items():
        joined = pool.nvlink_domain or pool.gpus_per_node
        if joined % pool.gpus_per_node:
            key, per_node = pool_key(name, "nvlink_domain"), pool.gpus_per_node
            text = f"{key} must be a multiple of gpus_per_node={per_node}, got {joined}"
            raise RunError(key, joined, None, text, (pool_key(name, "gpus_per_node"),))


def _check_rollout(kinds: tuple[RolloutConfig, ...], pools: dict[str, PoolConfig]) -> None:
    for kind, rollout in enumerate(kinds):
        key, degree, experts = kind_key(kind), rollout.tensor_parallel, rollout.expert_parallel
        _check_tensor_parallel(key, rollout.pool, degree, rollout.num_gpus, pools, spans_nodes=True)
        if rollout.data_parallel > 1:
            _check_attention_ranks(key, rollout)
        elif experts not in (1, degree):
            raise RunError(
                f"{key}.expert_parallel",
                experts,
                OneOf([1, degree]),
                f"{key}.expert_parallel must be 1 or tensor_parallel {degree}, got {experts}",
                (f"{key}.tensor_parallel",),
            )


def _check_attention_ranks(key: str, rollout: RolloutConfig) -> None:
    """Check that data-parallel attention ranks form one replica that shards its experts over all of them."""
    ranks, experts = rollout.data_parallel * rollout.tensor_parallel, rollout.expert_parallel
    if experts != ranks:
        raise RunError(
            f"{key}.expert_parallel",
            experts,
            OneOf([ranks]),
            f"{key}.expert_parallel must be data_parallel x tensor_parallel = {ranks} if attention is "
            f"data-parallel, got {experts}",
            (f"{key}.data_parallel", f"{key}.tensor_parallel"),
        )
    if rollout.pipeline_parallel > 1:
        raise RunError(
            f"{key}.pipeline_parallel",
            rollout.pipeline_parallel,
            OneOf([1]),
            f"{key}.pipeline_parallel must be 1 if {key}.data_parallel is {rollout.data_parallel}, "
            f"got {rollout.pipeline_parallel}",
            (f"{key}.data_parallel",),
        )


def _check_kinds(policies: PoliciesConfig, others: tuple[ReplicasConfig, ...]) -> None:
    """Refuse several kinds of replicas where a policy reckons with one."""
    if not others:
        return
    for key, value, only in (
        ("policies.system", policies.system, "colocated"),
        ("policies.resize", policies.resize, "adjust"),
        ("policies.migration", policies.migration, "consolidate"),
        ("policies.migration", policies.migration, "overrun"),
        ("policies.learns_from_siblings", policies.learns_from_siblings, True),
        ("policies.concurrency", policies.concurrency, "kv-pressure"),
    ):
        if value == only:
            text = f"{key} {value!r} supports one kind of replica, but rollout.others has {len(others)} more"
            raise RunError(key, value, None, text, ("rollout.others",))


def _check_lending(
    lending: LendingConfig | None, lent: RolloutConfig | None, trainer: TrainerConfig
) -> None:
    """Refuse replicas that do not fit on the GPUs of the primary trainer."""
    if lending is None or lent is None:
        return
    if lent.num_gpus > trainer.num_gpus or not lent.replicas:
        key, value = "lending.replicas", lending.replicas
        if value is None:
            key, value = "lending.tensor_parallel", lent.tensor_parallel
        each = f"{lent.gpus_per_replica} GPU{'s' * (lent.gpus_per_replica > 1)}"
        text = f"{key}={value}: a lent replica has {each}, but the trainer has only {trainer.num_gpus}; lower it"
        raise RunError(key, value, None, text, ("lending.tensor_parallel", "lending.replicas"))


def _check_trainers(trainers: tuple[TrainerConfig, ...], pools: dict[str, PoolConfig]) -> None:
    for number, trainer in enumerate(trainers):
        _check_trainer(pools, trainer_key(number), trainer)


def _check_trainer(pools: dict[str, PoolConfig], key: str, trainer: TrainerConfig) -> None:
    _check_tensor_parallel(key, trainer.pool, trainer.tensor_parallel, trainer.num_gpus, pools)
    _check_expert_slices(pools, key, trainer)
    _check_shard_ranks(key, trainer)
    ranks = trainer.copies * trainer.tensor_parallel
    if ranks % trainer.expert_parallel:
        raise RunError(
            f"{key}.expert_parallel",
            trainer.expert_parallel,
            OneOf(divisors(ranks)),
            f"{key}.expert_parallel must divide data_parallel x {_context(trainer)}tensor_parallel = {ranks}, "
            f"got {trainer.expert_parallel}",
            (f"{key}.data_parallel", f"{key}.tensor_parallel", f"{key}.context_parallel"),
        )
    if trainer.virtual_stages > 1 and trainer.pipeline_parallel == 1:
        raise RunError(
            f"{key}.virtual_stages",
            trainer.virtual_stages,
            OneOf([1]),
            f"{key}.virtual_stages must be 1 if {key}.pipeline_parallel is 1, "
            f"got {trainer.virtual_stages}",
            (f"{key}.pipeline_parallel",),
        )


def _check_changes_of_ranks(
    trainers: tuple[TrainerConfig, ...],
    steps: int,
    policies: PoliciesConfig,
    lending: LendingConfig | None,
) -> None:
    """Refuse changes of ranks of secondary trainers, out of order, or of a trainer whose ranks cannot change."""
    for number, trainer in enumerate(trainers):
        key = f"{trainer_key(number)}.resize"
        if not trainer.resize:
            continue
        if number:
            text = f"{key} must be absent: only the primary trainer changes its ranks; remove it"
            raise RunError(key, trainer.sizes[1:], None, text)
        _check_order(key, trainer.sizes, steps)
        check_resizable(trainer, policies, lending)


def check_resizable(
    trainer: TrainerConfig, policies: PoliciesConfig, lending: LendingConfig | None
) -> None:
    """Raise `RunError` if the primary trainer shards its state over ranks, or others use its GPUs or take its place."""
    if trainer.borrows:
        text = "trainer.resize does not work with trainer.borrows, which changes the ranks by itself; remove one of them"
        raise RunError("trainer.resize", trainer.sizes[1:], None, text, ("trainer.borrows",))
    check_joinable("trainer.resize", trainer.sizes[1:], trainer, policies, lending)


def check_joinable(
    key: str,
    wanted: object,
    trainer: TrainerConfig,
    policies: PoliciesConfig,
    lending: LendingConfig | None,
) -> None:
    """Raise `RunError` if no rank can join the primary trainer, as the setting `key` with the value `wanted` needs."""
    for name, value, needed in (
        ("trainer.zero", trainer.zero, 0),
        ("trainer.expert_parallel", trainer.expert_parallel, 1),
        ("trainer.expert_tensor_parallel", trainer.expert_tensor_parallel, None),
    ):
        if value != needed:
            must = "be absent" if needed is None else f"be {needed}"
            text = f"{name} must {must} with {key}, so that each data-parallel rank has the state of every other, got {value}; change it, or remove {key}"
            raise RunError(name, value, OneOf([needed]), text, (key,))
    for name, is_used, why in (
        ("policies.system 'colocated'", policies.shares_gpus, "replicas share its GPUs"),
        ("[lending]", lending is not None, "replicas generate on its GPUs"),
        ("policies.promote", policies.promote is not None, "another trainer may replace it"),
    ):
        if is_used:
            text = f"{key} does not work with {name}, because {why}; remove one of them"
            raise RunError(key, wanted, None, text)


def _check_borrowing(
    trainers: tuple[TrainerConfig, ...],
    rollout: RolloutConfig,
    policies: PoliciesConfig,
    lending: LendingConfig | None,
) -> None:
    """Refuse a trainer that borrows GPUs which cannot be its ranks, or which other policies reckon with."""
    key, trainer = "trainer.borrows", trainers[0]
    for number, follower in enumerate(trainers[1:], start=1):
        if follower.borrows:
            name = f"{trainer_key(number)}.borrows"
            text = f"{name} must be absent: only the primary trainer borrows GPUs; remove it"
            raise RunError(name, True, OneOf([False]), text)
    if not trainer.borrows:
        return
    check_joinable(key, True, trainer, policies, lending)
    each = trainer.num_gpus // trainer.data_parallel
    for name, value, is_right, must in (
        ("rollout.pool", rollout.pool, rollout.pool == trainer.pool, f"be {trainer.pool!r}"),
        ("rollout.others", len(rollout.others), not rollout.others, "be absent"),
        (
            "rollout.replicas",
            rollout.replicas,
            not rollout.num_gpus % each,
            f"have a multiple of {each} GPUs, which one data-parallel rank has,",
        ),
        ("policies.resize", policies.resize, policies.resize == "keep", "be 'keep'"),
    ):
        if not is_right:
            text = f"{name} must {must} with {key}, got {value!r}; change it, or remove {key}"
            raise RunError(name, value, None, text, (key,))


def _check_order(key: str, sizes: Sequence[tuple[int, int]], steps: int) -> None:
    """Refuse steps out of order or beyond the run, and changes that change nothing."""
    for place, ((before, had), (step, ranks)) in enumerate(pairwise(sizes)):
        if not before < step <= steps:
            bounds = Bounds(max(2, before + 1), steps)
            text = f"{key}.{place}.step must be {bounds}: steps ascend to algorithm.steps={steps}, got {step}"
            raise RunError(f"{key}.{place}.step", step, bounds, text, ("algorithm.steps",))
        if ranks == had:
            text = (
                f"{key}.{place}.data_parallel is {ranks}, as before; change it, or remove the entry"
            )
            raise RunError(f"{key}.{place}.data_parallel", ranks, None, text)


def _check_room(
    trainer: TrainerConfig, sides: Sequence[Side], pools: dict[str, PoolConfig]
) -> None:
    """Refuse more data-parallel ranks than the pool has GPUs for."""
    others = gpus_used(sides, trainer.pool) - trainer.num_gpus
    room = pools[trainer.pool].num_gpus - others
    each = trainer.num_gpus // trainer.data_parallel
    for place, change in enumerate(trainer.resize):
        if change.data_parallel * each > room:
            key = f"trainer.resize.{place}.data_parallel"
            text = f"{key} must be at most {room // each}, because pool {trainer.pool!r} has {room} GPUs for the trainer, got {change.data_parallel}"
            others_keys = (pool_key(trainer.pool, "nodes"),)
            raise RunError(key, change.data_parallel, Bounds(1, room // each), text, others_keys)


def _check_shard_ranks(key: str, trainer: TrainerConfig) -> None:
    """Refuse sharding groups that do not divide the ranks, or that have nothing to shard alike."""
    ranks, name = trainer.shard_ranks, f"{key}.shard_ranks"
    if ranks is None:
        return
    if trainer.copies % ranks:
        text = (
            f"{name} must divide data_parallel{' x context_parallel' if trainer.context_parallel > 1 else ''} = "
            f"{trainer.copies}, got {ranks}"
        )
        others = (f"{key}.data_parallel", f"{key}.context_parallel")
        raise RunError(name, ranks, OneOf(divisors(trainer.copies)), text, others)
    for other, value, needed in (
        ("zero", trainer.zero, 3),
        ("expert_parallel", trainer.expert_parallel, 1),
    ):
        if value != needed:
            text = f"{name}={ranks} needs {key}.{other} = {needed}, got {value}; set it, or remove {name}"
            raise RunError(name, ranks, text=text, others=(f"{key}.{other}",))


def _check_expert_slices(pools: dict[str, PoolConfig], key: str, trainer: TrainerConfig) -> None:
    """Refuse slices of experts that share no NVLink, or that other ranks of a stage cannot be folded into."""
    slices, ranks = trainer.expert_tensor_parallel, trainer.copies * trainer.tensor_parallel
    if slices is None:
        return
    name, pool = f"{key}.expert_tensor_parallel", pools[trainer.pool]
    domain = pool.domain
    others = (f"{key}.expert_parallel", f"{key}.data_parallel", f"{key}.tensor_parallel")
    if not pool.joins(slices):
        text = f"{name} must divide the {domain} GPUs that NVLink joins, got {slices}"
        raise RunError(name, slices, OneOf(divisors(domain)), text)
    if ranks % trainer.expert_parallel == 0 and ranks % trainer.expert_ranks:
        text = (
            f"{name} x expert_parallel = {trainer.expert_ranks} must divide data_parallel x {_context(trainer)}"
            f"tensor_parallel = {ranks}, got expert_tensor_parallel {slices}"
        )
        raise RunError(
            name, slices, OneOf(divisors(ranks // trainer.expert_parallel)), text, others
        )


def _context(trainer: TrainerConfig) -> str:
    return "context_parallel x " if trainer.context_parallel > 1 else ""


def _check_follower_names(followers: tuple[SecondaryTrainerConfig, ...], num_kinds: int) -> None:
    taken = {"trainer", "verifier", "shared", *map(kind_name, range(num_kinds))}
    for number, follower in enumerate(followers, start=1):
        name = follower.name
        if not name or name != name.strip() or not name.isprintable() or name in taken:
            key = f"{trainer_key(number)}.name"
            text = (
                f"{key} must be one line and differ from the name of every other side, got {name!r}"
            )
            raise RunError(key, follower.name, str, text)
        taken.add(follower.name)


def _check_verifier(verifier: VerifierConfig) -> None:
    if (verifier.pool is None) != (verifier.gpus_per_worker == 0):
        raise RunError(
            "verifier.gpus_per_worker",
            verifier.gpus_per_worker,
            Bounds(1) if verifier.pool is not None else OneOf([0]),
            f"verifier.gpus_per_worker={verifier.gpus_per_worker} and verifier.pool={verifier.pool!r} "
            "contradict each other: workers have GPUs exactly if they have a pool",
            ("verifier.pool",),
        )


def _check_tensor_parallel(
    side: str,
    pool: str,
    degree: int,
    num_gpus: int,
    pools: dict[str, PoolConfig],
    *,
    spans_nodes: bool = False,
) -> None:
    """Refuse tensor ranks that share no NVLink, but for those of a replica that has several whole domains.

    A rack of 72 GPUs holds four groups of 16 tensor ranks. Its other eight GPUs are free for smaller groups.
    """
    config, key = pools[pool], f"{side}.tensor_parallel"
    domain, what = config.domain, "a node" if config.nvlink_domain is None else "an NVLink domain"
    if not config.joins(degree) and not (spans_nodes and degree % domain == 0):
        allowed = [f"must divide the {domain} GPUs of {what}"]
        if spans_nodes and config.num_gpus > domain:
            allowed.append("be a multiple of them")
        if domain > config.gpus_per_node:
            allowed.append(f"be whole nodes of {config.gpus_per_node} GPUs")
        text = f"{key} {listing(allowed, 'or')}, got {degree}"
        raise RunError(key, degree, OneOf(divisors(domain)), text)
    if not config.holds(num_gpus // degree, degree):
        held = domain // degree
        own = pool_key(pool, "nvlink_domain")
        text = (
            f"{key}={degree} has {num_gpus // degree} groups of tensor ranks, but {config.num_domains} NVLink domains of "
            f"{domain} GPUs hold {held} each; use fewer GPUs, or set {own}={held * degree} if there are more domains"
        )
        raise RunError(key, degree, text=text, others=(own,))


def _check_shared(
    policies: PoliciesConfig, sync: SyncConfig, rollout_pool: str, trainer_pool: str
) -> None:
    """Generation and training that take turns on one set of GPUs cannot overlap, or send over a wire."""
    if not policies.shares_gpus:
        return
    if rollout_pool != trainer_pool:
        raise RunError(
            "trainer.pool",
            trainer_pool,
            OneOf([rollout_pool]),
            f"policies.system 'colocated' shares GPUs, so trainer.pool must be rollout.pool "
            f"{rollout_pool!r}, got {trainer_pool!r}",
            ("policies.system", "rollout.pool"),
        )
    for key, value, only in (
        ("policies.max_staleness", policies.max_staleness, 0),
        ("policies.sync_every", policies.sync_every, 1),
        ("policies.waits_for_whole_batches", policies.waits_for_whole_batches, False),
        ("policies.streaming", policies.streaming, "whole-batch"),
        ("policies.weight_sync", policies.weight_sync, "barrier"),
        ("policies.resize", policies.resize, "keep"),
        ("sync.mode", sync.mode if sync.mode == "delta" else None, "full"),
        ("sync.backend", sync.backend, SyncConfig().backend),
    ):
        if value is not None and value != only:
            text = f"{key} must be {only!r} if policies.system is 'colocated', got {value!r}"
            raise RunError(key, value, OneOf([only]), text, ("policies.system",))


def _check_num_gpus(
    claims: Sequence[Claim], sides: Sequence[Side], pools: dict[str, PoolConfig]
) -> None:
    for name, pool in pools.items():
        need = gpus_used(sides, name)
        if need > pool.num_gpus:
            users = [claim for claim in claims if claim.pool == name]
            products = " and ".join(map(_product, users))
            text = f"pool {name!r} has {pool.num_gpus} GPUs, but {products} need {need}"
            keys = [claim.keys[0] for claim in users]
            keys += [key for claim in users for key in claim.keys[1:]]
            keys += [pool_key(name, "nodes")]
            value = getattr(users[0].section, users[0].factors[0])
            raise RunError(keys[0], value, None, text, tuple(keys[1:]))


def _product(claim: Claim) -> str:
    """Say what a side's GPUs are: "rollout.replicas=9 x tensor_parallel=1"."""
    factors = (f"{factor}={getattr(claim.section, factor)}" for factor in claim.factors)
    return f"{claim.key}.{' x '.join(factors)}"


def _check_link(
    links: list[LinkConfig], kinds: tuple[RolloutConfig, ...], trainer_pool: str
) -> None:
    for rollout in kinds:
        first, second = rollout.pool, trainer_pool
        if first != second and find_link(links, first, second) is None:
            text = f"cluster.links has no link between {first!r} and {second!r}"
            raise RunError("cluster.links", links, None, text)


def _check_resize(
    policies: PoliciesConfig, rollout: RolloutConfig, pools: dict[str, PoolConfig], room: int
) -> None:
    """Refuse to adjust replicas where there could be neither more nor fewer: the pool has GPUs for `room`."""
    least, most = rollout.replicas, policies.max_replicas or room
    if not least <= most <= room:
        raise RunError(
            "policies.max_replicas",
            most,
            Bounds(least, room),
            f"policies.max_replicas must be between rollout.replicas={least} and {room}, the most that pool "
            f"{rollout.pool!r} has GPUs for, got {most}",
            ("rollout.replicas",),
        )
    unit = policies.resize_unit or replicas_per_node(rollout, pools)
    if policies.resize == "adjust" and least + unit > most and policies.shrink_after is None:
        raise RunError(
            "policies.resize",
            policies.resize,
            OneOf(["keep"]),
            f"policies.resize 'adjust' adds {unit} replicas at once, but at most {most} are possible in pool "
            f"{rollout.pool!r} and rollout.replicas is {least}",
            ("rollout.replicas", "policies.resize_unit", "policies.shrink_after"),
        )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number of GPUs, up to the largest useful degree."""
    return [n for n in range(1, min(number, MOST_DEGREE) + 1) if number % n == 0]


POOL_CHECKS: tuple[Callable[[Run], None], ...] = (
    lambda run: _check_names(claims_of(run.rollout.kinds, run.trainers, run.verifier), run.cluster),
    lambda run: _check_links(run.cluster.links),
    lambda run: _check_lines(run.cluster.pools),
    lambda run: _check_sizes(run.cluster.pools),
    lambda run: _check_owned(run.cluster.pools),
    lambda run: _check_spot(
        run.cluster.pools, run.rollout.pool if run.policies.shares_gpus else None
    ),
    lambda run: _check_domains(run.cluster.pools),
    lambda run: _check_rollout(run.rollout.kinds, run.cluster.pools),
    lambda run: _check_kinds(run.policies, run.rollout.others),
    lambda run: _check_lending(run.lending, run.lent, run.trainer),
    lambda run: _check_trainers(run.trainers, run.cluster.pools),
    lambda run: _check_shared(run.policies, run.sync, run.rollout.pool, run.trainer.pool),
    lambda run: _check_changes_of_ranks(
        run.trainers, run.algorithm.steps, run.policies, run.lending
    ),
    lambda run: _check_borrowing(run.trainers, run.rollout, run.policies, run.lending),
    lambda run: _check_follower_names(run.followers, run.rollout.num_kinds),
    lambda run: _check_verifier(run.verifier),
    lambda run: _check_num_gpus(
        list(claims_of(run.rollout.kinds, run.trainers, run.verifier)),
        sides_of(run),
        run.cluster.pools,
    ),
    lambda run: _check_room(run.trainer, sides_of(run), run.cluster.pools),
    lambda run: _check_link(run.cluster.links, run.rollout.kinds, run.trainer.pool),
    lambda run: _check_resize(run.policies, run.rollout, run.cluster.pools, most_replicas(run)),
)
"""Each raises `RunError`; later ones rely on earlier ones."""


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`: the degrees to try by default."""
    return [1 << bits for bits in range(most.bit_length())]
