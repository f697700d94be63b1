"""Compute how long shared GPUs need to switch between generation and training: policies.system = "colocated", and [lending].

    generate ─► sleep ─► onload ─► score, train, step ─► reshard ─► offload ─► wake ─► generate

- sleep: the replica's KV cache and weights are discarded. No bytes move, because new weights
  follow. But some frameworks keep the old weights in host memory meanwhile, and copy them back
  before the new ones come (`keeps_weights` of profiles/frameworks).
- onload: weights of actor, critic and reference and the optimizer states go from host memory to the
  GPU.
- reshard: frameworks gather every tensor on every GPU, in buckets, and hand it to the replica there
  (profiles/sync, CUDA IPC). Each tensor takes calls, and its bytes cross NVLink, or the network if
  ranks of several nodes share a copy of the weights. If the run file states
  `framework.switch_time`, a GPU receives only the part of its replica's shard that it does not train.
- offload: changed weights and optimizer states go to host memory. Gradients are dropped, and the
  reference needs no copy.
- wake: the received weights are copied into the replica, and quantised if it uses a narrow format.
  The cache starts empty.

A trainer of adapters (sync.mode = "lora") changes only them and their optimizer states. Its base weights are frozen: they
return to the GPU, and no copy leaves it. If replicas compute with adapters beside their weights, these weights stay the
same. Sleep copies them to host memory and wake copies them back (level 1 of vLLM's sleep mode). A reshard then has only the
adapters, all of them for each GPU. If adapters are merged, replicas receive whole weights as above.

Data that fits next to the generator, in (1 - rollout.memory_utilization) of a GPU, stays there and
does not move. Some frameworks offload optimizer states in every switch, to pageable memory. Both ways
then take a fraction of the host link (`offload_bandwidth` and `onload_bandwidth` of
profiles/frameworks). All other bytes move at datasheet bandwidths. The framework's own calls come on top: `framework.switch_time`.

With `[lending]` the same parts are two switches. Lending GPUs takes offload, reshard, wake and the framework's calls;
taking them back takes onload. The KV cache is dropped. CUDA graphs stay captured, as in vLLM's sleep mode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamrl.hardware.memory import fullest_stage, model_state, shard_parameters
from streamrl.hardware.model_shape import BYTES, linear_layers, lora_parameters
from streamrl.hardware.precision import is_narrow, quantised_bytes
from streamrl.hardware.resolved import ReplicaHardware, ResolvedRun, TrainerHardware
from streamrl.hardware.tiers import Tier
from streamrl.runfile.frameworks import SwitchSeconds
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig
from streamrl.sim.costs.corrections import Corrections, OwnSwitch, own_switch
from streamrl.sim.costs.sync_profiles import load_hand_over
from streamrl.sim.costs.weight_sync import (
    COPY_TRAFFIC,
    SyncCosts,
    SyncSide,
    num_tensors,
    weight_ranks,
)

TIER: Tier = "roofline"


@dataclass(frozen=True)
class PhaseBytes:
    """Bytes that a change of phase moves on one GPU."""

    onloaded: float
    offloaded: float
    resharded: float
    """Bytes that the GPU receives from others."""
    woken: float
    """Bytes of the replica's shard that are new."""


