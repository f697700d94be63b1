"""Compute the seconds in which a trainer's ranks are added or removed between two steps.

    added ranks     start_time + group_time(all ranks) + group_time(first and added ranks) + depth x bytes / rate
    removed ranks   group_time(all ranks)

- start_time: `trainer.rank_start_time`, or else `trainer.start_time`. All added ranks start at the same time, and the
  others wait for them.
- group_time: the ranks leave their process group, meet, and connect: `setup_time`, and `rank_time` for each rank
  (profiles/sync, `ranks-nccl` and `ranks-gloo`). The first rank and the added ones make a second group for the state.
- bytes: the optimizer's states of one rank with its float32 weights. 16-bit weights are cast from these.
- rate: NVLink if one domain has all ranks, else the network of a GPU; at most what the library sends.
- depth: NCCL sends on while it receives, so 1. gloo sends whole tensors along a binomial tree: n new ranks take
  log2(n + 1) rounds, rounded up.

Ranks that stay keep their state, so no bytes go to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.hardware.memory import model_state
from streamrl.hardware.resolved import ResolvedRun, TrainerHardware
from streamrl.hardware.tiers import Tier
from streamrl.sim.costs.sync_profiles import load_rank_group
from streamrl.sim.costs.weight_sync import SyncSide

TIER: Tier = "roofline"


@dataclass(frozen=True, kw_only=True)
class ResizingCosts:
    """Seconds of each part of a change of a trainer's data-parallel ranks."""

    start_time: float
    """Seconds until an added rank has its process, its libraries and an empty model."""
    setup_time: float
    """Seconds until a group is there, whatever its size."""
    rank_time: float
    """Seconds for each rank of the group."""
    num_bytes: float
    """Bytes that each GPU of an added rank receives."""
    near: float
    """Bytes per second within an NVLink domain."""
    far: float
    """Bytes per second between domains."""
    domain: int
    rank_gpus: int
    """GPUs of one data-parallel rank."""
    sends_on: bool
    """Whether a rank sends bytes on while it still receives others."""
    sources: tuple[str, ...]
    tier: Tier = TIER

    @classmethod
    def load(cls, resolved: ResolvedRun) -> ResizingCosts:
        """Compute the costs of a run's primary trainer.

        Raises:
            ValueError: a profile is missing, or the model cannot be split as the run file says.
        """
        own = resolved.trainer.config
        start = own.start_time if own.rank_start_time is None else own.rank_start_time
        return cls.of(resolved.trainer, float(start))

    @classmethod
    def of(cls, trainer: TrainerHardware, start_time: float) -> ResizingCosts:
        """Compute the costs of a trainer whose added ranks start in `start_time` seconds."""
        on_cpu = trainer.pool.gpu == "cpu"
        name = "ranks-gloo" if on_cpu else "ranks-nccl"
        library, config = load_rank_group(name), trainer.config
        side = SyncSide.of(trainer.pool, config.num_gpus)
        most = library.sender_bandwidth or float("inf")
        state = model_state(trainer.model, config, trainer.dtype)
        return cls(
            start_time=start_time,
            setup_time=float(library.setup_time),
            rank_time=float(library.rank_time),
            num_bytes=state.optimizer * trainer.trained_models,
            near=min(most, side.gpu.nvlink),
            far=min(most, side.rank_bandwidth),
            domain=trainer.pool.domain,
            rank_gpus=config.num_gpus // config.data_parallel,
            sends_on=library.sends_on,
            sources=(f"profiles/sync/{name}.toml", f"profiles/gpus/{trainer.pool.gpu}.toml"),
        )

    def time(self, before: int, after: int) -> float:
        """Return the seconds from `before` data-parallel ranks to `after`."""
        added = after - before
        group_time = self._group_time(after)
        if added <= 0:
            return group_time
        is_near = after * self.rank_gpus <= self.domain
        depth = 1 if self.sends_on else added.bit_length()
        sent = depth * self.num_bytes / (self.near if is_near else self.far)
        return self.start_time + group_time + self._group_time(1 + added) + sent

    def _group_time(self, ranks: int) -> float:
        """Return the seconds in which data-parallel ranks make a process group."""
        return self.setup_time + ranks * self.rank_gpus * self.rank_time
