"""List the layouts that fit the GPUs: replicas of one or two kinds, and the parallelism of a trainer.

Layouts that do not fit are left out, and their reasons are counted.

Replicas of the second kind use a second pool, or other degrees in the same pool. The step time of
two kinds together is near that of each kind alone. So they are built only from the best plans with
one kind of replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from streamrl.hardware.memory import (
    ROOMY,
    PassMemory,
    bytes_in_ways,
    host_memory,
    kv_capacity,
    offloaded_bytes,
)
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.nvme import check_nvme
from streamrl.hardware.parallelism import slices_experts, splits_context
from streamrl.hardware.resolved import ReplicaHardware, TrainerHardware
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.frameworks import has_layout
from streamrl.runfile.gpu_pools import powers_of_two
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import (
    KernelFusion,
    Logits,
    Recompute,
    ReplicasConfig,
    RolloutConfig,
    SpeculativeConfig,
    TrainerConfig,
)
from streamrl.runfile.simulation_config import FrameworkName

ROLLOUT_MEMORY = "rollout: a replica holds no longest rollout beside its weights"
TRAINER_MEMORY = "trainer: does not fit its memory"
TIGHT = (
    f"trainer: takes over {ROOMY:.0%} of a GPU, which leaves too little for buffers of collectives"
)
DIVISIBILITY = "degrees do not divide the GPUs"
HEADS = "tensor parallelism does not divide the attention heads"
SLICES = "trainer: expert_tensor_parallel does not divide the channels of an expert"
EXPERTS = "rollout: attention ranks do not divide the experts"
LAYERS = "trainer: more pipeline stages than layers, or experts than there are"
RANKS = "trainer: more data-parallel ranks than rollouts in a step"
ZERO_STAGES = (
    "trainer: ZeRO 3 beside pipeline stages, which gather weights for each pass: "
    "plan.zero = [3] tries it"
)
"""DeepSpeed rejects ZeRO 3 with pipeline stages, and Megatron's optimizer has ZeRO 1. PyTorch's
FSDP2 supports both together (torchtitan).
"""
SHARD_RANKS = (
    "trainer: trainer.shard_ranks needs ZeRO 3, whole experts and a number of ranks that it divides"
)
ZERO_ALONE = "trainer: ZeRO 3 of one rank, which has nobody to split with: plan.zero = [3] tries it"
OF_FRAMEWORK = "trainer: framework {} splits none so"


FEWEST_RUNNING = 8
"""Smallest `max_running` that is tried for models with states."""
MOST_STAGES = 16
"""Most pipeline stages of a replica that are tried by default."""
FINE = 16
"""Sizes of a side that are tried between a number of nodes and twice that number, in a large pool.
"""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "mlp", "full")
"""Recomputation in the backward pass, ordered from the fastest, which needs most memory."""

Side = TypeVar("Side", ReplicaHardware, TrainerHardware)


def in_pool(side: Side, name: str, pools: Mapping[str, PoolConfig]) -> Side:
    """Return a side, moved to the GPUs of a pool."""
    return replace(side, config=replace(side.config, pool=name), pool=pools[name])


class Replicas(NamedTuple):
    """The generation side: replicas of one kind, and perhaps of further kinds."""

    pool: str
    replicas: int
    tensor_parallel: int
    expert_parallel: int
    max_running: int
    beside: Replicas | None = None
    """Replicas of another kind."""
    pipeline_parallel: int = 1
    data_parallel: int = 1
    drafted: int | None = None
    """Tokens that each replica drafts per step. 0 turns drafting off; None keeps the run's own
    value. All kinds have the same value.
    """

    @property
    def kinds(self) -> tuple[Replicas, ...]:
        """Each kind of replica, without the others."""
        others = () if self.beside is None else self.beside.kinds
        return (self._replace(beside=None), *others)

    @property
    def layout(self) -> Replicas:
        """The same replicas without their `max_running`, to compare layouts."""
        beside = None if self.beside is None else self.beside.layout
        return self._replace(max_running=0, beside=beside)

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return sum(kind.replicas * kind.gpus_per_replica for kind in self.kinds)

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of one replica of the first kind."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def num_replicas(self) -> int:
        """Replicas of all kinds."""
        return sum(kind.replicas for kind in self.kinds)

    @property
    def pools(self) -> tuple[str, ...]:
        """Pools of all kinds by name, each once."""
        return tuple(sorted({kind.pool for kind in self.kinds}))

    @property
    def own(self) -> dict[str, Any]:
        """Keys and values of the first kind in the run file."""
        shared = ("beside", "drafted")
        return {key: value for key, value in self._asdict().items() if key not in shared}

    def change(self, rollout: RolloutConfig) -> RolloutConfig:
        """Return the section of the run file with these replicas."""
        others = tuple(ReplicasConfig(**kind.own) for kind in self.kinds[1:])
        speculative = self._drafting(rollout.speculative)
        return replace(rollout, **self.own, others=others, speculative=speculative)

    def place(self, replica: ReplicaHardware, pool: PoolConfig) -> ReplicaHardware:
        """Return one kind of replica with these degrees, in the given pool."""
        return replace(replica, config=self.change(replica.config), pool=pool)

    def fits(self, replica: ReplicaHardware, pools: Mapping[str, PoolConfig]) -> bool:
        """Return whether one replica of each kind holds a rollout of maximum length."""
        return all(holds_rollouts(kind.place(replica, pools[kind.pool])) for kind in self.kinds)

    def _drafting(self, own: SpeculativeConfig | None) -> SpeculativeConfig | None:
        if own is None or self.drafted is None:
            return own
        return replace(own, tokens=self.drafted or own.tokens, enabled=self.drafted > 0)


class Degrees(NamedTuple):
    """The training side: the parallelism of the trainer, and how it fits its memory."""

    pool: str
    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    micro_batch: int
    zero: int
    recompute: Recompute
    logits: Logits | None
    offload: bool
    context_parallel: int = 1
    expert_tensor_parallel: int | None = None
    kernels: KernelFusion | None = None
    """Kernels of the framework's back end that has this ZeRO stage; None keeps those of the run."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the trainer."""
        split = self.tensor_parallel * self.pipeline_parallel
        return self.data_parallel * self.context_parallel * split

    @property
    def split(self) -> Degrees:
        """The same trainer without the choices that save memory, to compare how models and batches are split."""
        return self._replace(recompute="full", logits=None, offload=False)

    @property
    def layout(self) -> Degrees:
        """The same split with micro-batches of 1, to compare layouts."""
        return self.split._replace(micro_batch=1)

    def change(self, trainer: TrainerConfig) -> TrainerConfig:
        """Return the section of a trainer with these degrees.

        With a single pipeline stage, `virtual_stages` is 1.
        """
        slices = trainer.virtual_stages if self.pipeline_parallel > 1 else 1
        keys = self._asdict() | {"kernels": self.kernels or trainer.kernels}
        return replace(trainer, **keys, virtual_stages=slices)

    def place(self, trainer: TrainerHardware) -> TrainerHardware:
        """Return the trainer with these degrees. It must already be in their pool."""
        return replace(trainer, config=self.change(trainer.config))


