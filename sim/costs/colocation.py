"""Compute how long shared GPUs need to switch between generation and training: policies.system = "colocated".

    generate ─► sleep ─► onload ─► score, train, step ─► reshard ─► offload ─► wake ─► generate

- sleep: the replica's KV cache and weights are discarded. No bytes move, because new weights
  follow.
- onload: weights of actor, critic and reference and the optimizer states go from host memory to the
  GPU.
- reshard: every GPU receives the part of its replica's shard that it does not train.
- offload: changed weights and optimizer states go to host memory. Gradients are dropped, and the
  reference needs no copy.
- wake: the received weights are copied into the replica, and quantised if it uses a narrow format.
  The cache starts empty.

A trainer of adapters (sync.mode = "lora") changes only them and their optimizer states. Its base weights are frozen: they
return to the GPU, and no copy leaves it. If replicas compute with adapters beside their weights, these weights stay the
same. Sleep copies them to host memory and wake copies them back (level 1 of vLLM's sleep mode). A reshard then has only the
adapters, all of them for each GPU. If adapters are merged, replicas receive whole weights as above.

Data that fits next to the generator, in (1 - rollout.memory_utilization) of a GPU, stays there and
does not move. Bytes move at datasheet bandwidths. The framework's own calls, for every tensor and
memory map, take the longest: `framework.switch_time`. Its default comes from the framework or from
published switches (profiles/frameworks).
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.hardware.memory import fullest_stage, model_state, shard_parameters
from streamrl.hardware.model_shape import BYTES, lora_parameters
from streamrl.hardware.precision import is_narrow, quantised_bytes
from streamrl.hardware.resolved import ReplicaHardware, ResolvedRun, TrainerHardware
from streamrl.hardware.tiers import Tier
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig
from streamrl.sim.costs.corrections import Corrections, own_switch_time
from streamrl.sim.costs.weight_sync import COPY_TRAFFIC, SyncCosts, SyncSide, weight_ranks

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
    switch_time: float
    """Seconds of the framework's own calls, in addition to moving bytes."""
    sent_bytes: int
    """Bytes that all GPUs together send in a reshard."""
    sources: tuple[str, ...]

    @classmethod
    def load(cls, resolved: ResolvedRun) -> PhaseChange:
        """Compute the phase change of a run whose trainer and replicas share GPUs.

        Raises:
            ValueError: a profile is missing, or the model cannot be split as the run file says.
        """
        gpu, size = resolved.trainer.pool.gpu, resolved.model.num_parameters
        switch_time = own_switch_time(resolved.run.framework, gpu, size).seconds
        return cls.of(resolved.replica, resolved.trainer, switch_time)

    @classmethod
    def of(
        cls, replica: ReplicaHardware, trainer: TrainerHardware, switch_time: float
    ) -> PhaseChange:
        """Compute the phase change of GPUs that a kind of replica and a trainer share."""
        moved = count_moved(replica, trainer)
        num_gpus = max(replica.config.num_gpus, trainer.config.num_gpus)
        side = SyncSide.of(replica.pool, num_gpus)
        memory_bandwidth = side.gpu.memory_bandwidth * side.gpu.roofline.bandwidth_efficiency
        wire, sources = _wire(replica.config, trainer.config, side)
        quantised = 0.0
        if replica.adapter_rank is None:  # else the weights in the replica's format stay
            quantised = quantised_bytes(replica.model, replica.precision, trainer.dtype)
            quantised /= weight_ranks(replica)
        return cls(
            onload_time=moved.onloaded / side.gpu.host_link,
            offload_time=moved.offloaded / side.gpu.host_link,
            reshard_time=moved.resharded / wire,
            switch_time=switch_time,
            wake_time=(COPY_TRAFFIC * moved.woken + quantised) / memory_bandwidth,
            sent_bytes=round(moved.resharded * replica.config.num_gpus),
            sources=sources,
        )

    @property
    def push_time(self) -> float:
        """Seconds from the end of a step until replicas can wake up."""
        return self.reshard_time + self.offload_time + self.onload_time + self.switch_time

    def sync_costs(self) -> SyncCosts:
        """Return the change as a push and a load, the form that traces use.

        The push after step s also contains the onload between generation and training in step s +
        1. GPUs are idle meanwhile, so the step time is the same, and those seconds also count as
        sync. Step 1 finds its states on the GPUs, and nothing is offloaded after the last step.
        """
        return SyncCosts(
            wire_bytes=self.sent_bytes,
            fill_time=self.offload_time + self.onload_time + self.switch_time,
            wire_time=self.reshard_time,
            drain_time=0.0,
            load_time=self.wake_time,
            tier=TIER,
            sources=self.sources,
        )


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
    ways = trainer.config.copies if trainer.config.zero == 3 else 1
    return parameters * BYTES[trainer.dtype] / ways


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
    split *= trainer.copies if trainer.zero == 3 else 1
    reach = split if rollout.num_gpus <= trainer.num_gpus else side.num_gpus
    if reach <= side.pool.domain:
        return side.gpu.nvlink, (gpu,)
    return side.rank_bandwidth, (gpu, f"profiles/transports/{side.pool.transport}.toml")
