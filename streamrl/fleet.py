"""The replicas of a run: who serves which policy version, with how much on its hands."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from streamrl.entities import Replica, Rollout

LOADS_PER_REPLICA = (
    8  # entries that a load heap may hold per replica before outdated ones are swept
)


@dataclass(slots=True)
class Fleet:
    """Every replica that is up or coming up, indexed by version and load."""

    replicas: dict[int, Replica] = field(default_factory=dict)
    num_serving: dict[int, int] = field(default_factory=dict)
    """Serving replicas by version."""
    outdated: dict[int, Replica] = field(default_factory=dict)
    """Serving replicas older than the pushed weights that nobody has told to load."""
    num_started: int = 0
    """Replicas ever started; the next one gets this id."""
    last_used: int = -1
    """Replica that got the last rollout."""
    has_come_up: bool = False
    """Whether every replica that was started first has served: before that, the first would get all."""
    _num_promised: dict[int, int] = field(default_factory=dict)
    _loads: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Heaps of (number of rollouts, replica) by promised version; outdated entries are skipped."""

    def is_synced(self, version: int) -> bool:
        """Whether every serving replica has `version`."""
        return len(self.num_serving) == 1 and version in self.num_serving

    def least_loaded(self, oldest_version: int) -> Replica | None:
        """Give the replica that promises `oldest_version` or newer and has the fewest rollouts, least id first."""
        best: tuple[int, int] | None = None
        for version, loads in self._loads.items():
            if version < oldest_version:
                continue
            while loads and not self._is_current(version, loads[0]):
                heappop(loads)
            if loads and (best is None or loads[0] < best):
                best = loads[0]
        return None if best is None else self.replicas[best[1]]

    def next_in_turn(self, oldest_version: int) -> Replica | None:
        """Give the replica that promises `oldest_version` or newer and follows the last one used."""
        if all(version < oldest_version for version in self._loads):
            return None
        for offset in range(1, self.num_started + 1):
            replica = self.replicas.get((self.last_used + offset) % self.num_started)
            if replica is not None and _promises(replica, oldest_version):
                return replica
        return None

    def start(self, replica_id: int, version: int) -> None:
        """Enter a replica that is coming up with `version`."""
        self.replicas[replica_id] = Replica(replica_id, version, loading=version)
        self.num_started = max(self.num_started, replica_id + 1)

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
            self.has_come_up = sum(self.num_serving.values()) == len(self.replicas)
        if version < pushed_version:
            self.outdated[replica_id] = replica

    def lose(self, replica_id: int) -> None:
        """Forget a replica that is gone; what ran there fails on its own."""
        replica = self.replicas.pop(replica_id)
        self.outdated.pop(replica_id, None)
        self._break_promise(replica)
        if replica.is_serving:
            replica.is_serving = False
            self._leave_version(replica)

    def find_outdated(self, pushed_version: int) -> None:
        """Enter that weights of `pushed_version` can be loaded."""
        self.outdated = {
            replica.id: replica
            for replica in self.replicas.values()
            if replica.is_serving and replica.loading is None and replica.version < pushed_version
        }

    def load(self, replica_id: int, version: int) -> None:
        """Enter that a replica was told to load `version`."""
        replica = self.replicas[replica_id]
        replica.loading = version
        self.outdated.pop(replica_id, None)
        self._promise(replica, version)

    def assign(self, rollout: Rollout, replica_id: int) -> None:
        """Enter that `rollout` was sent to a replica."""
        replica = self.replicas[replica_id]
        rollout.replica = replica
        replica.rollouts[rollout.id] = rollout
        self.last_used = replica_id
        self._note_load(replica)

    def release(self, rollout: Rollout) -> None:
        """Enter that `rollout` is no longer on its replica."""
        replica = rollout.replica
        assert replica is not None, f"rollout {rollout.id} runs nowhere"
        del replica.rollouts[rollout.id]
        rollout.replica = None
        self._note_load(replica)

    def _is_current(self, version: int, entry: tuple[int, int]) -> bool:
        load, replica_id = entry
        replica = self.replicas.get(replica_id)
        return replica is not None and replica.promised == version and len(replica.rollouts) == load

    def _promise(self, replica: Replica, version: int) -> None:
        self._break_promise(replica)
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
        if replica.promised is None:
            return
        loads = self._loads.setdefault(replica.promised, [])
        heappush(loads, (len(replica.rollouts), replica.id))
        if len(loads) > LOADS_PER_REPLICA * (len(self.replicas) + 1):
            loads[:] = [
                (len(other.rollouts), other.id)
                for other in self.replicas.values()
                if other.promised == replica.promised
            ]
            heapify(loads)

    def _leave_version(self, replica: Replica) -> None:
        self.num_serving[replica.version] -= 1
        if not self.num_serving[replica.version]:
            del self.num_serving[replica.version]


def _promises(replica: Replica, oldest_version: int) -> bool:
    return replica.promised is not None and replica.promised >= oldest_version
