"""Layouts of both sides that fit the GPUs: replicas of one or two kinds, and parallelism of a trainer.

A layout that does not fit is left out, and its reason is counted.

Replicas of the second kind use a second pool, or other degrees in the same pool. Their seconds are near those of the
kinds that they combine. So they are built only from the best plans whose replicas are all alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from itertools import product
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from streamrl.hardware.memory import (
    ROOMY,
    host_memory,
    kv_capacity,
    offloaded_bytes,
    trainer_memory,
)
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.parallelism import slices_experts, splits_context
from streamrl.hardware.profiles import load_gpu
from streamrl.hardware.resolved import ReplicaHardware, TrainerHardware
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.frameworks import has_layout
from streamrl.runfile.gpu_pools import powers_of_two
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import (
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
"""DeepSpeed refuses both together and Megatron's optimizer has ZeRO 1; PyTorch's FSDP2 has it (torchtitan)."""
ZERO_ALONE = "trainer: ZeRO 3 of one rank, which has nobody to split with: plan.zero = [3] tries it"
OF_FRAMEWORK = "trainer: framework {} splits none so"


MOST_STAGES = 16
"""Pipeline stages of a replica that are tried unasked."""
FINE = 16
"""Sizes of a side between a number of nodes and twice that, in a pool that has so many."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "mlp", "full")
"""What a backward pass makes again, the fastest and largest first."""

Side = TypeVar("Side", ReplicaHardware, TrainerHardware)


def in_pool(side: Side, name: str, pools: Mapping[str, PoolConfig]) -> Side:
    """Return a side on the GPUs of a pool."""
    return replace_fields(side, config=replace(side.config, pool=name), pool=pools[name])


class Replicas(NamedTuple):
    """The generation side: replicas that are alike, and maybe others beside them."""

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
    """Tokens that each drafts a step, 0: none; None: the run's own. All kinds draft alike."""

    @property
    def kinds(self) -> tuple[Replicas, ...]:
        """Each kind of replica by itself."""
        others = () if self.beside is None else self.beside.kinds
        return (self._replace(beside=None), *others)

    @property
    def layout(self) -> Replicas:
        """What it is, however many rollouts each replica decodes at once."""
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
        """What the section of the first kind says."""
        shared = ("beside", "drafted")
        return {key: value for key, value in self._asdict().items() if key not in shared}

    def change(self, rollout: RolloutConfig) -> RolloutConfig:
        """Return the section of the run file with these replicas."""
        others = tuple(ReplicasConfig(**kind.own) for kind in self.kinds[1:])
        speculative = self._drafting(rollout.speculative)
        return replace(rollout, **self.own, others=others, speculative=speculative)

    def place(self, replica: ReplicaHardware, pool: PoolConfig) -> ReplicaHardware:
        """Return one kind of replica with these degrees, in the pool that they name."""
        return replace_fields(replica, config=self.change(replica.config), pool=pool)

    def fits(self, replica: ReplicaHardware, pools: Mapping[str, PoolConfig]) -> bool:
        """Return whether one replica of each kind holds a rollout of the longest kind."""
        return all(holds_rollouts(kind.place(replica, pools[kind.pool])) for kind in self.kinds)

    def _drafting(self, own: SpeculativeConfig | None) -> SpeculativeConfig | None:
        if own is None or self.drafted is None:
            return own
        return replace(own, tokens=self.drafted or own.tokens, enabled=self.drafted > 0)


class Degrees(NamedTuple):
    """The training side."""

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

    @property
    def num_gpus(self) -> int:
        """GPUs of the trainer."""
        split = self.tensor_parallel * self.pipeline_parallel
        return self.data_parallel * self.context_parallel * split

    @property
    def split(self) -> Degrees:
        """How it splits models and batches, whatever it does to fit its memory."""
        return self._replace(recompute="full", logits=None, offload=False)

    @property
    def layout(self) -> Degrees:
        """How it splits models, whatever it does to fit its memory and however large its micro batches are."""
        return self.split._replace(micro_batch=1)

    def change(self, trainer: TrainerConfig) -> TrainerConfig:
        """Return the section of a trainer with these degrees. A single pipeline stage has one slice."""
        slices = trainer.virtual_stages if self.pipeline_parallel > 1 else 1
        return replace(trainer, **self._asdict(), virtual_stages=slices)

    def place(self, trainer: TrainerHardware) -> TrainerHardware:
        """Return a trainer, already in the pool of these degrees, that is split by them."""
        return replace_fields(trainer, config=self.change(trainer.config))


