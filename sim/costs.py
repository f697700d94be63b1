"""Seconds of every operation of a run, each from the best tier that has data, and where each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.curves import DecodeCurve, PrefillCurve, compose_decode
from sim.inference import Shard
from sim.kernels import Kernels
from sim.sync import SyncCosts
from sim.training import TrainingCosts
from streamrl.config import Run
from streamrl.memory import check_memory, kv_capacity, longest_sequence
from streamrl.profile import load_model
from streamrl.tiers import Provenance


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, bytes and capacities of one run's hardware."""

    decode: DecodeCurve
    prefill: PrefillCurve
    kv_capacity: int
    """Tokens whose keys and values a replica holds."""
    sync: SyncCosts
    training: TrainingCosts
    provenance: dict[str, Provenance]
    """Where the seconds of each operation come from: prefill, decode, score, train, sync."""

    @classmethod
    def load(cls, run: Run) -> Costs:
        """Put the costs of a run together.

        Raises:
            ValueError: a profile is missing, or a side does not fit its memory.
        """
        check_memory(run)
        decode, prefill = _compose_replica(run)
        training, sync = TrainingCosts.load(run), SyncCosts.load(run)
        trained = Provenance.of(training.tier, training.sources)
        return cls(
            decode=decode,
            prefill=prefill,
            kv_capacity=kv_capacity(run),
            sync=sync,
            training=training,
            provenance={
                "prefill": prefill.provenance,
                "decode": decode.provenance,
                "score": trained,
                "train": trained,
                "sync": Provenance.of(sync.tier, sync.sources),
            },
        )

    def prefill_time(self, num_tokens: int, context_pairs: float, num_running: int) -> float:
        """Give the seconds that prefill adds to what `num_running` decoding rollouts take.

        The new tokens attend to `context_pairs` tokens in all.
        """
        return self.prefill.time(num_tokens, context_pairs, num_running)

    @property
    def load_time(self) -> float:
        """Seconds in which a replica copies pushed weights into its GPUs."""
        return self.sync.load_time

    @property
    def optimizer_time(self) -> float:
        """Seconds of gradient reduction and optimizer step."""
        return self.training.optimizer_time

    def score_time(self, lengths: Sequence[int]) -> float:
        """Give the seconds of the forward passes that these rollouts (prompt + output tokens) need first."""
        return self.training.score_time(lengths)

    def train_time(self, lengths: Sequence[int]) -> float:
        """Give the seconds of forward and backward passes over rollouts (prompt + output tokens)."""
        return self.training.train_time(lengths)

    @property
    def facts(self) -> dict[str, dict[str, float] | list[str]]:
        """What a trace says of its seconds: the tiers' shares of each operation, and all sources."""
        shares: dict[str, dict[str, float] | list[str]] = {
            operation: {str(tier): share for tier, share in found.shares.items()}
            for operation, found in self.provenance.items()
        }
        sources = dict.fromkeys(s for found in self.provenance.values() for s in found.sources)
        return {**shares, "sources": list(sources)}


def _compose_replica(run: Run) -> tuple[DecodeCurve, PrefillCurve]:
    """Compose a replica's decode step and prefill from operators."""
    rollout = run.rollout
    shard = Shard(
        load_model(run.model),
        Kernels(run.cluster.pools[rollout.pool].gpu, run.model.dtype),
        rollout.tensor_parallel,
        rollout.expert_parallel,
    )
    decode = compose_decode(shard, rollout.max_running, longest_sequence(run), kv_capacity(run))
    return decode, PrefillCurve(shard, rollout.max_running, is_mixed=rollout.chunked_prefill)