@dataclass(frozen=True, kw_only=True)
class PhaseChange:
    """Seconds of each part of a change from training to generation and back."""

    onload_time: float
    offload_time: float
    reshard_time: float
    wake_time: float
    num_tensors: int = 0
    """Tensors that a framework hands over, one by one."""
    hand_over_time: float = 0.0
    """Seconds to convert tensors to the checkpoint's format and to load them, in addition to their bytes."""
    kept_time: float = 0.0
    """Seconds in which a replica that sleeps copies its weights to host memory; as many bring them back."""
    switch_time: float
    """Seconds of the framework's own calls, in addition to weights and moving bytes."""
    sent_bytes: int
    """Bytes that all GPUs together send in a reshard."""
    sources: tuple[str, ...]

    @classmethod
    def load(cls, resolved: ResolvedRun) -> PhaseChange:
        """Compute the phase change of a run whose trainer and replicas share GPUs.

        Raises:
            ValueError: a profile is missing, or the model cannot be split as the run file says.
        """
        own = own_switch(resolved.run.framework, resolved.trainer.pool.gpu)
        return cls.of(resolved.replica, resolved.trainer, own)

    @classmethod
    def of(cls, replica: ReplicaHardware, trainer: TrainerHardware, own: OwnSwitch) -> PhaseChange:
        """Compute the phase change of GPUs that a kind of replica and a trainer share.

        Args:
            replica: one kind of replica.
            trainer: the trainer.
            own: what the framework adds.
        """
        moved = count_moved(replica, trainer)
        num_gpus = max(replica.config.num_gpus, trainer.config.num_gpus)
        side = SyncSide.of(replica.pool, num_gpus)
        memory_bandwidth = side.gpu.memory_bandwidth * side.gpu.roofline.bandwidth_efficiency
        wire, sources = _wire(replica.config, trainer.config, side)
        quantised = 0.0
        if replica.adapter_rank is None:  # else the weights in the replica's format stay
            quantised = quantised_bytes(replica.model, replica.precision, trainer.dtype)
            quantised /= weight_ranks(replica)
        change = cls(
            onload_time=moved.onloaded / side.gpu.host_link,
            offload_time=moved.offloaded / side.gpu.host_link,
            reshard_time=moved.resharded / wire,
            switch_time=own.seconds,
            wake_time=(COPY_TRAFFIC * moved.woken + quantised) / memory_bandwidth,
            sent_bytes=round(moved.resharded * replica.config.num_gpus),
            sources=sources,
        )
        return change if own.per_gpu is None else change._of(own.per_gpu, replica, trainer, side)

    def _of(
        self,
        own: SwitchSeconds,
        replica: ReplicaHardware,
        trainer: TrainerHardware,
        side: SyncSide,
    ) -> PhaseChange:
        """Return the change as a framework makes it, which gathers whole tensors on every GPU."""
        num_bytes, count = _handed_over(replica, trainer)
        ranks = _copy_ranks(trainer.config)
        gathered = num_bytes * (1 - 1 / ranks)
        wire = side.gpu.nvlink if ranks <= side.pool.domain else side.rank_bandwidth
        onload_time, offload_time = self.onload_time, self.offload_time
        if own.offload_bandwidth is not None:
            moved = _optimizer_on_gpu(trainer)
            at_link = moved / side.gpu.host_link
            onload_time = max(onload_time, own.onload_time(moved, side.gpu.host_link))
            offload_time = moved / own.offload_bandwidth + max(0.0, offload_time - at_link)
        kept_time = 0.0
        if own.keeps_weights and replica.adapter_rank is None:
            kept_time = fullest_stage(replica).weights / side.gpu.host_link
        return replace(
            self,
            onload_time=onload_time,
            offload_time=offload_time,
            kept_time=kept_time,
            reshard_time=gathered / wire,
            num_tensors=count,
            hand_over_time=count * load_hand_over(own.hand_over).tensor_time,
            sent_bytes=round(gathered * replica.config.num_gpus),
            sources=(*self.sources, f"profiles/sync/{own.hand_over}.toml"),
        )

    @property
    def fill_time(self) -> float:
        """Seconds of a push apart from bytes between GPUs."""
        moved = self.offload_time + self.onload_time + 2 * self.kept_time
        return moved + self.hand_over_time + self.switch_time

    @property
    def push_time(self) -> float:
        """Seconds from the end of a step until replicas can wake up."""
        return self.fill_time + self.reshard_time

    @property
    def lend_time(self) -> float:
        """Seconds until GPUs of an idle trainer generate with its newest weights."""
        handed = self.reshard_time + self.hand_over_time + self.wake_time
        return self.offload_time + self.kept_time + handed + self.switch_time

    @property
    def return_time(self) -> float:
        """Seconds until these GPUs can train again."""
        return self.kept_time + self.onload_time

    def sync_costs(self) -> SyncCosts:
        """Return the change as a push and a load, the form that traces use.

        The push after step s also contains the onload between generation and training in step s +
        1. GPUs are idle meanwhile, so the step time is the same, and those seconds also count as
        sync. Step 1 finds its states on the GPUs, and nothing is offloaded after the last step.
        """
        return SyncCosts(
            wire_bytes=self.sent_bytes,
            fill_time=self.fill_time,
            wire_time=self.reshard_time,
            drain_time=0.0,
            load_time=self.wake_time,
            tier=TIER,
            sources=self.sources,
        )


@dataclass(frozen=True)
class LendingCosts:
    """Seconds in which GPUs that are lent neither train nor generate."""

    lend_time: float
    return_time: float
    tier: Tier = TIER
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, lent: ReplicaHardware, trainer: TrainerHardware, own: OwnSwitch) -> LendingCosts:
        """Return the seconds of both switches; `own` is what the framework adds to them."""
        change = PhaseChange.of(lent, trainer, own)
        return cls(change.lend_time, change.return_time, sources=(*change.sources, own.source))