@dataclass(frozen=True, kw_only=True)
class TrainerRange:
    """Degrees and portions to try; powers of two where a degree is left open."""

    tensor_parallel: Sequence[int] | None = None
    pipeline_parallel: Sequence[int] | None = None
    expert_parallel: Sequence[int] = (1,)
    expert_tensor_parallel: Sequence[int | None] = (None,)
    context_parallel: Sequence[int] = (1,)
    micro_batch: Sequence[int]
    zero: Sequence[int]
    recompute: Sequence[Recompute]
    """The first that fits is taken: the less is made again, the faster a step."""
    most_memory: float = 1.0
    """Share of a GPU that may be taken."""
    framework: FrameworkName | None = None
    """The framework whose layouts alone are tried; None: all layouts."""


def fitting_replicas(
    replica: ReplicaHardware, plan: PlanConfig, num_gpus: int, cut: Counter[str]
) -> Iterator[Replicas]:
    """Yield the replicas that fit on `num_gpus` of a replica's pool, the smallest tensor parallelism first.

    Replicas keep expert parallelism if the run has it. Several pipeline stages, or attention ranks, are tried only if
    `[plan]` or the run names them. Pipeline stages are also tried if no other replica holds a rollout.
    """
    domain, model = replica.pool.domain, replica.model
    degrees = plan.rollout_tensor_parallel
    tried = powers_of_two(domain) if degrees is None else degrees
    drafts: Sequence[int | None] = plan.speculative or [None]
    has_any = False
    for degree in tried:
        if (domain % degree and degree % domain) or num_gpus % degree:
            cut[DIVISIBILITY] += 1
            continue
        if not model.splits_over(degree):
            cut[HEADS] += 1
            continue
        ways = _replicas_of(replica, plan, num_gpus, degree, cut)
        for found in _drafting(drafts, ways):
            if holds_rollouts(found.place(replica, replica.pool)):
                has_any = True
                yield found
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


def _drafting(drafts: Sequence[int | None], ways: Iterable[Replicas]) -> Iterator[Replicas]:
    """Yield each layout of replicas with each number of drafted tokens that a plan may choose."""
    yield from (each._replace(drafted=tokens) for each in ways for tokens in drafts)


