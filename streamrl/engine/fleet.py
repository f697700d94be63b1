"""The replicas of a run: which policy version each serves, its load, and the fleet that a run begins with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from streamrl.engine.concurrency import ConcurrencyLimit, FinalLengths
from streamrl.engine.entities import Replica, Rollout
from streamrl.engine.messages import Generated, ReplicaStarted, Resize, StartReplica, StopReplica
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import RolloutConfig
from streamrl.runfile.workload_config import WorkloadConfig

LOADS_PER_REPLICA = (
    8  # entries that a load heap may hold per replica before outdated ones are swept
)


@dataclass(slots=True)
class Kind:
    """Replicas that are alike."""

    num_wanted: int
    """How many there should be."""
    share: float = 1.0
    """Rollouts that one gets for each that one of the first kind gets."""


@dataclass(slots=True)
class Fleet:
    """Every replica that is up or coming up, indexed by version and load."""

    replicas: dict[int, Replica] = field(default_factory=dict)
    num_serving: dict[int, int] = field(default_factory=dict)
    """Serving replicas by version."""
    outdated: dict[int, Replica] = field(default_factory=dict)
    """Serving replicas older than the pushed weights that nobody has told to load."""
    idle: dict[int, Replica] = field(default_factory=dict)
    """Serving replicas with nothing on their hands, the one that has been so for longest first."""
    stopping: dict[int, Replica] = field(default_factory=dict)
    """Replicas that were told to end and have not."""
    kinds: list[Kind] = field(default_factory=lambda: [Kind(0)])
    """What replicas there should be; the first kind is the one that `Resize` changes."""
    final: FinalLengths | None = None
    """How long rollouts get, where the places of replicas follow their KV caches."""
    most_places: int = 0
    """Most rollouts that a replica may have then."""
    num_started: int = 0
    """Replicas ever started; the next one gets this id."""
    num_lost: int = 0
    """Replicas that ended without being told to, or never came up."""
    last_used: int = -1
    """Replica that got the last rollout."""
    has_come_up: bool = False
    """Whether every replica that was started first has served: before that, the first would get all."""
    _num_promised: dict[int, int] = field(default_factory=dict)
    _loads: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """Heaps of (load, replica) by promised version; outdated entries are skipped."""
    _knows_most: bool = False
    """Whether anyone has asked for the most loaded replica: few runs do, and keeping it costs them all."""
    _most: list[tuple[int, int]] = field(default_factory=list)
    """Heap of (number of rollouts, negative; replica); outdated entries are skipped."""

    @property
    def num_wanted(self) -> int:
        """Replicas that there should be."""
        return sum(kind.num_wanted for kind in self.kinds)

    def lacking(self) -> int:
        """Return the first kind of which there are fewer than there should be.

        Raises:
            ValueError: there is none.
        """
        there = Counter(replica.kind for replica in self.replicas.values())
        for kind, wanted in enumerate(self.kinds):
            if there[kind] < wanted.num_wanted:
                return kind
        raise ValueError("every replica is there that should be")

    def is_synced(self, version: int) -> bool:
        """Whether every serving replica has `version`."""
        return len(self.num_serving) == 1 and version in self.num_serving

    @property
    def is_settled(self) -> bool:
        """Whether no replica is coming up, loading or ending."""
        return not self.stopping and all(r.loading is None for r in self.replicas.values())

    @property
    def num_up(self) -> int:
        """Replicas that serve, whichever version."""
        return sum(self.num_serving.values())

    def newest_idle(self) -> Replica | None:
        """Return the replica that started last among those with nothing on their hands, or None."""
        return self.idle[max(self.idle)] if self.idle else None

    def least_loaded(self, oldest_version: int) -> Replica | None:
        """Return the replica that promises `oldest_version` or newer and has the least load, least id first."""
        best: tuple[float, int] | None = None
        for version, loads in self._loads.items():
            if version < oldest_version:
                continue
            while loads and not self._is_current(version, loads[0]):
                heappop(loads)
            if loads and (best is None or loads[0] < best):
                best = loads[0]
        return None if best is None else self.replicas[best[1]]

    def most_loaded(self) -> Replica | None:
        """Return the replica with the most rollouts, least id first."""
        if not self._knows_most:
            self._knows_most = True
            self._sweep_most()
        most = self._most
        while most and not self._has_load(-most[0][0], most[0][1]):
            heappop(most)
        return self.replicas[most[0][1]] if most else None

    def next_in_turn(self, oldest_version: int) -> Replica | None:
        """Return the replica that promises `oldest_version` or newer and follows the last one used."""
        if all(version < oldest_version for version in self._loads):
            return None
        for offset in range(1, self.num_started + 1):
            replica = self.replicas.get((self.last_used + offset) % self.num_started)
            if replica is not None and replica.promises(oldest_version):
                return replica
        return None

    def fresh(self, oldest_version: int) -> list[Replica]:
        """Return every replica that promises `oldest_version` or newer, by id."""
        if all(version < oldest_version for version in self._loads):
            return []
        found = [r for r in self.replicas.values() if r.promises(oldest_version)]
        return sorted(found, key=_by_id)

    def serving(self) -> list[Replica]:
        """Return every replica that serves, by id."""
        return sorted((r for r in self.replicas.values() if r.is_serving), key=_by_id)

    def start(self, replica_id: int, version: int, kind: int = 0) -> None:
        """Enter a replica that is coming up with `version`."""
        share = self.kinds[kind].share
        replica = Replica(replica_id, version, kind, share, load=1 / share, loading=version)
        if self.final is not None:
            replica.places = ConcurrencyLimit(self.most_places)
        self.replicas[replica_id] = replica
        self.num_started = max(self.num_started, replica_id + 1)

    def change(self, command: StartReplica | StopReplica | Resize) -> None:
        """Enter that a replica is coming up or, idle, going down, or how many there should be."""
        match command:
            case StartReplica(replica_id, version, kind):
                self.start(replica_id, version, kind)
            case StopReplica(replica_id):
                self.stopping[replica_id] = self._remove(replica_id)
            case Resize(num_replicas):
                self.kinds[0].num_wanted = num_replicas

    def serve(self, replica_id: int, version: int, pushed_version: int) -> None:
        """Enter that a replica now serves `version`."""
        replica = self.replicas[replica_id]
        if replica.is_serving:
            self._leave_version(replica)
        replica.version = version
        replica.loading = None
        replica.is_serving = True
        self.num_serving[version] = self.num_serving.get(version, 0) + 1
        self._promise(replica, version)
        if not self.has_come_up:
            self.has_come_up = self.num_up == len(self.replicas)
        if version != pushed_version or replica.must_load:
            self.outdated[replica_id] = replica

    def come_up(self, event: ReplicaStarted, pushed_version: int, num_running: int) -> None:
        """Enter that a replica is there, with a cache of so many tokens; others run so many rollouts."""
        places = self.replicas[event.replica].places
        if places is not None and self.final is not None:
            places.open(event.cache_tokens, self.final.expected(num_running))
        self.serve(event.replica, event.version, pushed_version)

    def see_pressure(self, rollout: Rollout, event: Generated, num_running: int) -> None:
        """Enter how full a replica's cache was when one of its rollouts ended, before that is released."""
        replica = rollout.replica
        if replica is None or replica.places is None or self.final is None:
            return
        if event.finish != "aborted":
            self.final.add(rollout.group.prompt_tokens + event.tokens)
        left, expected = len(replica.rollouts) - 1, self.final.expected(num_running)
        replica.places.see(event.cache_use, event.num_preempted, left, expected)

    def lose(self, replica_id: int) -> None:
        """Forget a replica that is gone; what ran there fails on its own."""
        if self.stopping.pop(replica_id, None) is None:
            self._remove(replica_id)
            self.num_lost += 1

    def _remove(self, replica_id: int) -> Replica:
        replica = self.replicas.pop(replica_id)
        self.outdated.pop(replica_id, None)
        self.idle.pop(replica_id, None)
        self._break_promise(replica)
        if replica.is_serving:
            replica.is_serving = False
            self._leave_version(replica)
        return replica

    def find_outdated(self, pushed_version: int) -> None:
        """Enter that weights of `pushed_version` can be loaded."""
        self.outdated = {
            replica.id: replica
            for replica in self.replicas.values()
            if replica.is_serving
            and replica.loading is None
            and (replica.version != pushed_version or replica.must_load)
        }

    def load(self, replica_id: int, version: int) -> None:
        """Enter that a replica was told to load `version`."""
        replica = self.replicas[replica_id]
        replica.loading = version
        replica.must_load = False
        self.outdated.pop(replica_id, None)
        self._promise(replica, version)

    def fall_back(self, version: int) -> None:
        """Enter that versions after `version` are lost: who has one, or loads one, must load before it goes on."""
        self.outdated.clear()
        for replica in self.replicas.values():
            if max(replica.version, replica.loading or 0) > version:
                replica.must_load = True
                self._break_promise(replica)

    def assign(self, rollout: Rollout, replica_id: int, now: float) -> None:
        """Enter that `rollout` was sent to a replica at `now` seconds."""
        replica = self.replicas[replica_id]
        rollout.phase = "generating"
        rollout.replica = replica
        rollout.sent_at = now
        replica.rollouts[rollout.id] = rollout
        self.last_used = replica_id
        self._note_load(replica)

    def release(self, rollout: Rollout) -> None:
        """Enter that `rollout` is no longer on its replica."""
        replica = rollout.replica
        assert replica is not None, f"rollout {rollout.id} runs nowhere"
        del replica.rollouts[rollout.id]
        rollout.replica = None
        rollout.is_aborting = False
        self._note_load(replica)

    def _is_current(self, version: int, entry: tuple[float, int]) -> bool:
        load, replica_id = entry
        replica = self.replicas.get(replica_id)
        return replica is not None and replica.promised == version and replica.load == load

    def _has_load(self, load: int, replica_id: int) -> bool:
        replica = self.replicas.get(replica_id)
        return replica is not None and len(replica.rollouts) == load

    def _sweep_most(self) -> None:
        self._most = [(-len(replica.rollouts), replica.id) for replica in self.replicas.values()]
        heapify(self._most)

    def _promise(self, replica: Replica, version: int) -> None:
        self._break_promise(replica)
        if replica.must_load:
            self._note_load(replica)
            return
        replica.promised = version
        self._num_promised[version] = self._num_promised.get(version, 0) + 1
        self._note_load(replica)

    def _break_promise(self, replica: Replica) -> None:
        promised = replica.promised
        if promised is None:
            return
        replica.promised = None
        self._num_promised[promised] -= 1
        if not self._num_promised[promised]:
            del self._num_promised[promised]
            del self._loads[promised]

    def _note_load(self, replica: Replica) -> None:
        width = replica.share if replica.places is None else replica.places.limit
        replica.load = (len(replica.rollouts) + 1) / width
        if replica.rollouts or replica.loading is not None or not replica.is_serving:
            self.idle.pop(replica.id, None)
        else:
            self.idle[replica.id] = replica
        if self._knows_most:
            heappush(self._most, (-len(replica.rollouts), replica.id))
            if len(self._most) > LOADS_PER_REPLICA * (len(self.replicas) + 1):
                self._sweep_most()
        if replica.promised is None:
            return
        loads = self._loads.setdefault(replica.promised, [])
        heappush(loads, (replica.load, replica.id))
        if len(loads) > LOADS_PER_REPLICA * (len(self.replicas) + 1):
            loads[:] = [
                (other.load, other.id)
                for other in self.replicas.values()
                if other.promised == replica.promised
            ]
            heapify(loads)

    def _leave_version(self, replica: Replica) -> None:
        self.num_serving[replica.version] -= 1
        if not self.num_serving[replica.version]:
            del self.num_serving[replica.version]


def _by_id(replica: Replica) -> int:
    return replica.id


def make_fleet(
    policies: PoliciesConfig,
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    workload: WorkloadConfig,
) -> Fleet:
    """Make it.

    Raises:
        ValueError: nobody has filled in what share of rollouts replicas of another kind get.
    """
    kinds = list(_kinds(rollout))
    if not policies.follows_pressure:
        return Fleet(kinds=kinds)
    longest = workload.max_prompt_tokens + rollout.max_tokens
    final = FinalLengths(algorithm.rollouts_per_step, longest)
    return Fleet(kinds=kinds, final=final, most_places=rollout.max_running)


def _kinds(rollout: RolloutConfig) -> Iterator[Kind]:
    """Yield what replicas there should be.

    Raises:
        ValueError: nobody has filled in what share of rollouts those of another kind get.
    """
    yield Kind(rollout.replicas)
    for other in rollout.others:
        if other.share is None:
            raise ValueError("rollout.others: share is missing, by which each kind gets rollouts")
        yield Kind(other.replicas, other.share)
