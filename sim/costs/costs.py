"""Load the seconds of every operation of a run, each from the best tier that has data, and record their sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from pathlib import Path

import msgspec

from streamrl.engine.systems import moves_caches
from streamrl.engine.trace import DecodeYield
from streamrl.hardware.efficiency import scaled_errors
from streamrl.hardware.memory import (
    check_host_memory,
    check_memory,
    check_sync_buffer,
    check_trainer_memory,
    kv_capacity,
    most_running,
)
from streamrl.hardware.nvme import check_nvme
from streamrl.hardware.precision import Precision
from streamrl.hardware.profiles import check_profiles, load_gpu
from streamrl.hardware.resolved import ReplicaHardware, ResolvedRun, check_precision, resolve
from streamrl.hardware.tiers import DATASHEETS, PARTITION, SPREADS, Provenance
from streamrl.runfile.backend_choice import RolloutBackend, engine_named, simulated_engines
from streamrl.runfile.config import CostsConfig, Run
from streamrl.runfile.errors import OneOf, RunError
from streamrl.runfile.frameworks import calls_over_http, returns_log_probs
from streamrl.runfile.gpu_pools import of_kind, of_lent
from streamrl.runfile.roles_config import AdmissionName
from streamrl.sim.costs.cache_transfer import CacheRoute, CacheTransfer, HostCache
from streamrl.sim.costs.colocation import LendingCosts, sync_costs
from streamrl.sim.costs.corrections import Corrections, framework_sources, own_switch
from streamrl.sim.costs.cpu_contention import CoreSharing
from streamrl.sim.costs.curves import DecodeCurve, PrefillCurve, compose_decode, compose_speculative
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.interconnect import Interconnect
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.machine_profile import (
    MachineCosts,
    MeasuredPrefill,
    MeasuredTraining,
    switch_times,
)
from streamrl.sim.costs.overheads import LogProbs, decode_errors, load_engine
from streamrl.sim.costs.resizing import ResizingCosts
from streamrl.sim.costs.reward_model import ModelRewards, StatedRewards, reward_costs
from streamrl.sim.costs.router_replay import check_replay, recording_time, token_bytes
from streamrl.sim.costs.training.pipeline import SerialSchedule, TrainerSchedule
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.costs.weight_sync import SyncCosts


@dataclass(frozen=True)
class NoTraining:
    """Costs of a trainer that only counts tokens: it takes no time."""

    optimizer_time: float = 0.0
    overhead_time: float = 0.0

    def line(self) -> TrainerSchedule:
        """Return a schedule that never delays anything."""
        return SerialSchedule(lambda lengths: 0.0, lambda lengths: 0.0)


@dataclass(frozen=True, kw_only=True)
class TrainerCosts:
    """Seconds of one trainer."""

    training: TrainingCosts | MeasuredTraining | NoTraining
    training_factor: float = 1.0
    """Divisor of the seconds of score, train and the optimizer step."""

    @property
    def step_time(self) -> float:
        """Seconds of gradient reduction, the optimizer step, and the framework's own work."""
        training = self.training
        return training.optimizer_time / self.training_factor + training.overhead_time

    def line(self) -> TrainerSchedule:
        """Return an empty schedule of the trainer's passes."""
        line = self.training.line()
        return line if self.training_factor == 1.0 else ScaledSchedule(line, self.training_factor)


class ScaledSchedule:
    """Another schedule, faster by a factor."""

    def __init__(self, line: TrainerSchedule, factor: float) -> None:
        self._line, self._factor = line, factor

    def score(self, lengths: Sequence[int], now: float) -> float:
        """See `TrainerSchedule`."""
        return self._line.score(lengths, now * self._factor) / self._factor

    def train(self, lengths: Sequence[int], now: float) -> float:
        """See `TrainerSchedule`."""
        return self._line.train(lengths, now * self._factor) / self._factor

    def finish(self, now: float) -> float:
        """See `TrainerSchedule`."""
        return self._line.finish(now * self._factor) / self._factor