def sync_costs(resolved: ResolvedRun) -> SyncCosts:
    """Return the cost of a weight sync, or of a phase change if trainer and replicas share GPUs.

    Raises:
        ValueError: a profile is missing or wrong.
    """
    if resolved.run.policies.shares_gpus:
        return PhaseChange.load(resolved).sync_costs().calibrated(Corrections.of(resolved))
    return SyncCosts.load(resolved)


def count_moved(replica: ReplicaHardware, trainer: TrainerHardware) -> PhaseBytes:
    """Count the bytes that a change of phase moves on the GPU that moves most.

    With `trainer.offload`, models are moved within score, train and step, whose seconds include
    this. The actor steps last, so its weights are on the GPU for the reshard. A single model only
    moves its optimizer states.
    """
    config, trained = trainer.config, _trained_shard(trainer)
    needed, is_kept = fullest_stage(replica).weights, not is_narrow(replica.precision.weights)
    onloaded = offloaded = 0.0
    if not (config.offload and trainer.num_models > 1):
        optimizer = 0.0
        if not config.offload:
            optimizer = model_state(trainer.model, config, trainer.dtype).optimizer
        changed = trainer.trained_models * (trained + optimizer)
        unchanged = (trainer.num_resident_models - trainer.trained_models) * trained
        room = _room_beside_generator(replica)
        offloaded = max(0.0, changed - room)
        onloaded = max(0.0, changed + unchanged - room)
    if replica.adapter_rank is not None:
        adapters = lora_parameters(replica.model, replica.adapter_rank)
        received = float(adapters * BYTES[replica.adapter_dtype])
        return PhaseBytes(onloaded + needed, offloaded + needed, received, received)
    held = trained if is_kept and replica.config.num_gpus <= config.num_gpus else 0.0
    return PhaseBytes(onloaded, offloaded, max(0.0, needed - held), needed)


def _trained_shard(trainer: TrainerHardware) -> float:
    """Return the bytes of one model's weights that a GPU of the trainer keeps."""
    parameters = shard_parameters(trainer.model, trainer.config)
    ways = trainer.config.shards if trainer.config.zero == 3 else 1
    return parameters * BYTES[trainer.dtype] / ways


def _handed_over(replica: ReplicaHardware, trainer: TrainerHardware) -> tuple[float, int]:
    """Return the bytes and tensors that every replica loads: all weights, or adapters."""
    model = replica.model
    if replica.adapter_rank is not None:
        adapters = lora_parameters(model, replica.adapter_rank)
        num_adapted = sum(count for _, _, count in linear_layers(model))
        return float(adapters * BYTES[replica.adapter_dtype]), 2 * num_adapted
    return float(model.num_parameters * BYTES[trainer.dtype]), num_tensors(model)


def _copy_ranks(trainer: TrainerConfig) -> int:
    """Return the number of GPUs that share one copy of the weights."""
    if trainer.zero == 3:
        return trainer.num_gpus * trainer.shards // trainer.copies
    return trainer.pipeline_parallel * max(trainer.tensor_parallel, trainer.expert_ranks)


def _optimizer_on_gpu(trainer: TrainerHardware) -> float:
    """Return the bytes of optimizer states on a GPU; none if they are in host memory for good."""
    if trainer.config.offload and trainer.num_models == 1:
        return 0.0
    state = model_state(trainer.model, trainer.config, trainer.dtype)
    return trainer.trained_models * state.optimizer


def _room_beside_generator(replica: ReplicaHardware) -> float:
    """Return the bytes of a GPU that the replica's weights and KV cache leave free."""
    return replica.gpu.usable_memory * (1 - replica.config.memory_utilization)


def _wire(
    rollout: RolloutConfig, trainer: TrainerConfig, side: SyncSide
) -> tuple[float, tuple[str, ...]]:
    """Return the bytes per second that a GPU receives in a reshard, and the profiles used.

    The ranks that together hold one copy of the weights send each other the missing parts, as in
    the 3D-HybridEngine (Sheng et al. 2025, HybridFlow, arXiv 2409.19256, section 5). GPUs of
    replicas that do not train receive their shards from other nodes.
    """
    gpu = f"profiles/gpus/{side.pool.gpu}.toml"
    split = trainer.tensor_parallel * trainer.pipeline_parallel
    split *= trainer.shards if trainer.zero == 3 else 1
    reach = split if rollout.num_gpus <= trainer.num_gpus else side.num_gpus
    if reach <= side.pool.domain:
        return side.gpu.nvlink, (gpu,)
    return side.rank_bandwidth, (gpu, f"profiles/transports/{side.pool.transport}.toml")
