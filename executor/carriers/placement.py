"""Which GPUs of which node each role of a run has; what a launcher makes of them is its own business.

Replicas have the lowest GPUs of their pool, then the trainers, the reward model, then replicas that are added. The GPUs of one replica,
and of one tensor-parallel group of the trainer, are on one node, where they talk over NVLink.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streamrl.runfile.config import Run
from streamrl.runfile.sides import trainer_names


class Place(NamedTuple):
    """GPUs of one node."""

    pool: str
    node: int
    """Index of the node within the pool."""
    gpus: tuple[int, ...]
    """Indices of the GPUs on that node, rising."""


class Placement:
    """Knows which GPUs are taken, and gives a replica those that nobody has."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._free: dict[str, list[set[int]]] = {
            name: [set(range(pool.gpus_per_node)) for _ in range(pool.nodes)]
            for name, pool in run.cluster.pools.items()
        }
        self._replicas: dict[int, Place] = {}
        first = run.rollout.kind_of_each
        if not run.shares_gpus:
            for replica, kind in enumerate(first):
                self.replica(replica, kind)
        self.trainers = [self._take_trainer(number) for number in range(run.num_trainers)]
        """The place of each rank of each trainer, one GPU each, since a rank is a process of its own. Ranks of one
        tensor-parallel group follow each other, then those of data parallelism, then stages:
        rank = (stage x data + d) x tensor + t."""
        self.reward_models = list(self._take_reward_models())
        """The place of each replica of the reward model."""
        for replica in range(len(first)):
            self.free(replica)

    def join(self, run: Run) -> None:
        """Take GPUs for the last trainer of a run, which joins the others.

        Raises:
            RuntimeError: no node has as many.
        """
        before, self._run = self._run, run
        try:
            self.trainers.append(self._take_trainer(len(self.trainers)))
        except RuntimeError:
            self._run = before
            raise

    def replica(self, replica: int, kind: int = 0) -> Place:
        """Take the lowest GPUs that nobody has for a replica of a kind.

        Raises:
            RuntimeError: no node has as many.
        """
        rollout = self._run.rollout.kinds[kind]
        place = self._take(rollout.pool, rollout.tensor_parallel, f"replica {replica}")
        self._replicas[replica] = place
        return place

    def free(self, replica: int) -> None:
        """Give the GPUs of a replica that is gone back; its replacement finds them."""
        place = self._replicas.pop(replica, None)
        if place is not None:
            self._free[place.pool][place.node].update(place.gpus)

    def _take_trainer(self, number: int) -> tuple[Place, ...]:
        run = self._run.as_seen_by(number)
        trainer, role = run.trainer, trainer_names(self._run)[number]
        num_groups = trainer.copies * trainer.pipeline_parallel
        groups = [
            self._take(trainer.pool, trainer.tensor_parallel, role) for _ in range(num_groups)
        ]
        if run.shares_gpus:  # replicas have the same ones while it rests
            for place in groups:
                self._free[place.pool][place.node].update(place.gpus)
        return tuple(
            Place(group.pool, group.node, (gpu,)) for group in groups for gpu in group.gpus
        )

    def _take_reward_models(self) -> Iterator[Place]:
        verifier = self._run.verifier
        if verifier.pool is not None:
            for number in range(verifier.workers):
                yield self._take(verifier.pool, verifier.gpus_per_worker, f"reward model {number}")

    def _take(self, pool: str, num_gpus: int, role: str) -> Place:
        for node, free in enumerate(self._free[pool]):
            if len(free) >= num_gpus:
                place = Place(pool, node, tuple(sorted(free)[:num_gpus]))
                free.difference_update(place.gpus)
                return place
        raise RuntimeError(f"no node of pool {pool!r} has {num_gpus} GPUs left for {role}")