@dataclass(frozen=True, kw_only=True)
class SecondaryTrainerCosts(TrainerCosts):
    """Costs of a secondary trainer, from its own section of the run file."""

    name: str
    provenance: Provenance

    @classmethod
    def load(cls, resolved: ResolvedRun, trainer: int) -> SecondaryTrainerCosts:
        """Load the costs of one secondary trainer.

        Raises:
            ValueError: a profile is missing, or the trainer does not fit in its memory.
        """
        run, config = resolved.run, resolved.run.costs
        name = run.followers[trainer - 1].name
        if run.only_counts(trainer):
            return cls(name=name, training=NoTraining(), provenance=Provenance(shares={}))
        check_trainer_memory(resolved.trainers[trainer])
        seen = resolved.seen_by_followers[trainer - 1]
        training: TrainingCosts | MeasuredTraining
        if config.profile is not None:
            machine = MachineCosts.load(seen, Path(config.profile))
            training, provenance = machine.training, machine.provenance
        else:
            training = TrainingCosts.load(seen)
            provenance = training.provenance
        if (told := Corrections.of(seen).sources.get("train")) is not None:
            provenance = provenance.adjusted(told)
        if config.training_factor != 1.0:
            source = f"run file: costs.training_factor={config.training_factor:g}"
            provenance = provenance.adjusted(source)
        return cls(
            name=name,
            training=training,
            training_factor=config.training_factor,
            provenance=provenance,
        )


CHECKED = {"bfloat16", "float16"}
"""Formats for which engine errors were measured: formats of the cache in decode, and of weights
other than fp8.
"""