def check_attention_ranks(plan: PlanConfig, model: ModelShape) -> None:
    """Check that the attention ranks which a plan names divide the experts of the model.

    Raises:
        RunError: they divide no experts with any tensor degree of the plan.
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
    """Yield replicas of a tensor degree, with the stages and the attention ranks that a plan may have."""
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
    """Yield replicas with several pipeline stages of one tensor degree, those with fewest stages first."""
    pool, experts = rollout.pool, degree if rollout.expert_parallel > 1 else 1
    for stages in powers_of_two(min(num_gpus // degree, MOST_STAGES))[1:]:
        if num_gpus % (degree * stages) == 0:
            one = Replicas(pool, num_gpus // degree // stages, degree, experts, rollout.max_running)
            yield one._replace(pipeline_parallel=stages)


def holds_rollouts(replica: ReplicaHardware, least: int = 1) -> bool:
    """Return whether a replica holds `least` rollouts of the longest kind at once."""
    try:
        return kv_capacity(replica) >= least * replica.longest_sequence
    except ValueError:
        return False


def fitting_trainers(
    trainer: TrainerHardware, num_gpus: int, among: TrainerRange, cut: Counter[str]
) -> Iterator[Degrees]:
    """Yield every trainer that fits on `num_gpus` of a trainer's pool.

    The same split may give two trainers. One keeps everything on its GPUs. The other offloads and recomputes less.
    """
    pool, per_node = trainer.config.pool, trainer.pool.domain
    for tensor in among.tensor_parallel or powers_of_two(per_node):
        if not trainer.model.splits_over(tensor):
            cut[HEADS] += 1
            continue
        pipelines = among.pipeline_parallel or powers_of_two(num_gpus // tensor)
        for pipeline, context in product(pipelines, among.context_parallel):
            data, rest = divmod(num_gpus, tensor * pipeline * context)
            if not data:
                continue
            if rest or per_node % tensor:
                cut[DIVISIBILITY] += 1
                continue
            for expert, slices, zero, micro in product(
                among.expert_parallel, among.expert_tensor_parallel, among.zero, among.micro_batch
            ):
                if zero == 3 and pipeline > 1 and len(among.zero) > 1:
                    cut[ZERO_STAGES] += 1
                    continue
                if zero == 3 and data * context == 1 and len(among.zero) > 1:
                    cut[ZERO_ALONE] += 1
                    continue
                split = (pool, data, tensor, pipeline, expert, micro, zero)
                degrees = Degrees(
                    *(*split, among.recompute[0], trainer.config.logits, False, context, slices)
                )
                reason = _reason_against(trainer, degrees, among.framework)
                yield from _ways_to_fit(trainer, degrees, among, reason, cut)


def _ways_to_fit(
    trainer: TrainerHardware,
    degrees: Degrees,
    among: TrainerRange,
    reason: str | None,
    cut: Counter[str],
) -> list[Degrees]:
    """Return the trainers that recompute least, first without and then with offloading; none if neither fits.

    Offloading costs transfers, so it is tried only with less recomputation than without it. Logits are computed in
    chunks only if they do not fit otherwise.

    Args:
        trainer: the run's trainer in the pool of `degrees`.
        degrees: how it is split.
        among: what may be recomputed.
        reason: why the split is impossible, or None.
        cut: counts reasons.
    """
    if reason is not None:
        cut[reason] += 1
        return []
    found: list[Degrees] = []
    is_tight = False
    for offload in (False, True):
        ways = _lightest_first(degrees._replace(offload=offload), among)
        if found:
            ways = ways[: ways.index(found[0]._replace(offload=offload, logits=ways[0].logits))]
        way, is_close = _first_that_fits(trainer, ways, among.most_memory)
        found += [way] if way is not None else []
        is_tight = is_tight or is_close
    if not found:
        cut[TIGHT if is_tight else TRAINER_MEMORY] += 1
    return found


def _lightest_first(degrees: Degrees, among: TrainerRange) -> list[Degrees]:
    """Return the choices of what a trainer keeps and recomputes, the fastest and largest first."""
    logits: tuple[Logits | None, ...] = (degrees.logits,)
    if degrees.logits is None:
        logits = (None, "chunked")
    return [
        degrees._replace(recompute=recompute, logits=loss)
        for recompute, loss in product(among.recompute, logits)
    ]


def _first_that_fits(
    trainer: TrainerHardware, ways: Sequence[Degrees], most_memory: float
) -> tuple[Degrees | None, bool]:
    """Return the first way that uses at most a share of GPU memory, and whether only a larger share would do."""
    if not ways:
        return None, False
    memory = load_gpu(trainer.pool.gpu).usable_memory
    leanest = ways[-1].place(trainer)
    least = _trainer_bytes(leanest) / memory
    if least > 1 or offloaded_bytes(leanest) > host_memory(leanest.pool):
        return None, False
    if least > most_memory:
        return None, True
    shares = ((way, _trainer_bytes(way.place(trainer)) / memory) for way in ways)
    return next(way for way, share in shares if share <= most_memory), False


def _reason_against(
    hardware: TrainerHardware, degrees: Degrees, framework: FrameworkName | None
) -> str | None:
    """Return why a trainer cannot be split so with any amount of memory; None if it can."""
    trainer, model = degrees.change(hardware.config), hardware.model
    if not has_layout(framework, trainer):
        return OF_FRAMEWORK.format(framework)
    if degrees.data_parallel > hardware.algorithm.rollouts_per_step:
        return RANKS
    domain = hardware.pool.domain
    is_folded = trainer.copies * trainer.tensor_parallel % trainer.expert_ranks == 0
    if not is_folded or domain % (degrees.expert_tensor_parallel or 1):
        return DIVISIBILITY
    if not splits_context(model, trainer):
        return HEADS
    if not slices_experts(model, trainer):
        return SLICES
    has_too_many = trainer.expert_parallel > 1 or (trainer.expert_tensor_parallel or 1) > 1
    if trainer.num_slices > model.num_layers or (has_too_many and model.experts is None):
        return LAYERS
    return None


def _trainer_bytes(trainer: TrainerHardware) -> float:
    """Return the bytes on the fullest GPU; infinity if the model cannot be split that way."""
    try:
        return sum(trainer_memory(trainer).values())
    except ValueError:
        return float("inf")


def sizes(pool: PoolConfig, unit: int | None) -> list[int]:
    """Return the numbers of GPUs that a side may have in a pool: whole nodes, or GPUs of a single node.

    In a large pool they differ by about a sixteenth, unless the pool or the plan has a `unit`.
    """
    unit = pool.unit or unit
    step = unit or (pool.gpus_per_node if pool.nodes > 1 else 1)
    counts = range(1, pool.num_gpus // step + 1)
    return [step * count for count in counts if unit or not count % _coarseness(count)]


def _coarseness(count: int) -> int:
    """Return the power of two that is a sixteenth to a thirty-second of a number; 1 where there is none."""
    return max(1, (1 << (count.bit_length() - 1)) // FINE)


SHARES = (1.0, 0.75, 0.5)
"""How much of a good side stays when others come beside it, of a pool that may be needed for them."""
MOST_SIZES = 6
"""Sizes of the second kind that are tried in a pool, between its smallest and all that is left."""


def mixed_fleets(
    replica: ReplicaHardware,
    pools: Mapping[str, PoolConfig],
    plan: PlanConfig,
    replicas: Iterable[Replicas],
    trainers: Sequence[Degrees],
) -> list[Replicas]:
    """Return replicas of two kinds: all or most of one of `replicas`, with others in the remaining GPUs.

    Args:
        replica: the run file's own.
        pools: the offer.
        plan: the section `[plan]`, which allows two kinds (`can_mix`).
        replicas: good ones, of one kind each.
        trainers: the smallest of them decides how many GPUs remain.
    """
    found = dict.fromkeys(
        _together(each._replace(replicas=kept), beside)
        for each in replicas
        if each.beside is None
        for share in SHARES
        if (kept := int(each.replicas * share))
        for beside in _beside(replica, pools, plan, each._replace(replicas=kept), trainers)
    )
    return list(found)


def _together(first: Replicas, second: Replicas) -> Replicas:
    """Return both kinds, in the same order whichever was there first."""
    kinds = sorted((first, second), key=lambda kind: (kind.pool, kind.tensor_parallel))
    return kinds[0]._replace(beside=kinds[1])


def can_mix(plan: PlanConfig, policies: PoliciesConfig) -> bool:
    """Return whether a plan may have two kinds of replicas, and each policy supports them."""
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
) -> Iterator[Replicas]:
    """Yield the replicas of another kind that fit on the remaining GPUs."""
    for pool in plan.rollout_pools or pools:
        taken = min(trainer.num_gpus if trainer.pool == pool else 0 for trainer in trainers)
        room = pools[pool].num_gpus - taken
        room -= kept.num_gpus if kept.pool == pool else 0
        open_sizes = [size for size in sizes(pools[pool], plan.unit) if size <= room]
        there = in_pool(replica, pool, pools)
        for size in _spread(open_sizes):
            for choice in fitting_replicas(there, plan, size, Counter()):
                is_other = (pool, choice.tensor_parallel) != (kept.pool, kept.tensor_parallel)
                if is_other and choice.drafted == kept.drafted:
                    yield choice._replace(max_running=kept.max_running)


def _spread(open_sizes: list[int]) -> list[int]:
    """Return a few of many sizes, the smallest and the largest among them."""
    if len(open_sizes) <= MOST_SIZES:
        return open_sizes
    last = len(open_sizes) - 1
    return [open_sizes[place * last // (MOST_SIZES - 1)] for place in range(MOST_SIZES)]