@dataclass(frozen=True, kw_only=True)
class TrainerRange:
    """Degrees and sizes to try. A degree of None stands for all powers of two that fit."""

    tensor_parallel: Sequence[int] | None = None
    pipeline_parallel: Sequence[int] | None = None
    expert_parallel: Sequence[int] = (1,)
    expert_tensor_parallel: Sequence[int | None] = (None,)
    context_parallel: Sequence[int] = (1,)
    micro_batch: Sequence[int]
    zero: Sequence[int]
    recompute: Sequence[Recompute]
    """Choices from the least recomputation to the most. The first that fits is used, because less
    is faster.
    """
    logits: Sequence[Logits | None] = (None, "chunked")
    """Ways to hold logits, from the most memory to the least."""
    kernels: Mapping[int, KernelFusion] = field(default_factory=dict)
    """Kernels by ZeRO stage, where the framework's back ends differ from the run's."""
    most_memory: float = 1.0
    """Largest share of a GPU's memory that a trainer may use."""
    framework: FrameworkName | None = None
    """Try only layouts of this framework; None tries all layouts."""
    refusal: Callable[[Degrees], str] | None = None
    """Returns why what is to run the plan cannot run a trainer; "" if it can. None: it can run all."""

    @cached_property
    def ways(self) -> list[PassMemory]:
        """Ways to save the memory of passes, the fastest and largest first."""
        return [PassMemory(*way) for way in product(self.recompute, self.logits)]