@dataclass(frozen=True, kw_only=True)
class Costs(TrainerCosts):
    """Seconds, bytes and capacities of one run's hardware; as `TrainerCosts`, those of the primary trainer."""

    decode: DecodeCurve
    prefill: PrefillCurve | MeasuredPrefill
    kv_capacity: int
    """Tokens that fit in a replica's KV cache."""
    sync: SyncCosts
    cache_transfer: CacheTransfer
    cache_routes: Mapping[tuple[int, int], CacheRoute] = field(default_factory=dict)
    """By kinds of replicas: how KV caches go from prefill replicas to decode replicas; empty if none does."""
    host_cache: HostCache | None = None
    """Host memory for evicted contexts; None without offload."""
    rides_along: bool = False
    """Whether running rollouts make a token in a pass that prefills others."""
    padded_share: float = 0.0
    """Share of the context cost that a decode step pays for padding every rollout to the longest
    one. The rest depends on the real context tokens.
    """
    tokens_per_pass: float = inf
    """Limit on tokens per forward pass of a replica: one for each running rollout, the rest from
    prefixes.
    """
    refill_passes: int = 0
    """Passes between the end of a rollout and the pass that the next queued rollout joins."""
    sharing: CoreSharing | None = None
    """Slowdown of roles that share one host's cores; None if roles do not slow each other down."""
    message_time: float = 0.0
    """Seconds that a command or an event takes over a link: its latency."""
    handling_time: float = 0.0
    """CPU seconds per rollout in the controller, verifier and replica server, on a host whose
    cores they share.
    """
    episode_time: float = 0.0
    """CPU seconds per episode in the controller and the replica's server, beyond a rollout: of its start and last action."""
    action_time: float = 0.0
    """CPU seconds per further action there, with its observation and the call of the next turn."""
    serving_time: float = 0.0
    """Seconds that the call of a turn, which arrives while the replica generates, adds to its passes beyond a
    rollout of its queue. Its server and its passes share one Python interpreter.
    """
    environment_action_time: float = 0.0
    """CPU seconds per action in the environment's process."""
    environment_start_time: float = 0.0
    """CPU seconds per start of an environment, in its process."""
    recording_time: float = 0.0
    """Seconds in which a replica copies the experts of a prefilled token to host memory; see `router_replay`."""
    generation_factor: float = 1.0
    """Divisor of the prefill seconds; the seconds in `decode` are already divided."""
    followers: tuple[SecondaryTrainerCosts, ...] = ()
    """Costs of the secondary trainers, in order."""
    rewards: StatedRewards | ModelRewards | None = None
    """Costs of the reward-model replicas; None if there are none."""
    others: tuple[Costs, ...] = ()
    """For each kind in `rollout.others`, in order: costs of a run with replicas of this kind only."""
    lent: Costs | None = None
    """The same for the replicas on GPUs of the primary trainer; None if it lends none."""
    lending: LendingCosts | None = None
    """Seconds to lend these GPUs and to take them back."""
    resizing: ResizingCosts | None = None
    """Seconds to change the primary trainer's ranks; None if the run file has no such change."""
    sizes: Mapping[int, TrainerCosts] = field(default_factory=dict)
    """Costs of the primary trainer by its data-parallel ranks, if these change."""
    partition: tuple[str, ...] = ()
    """Known before a run about the size of its errors: kind of model, silicon, and whether the framework is named."""
    provenance: dict[str, Provenance]
    """Source of the seconds of each operation: prefill, decode, score, train and sync. Also
    cache_transfer if the run moves caches, and verify if a reward model's seconds are not in the
    run file.
    """

    @classmethod
    def load(cls, run: Run) -> Costs:
        """Load the costs of a run.

        Raises:
            ValueError: a profile is missing, a side does not fit in its memory, or the back end has
                no model.
        """
        resolved = resolve(run)
        costs = _of_kinds(resolved) if run.rollout.others else _of_one_kind(resolved)
        if run.trainer.resize or run.trainer.borrows:
            costs = _with_sizes(costs, resolved)
        if run.trainer.borrows:
            costs = _with_borrowing(costs, resolved)
        return costs if run.lending is None else _with_lending(costs, resolved)

    def with_ranks(self, data_parallel: int) -> TrainerCosts:
        """Return the costs of the primary trainer with a number of data-parallel ranks of the run file."""
        return self.sizes.get(data_parallel, self)

    def prefill_time(
        self, num_tokens: int, context_pairs: float, num_running: int, num_rollouts: int = 1
    ) -> float:
        """Return the seconds that prefill adds to the decode step of `num_running` rollouts.

        The new tokens of `num_rollouts` rollouts attend to `context_pairs` tokens in total.
        """
        seconds = self.prefill.time(num_tokens, context_pairs, num_running, num_rollouts)
        return (seconds + num_tokens * self.recording_time) / self.generation_factor

    def of_kind(self, kind: int) -> Costs:
        """Return the costs of a kind of replica; kind 0 is the first one in the run file."""
        return self.kinds[kind]

    @property
    def kinds(self) -> tuple[Costs, ...]:
        """The costs of each kind of replica, as `Run.replica_kinds` has them."""
        return (self, *self.others, *(() if self.lent is None else (self.lent,)))

    @property
    def load_time(self) -> float:
        """Return the full batch's decode costs of each kind of replica, for the trace.

        Reserved memory limits the batch by itself, so the cache capacity is None then.
        """
        return self.sync.load_time

    def decode_yields(self, admission: AdmissionName) -> list[DecodeYield]:
        """Return the full batch's decode costs of each kind of replica, for the trace.

        Reserved memory limits the batch by itself, so the cache capacity is None then.
        """
        is_bound = admission == "on-demand"
        return [
            DecodeYield.of(
                own.decode.base,
                own.decode.per_context_token,
                float(own.kv_capacity) if is_bound and own.kv_capacity < inf else None,
            )
            for own in self.kinds
        ]

    @property
    def facts(self) -> dict[str, dict[str, float] | list[str]]:
        """The trace's entry about costs: each operation's shares by tier, and all sources."""
        shares: dict[str, dict[str, float] | list[str]] = {
            operation: {str(tier): share for tier, share in found.shares.items()}
            for operation, found in self.provenance.items()
        }
        for costs in (each for each in self.followers if each.provenance.shares):
            own = costs.provenance.shares.items()
            shares[f"train {costs.name}"] = {str(tier): share for tier, share in own}
        errors = {name: p.error for name, p in self.provenance.items() if p.error is not None}
        p90 = {name: p.p90 for name, p in self.provenance.items() if p.p90 is not None}
        named = {
            f"{operation}: {part}": share
            for operation, found in self.provenance.items()
            for part, share in found.datasheets.items()
        }
        everything = (*self.provenance.values(), *(costs.provenance for costs in self.followers))
        sources = dict.fromkeys(source for found in everything for source in found.sources)
        facts = {**shares, "errors": errors, "p90": p90, "sources": list(sources)}
        facts[PARTITION] = list(self.partition)
        spreads = {name: p.spread for name, p in self.provenance.items() if p.spread}
        facts |= {SPREADS: spreads} if spreads else {}
        return {**facts, DATASHEETS: named} if named else facts


