"""The replicas of a run: the policy version and load of each, and the initial fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from streamrl.engine.concurrency import ConcurrencyLimit, FinalLengths
from streamrl.engine.entities import Group, Replica, Rollout
from streamrl.engine.messages import Generated, ReplicaStarted, Resize, StartReplica, StopReplica
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import LendingConfig, RolloutConfig
from streamrl.runfile.workload_config import WorkloadConfig

LOADS_PER_REPLICA = 8  # entries of a load heap per replica before outdated ones are removed
ABORT_TIME = 5.0
"""Seconds before the loss of a machine at which its rollouts move: enough for a decode step or a
prefill pass, after which aborts take effect, and for the answers. Assumed.
"""
ABORT_SHARE = 0.25
"""The same as a share of the warning, where that is less."""
DRAIN_TIME = 120.0
"""Seconds before the loss of a machine at which its replicas get no more rollouts. An earlier notice is kept
until then, so that no machine is idle for long. It is the warning of AWS.
"""


@dataclass(slots=True)
class Kind:
    """Replicas of one kind."""

    num_wanted: int
    """Target number of replicas."""
    share: float = 1.0
    """Rollouts that a replica gets for each rollout of one of the first kind."""
    is_lent: bool = False
    """Whether its replicas are on GPUs of the primary trainer."""
    prefills: bool = False
    """Whether its replicas only prefill contexts, which other replicas decode."""
    num_away: int = 0
    """Machines that are taken away, or will be, and have no replacement yet."""

    @property
    def num_possible(self) -> int:
        """Target number of replicas, without those whose machines are taken away."""
        return self.num_wanted - self.num_away


@dataclass(slots=True)
class Fleet:
    """All replicas that serve or start, indexed by version and load."""

    replicas: dict[int, Replica] = field(default_factory=dict)
    num_serving: dict[int, int] = field(default_factory=dict)
    """Serving replicas by version."""
    outdated: dict[int, Replica] = field(default_factory=dict)
    """Serving replicas older than the pushed weights, without a load command."""
    idle: dict[int, Replica] = field(default_factory=dict)
    """Serving replicas without rollouts, the longest idle first."""
    stopping: dict[int, Replica] = field(default_factory=dict)
    """Replicas that are being stopped."""
    asleep: dict[int, Replica] = field(default_factory=dict)
    """Replicas whose GPUs the primary trainer has now: its own, or borrowed ones."""
    lent: dict[int, Replica] = field(default_factory=dict)
    """Replicas that start on GPUs of the primary trainer, or have these GPUs."""
    leaving: dict[int, Replica] = field(default_factory=dict)
    """Replicas whose machines will be taken away, until they have ended."""
    away: dict[int, int] = field(default_factory=dict)
    """Kind of each replica whose machine is taken away, or will be, until it is replaced."""
    kinds: list[Kind] = field(default_factory=lambda: [Kind(0)])
    """Target replicas by kind; `Resize` changes the first kind."""
    final: FinalLengths | None = None
    """Lengths of rollouts, where limits of replicas follow their KV caches."""
    most_places: int = 0
    """Upper bound of those limits."""
    num_started: int = 0
    """Replicas started so far; the next one gets this id."""
    num_lost: int = 0
    """Replicas that ended without a stop command, or never started, unless they were excused."""
    last_used: int = -1
    """Replica that got the last rollout."""
    has_come_up: bool = False
    """Whether all initial replicas have served. Before that, the first one would get all rollouts.
    """
    _num_promised: dict[int, int] = field(default_factory=dict)
    _loads: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """Heaps of (load, replica) by promised version. Outdated entries are skipped."""
    _prefill_loads: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """The same of replicas that only prefill."""
    _newest: dict[int, tuple[float, int]] = field(default_factory=dict)
    """The newest entry of each replica in those heaps; all others are outdated."""
    _changed: dict[int, Replica] = field(default_factory=dict)
    """Replicas whose load is not in the heaps yet; it is entered when a heap is read."""
    _knows_most: bool = False
    """Whether the most loaded replica was requested. Few runs need it, so the heap is built on
    demand.
    """
    _most: list[tuple[int, int]] = field(default_factory=list)
    """Heap of (negative number of rollouts, replica). Outdated entries are skipped."""

    @property
    def num_wanted(self) -> int:
        """Target number of replicas."""
        return sum(kind.num_wanted for kind in self.kinds)

    @property
    def num_lacking(self) -> int:
        """Replicas to start, or to stop if negative. Replicas that leave and machines that are away do not count."""
        staying = len(self.replicas) - len(self.leaving)
        return self.num_wanted - len(self.away) - staying

    def lacking(self) -> int:
        """Return the first kind with fewer replicas than its target.

        Raises:
            ValueError: no kind lacks a replica.
        """
        there = Counter(r.kind for r in self.replicas.values() if r.leaves_at is None)
        for kind, wanted in enumerate(self.kinds):
            if there[kind] < wanted.num_possible:
                return kind
        raise ValueError("no kind of replica is below its target")

    def is_synced(self, version: int) -> bool:
        """Whether every serving replica has `version`; also if all replicas sleep."""
        if not self.num_serving:
            return bool(self.asleep) and len(self.asleep) == len(self.replicas)
        return len(self.num_serving) == 1 and version in self.num_serving

    @property
    def is_settled(self) -> bool:
        """Whether no replica is starting, loading or stopping."""
        return not self.stopping and all(r.loading is None for r in self.replicas.values())

    @property
    def num_up(self) -> int:
        """Number of serving replicas, of any version."""
        return sum(self.num_serving.values())

    def newest_idle(self) -> Replica | None:
        """Return the idle replica that started last, or None."""
        return self.idle[max(self.idle)] if self.idle else None

    def least_loaded(self, oldest_version: int, *, prefills: bool = False) -> Replica | None:
        """Return the replica with the least load that promises `oldest_version` or newer; ties go to the smaller id.

        With `prefills` it is one of the replicas that only prefill, else one of the others.
        """
        if self._changed:
            self._enter_loads()
        best: tuple[float, int] | None = None
        newest = self._newest
        for version, loads in (self._prefill_loads if prefills else self._loads).items():
            if version < oldest_version:
                continue
            while loads and newest.get((first := loads[0])[1]) is not first:
                heappop(loads)
            if loads and (best is None or loads[0] < best):
                best = loads[0]
        return None if best is None else self.replicas[best[1]]

    def most_loaded(self) -> Replica | None:
        """Return the replica with the most rollouts; ties go to the smaller id."""
        if not self._knows_most:
            self._knows_most = True
            self._sweep_most()
        self._enter_loads()
        most = self._most
        while most and not self._has_load(-most[0][0], most[0][1]):
            heappop(most)
        return self.replicas[most[0][1]] if most else None

    def serves(self, group: Group) -> bool:
        """Return whether a replica promises a version that is fresh enough for a group."""
        return any(version >= group.oldest_version for version in self._num_promised)

    def next_in_turn(self, oldest_version: int) -> Replica | None:
        """Return the next replica by id after the last used one that promises `oldest_version` or newer."""
        if all(version < oldest_version for version in self._num_promised):
            return None
        for offset in range(1, self.num_started + 1):
            replica = self.replicas.get((self.last_used + offset) % self.num_started)
            if replica is not None and replica.promises(oldest_version):
                return replica
        return None

    def fresh(self, oldest_version: int) -> list[Replica]:
        """Return all replicas that promise `oldest_version` or newer, by id."""
        if all(version < oldest_version for version in self._num_promised):
            return []
        found = [r for r in self.replicas.values() if r.promises(oldest_version)]
        return sorted(found, key=_by_id)

    def serving(self) -> list[Replica]:
        """Return all serving replicas, by id."""
        return sorted((r for r in self.replicas.values() if r.is_serving), key=_by_id)

    def start(self, replica_id: int, version: int, kind: int = 0) -> None:
        """Record that a replica starts with `version`."""
        share = self.kinds[kind].share
        replica = Replica(replica_id, version, kind, share, loading=version)
        replica.prefills = self.kinds[kind].prefills
        if self.kinds[kind].is_lent:
            replica.is_lent = True
            self.lent[replica_id] = replica
        if self.final is not None:
            replica.places = ConcurrencyLimit(self.most_places)
        self.replicas[replica_id] = replica
        self.num_started = max(self.num_started, replica_id + 1)

    def change(self, command: StartReplica | StopReplica | Resize) -> None:
        """Record that a replica starts or stops, or that the target changes."""
        match command:
            case StartReplica(replica_id, version, kind):
                self.start(replica_id, version, kind)
            case StopReplica(replica_id):
                self.stopping[replica_id] = self._remove(replica_id)
            case Resize(num_replicas):
                num_fewer = max(0, self.kinds[0].num_wanted - num_replicas)
                self.kinds[0].num_wanted = num_replicas
                for replica_id in [r for r, kind in self.away.items() if kind == 0][:num_fewer]:
                    self.replace_machine(replica_id)  # none is needed

    def serve(self, replica_id: int, version: int, pushed_version: int) -> None:
        """Record that a replica serves `version`."""
        replica = self.replicas[replica_id]
        if replica.is_serving:
            self._leave_version(replica)
        replica.version = version
        replica.loading = None
        replica.is_excused = False
        if replica.leaves_at is not None:
            replica.is_serving = False
            return
        replica.is_serving = True
        self.num_serving[version] = self.num_serving.get(version, 0) + 1
        self._promise(replica, version)
        self._see_if_up()
        if version != pushed_version or replica.must_load:
            self.outdated[replica_id] = replica

    def come_up(self, event: ReplicaStarted, pushed_version: int, num_running: int) -> None:
        """Record that a replica started, with its cache size; other replicas run `num_running` rollouts."""
        replica = self.replicas[event.replica]
        if replica.is_lent:
            self._sleep(replica)
            return
        places = replica.places
        if places is not None and self.final is not None:
            places.open(event.cache_tokens, self.final.expected(num_running))
        self.serve(event.replica, event.version, pushed_version)

    def see_pressure(self, rollout: Rollout, event: Generated, num_running: int) -> None:
        """Record the cache use of a replica when one of its rollouts ends, before that rollout is released."""
        replica = rollout.replica
        assert self.final is not None, "limits follow the KV caches"
        if replica is None or replica.places is None:
            return
        if event.finish != "aborted":
            self.final.add(rollout.group.prompt_tokens + event.tokens)
        left, expected = len(replica.rollouts) - 1, self.final.expected(num_running)
        replica.places.see(event.cache_use, event.num_preempted, left, expected)

    def lose(self, replica_id: int) -> None:
        """Forget a lost replica; its rollouts fail by their own events. The loss of one that was leaving does not count."""
        if self.stopping.pop(replica_id, None) is None:
            lost = self._remove(replica_id)
            self.num_lost += not lost.is_excused and lost.leaves_at is None

    def leave(self, replica_id: int, warning: float, now: float) -> None:
        """Record that a replica's machine will be taken away in `warning` seconds; the earliest of several notices counts.

        A replica that has ended, and one on GPUs of the primary trainer, are not affected.
        """
        replica = self.replicas.get(replica_id)
        if replica is None or replica.is_lent:
            return
        if replica.leaves_at is None:
            self.leaving[replica_id] = replica
            self.away[replica_id] = replica.kind
            self.kinds[replica.kind].num_away += 1
            self._withdraw(replica)
        at = now + warning
        replica.leaves_at = at if replica.leaves_at is None else min(at, replica.leaves_at)
        rest = max(0.0, warning - min(ABORT_TIME, ABORT_SHARE * warning))
        replica.empty_at = min(now + rest, replica.empty_at)
        self._see_if_up()

    def replace_machine(self, replica_id: int) -> None:
        """Record that a machine is there in place of that of a replica, unless one was before."""
        kind = self.away.pop(replica_id, None)
        if kind is not None:
            self.kinds[kind].num_away -= 1

    def _see_if_up(self) -> None:
        """Record whether all initial replicas serve, except those that leave."""
        if not self.has_come_up and self.num_up:
            on_trainer = len(self.asleep) + len(self.lent)
            awaited = len(self.replicas) - on_trainer - len(self.leaving)
            self.has_come_up = self.num_up == awaited

    def excuse_loads(self) -> None:
        """Record that weights were lost with the trainer: a replica that starts or loads now may fail for want of them."""
        for replica in self.replicas.values():
            replica.is_excused = replica.loading is not None

    def lend(self, replica_id: int, version: int) -> None:
        """Record that a replica gets GPUs that the primary trainer had, and then serves `version`."""
        replica = self.asleep.pop(replica_id)
        if replica.is_lent:
            self.lent[replica_id] = replica
        self.load(replica_id, version)
        replica.version = version

    def take_back(self, replica_id: int) -> None:
        """Record that a replica gets no rollouts any more, because the trainer gets its GPUs."""
        replica = self.replicas[replica_id]
        replica.loading = replica.version  # its command is running
        self._withdraw(replica)

    def end_lending(self, replica_id: int) -> None:
        """Record that the trainer has the GPUs of a replica."""
        self._sleep(self.replicas[replica_id])

    def _sleep(self, replica: Replica) -> None:
        replica.loading = None
        replica.is_excused = False
        self.lent.pop(replica.id, None)
        self.asleep[replica.id] = replica

    def _remove(self, replica_id: int) -> Replica:
        replica = self.replicas.pop(replica_id)
        self.asleep.pop(replica_id, None)
        self.lent.pop(replica_id, None)
        self.leaving.pop(replica_id, None)
        self.outdated.pop(replica_id, None)
        self.idle.pop(replica_id, None)
        self._changed.pop(replica_id, None)
        self._break_promise(replica)
        if replica.is_serving:
            replica.is_serving = False
            self._leave_version(replica)
        return replica

    def find_outdated(self, pushed_version: int) -> None:
        """Record that weights of `pushed_version` can be loaded."""
        self.outdated = {
            replica.id: replica
            for replica in self.replicas.values()
            if replica.is_serving
            and replica.loading is None
            and (replica.version != pushed_version or replica.must_load)
        }

    def load(self, replica_id: int, version: int) -> None:
        """Record that a replica got the command to load `version`."""
        replica = self.replicas[replica_id]
        replica.loading = version
        replica.must_load = False
        self.outdated.pop(replica_id, None)
        self._promise(replica, version)

    def fall_back(self, version: int) -> None:
        """Record that versions after `version` are lost. Replicas that have or load one must load again."""
        self.outdated.clear()
        for replica in self.replicas.values():
            if max(replica.version, replica.loading or 0) > version:
                replica.must_load = True
                self._break_promise(replica)

    def assign(self, rollout: Rollout, replica_id: int, now: float) -> None:
        """Record that `rollout` was sent to a replica at `now` seconds."""
        replica = self.replicas[replica_id]
        rollout.phase = "generating"
        rollout.replica = replica
        rollout.sent_at = now
        if not replica.rollouts:
            self.idle.pop(replica_id, None)
        replica.rollouts[rollout.id] = rollout
        self.last_used = replica_id
        self._changed[replica_id] = replica

    def release(self, rollout: Rollout) -> None:
        """Record that `rollout` is no longer on its replica."""
        replica = rollout.replica
        assert replica is not None, f"rollout {rollout.id} runs nowhere"
        del replica.rollouts[rollout.id]
        rollout.replica = None
        rollout.is_aborting = False
        self._changed[replica.id] = replica
        if not replica.rollouts:
            self._find_if_idle(replica)

    def _has_load(self, load: int, replica_id: int) -> bool:
        replica = self.replicas.get(replica_id)
        return replica is not None and len(replica.rollouts) == load

    def _sweep_most(self) -> None:
        self._most = [(-len(replica.rollouts), replica.id) for replica in self.replicas.values()]
        heapify(self._most)

    def _promise(self, replica: Replica, version: int) -> None:
        self._break_promise(replica)
        if not replica.must_load:
            replica.promised = version
            self._num_promised[version] = self._num_promised.get(version, 0) + 1
        self._changed[replica.id] = replica
        self._find_if_idle(replica)

    def _withdraw(self, replica: Replica) -> None:
        """Let a replica get no rollouts any more."""
        self._break_promise(replica)
        self.outdated.pop(replica.id, None)
        self.idle.pop(replica.id, None)
        if replica.is_serving:
            replica.is_serving = False
            self._leave_version(replica)

    def _break_promise(self, replica: Replica) -> None:
        promised = replica.promised
        if promised is None:
            return
        replica.promised = None
        self._newest.pop(replica.id, None)
        self._num_promised[promised] -= 1
        if not self._num_promised[promised]:
            del self._num_promised[promised]
            self._loads.pop(promised, None)
            self._prefill_loads.pop(promised, None)

    def _find_if_idle(self, replica: Replica) -> None:
        if replica.rollouts or replica.loading is not None or not replica.is_serving:
            self.idle.pop(replica.id, None)
        else:
            self.idle[replica.id] = replica

    def _enter_loads(self) -> None:
        """Enter the loads that have changed since a heap was read."""
        newest, most_entries = self._newest, LOADS_PER_REPLICA * (len(self.replicas) + 1)
        for replica in self._changed.values():
            if self._knows_most:
                self._enter_most(replica)
            if (promised := replica.promised) is None:
                continue
            heaps = self._prefill_loads if replica.prefills else self._loads
            loads = heaps.get(promised)
            if loads is None:
                loads = heaps[promised] = []
            number = replica.id
            entry, before = (replica.load, number), newest.get(number)
            newest[number] = entry
            if loads and loads[0] is before:
                heapreplace(loads, entry)
                continue
            heappush(loads, entry)
            if len(loads) > most_entries:
                loads[:] = [each for each in loads if newest.get(each[1]) is each]
                heapify(loads)
        self._changed.clear()

    def _enter_most(self, replica: Replica) -> None:
        heappush(self._most, (-len(replica.rollouts), replica.id))
        if len(self._most) > LOADS_PER_REPLICA * (len(self.replicas) + 1):
            self._sweep_most()

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
    lending: LendingConfig | None = None,
    lent: RolloutConfig | None = None,
) -> Fleet:
    """Return the initial fleet of a run; `lent` are the replicas on GPUs of the primary trainer.

    Raises:
        ValueError: the share of rollouts for replicas of another kind is missing.
    """
    kinds = list(_kinds(rollout))
    if lending is not None and lent is not None:
        if lending.share is None:
            raise ValueError("lending.share is missing, by which replicas get rollouts")
        kinds.append(Kind(lent.replicas, lending.share, is_lent=True))
    if not policies.follows_pressure:
        return Fleet(kinds=kinds)
    longest = workload.max_prompt_tokens + rollout.max_tokens
    final = FinalLengths(algorithm.rollouts_per_step, longest)
    return Fleet(kinds=kinds, final=final, most_places=rollout.max_running)


def _kinds(rollout: RolloutConfig) -> Iterator[Kind]:
    """Yield the kinds of replicas of a run.

    Raises:
        ValueError: the share of rollouts for replicas of another kind is missing.
    """
    yield Kind(rollout.replicas)
    for other in rollout.others:
        if other.prefills:
            yield Kind(other.replicas, prefills=True)
            continue
        if other.share is None:
            raise ValueError("rollout.others: share is missing, by which each kind gets rollouts")
        yield Kind(other.replicas, other.share)
