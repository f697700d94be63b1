"""Place the roles of a run on the GPUs and CPU cores of this machine.

`Placement` assigns GPUs of a pool's nodes to each role. Roles take the lowest free GPUs in this order: replicas,
trainers, reward models, replicas added later. The GPUs of one replica, or of one tensor-parallel group of the trainer,
are on one node, connected by NVLink.

`LocalGpus` maps these places to the GPUs of this machine, which has all pools and all of their nodes. GPUs are
numbered in the same order of roles. Roles on the CPU get no GPU.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from math import ceil
from pathlib import Path
from typing import NamedTuple

from streamrl.hardware.parallelism import threads_per_role
from streamrl.runfile.backend_choice import engine_named
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import DEVICE, ExecuteConfig, Run
from streamrl.runfile.gpu_pools import device_of, most_replicas
from streamrl.runfile.roles_config import (
    RolloutConfig,
    SecondaryTrainerConfig,
    TrainerConfig,
    VerifierConfig,
)


@dataclass(frozen=True, kw_only=True)
class PlacedRoles:
    """The roles of a run that need GPUs or cores, and the settings that select their devices."""

    rollout: RolloutConfig
    most_replicas: int
    """Maximum number of replicas at one time; a run may add some."""
    lent: RolloutConfig | None
    """Replicas on GPUs of the primary trainer; None if it lends none."""
    trainer: TrainerConfig
    followers: tuple[SecondaryTrainerConfig, ...]
    verifier: VerifierConfig
    pools: dict[str, PoolConfig]
    execute: ExecuteConfig
    shares_gpus: bool
    """Whether replicas and the primary trainer take turns on the same GPUs."""
    borrowed_ranks: int
    """Ranks of the primary trainer on GPUs of replicas, while these sleep."""

    @classmethod
    def of(cls, run: Run) -> PlacedRoles:
        """Return the roles of a run file."""
        policies, most = run.policies, run.rollout.num_replicas
        if policies.resize != "keep":
            most = policies.max_replicas or most_replicas(run)
        return cls(
            rollout=run.rollout,
            most_replicas=most,
            lent=run.lent,
            trainer=run.trainer,
            followers=run.followers,
            verifier=run.verifier,
            pools=run.cluster.pools,
            execute=run.execute,
            shares_gpus=policies.shares_gpus,
            borrowed_ranks=run.borrowed_ranks,
        )

    @property
    def replica_kinds(self) -> tuple[RolloutConfig, ...]:
        """Every kind of replica; the last one may be on GPUs of the primary trainer."""
        return (*self.rollout.kinds, *(() if self.lent is None else (self.lent,)))

    @property
    def trainers(self) -> tuple[TrainerConfig, ...]:
        """Every trainer, the primary one first."""
        return (self.trainer, *self.followers)

    def device_of(self, pool: str) -> str:
        """Return the torch device of the roles in `pool`."""
        return device_of(self.execute.device, self.pools[pool])

    @property
    def replicas_compute(self) -> bool:
        """Whether processes of this run generate, and not servers that someone else runs."""
        return not engine_named(self.rollout.backend).runs_elsewhere


class Place(NamedTuple):
    """GPUs of one node."""

    pool: str
    node: int
    """Index of the node within the pool."""
    gpus: tuple[int, ...]
    """Indices of the GPUs on that node, in ascending order."""


class NoGpusLeftError(RuntimeError):
    """No node of a pool has enough free GPUs for a role."""


class Placement:
    """Tracks which GPUs are taken, and assigns free GPUs to roles."""

    def __init__(self, roles: PlacedRoles) -> None:
        self._roles = roles
        self._free: dict[str, list[set[int]]] = {
            name: [set(range(pool.gpus_per_node)) for _ in range(pool.nodes)]
            for name, pool in roles.pools.items()
        }
        self._replicas: dict[int, Place] = {}
        self._kinds: dict[int, int] = {}
        """Kind of each replica that has GPUs."""
        first = roles.rollout.kind_of_each
        if not roles.shares_gpus:
            for replica, kind in enumerate(first):
                self.replica(replica, kind)
        self.trainers = [
            self._take_trainer(roles.trainer.largest, "trainer", is_shared=roles.shares_gpus)
        ]
        """Place of each rank of each trainer. A rank is a process with one GPU. The tensor-parallel index varies
        fastest, then the data-parallel index d, then the pipeline stage:
        rank = (stage x data + d) x tensor + t."""
        if roles.borrowed_ranks:
            on_replicas = [
                Place(place.pool, place.node, (gpu,))
                for place in self._replicas.values()
                for gpu in place.gpus
            ]
            self.trainers[0] = (*self.trainers[0], *on_replicas)
        for follower in roles.followers:
            self.join(follower)
        self._on_trainer = tuple(self._places_on_trainer(roles.lent))
        self._lent_free = list(self._on_trainer)
        """Places on GPUs of the primary trainer that no replica has."""
        self.reward_models = list(self._take_reward_models())
        """The place of each replica of the reward model."""
        for replica in range(len(first)):
            self.free(replica)

    def join(self, follower: SecondaryTrainerConfig, wanted_replicas: Sequence[int] = ()) -> None:
        """Reserve GPUs for one more trainer, beside `wanted_replicas` of each kind.

        Raises:
            NoGpusLeftError: no node has enough free GPUs.
        """
        with self._awaiting(wanted_replicas):
            self.trainers.append(self._take_trainer(follower, follower.name))

    def resize_trainer(self, data_parallel: int, wanted_replicas: Sequence[int]) -> None:
        """Reserve GPUs for more ranks of the primary trainer than its run file has, if it is to have them.

        Args:
            data_parallel: the ranks that it is to have.
            wanted_replicas: replicas of each kind that the run wants, with those that are awaited.

        Raises:
            RuntimeError: the pool has too few free GPUs, or the ranks need GPUs that the run did not claim at its start.
        """
        own, places = self._roles.trainer, self.trainers[0]
        if data_parallel <= len(places):
            return
        if self._roles.device_of(own.pool) != "cpu":
            raise RuntimeError(
                f"a run on this machine's GPUs claims them all as it begins, {len(places)} for the trainer"
            )
        with self._awaiting(wanted_replicas):
            most = len(places) + sum(map(len, self._free[own.pool]))
            if data_parallel > most:
                raise RuntimeError(
                    f"--data-parallel must be at most {most}, because pool {own.pool!r} has no more free GPUs, "
                    f"got {data_parallel}"
                )
            more = own.with_ranks(data_parallel - len(places))
            self.trainers[0] = (*places, *self._take_trainer(more, "trainer"))

    @contextmanager
    def _awaiting(self, wanted_replicas: Sequence[int]) -> Iterator[None]:
        """Take the GPUs of replicas that are awaited, such as after a loss or a spot notice, and free them at the end."""
        held = list(self._kinds.values())
        taken = []
        for kind, (own, num_wanted) in enumerate(
            zip(self._roles.rollout.kinds, wanted_replicas, strict=False)
        ):
            for _ in range(num_wanted - held.count(kind)):
                if (place := self._find(own.pool, own.tensor_parallel)) is not None:
                    taken.append(place)
        try:
            yield
        finally:
            for place in taken:
                self._free[place.pool][place.node].update(place.gpus)

    def replica(self, replica: int, kind: int = 0) -> Place:
        """Reserve the lowest free GPUs for a replica of a kind.

        Raises:
            NoGpusLeftError: no node has enough free GPUs.
        """
        rollout = self._roles.replica_kinds[kind]
        if kind == self._roles.rollout.num_kinds:
            place = self._lent_free.pop(0)
        else:
            place = self._take(rollout.pool, rollout.tensor_parallel, f"replica {replica}")
        self._replicas[replica], self._kinds[replica] = place, kind
        return place

    def free(self, replica: int) -> None:
        """Release the GPUs of a replica that has ended, for its replacement."""
        place = self._replicas.pop(replica, None)
        self._kinds.pop(replica, None)
        if place is not None and place in self._on_trainer:
            self._lent_free.append(place)
        elif place is not None:
            self._free[place.pool][place.node].update(place.gpus)

    def _take_trainer(
        self, trainer: TrainerConfig, name: str, *, is_shared: bool = False
    ) -> tuple[Place, ...]:
        num_groups = trainer.copies * trainer.pipeline_parallel
        groups = [
            self._take(trainer.pool, trainer.tensor_parallel, name) for _ in range(num_groups)
        ]
        if is_shared:  # replicas use the same GPUs while the trainer sleeps
            for place in groups:
                self._free[place.pool][place.node].update(place.gpus)
        return tuple(
            Place(group.pool, group.node, (gpu,)) for group in groups for gpu in group.gpus
        )

    def _places_on_trainer(self, lent: RolloutConfig | None) -> Iterator[Place]:
        """Yield the places of replicas on GPUs of the primary trainer; those of one replica are on one node."""
        if lent is None:
            return
        nodes: dict[tuple[str, int], list[int]] = {}
        for place in self.trainers[0]:
            nodes.setdefault((place.pool, place.node), []).extend(place.gpus)
        degree = lent.tensor_parallel
        found = [
            Place(pool, node, tuple(gpus[first : first + degree]))
            for (pool, node), gpus in nodes.items()
            for first in range(0, len(gpus) - degree + 1, degree)
        ]
        if len(found) < lent.replicas:
            raise RuntimeError(
                f"the trainer's GPUs have room for {len(found)} lent replicas, not {lent.replicas}"
            )
        yield from found[: lent.replicas]

    def _take_reward_models(self) -> Iterator[Place]:
        verifier = self._roles.verifier
        if verifier.pool is not None:
            for number in range(verifier.workers):
                yield self._take(verifier.pool, verifier.gpus_per_worker, f"reward model {number}")

    def _take(self, pool: str, num_gpus: int, role: str) -> Place:
        place = self._find(pool, num_gpus)
        if place is None:
            raise NoGpusLeftError(f"no node of pool {pool!r} has {num_gpus} GPUs left for {role}")
        return place

    def _find(self, pool: str, num_gpus: int) -> Place | None:
        """Take the lowest free GPUs of one node; return None if no node has enough."""
        for node, free in enumerate(self._free[pool]):
            if len(free) >= num_gpus:
                place = Place(pool, node, tuple(sorted(free)[:num_gpus]))
                free.difference_update(place.gpus)
                return place
        return None


VARIABLE = "CUDA_VISIBLE_DEVICES"
NAME = re.compile(r"\d+|GPU-.+|MIG-.+")
"""A valid entry of CUDA_VISIBLE_DEVICES. CUDA ignores an invalid entry and all entries after it (CUDA C++ Programming
Guide, section CUDA Environment Variables)."""


def index_of(device: str) -> int | None:
    """Return the GPU index in a device name such as cuda:1, or None if there is none."""
    match = DEVICE.fullmatch(device)
    return None if match is None or match["index"] is None else int(match["index"])


def gpus_needed(roles: PlacedRoles) -> int:
    """Return how many GPUs of this machine a run needs with its largest number of replicas."""
    rollout, verifier = roles.rollout, roles.verifier
    computing = rollout.kinds if roles.replicas_compute else ()
    on_gpus = [own for own in computing if roles.device_of(own.pool) != "cpu"]
    trainers = [
        0 if roles.device_of(trainer.pool) == "cpu" else trainer.largest.num_gpus
        for trainer in roles.trainers
    ]
    has_rewards = verifier.pool is not None and roles.device_of(verifier.pool) != "cpu"
    rewards = verifier.num_gpus if has_rewards else 0
    if not on_gpus and not any(trainers) and not rewards:
        return 0
    named = index_of(roles.execute.device)
    if named is not None:
        return named + 1
    if roles.execute.launcher == "in-process":
        return 1
    added = (roles.most_replicas - rollout.num_replicas) * rollout.tensor_parallel
    for_replicas = sum(own.num_gpus for own in on_gpus)
    for_replicas += added if rollout.kinds[0] in on_gpus else 0
    leader, *followers = trainers
    for_both = max(for_replicas, leader) if roles.shares_gpus else for_replicas + leader
    return for_both + sum(followers) + rewards


class LocalGpus:
    """Maps places to GPUs of this machine, as entries of CUDA_VISIBLE_DEVICES."""

    def __init__(self, roles: PlacedRoles, names: Sequence[str]) -> None:
        """Number the GPUs that a run may take.

        Args:
            roles: the roles that are placed.
            names: the GPUs that `claim_gpus` returned for them.
        """
        self._roles = roles
        self._names = names
        self._numbers: dict[tuple[str, int, int], int] = {}
        for place in _places_in_order(roles):
            if roles.device_of(place.pool) == "cuda":
                for gpu in place.gpus:
                    self._numbers.setdefault((place.pool, place.node, gpu), len(self._numbers))

    def environment(self, place: Place) -> dict[str, str]:
        """Return the environment variables that restrict a process to the GPUs of its place.

        A role on the CPU needs none. If `execute.device` names a GPU, every role gets that one.
        """
        device = self._roles.device_of(place.pool)
        if device == "cpu":
            return {}
        if (named := index_of(device)) is not None:
            return {VARIABLE: self._names[named]}
        numbers = [self._numbers[place.pool, place.node, gpu] for gpu in place.gpus]
        return {VARIABLE: ",".join(self._names[number] for number in numbers)}


def usable_gpus(inherited: str | None, num_seen: int) -> list[str]:
    """Return the GPUs that this process may use, each as an entry of CUDA_VISIBLE_DEVICES for a worker.

    Args:
        inherited: the variable in this process, or None if it is not set. It lists indices, UUIDs of GPUs, or UUIDs
            of MIG instances. An empty value or a leading -1 hides all GPUs.
        num_seen: GPUs that torch counts in this process.
    """
    if inherited is None:
        return [str(index) for index in range(num_seen)]
    names = list(takewhile(NAME.fullmatch, map(str.strip, inherited.split(","))))
    instances = list(takewhile(lambda name: name.startswith("MIG-"), names))
    if num_seen and instances:
        return (
            instances  # a process sees one of its MIG instances, but each worker can have another
        )
    return names[:num_seen]


def find_gpus() -> list[str]:
    """Return `usable_gpus` of this process; an empty list if torch or CUDA is missing."""
    try:
        import torch
    except ImportError:
        return []
    num_seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return usable_gpus(os.environ.get(VARIABLE), num_seen)


def claim_gpus(roles: PlacedRoles) -> list[str]:
    """Return the GPUs of this machine for the places of a run, in order; import torch only if it needs any.

    Raises:
        ValueError: the machine has fewer GPUs than the run needs.
    """
    needed = gpus_needed(roles)
    gpus = find_gpus() if needed else []
    if len(gpus) < needed:
        raise ValueError(
            f"execute.device {roles.execute.device!r} needs {needed} GPUs of this machine, {say_seen(len(gpus))}: "
            "--set execute.device=cpu executes the run without"
        )
    return gpus


def say_seen(num_gpus: int) -> str:
    """Return text with the number of GPUs that torch sees, and the variable that limits them."""
    inherited = os.environ.get(VARIABLE)
    return f"torch sees {num_gpus}" + ("" if inherited is None else f" ({VARIABLE}={inherited!r})")


def _places_in_order(roles: PlacedRoles) -> Iterator[Place]:
    """Yield every place that a run may take: first replicas, trainers, reward models, then added replicas."""
    placement, first = Placement(roles), roles.rollout.kind_of_each
    has_replicas = roles.replicas_compute
    if has_replicas:
        yield from (placement.replica(replica, kind) for replica, kind in enumerate(first))
    for places in placement.trainers:
        yield from places
    yield from placement.reward_models
    if has_replicas:
        yield from map(placement.replica, range(len(first), roles.most_replicas))


class Servers:
    """The servers of `rollout.external`, each used by at most one replica at a time."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._free = deque(endpoints)
        """The one that was used last is at the end, so a spare server replaces a dead one."""
        self._of: dict[int, str] = {}

    @classmethod
    def of(cls, rollout: RolloutConfig) -> Servers | None:
        """Return the servers of a run; None if its replicas have engines of their own."""
        return None if rollout.external is None else cls(rollout.external.endpoints)

    def take(self, replica: int) -> str:
        """Return the URL of a free server for a replica.

        Raises:
            RuntimeError: every server has a replica.
        """
        if not self._free:
            raise RuntimeError(f"no server of rollout.external.endpoints is free for {replica=}")
        self._of[replica] = self._free.popleft()
        return self._of[replica]

    def free(self, replica: int) -> None:
        """Release the server of a replica that has ended."""
        url = self._of.pop(replica, None)
        if url is not None:
            self._free.append(url)


QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""CPU quota of a container in cgroup v2: CPU time and period, both in microseconds; the time is "max" without a limit."""


def usable_cores() -> int:
    """Return how many CPU cores this process may use: its affinity, limited by its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, _allowed(QUOTA)))


def roles_on_cores(roles: PlacedRoles) -> int:
    """Return how many processes of a run compute on the CPU: initial replicas, trainer ranks and reward models.

    Trainers that only count rollouts are left out.
    """
    return sum(number for number, pool in _processes(roles) if roles.device_of(pool) == "cpu")


def _processes(roles: PlacedRoles) -> Iterator[tuple[int, str]]:
    """Yield the number of processes and the pool of each kind of role."""
    for kind in roles.rollout.kinds if roles.replicas_compute else ():
        yield kind.replicas, kind.pool
    yield roles.trainer.num_gpus, roles.trainer.pool
    for follower in roles.followers:
        if not follower.counts_only:
            yield follower.num_gpus, follower.pool
    if roles.verifier.pool is not None:
        yield roles.verifier.workers, roles.verifier.pool


def threads_of(roles: PlacedRoles) -> int:
    """Return the CPU threads of each worker process; workers on GPUs use them to write and check weights."""
    if roles.execute.threads is not None:
        return roles.execute.threads
    if roles.execute.deterministic:
        return 1
    num_roles = roles_on_cores(roles) or sum(number for number, _ in _processes(roles))
    return threads_per_role(usable_cores(), num_roles)


def _allowed(quota: Path) -> int:
    """Return the number of cores in a CPU quota, rounded up."""
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
        return ceil(int(allowed) / int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return 10**6