def _of_one_kind(resolved: ResolvedRun) -> Costs:
    """Load the costs of a run whose replicas are of one kind.

    Raises:
        ValueError: as `Costs.load`.
    """
    _check(resolved)
    run, replica = resolved.run, resolved.replica
    log_probs: LogProbs = "none"
    if returns_log_probs(run.framework, run.algorithm):
        is_behind_http = calls_over_http(run.framework) or run.rollout.external is not None
        log_probs = "over HTTP" if is_behind_http else "in process"
    decode, prefill = _compose_replica(replica, run.costs, log_probs)
    training, sync = TrainingCosts.load(resolved), sync_costs(resolved)
    rewards = reward_costs(resolved.reward, run.costs)
    costs = Costs(
        decode=decode,
        prefill=prefill,
        kv_capacity=kv_capacity(replica),
        sync=sync,
        training=training,
        cache_transfer=CacheTransfer.of(replica),
        host_cache=HostCache.of(replica),
        message_time=0.0 if resolved.link is None else resolved.link.latency,
        followers=tuple(
            SecondaryTrainerCosts.load(resolved, number) for number in range(1, run.num_trainers)
        ),
        rewards=rewards,
        partition=partition_of(resolved),
        provenance={
            "prefill": _replica_source(prefill.provenance, replica, run.costs),
            "decode": _replica_source(decode.provenance, replica, run.costs),
            "score": training.provenance,
            "train": training.provenance,
            "sync": sync.provenance,
        },
    )
    if moves_caches(run.policies.migration, run.rollout.migration_transfer):
        costs = _with_source(costs, "cache_transfer", costs.cache_transfer.provenance)
    if run.costs.profile is not None:
        costs = _with_machine(costs, MachineCosts.load(resolved, Path(run.costs.profile)))
    if rewards is not None and rewards.provenance is not None:
        costs = _with_source(costs, "verify", rewards.provenance)
    if run.algorithm.router_replay:
        costs = _with_replay(costs, resolved)
    costs = _with_factors(costs, run.costs, Corrections.of(resolved))
    return _with_framework(costs, framework_sources(resolved))


def _with_replay(costs: Costs, resolved: ResolvedRun) -> Costs:
    """Add the seconds in which replicas copy the experts of each token to host memory."""
    seconds, size = recording_time(resolved), token_bytes(resolved.model)
    base = [each + number * seconds for number, each in enumerate(costs.decode.base)]
    decode = replace(costs.decode, base=base)
    told = f"algorithm.router_replay: {size:,} bytes a token over the host links, not measured"
    costs = replace(costs, decode=decode, recording_time=seconds)
    for name in ("decode", "prefill", "train"):
        source = costs.provenance[name]
        source = msgspec.structs.replace(source, sources=(*source.sources, told))
        costs = _with_source(costs, name, source)
    return costs


