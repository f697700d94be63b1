"""Start roles as actors of a Ray cluster.

| role                 | placement                                                                            |
|----------------------|--------------------------------------------------------------------------------------|
| replica              | one node of its pool; its own placement group, so replicas can be added and removed  |
| trainer              | one placement group with a bundle for each rank, on as few nodes of its pool as possible |
| reward model replica | one node of the verifier's pool, in its own placement group                          |
| relay                | the node of the replicas that it serves; one more on the primary trainer's first node |

A resource marks the pool of a node: `ray start --resources='{"pool-NAME": 1}'`. So a pool can be a datacenter.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from streamrl.engine.trainer_side import LEADER
from streamrl.executor.directory_lock import HIDDEN
from streamrl.executor.launchers.handles import FACTOR, Config, Handle, RankHandles
from streamrl.executor.launchers.launcher import (
    RELAY,
    REPLICA,
    REWARD_MODEL,
    TRAINER,
    Launcher,
    name_of,
    worker_environment,
)
from streamrl.executor.launchers.placement import PlacedRoles
from streamrl.executor.launchers.ray_actor import RayActor, RayRole
from streamrl.executor.launchers.ray_cluster import CALLS_AT_ONCE, LEAST, pool_resource
from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.record import RunDirectory

Bundle = dict[str, float]
DRAIN_TIME = 120.0
"""Seconds that replicas have on a node that drains without a deadline: as long as AWS warns. Assumed."""


def time_left(deadline: int, now: float) -> float:
    """Return the seconds until a node goes.

    Args:
        deadline: Unix time in milliseconds; 0 if Ray knows none.
        now: Unix time in seconds.
    """
    return max(0.0, deadline / 1e3 - now) if deadline else DRAIN_TIME


class RayLauncher(Launcher):
    """Starts each role on a node of its pool. Join the cluster first, with `joined_cluster`."""

    def __init__(self, configs: RoleConfigs, roles: PlacedRoles, directory: RunDirectory) -> None:
        super().__init__(configs, roles, directory)
        self._node_of: dict[int, str] = {}
        """Ray's node id of each replica."""
        self._trainer_node: str | None = None
        self._umask = HIDDEN[roles.execute.readers]

    @property
    def num_threads(self) -> int:
        """CPU threads of each role."""
        return self._roles.execute.threads or 1

    def free(self, replica_id: int) -> None:
        """Forget the node of a replica; Ray releases its GPUs when its placement group is removed."""
        self._node_of.pop(replica_id, None)

    def leaving(self) -> dict[int, float]:
        """Return the replicas on nodes that Ray drains, with the seconds until these nodes go."""
        draining: dict[str, int] = ray._private.state.state.get_draining_nodes()
        if not draining:
            return {}
        return {
            replica: time_left(draining[node], time.time())
            for replica, node in self._node_of.items()
            if node in draining
        }

    def place_of(self, replica_id: int) -> str:
        """Return the node of a replica; replicas of one node share a relay."""
        return self._node_of[replica_id]

    def trainer_place(self) -> str:
        """Return the node of the primary trainer's first rank."""
        return self._trainer_node or ""

    async def _start_replica(self, replica_id: int, kind: int, config: Config) -> Handle:
        own = self._roles.rollout.kinds[kind]
        name = f"replica-{replica_id}"
        (actor,) = await self._reserve([name], [self._bundle(own.pool, own.tensor_parallel)])
        assert actor.whereabouts is not None
        self._node_of[replica_id] = actor.whereabouts.node  # its node may drain while it starts
        await self._begin(actor, REPLICA, config, name)
        return actor

    async def _start_trainer(self, number: int, config: Config) -> Handle:
        name, bundle = name_of(number), self._bundle(self._roles.trainers[number].pool, 1)
        (actor,) = await self._reserve([name], [bundle])
        await self._begin(actor, self._trainer_role(number), config, name)
        assert actor.whereabouts is not None
        if number == LEADER:
            self._trainer_node = actor.whereabouts.node
        return actor

    async def _start_ranks(self, number: int, configs: list[Config]) -> Handle:
        names = [f"{name_of(number)}-{rank}" for rank in range(len(configs))]
        bundle = self._bundle(self._roles.trainers[number].pool, 1)
        actors = await self._reserve(names, [bundle] * len(configs))
        first = actors[0].whereabouts
        assert first is not None
        rendezvous = f"tcp://{first.address}:{first.free_port}"
        if number == LEADER:
            self._trainer_node = first.node
        await asyncio.gather(
            *(
                self._begin(actor, TRAINER, {**config, "rendezvous": rendezvous}, name)
                for actor, config, name in zip(actors, configs, names, strict=True)
            )
        )
        return RankHandles(actors, lambda: None, self._roles.trainers[number].ranks_alike)

    async def _start_reward_model(self, number: int, config: Config) -> Handle:
        pool, name = self._roles.verifier.pool, f"reward-model-{number}"
        assert pool is not None, "check_rewards wants one"
        (actor,) = await self._reserve([name], [self._bundle(pool, 1)])
        await self._begin(actor, REWARD_MODEL, config, name)
        return actor

    async def _start_relay(self, place: str | None, config: Config, name: str) -> Handle:
        node = self._trainer_node if place is None else place
        strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        actor = self._actor(name, {"num_cpus": 0, "scheduling_strategy": strategy})
        await self._locate([actor])
        await self._begin(actor, RELAY, config, name)
        return actor

    def _bundle(self, pool: str, num_gpus: int) -> Bundle:
        """Return the resources that a process takes on a node of its pool."""
        bundle: Bundle = {"CPU": self.num_threads, pool_resource(pool): LEAST}
        if self.device(pool) != "cpu":
            bundle["GPU"] = num_gpus
        return bundle

    async def _reserve(self, names: list[str], bundles: list[Bundle]) -> list[RayActor]:
        """Start an actor in each bundle of a new placement group.

        Raises:
            RuntimeError: the cluster has too few free resources.
        """
        group = placement_group(bundles, strategy="STRICT_PACK" if len(bundles) == 1 else "PACK")
        patience = FACTOR * self._roles.execute.patience
        try:
            await asyncio.wait_for(_ready(group), patience)
        except TimeoutError:
            remove_placement_group(group)
            raise RuntimeError(
                f"the Ray cluster had no free resources for {', '.join(names)} within {patience:.0f} s: "
                f"each needs {bundles[0]}"
            ) from None
        actors: list[RayActor] = []

        def let_go() -> None:
            if all(actor.is_lost for actor in actors):
                remove_placement_group(group)

        for index, (name, bundle) in enumerate(zip(names, bundles, strict=True)):
            strategy = PlacementGroupSchedulingStrategy(group, index)
            options = {
                "num_cpus": bundle["CPU"],
                "num_gpus": bundle.get("GPU", 0),
                "scheduling_strategy": strategy,
            }
            actors.append(self._actor(name, options, let_go))
        await self._locate(actors)
        return actors

    def _actor(self, name: str, options: dict[str, Any], let_go: Any = lambda: None) -> RayActor:
        environment = worker_environment(self.num_threads)
        actor = (
            ray.remote(RayRole)
            .options(
                max_concurrency=CALLS_AT_ONCE,
                max_restarts=0,
                runtime_env={"env_vars": environment},
                **options,
            )
            .remote()
        )
        return RayActor(actor, name, self._roles.execute.patience, let_go)

    async def _locate(self, actors: list[RayActor]) -> None:
        await asyncio.gather(*(actor.locate() for actor in actors))

    async def _begin(self, actor: RayActor, role: str, config: Config, name: str) -> None:
        log = (self._directory.logs / f"{name}.log").resolve()
        await actor.begin(role, config, str(log), self._umask)


async def _ready(group: Any) -> None:
    await group.ready()