def fitting_replicas(
    replica: ReplicaHardware, plan: PlanConfig, num_gpus: int, cut: Counter[str]
) -> Iterator[Replicas]:
    """Yield the replicas that fit on `num_gpus` of a pool, the smallest tensor parallelism first.

    Replicas keep expert parallelism if the run has it. Several pipeline stages or attention ranks
    are tried only if `[plan]` or the run names them. Pipeline stages are also tried if no other
    replica holds a rollout.
    """
    pool, model = replica.pool, replica.model
    domain, degrees = pool.domain, plan.rollout_tensor_parallel
    tried = powers_of_two(domain) if degrees is None else degrees
    drafts: Sequence[int | None] = plan.speculative or [None]
    has_any = False
    for degree in tried:
        is_joined = pool.joins(degree) or degree % domain == 0
        if num_gpus % degree or not is_joined or not pool.holds(num_gpus // degree, degree):
            cut[DIVISIBILITY] += 1
            continue
        if not model.splits_over(degree):
            cut[HEADS] += 1
            continue
        ways = _replicas_of(replica, plan, num_gpus, degree, cut)
        for found in _drafting(drafts, ways):
            roomy = _with_room_for_states(found, replica)
            if roomy is not None:
                has_any = True
                yield roomy
            else:
                cut[ROLLOUT_MEMORY] += 1
    if has_any or plan.rollout_pipeline_parallel is not None or domain not in tried:
        return
    if not model.splits_over(domain):
        return
    for piped in _piped(replica.config, num_gpus, domain):
        drafting = _drafting(drafts, [piped])
        fitting = [each for each in drafting if holds_rollouts(each.place(replica, replica.pool))]
        if fitting:
            yield from fitting
            return


def _with_room_for_states(choice: Replicas, replica: ReplicaHardware) -> Replicas | None:
    """Return replicas that hold a rollout, with a smaller `max_running` if states need the room; else None.

    Each running rollout reserves its states and full windows, which may take more memory than its KV cache.
    """
    has_states = replica.longest_model.shard_state_bytes(replica.precision.wide, 1) > 0
    while not holds_rollouts(choice.place(replica, replica.pool)):
        if not has_states or choice.max_running < 2 * FEWEST_RUNNING:
            return None
        choice = choice._replace(max_running=choice.max_running // 2)
    return choice


def _drafting(drafts: Sequence[int | None], ways: Iterable[Replicas]) -> Iterator[Replicas]:
    """Yield each layout of replicas with each number of drafted tokens that the plan allows."""
    yield from (each._replace(drafted=tokens) for each in ways for tokens in drafts)


def check_attention_ranks(plan: PlanConfig, model: ModelShape) -> None:
    """Check that the attention ranks named in a plan divide the experts of the model.

    Raises:
        RunError: no tensor parallelism of the plan makes them divide the experts.
    """
    key, experts = "plan.rollout_data_parallel", model.experts
    num_experts = 0 if experts is None else experts.num_experts
    for ranks in plan.rollout_data_parallel or []:
        degrees = plan.rollout_tensor_parallel or [1]
        if ranks == 1 or any(num_experts and num_experts % (d * ranks) == 0 for d in degrees):
            continue
        has = f"{num_experts} experts" if num_experts else "no experts"
        beside = f", with tensor degrees of {degrees}" if plan.rollout_tensor_parallel else ""
        text = (
            f"{key} must divide the experts of {model.name}, which has {has}, got {ranks}{beside}"
        )
        raise RunError(
            key, plan.rollout_data_parallel, list, text, ("plan.rollout_tensor_parallel",)
        )


def _replicas_of(
    replica: ReplicaHardware, plan: PlanConfig, num_gpus: int, degree: int, cut: Counter[str]
) -> Iterator[Replicas]:
    """Yield replicas of one tensor parallelism, with each allowed number of pipeline stages or attention ranks."""
    rollout, mixture = replica.config, replica.model.experts
    pool, most = rollout.pool, rollout.max_running
    experts = degree if rollout.expert_parallel > 1 else 1
    stages = plan.rollout_pipeline_parallel or sorted({1, rollout.pipeline_parallel})
    for each in stages:
        if num_gpus % (degree * each) == 0:
            one = Replicas(pool, num_gpus // degree // each, degree, experts, most)
            yield one._replace(pipeline_parallel=each)
    for ranks in plan.rollout_data_parallel or [rollout.data_parallel]:
        if ranks == 1 or mixture is None:
            continue
        if num_gpus % (degree * ranks):
            cut[DIVISIBILITY] += 1
            continue
        if mixture.num_experts % (degree * ranks):
            cut[EXPERTS] += 1
            continue
        replicas, shared = num_gpus // degree // ranks, degree * ranks
        yield Replicas(pool, replicas, degree, shared, most, data_parallel=ranks)


def _piped(rollout: RolloutConfig, num_gpus: int, degree: int) -> Iterator[Replicas]:
    """Yield replicas of one tensor parallelism with several pipeline stages, the fewest stages first."""
    pool, experts = rollout.pool, degree if rollout.expert_parallel > 1 else 1
    for stages in powers_of_two(min(num_gpus // degree, MOST_STAGES))[1:]:
        if num_gpus % (degree * stages) == 0:
            one = Replicas(pool, num_gpus // degree // stages, degree, experts, rollout.max_running)
            yield one._replace(pipeline_parallel=stages)


def holds_rollouts(replica: ReplicaHardware, least: int = 1) -> bool:
    """Return whether a replica holds at least `least` rollouts of maximum length at once."""
    try:
        return kv_capacity(replica) >= least * replica.longest_sequence
    except ValueError:
        return False


def fitting_trainers(
    trainer: TrainerHardware, num_gpus: int, among: TrainerRange, cut: Counter[str]
) -> Iterator[Degrees]:
    """Yield every trainer that fits on `num_gpus` of a trainer's pool.

    The same split may yield two trainers. One keeps everything on its GPUs. The other offloads and
    recomputes less.
    """
    name, pool = trainer.config.pool, trainer.pool
    for tensor in among.tensor_parallel or powers_of_two(pool.domain):
        if not trainer.model.splits_over(tensor):
            cut[HEADS] += 1
            continue
        pipelines = among.pipeline_parallel or powers_of_two(num_gpus // tensor)
        for pipeline, context in product(pipelines, among.context_parallel):
            data, rest = divmod(num_gpus, tensor * pipeline * context)
            if not data:
                continue
            is_joined = pool.joins(tensor) and pool.holds(num_gpus // tensor, tensor)
            if rest or not is_joined:
                cut[DIVISIBILITY] += 1
                continue
            for expert, slices, zero, micro in product(
                among.expert_parallel, among.expert_tensor_parallel, among.zero, among.micro_batch
            ):
                if zero == 3 and pipeline > 1 and len(among.zero) > 1:
                    cut[ZERO_STAGES] += 1
                    continue
                own = trainer.config.shard_ranks
                if own is not None and (zero != 3 or expert > 1 or data * context % own):
                    cut[SHARD_RANKS] += 1
                    continue
                if zero > 1 and data * context == 1 and len(among.zero) > 1:
                    cut[ZERO_ALONE] += 1
                    continue
                split = (name, data, tensor, pipeline, expert, micro, zero)
                degrees = Degrees(
                    *(*split, among.recompute[0], among.logits[0], False, context, slices),
                    among.kernels.get(zero),
                )
                placed = degrees.place(trainer)
                if (reason := _reason_against(placed, among.framework)) is not None:
                    cut[reason] += 1
                else:
                    yield from _ways_to_fit(placed, degrees, among, cut)


def _ways_to_fit(
    trainer: TrainerHardware, degrees: Degrees, among: TrainerRange, cut: Counter[str]
) -> list[Degrees]:
    """Return the trainers with the least recomputation, first without and then with offloading.

    The result is empty if neither fits. Offloading costs transfers, so it is tried only with less
    recomputation than without it. Logits are computed in chunks only if they do not fit otherwise.

    Args:
        trainer: the trainer with these degrees.
        degrees: how it is split.
        among: the allowed recomputation.
        cut: counts reasons.
    """
    found: list[Degrees] = []
    is_tight, refused = False, ""
    for offload in (False, True):
        alike, ways = degrees._replace(offload=offload), among.ways
        if found:
            recomputes = [way.recompute for way in ways]
            ways = ways[: recomputes.index(found[0].recompute)]
        if among.refusal is not None:
            reasons = [among.refusal(alike._replace(**way._asdict())) for way in ways]
            ways = [way for way, reason in zip(ways, reasons, strict=True) if not reason]
            refused = refused if ways or not reasons else reasons[0]
        placed = replace(trainer, config=replace(trainer.config, offload=offload))
        way, is_close = _first_that_fits(placed, ways, among.most_memory)
        found += [alike._replace(**way._asdict())] if way is not None else []
        is_tight = is_tight or is_close
    if not found:
        cut[refused or (TIGHT if is_tight else TRAINER_MEMORY)] += 1
    return found


def _first_that_fits(
    trainer: TrainerHardware, ways: Sequence[PassMemory], most_memory: float
) -> tuple[PassMemory | None, bool]:
    """Return the first choice that fits into a share of GPU memory, or None.

    The second value is whether a choice fits only into a larger share.
    """
    if not ways:
        return None, False
    memory = trainer.gpu.usable_memory
    *others, leanest = ways
    sizes = bytes_in_ways(trainer, [leanest, *others])
    try:
        least = next(sizes) / memory
    except ValueError:  # the model cannot be split that way
        return None, False
    if least > 1 or not _holds_offloaded(trainer):
        return None, False
    if least > most_memory:
        return None, True
    fitting = (way for way, size in zip(others, sizes, strict=True) if size / memory <= most_memory)
    return next(fitting, leanest), False


def _holds_offloaded(trainer: TrainerHardware) -> bool:
    """Return whether the hosts and drives of a trainer's nodes hold what it offloads."""
    try:
        check_nvme(trainer)
    except RunError:
        return False
    return offloaded_bytes(trainer) <= host_memory(trainer.pool)


def _reason_against(hardware: TrainerHardware, framework: FrameworkName | None) -> str | None:
    """Return why a trainer cannot have its split with any amount of memory, or None if it can."""
    trainer, model = hardware.config, hardware.model
    if not has_layout(framework, trainer):
        return OF_FRAMEWORK.format(framework)
    if trainer.data_parallel > hardware.algorithm.rollouts_per_step:
        return RANKS
    is_folded = trainer.copies * trainer.tensor_parallel % trainer.expert_ranks == 0
    if not is_folded or not hardware.pool.joins(trainer.expert_tensor_parallel or 1):
        return DIVISIBILITY
    if not splits_context(model, trainer):
        return HEADS
    if not slices_experts(model, trainer):
        return SLICES
    has_too_many = trainer.expert_parallel > 1 or (trainer.expert_tensor_parallel or 1) > 1
    if trainer.num_slices > model.num_layers or (has_too_many and model.experts is None):
        return LAYERS
    return None


SPLITS = (1, 2, 4, 6, 12)
"""GPUs of a trainer that shares a node with replicas, in eighths of a node."""
SPLIT_NODES = 2
"""Most nodes of such a plan in a pool. On more nodes, one that is shared makes little difference."""


class Sizes(NamedTuple):
    """Numbers of GPUs of each side in a pool."""

    generate: list[int]
    train: list[int]


def rents_whole_nodes(plan: PlanConfig, pool: PoolConfig) -> bool:
    """Return whether a plan rents whole nodes of a pool. Both sides may share a node."""
    is_open = plan.unit is None and plan.rollout_gpus is None and plan.trainer_gpus is None
    return is_open and pool.nodes > 1 and pool.unit is None


def split_sizes(plan: PlanConfig, name: str, pool: PoolConfig) -> Sizes:
    """Return the numbers of GPUs of sides that fill nodes of a pool together but not alone."""
    offered = (plan.rollout_pools or [name], plan.trainer_pools or [name])
    if not rents_whole_nodes(plan, pool) or not all(name in each for each in offered):
        return Sizes([], [])
    node = pool.gpus_per_node
    most = node * min(SPLIT_NODES, pool.nodes)
    train = [node * part // 8 for part in SPLITS if not node * part % 8]
    train = [size for size in train if size < most]
    wholes = range(node, most + 1, node)
    generate = {whole - size for size in train for whole in wholes if whole > size}
    return Sizes(sorted(generate), train)


def sizes(pool: PoolConfig, unit: int | None) -> list[int]:
    """Return the numbers of GPUs that a side may have: multiples of the unit of a pool, or else of a plan.

    Without a unit they are whole nodes, or any number in a pool with a single node. In a large pool they differ by about
    a sixteenth, unless the plan has a `unit`.
    """
    step = pool.unit or unit or (pool.gpus_per_node if pool.nodes > 1 else 1)
    counts = range(1, pool.num_gpus // step + 1)
    return [step * count for count in counts if unit or not count % _coarseness(count)]


def _coarseness(count: int) -> int:
    """Return the power of two between 1/32 and 1/16 of a number, or 1 if there is none."""
    return max(1, (1 << (count.bit_length() - 1)) // FINE)


SHARES = (1.0, 0.75, 0.5)
"""Shares of a good side that are kept when replicas of another kind are added. The rest frees GPUs
for them.
"""
MOST_SIZES = 6
"""Sizes of the second kind that are tried in a pool, from the smallest to all remaining GPUs."""


def mixed_fleets(
    replica: ReplicaHardware,
    pools: Mapping[str, PoolConfig],
    plan: PlanConfig,
    replicas: Iterable[Replicas],
    trainers: Sequence[Degrees],
    others: Mapping[str, int] | None = None,
) -> list[Replicas]:
    """Return replicas of two kinds: all or most of one of `replicas`, with others on the remaining GPUs.

    Args:
        replica: a replica of the run file.
        pools: the offer.
        plan: the section `[plan]`, which must allow two kinds (`can_mix`).
        replicas: good replicas, each of one kind.
        trainers: the smallest of them decides how many GPUs remain.
        others: GPUs by pool that neither side can have, such as those of a reward model.
    """
    room = {name: pool.num_gpus - (others or {}).get(name, 0) for name, pool in pools.items()}
    found = dict.fromkeys(
        _together(each._replace(replicas=kept), beside)
        for each in replicas
        if each.beside is None
        for share in SHARES
        if (kept := int(each.replicas * share))
        for beside in _beside(replica, pools, plan, each._replace(replicas=kept), trainers, room)
    )
    return list(found)


def _together(first: Replicas, second: Replicas) -> Replicas:
    """Return both kinds in an order that does not depend on which came first."""
    kinds = sorted((first, second), key=lambda kind: (kind.pool, kind.tensor_parallel))
    return kinds[0]._replace(beside=kinds[1])


def can_mix(plan: PlanConfig, policies: PoliciesConfig) -> bool:
    """Return whether a plan may have two kinds of replicas and all policies support them."""
    knows_one = (
        policies.migration != "none" or policies.learns_from_siblings or policies.follows_pressure
    )
    return plan.mixes_replicas and plan.rollout_gpus is None and not knows_one


def _beside(
    replica: ReplicaHardware,
    pools: Mapping[str, PoolConfig],
    plan: PlanConfig,
    kept: Replicas,
    trainers: Sequence[Degrees],
    free: Mapping[str, int],
) -> Iterator[Replicas]:
    """Yield the replicas of another kind that fit on the remaining GPUs."""
    for pool in plan.rollout_pools or pools:
        taken = min(trainer.num_gpus if trainer.pool == pool else 0 for trainer in trainers)
        room = free[pool] - taken
        room -= kept.num_gpus if kept.pool == pool else 0
        open_sizes = [size for size in sizes(pools[pool], plan.unit) if size <= room]
        there = in_pool(replica, pool, pools)
        for size in _spread(open_sizes):
            for choice in fitting_replicas(there, plan, size, Counter()):
                is_other = (pool, choice.tensor_parallel) != (kept.pool, kept.tensor_parallel)
                if is_other and choice.drafted == kept.drafted:
                    yield choice._replace(max_running=kept.max_running)


def _spread(open_sizes: list[int]) -> list[int]:
    """Return a few of many sizes, including the smallest and the largest."""
    if len(open_sizes) <= MOST_SIZES:
        return open_sizes
    last = len(open_sizes) - 1
    return [open_sizes[place * last // (MOST_SIZES - 1)] for place in range(MOST_SIZES)]