def partition_of(resolved: ResolvedRun) -> tuple[str, ...]:
    """Return the kind of model, the silicon of both sides, and whether the framework is named."""
    run = resolved.run
    pools = dict.fromkeys((run.trainer.pool, *(kind.pool for kind in run.rollout.kinds)))
    silicon = dict.fromkeys(
        load_gpu(run.cluster.pools[pool].gpu).generation or "other" for pool in pools
    )
    kind = "dense" if resolved.replica.model.experts is None else "mixture"
    framework = "default framework" if run.framework.name is None else "named framework"
    return kind, " and ".join(sorted(silicon)), framework


def _of_kinds(resolved: ResolvedRun) -> Costs:
    """Combine the costs of each kind of replica; pushes to all kinds run at the same time.

    Raises:
        RunError: as `Costs.load`, with the keys of the affected kind.
    """
    kinds = []
    for number, kind in enumerate(resolved.kinds):
        try:
            kinds.append(_of_one_kind(kind))
        except RunError as error:
            raise of_kind(error, number) from None
    sync = SyncCosts.load(resolved)
    provenance = dict(kinds[0].provenance)
    for operation in ("prefill", "decode"):
        provenance[operation] = Provenance.joined([costs.provenance[operation] for costs in kinds])
    provenance["sync"] = sync.provenance
    routes = CacheRoute.between_kinds(resolved)
    if routes:
        provenance["cache_transfer"] = Provenance.joined([r.provenance for r in routes.values()])
    return replace(
        kinds[0],
        sync=sync,
        cache_routes=routes,
        others=tuple(kinds[1:]),
        provenance=provenance,
    )


def _with_lending(costs: Costs, resolved: ResolvedRun) -> Costs:
    """Add the costs of replicas on GPUs of the primary trainer.

    Raises:
        RunError: as `Costs.load`, with the keys of these replicas.
    """
    run = resolved.run
    alone = resolve(run.of_kind(run.rollout.num_kinds))
    try:
        lent = _of_one_kind(alone)
    except RunError as error:
        raise of_lent(error) from None
    own = own_switch(run.framework, alone.trainer.pool.gpu)
    lending = LendingCosts.of(alone.replica, alone.trainer, own)
    if run.costs.profile is not None:
        lending = _measured_switches(lent.sync, Path(run.costs.profile))
    provenance = {**costs.provenance, "switch": Provenance.of(lending.tier, lending.sources)}
    return replace(costs, lent=lent, lending=lending, provenance=provenance)


def _with_sizes(costs: Costs, resolved: ResolvedRun) -> Costs:
    """Add the costs of each number of the primary trainer's ranks, and of the changes between them."""
    run, sizes = resolved.run, {}
    for data_parallel in run.trainer_ranks:
        trainer = run.trainer.with_ranks(data_parallel)
        sized = resolve(msgspec.structs.replace(run, trainer=trainer))
        training: TrainingCosts | MeasuredTraining
        if run.costs.profile is None:
            training = TrainingCosts.load(sized)
        else:
            training = MachineCosts.load(sized, Path(run.costs.profile)).training
        sizes[data_parallel] = TrainerCosts(
            training=training, training_factor=costs.training_factor
        )
    resizing = ResizingCosts.load(resolved)
    provenance = {**costs.provenance, "resize": Provenance.of(resizing.tier, resizing.sources)}
    return replace(costs, sizes=sizes, resizing=resizing, provenance=provenance)


def _with_borrowing(costs: Costs, resolved: ResolvedRun) -> Costs:
    """Add the costs of replicas that sleep while their GPUs train.

    A sleeping replica discards its KV cache and weights, which moves no bytes. It wakes up with new weights. The
    processes of the ranks that join have started with the trainer.
    """
    assert costs.resizing is not None, "its ranks change"
    own = own_switch(resolved.run.framework, resolved.trainer.pool.gpu)
    sync = costs.sync
    switch = LendingCosts(sync.load_time + own.seconds, 0.0, sync.tier, (*sync.sources, own.source))
    if resolved.run.costs.profile is not None:
        switch = _measured_switches(sync, Path(resolved.run.costs.profile))
    provenance = {**costs.provenance, "switch": Provenance.of(switch.tier, switch.sources)}
    resizing = replace(costs.resizing, start_time=0.0)
    return replace(costs, lending=switch, resizing=resizing, provenance=provenance)


def _measured_switches(sync: SyncCosts, profile: Path) -> LendingCosts:
    """Return the seconds of both switches on the machine of a profile; the replica also loads new weights."""
    lend_time, return_time = switch_times(profile)
    return LendingCosts(sync.load_time + lend_time, return_time, sync.tier, sync.sources)


def _check(resolved: ResolvedRun) -> None:
    """Raise `ValueError` if a profile is missing, a side does not fit, or the back end has no model."""
    run = resolved.run
    _check_backend(run.rollout.backend)
    check_profiles(run)
    check_replay(resolved)
    check_precision(resolved)
    check_memory(resolved)
    check_host_memory(resolved.trainer)
    check_nvme(resolved.trainer)
    if not run.policies.shares_gpus:
        check_sync_buffer(resolved.replica, run.sync)


def _check_backend(backend: RolloutBackend) -> None:
    """Raise `RunError` if the back end generates a whole batch at a time, which `streamrl.sim.replica` cannot."""
    why = engine_named(backend).not_simulated
    if not why:
        return
    simulated = simulated_engines()
    text = (
        f"rollout.backend {backend!r} can be executed only, as {why}: "
        f"rollout.backend must be {' or '.join(map(repr, simulated))} for seconds of generation"
    )
    raise RunError("rollout.backend", backend, OneOf(simulated), text)


def _with_machine(costs: Costs, machine: MachineCosts) -> Costs:
    """Replace the seconds of every operation by those measured on a machine."""
    return replace(
        costs,
        decode=machine.decode,
        prefill=machine.prefill,
        sync=machine.sync,
        training=machine.training,
        rides_along=True,
        padded_share=machine.padded_share,
        tokens_per_pass=machine.tokens_per_pass,
        refill_passes=machine.refill_passes,
        sharing=machine.sharing,
        handling_time=machine.handling_time,
        episode_time=machine.episode_time,
        action_time=machine.action_time,
        serving_time=machine.serving_time,
        environment_action_time=machine.environment_action_time,
        environment_start_time=machine.environment_start_time,
        provenance={
            **dict.fromkeys(costs.provenance, machine.provenance),
            "decode": machine.decode.provenance,
            "sync": machine.sync.provenance,
        },
    )


def _with_factors(costs: Costs, config: CostsConfig, corrections: Corrections) -> Costs:
    """Divide the seconds of both sides by the factors of calibration and run file, and add these to the sources.

    The calibration's factors for trainer stages are already applied.
    """
    decode, provenance = costs.decode, dict(costs.provenance)
    for name, source in corrections.sources.items():
        provenance[name] = provenance[name].adjusted(source)
    factor_of_generation = config.generation_factor * corrections.generation_factor
    for key, factor, operations in (
        ("generation_factor", config.generation_factor, ("prefill", "decode")),
        ("training_factor", config.training_factor, ("score", "train")),
    ):
        if factor != 1.0:
            source = f"run file: costs.{key}={factor:g}"
            provenance.update((name, provenance[name].adjusted(source)) for name in operations)
    return replace(
        costs,
        decode=replace(
            decode,
            base=[seconds / factor_of_generation for seconds in decode.base],
            per_context_token=[s / factor_of_generation for s in decode.per_context_token],
            provenance=provenance["decode"],
        ),
        generation_factor=factor_of_generation,
        training_factor=config.training_factor,
        provenance=provenance,
    )


def _with_framework(costs: Costs, told: Iterable[str]) -> Costs:
    """Add the effects of the named framework to the sources of training."""
    train = costs.provenance["train"]
    said = msgspec.structs.replace(train, sources=(*train.sources, *told))
    return _with_source(costs, "train", said)


def _with_source(costs: Costs, operation: str, provenance: Provenance) -> Costs:
    """Set the source of the seconds of one operation."""
    return replace(costs, provenance={**costs.provenance, operation: provenance})


def _replica_source(
    provenance: Provenance, replica: ReplicaHardware, config: CostsConfig
) -> Provenance:
    """Return the source of a replica's seconds, with their error and the unmeasured parts."""
    provenance = _checked(provenance, replica, config)
    if replica.adapter_rank is None:
        return provenance
    word = "adapters beside weights as if their products took a replica nothing, which was not measured"
    sources = (*provenance.sources, word)
    return msgspec.structs.replace(provenance, sources=sources, error=None, p90=None)


def _checked(provenance: Provenance, replica: ReplicaHardware, config: CostsConfig) -> Provenance:
    """Add the engine's error to a source, if formats and layout are those that were checked."""
    own, rollout = replica.precision, replica.config
    in_fp8 = own.compute == "fp8"
    is_plain = rollout.drafts is None and rollout.gpus_per_replica == rollout.tensor_parallel
    is_checked = own.cache in CHECKED and (in_fp8 or own.weights in CHECKED)
    if not (is_plain and is_checked):
        return provenance
    if load_gpu(replica.pool.gpu).is_scaled:
        return Provenance.of("scaled", provenance.sources, scaled_errors().decode.median)
    if provenance.tier != "composed":
        return provenance
    engine, version = config.engine, config.engine_version
    found = decode_errors(engine, replica.pool.gpu, in_fp8=in_fp8, version=version)
    if found is None:
        return provenance
    sources = provenance.sources
    if version is not None and not load_engine(engine).is_of(version):
        sources = (*sources, f"engine {version} as {load_engine(engine).name}: another version")
    return msgspec.structs.replace(provenance, sources=sources, error=found.median, p90=found.p90)


def kernels_of(gpu: str, own: Precision, backend: str | None = None) -> Kernels:
    """Return the kernels of a GPU for a replica's formats."""
    return Kernels(gpu, own.compute, backend, own.cache, kept=own.weights)


def _compose_replica(
    replica: ReplicaHardware, config: CostsConfig, log_probs: LogProbs
) -> tuple[DecodeCurve, PrefillCurve]:
    """Compose a replica's decode step and prefill from operators, once for any number of replicas."""
    alone = msgspec.structs.replace(replica.config, replicas=1, others=())
    placed = msgspec.structs.replace(replica, config=alone)
    return _composed(placed, config.engine, config.backend, log_probs)


@lru_cache(maxsize=64)
def _composed(
    replica: ReplicaHardware, engine: str, backend: str | None, log_probs: LogProbs
) -> tuple[DecodeCurve, PrefillCurve]:
    rollout = replica.config
    serving = load_engine(engine).as_sampled(sorts=rollout.sorts_tokens, log_probs=log_probs)
    shard = Shard(
        replica.longest_model,
        kernels_of(replica.pool.gpu, replica.precision, backend),
        rollout.tensor_parallel,
        rollout.expert_parallel,
        serving,
        rollout.pipeline_parallel,
        rollout.data_parallel,
        overlaps_dispatch=rollout.overlaps_dispatch,
        wires=Interconnect.of(replica.pool),
    )
    most = most_running(replica)
    size = (most, replica.longest_sequence, kv_capacity(replica))
    if rollout.drafts is None:
        decode = compose_decode(shard, *size)
    else:
        decode = compose_speculative(shard, rollout.drafts, *size)
    return decode, PrefillCurve(shard, most, is_mixed=rollout.chunked_prefill)
