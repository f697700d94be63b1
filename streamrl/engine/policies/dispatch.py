"""Which replica generates a rollout, and in which order a replica starts its rollouts.

Rollouts are sent as soon as a replica promises a fresh enough version, and wait in its queue.
Commands to a replica take effect in order, so a rollout sent after a load starts under the loaded
version or a newer one.

`BatchByBatch` keeps batches apart: a replica finishes its share of one batch before it starts its
share of the next. Each replica does so at its own pace, and loads weights between the two with
`LoadBetweenBatches`. StreamRL (arXiv 2504.15930) generates batches back to back with the newest
received weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heapreplace
from itertools import cycle
from typing import Protocol

from streamrl.engine.entities import Replica, Rollout
from streamrl.engine.messages import Command, Event, Generate, Verified
from streamrl.engine.state import State
from streamrl.runfile.dispatch_choice import DISPATCH, DispatchProperties
from streamrl.runfile.errors import shown
from streamrl.runfile.policies_config import GroupPlacement, PoliciesConfig
from streamrl.runfile.roles_config import RolloutConfig

# longer than any rollout, so that steps do not mix in a longest-first priority
MOST_TOKENS = 1 << 32


class Order(Protocol):
    """Sets the priority of each rollout in a replica's queue."""

    def priority(self, rollout: Rollout) -> int:
        """Return the priority of `rollout`; smaller starts first, ties go by id."""
        ...


class FirstInFirstOut:
    """Start rollouts in the order their prompts were drawn."""

    def priority(self, rollout: Rollout) -> int:
        """Return the id: ids follow draw order."""
        return rollout.id


class LongestFirst:
    """Start the rollouts of the oldest step first, and among them the one expected to be longest.

    Longest processing time first: on identical machines the makespan is at most 4/3 of the best
    (Graham 1969).
    """

    def priority(self, rollout: Rollout) -> int:
        """Return the step, then the expected length from long to short."""
        return rollout.group.step * MOST_TOKENS - rollout.expected_tokens


OVERLOAD = 1.5
"""Turns of an overloaded replica, relative to the least loaded one. SGLang's router has the same default
(`--balance-rel-threshold`, github.com/lightseekorg/smg, docs/getting-started/load-balancing.md).
"""
AHEAD = 1  # rollouts: in a real run the engine learns of a free slot slightly later

_MASK = (1 << 64) - 1


class Dispatch(DispatchProperties):
    """Send every rollout that may start to the replica that `choose` gives.

    A new policy overrides `choose`. It says what else it needs in the attributes of `DispatchProperties`.
    """

    ignores: tuple[type[Event], ...] = (Verified,)

    @classmethod
    def make(
        cls, policies: PoliciesConfig, rollout: RolloutConfig, seed: int, order: Order
    ) -> Dispatch:
        """Return the policy of a run, from these sections of its run file."""
        return cls(order, stay_together(policies.group_placement))

    def __init__(self, order: Order, keeps_groups: bool = False) -> None:
        self.order = order
        self.keeps_groups = keeps_groups
        """Whether a rollout goes to the replica of its siblings, which has already computed its
        prompt.
        """

    def decide(self, state: State) -> Iterable[Command]:
        """Yield rollouts in draw order until no replica may take the next one."""
        if not state.waiting.heap or state.stop_reason is not None or not state.fleet.has_come_up:
            return ()
        return self._send(state)

    def _send(self, state: State) -> Iterator[Command]:
        while (rollout := state.waiting.first()) is not None:
            if rollout.home is not None or self.keeps_groups:
                replica = self.place(state, rollout)
            else:
                replica = self.choose(state, rollout)
            if replica is None:
                return
            yield self.send(rollout, replica)

    def place(self, state: State, rollout: Rollout) -> Replica | None:
        """Return the replica of its last turn, or of a sibling, where that counts, or else the one that `choose` gives."""
        if rollout.home is not None:
            replica = _home(state, rollout)
        else:
            replica = _beside_siblings(rollout) if self.keeps_groups else None
        return self.choose(state, rollout) if replica is None else replica

    def send(self, rollout: Rollout, replica: Replica) -> Generate:
        """Return the command that lets `replica` continue `rollout` from its last token."""
        if rollout.turn:
            return Generate(
                rollout.id,
                replica.id,
                self.order.priority(rollout),
                prefix=rollout.tokens,
                turn=rollout.turn,
                observed=rollout.observed,
            )
        return Generate(rollout.id, replica.id, self.order.priority(rollout), prefix=rollout.tokens)

    def choose(self, state: State, rollout: Rollout) -> Replica | None:
        """Return a replica that promises a version fresh enough for `rollout`, or None while there is none."""
        raise NotImplementedError

    def deal_to_idle(
        self, state: State, units: list[list[Rollout]], replicas: list[Replica]
    ) -> Mapping[int, int]:
        """Return the replica of the first rollout of each unit, as `choose` does if all replicas are idle.

        The result is empty if only `choose` can tell. The planner uses this, because it takes a
        fifth of the time.
        """
        return {}

    def check_choices(self, check: Callable[[object, State, Rollout], Replica | None]) -> None:
        """Pass what `choose` of this object returns through `check`; other objects take no time for it."""
        choose = self.choose

        def checked(state: State, rollout: Rollout) -> Replica | None:
            return check(choose(state, rollout), state, rollout)

        self.choose = checked  # type: ignore[method-assign]  # the class keeps its own


class LeastLoaded(Dispatch):
    """Send each rollout to the replica with the least load (rollouts divided by its share)."""

    sends_just_in_time = True

    @classmethod
    def make(
        cls, policies: PoliciesConfig, rollout: RolloutConfig, seed: int, order: Order
    ) -> Dispatch:
        """Return the policy; `JustInTime` if the order of waiting rollouts may change."""
        if policies.learns_from_siblings or policies.follows_pressure:
            return JustInTime(order, rollout.max_running)
        return cls(order, stay_together(policies.group_placement))

    def choose(self, state: State, rollout: Rollout) -> Replica | None:
        """Return the least loaded replica that is fresh enough."""
        return state.fleet.least_loaded(rollout.group.oldest_version)

    def deal_to_idle(
        self, state: State, units: list[list[Rollout]], replicas: list[Replica]
    ) -> Mapping[int, int]:
        """See `Dispatch`."""
        places, shares = dict[int, int](), {replica.id: replica.share for replica in replicas}
        loads = [(replica.load, replica.id) for replica in replicas]
        after = dict.fromkeys(shares, 1)
        heapify(loads)
        for unit in units:
            places[unit[0].id] = replica_id = loads[0][1]
            after[replica_id] += len(unit)
            heapreplace(loads, (after[replica_id] / shares[replica_id], replica_id))
        return places


class JustInTime(LeastLoaded):
    """Send a rollout only when a replica has room to run it, because the order of waiting rollouts may change.

    A replica gets `AHEAD` more rollouts than it runs, so that a free slot is filled at once. With a
    KV-cache limit (`streamrl.engine.concurrency`), it gets no more than the limit.
    """

    def __init__(self, order: Order, max_running: int) -> None:
        super().__init__(order)
        self.most = max_running + AHEAD

    def choose(self, state: State, rollout: Rollout) -> Replica | None:
        """Return the least loaded replica that is fresh enough, if it has room."""
        replica = super().choose(state, rollout)
        if replica is None or len(replica.rollouts) >= self.most or not replica.has_place:
            return None
        return replica

    def deal_to_idle(
        self, state: State, units: list[list[Rollout]], replicas: list[Replica]
    ) -> Mapping[int, int]:
        """See `Dispatch`: rollouts that find no room wait."""
        return {}


class RoundRobin(Dispatch):
    """Send rollouts to the replicas in turn, whatever their load."""

    def choose(self, state: State, rollout: Rollout) -> Replica | None:
        """Return the next replica by id that is fresh enough."""
        return state.fleet.next_in_turn(rollout.group.oldest_version)

    def deal_to_idle(
        self, state: State, units: list[list[Rollout]], replicas: list[Replica]
    ) -> Mapping[int, int]:
        """See `Dispatch`."""
        return {unit[0].id: replica.id for unit, replica in zip(units, cycle(replicas))}


class Dealt(Dispatch):
    """Assign all waiting rollouts of a step to replicas at once, then send each to its replica."""

    def __init__(self, order: Order, keeps_groups: bool = False) -> None:
        super().__init__(order, keeps_groups)
        self.places: dict[int, int] = {}
        """Replica of each assigned rollout that was not sent yet; siblings follow the first of
        them.
        """

    def choose(self, state: State, rollout: Rollout) -> Replica | None:
        """Return the replica of `rollout`, after assigning its step if necessary."""
        oldest = rollout.group.oldest_version
        if rollout.id not in self.places:
            replicas = state.fleet.fresh(oldest)
            if not replicas:
                return None
            waiting = state.waiting.of_step(rollout.group.step)
            self.deal(state, in_units(waiting, self.keeps_groups), replicas)
        replica = state.fleet.replicas.get(self.places.pop(rollout.id))
        if replica is not None and replica.promises(oldest):
            return replica
        return state.fleet.least_loaded(oldest)

    def deal_to_idle(
        self, state: State, units: list[list[Rollout]], replicas: list[Replica]
    ) -> Mapping[int, int]:
        """See `Dispatch`."""
        self.deal(state, units, replicas)
        return self.places

    def send(self, rollout: Rollout, replica: Replica) -> Generate:
        """See `Dispatch`; a rollout that returns to the replica of its last turn keeps no other place."""
        if rollout.home is not None:
            self.places.pop(rollout.id, None)
        return super().send(rollout, replica)

    def deal(self, state: State, units: list[list[Rollout]], replicas: list[Replica]) -> None:
        """Assign each unit of rollouts, which stay together, to one of `replicas` with `share_out`."""
        raise NotImplementedError

    def share_out(self, units: list[list[Rollout]], replicas: list[Replica]) -> None:
        """Give each unit in turn to the replica with the least load; ties go to the smaller id."""
        shares = {replica.id: replica.share for replica in replicas}
        loads = [(replica.load, replica.id) for replica in replicas]
        heapify(loads)
        for unit in units:
            load, replica_id = loads[0]
            self.places[unit[0].id] = replica_id
            heapreplace(loads, (load + len(unit) / shares[replica_id], replica_id))


class Random(Dealt):
    """Give every replica an equal, random share of a step's rollouts (StreamRL's Random-FIFO)."""

    @classmethod
    def make(
        cls, policies: PoliciesConfig, rollout: RolloutConfig, seed: int, order: Order
    ) -> Dispatch:
        """Return the policy with the run's seed."""
        return cls(order, stay_together(policies.group_placement), seed)

    def __init__(self, order: Order, keeps_groups: bool, seed: int) -> None:
        super().__init__(order, keeps_groups)
        self.seed = seed

    def deal(self, state: State, units: list[list[Rollout]], replicas: list[Replica]) -> None:
        """Share out the units in an order that depends only on the seed and their ids."""
        self.share_out(sorted(units, key=lambda unit: mix(self.seed, unit[0].id)), replicas)


def stay_together(placement: GroupPlacement) -> bool:
    """Return whether the rollouts of a group share a replica."""
    return placement == "together"


def mix(seed: int, number: int) -> int:
    """Return 64 pseudo-random bits, the same for the same two numbers (SplitMix64, Steele et al. 2014)."""
    bits = (seed * 0xD1342543DE82EF95 + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def _home(state: State, rollout: Rollout) -> Replica | None:
    """Return the replica of a rollout's last turn, if it is fresh enough, has room and is not overloaded."""
    oldest = rollout.group.oldest_version
    replica = None if rollout.home is None else state.fleet.replicas.get(rollout.home)
    if replica is None or not (replica.has_place and replica.promises(oldest)):
        return None
    own = state.environments
    if own is None or own.turn_imbalance is None:
        return replica
    least = state.fleet.least_loaded(oldest)
    num, fewest = len(replica.rollouts), 0 if least is None else len(least.rollouts)
    is_overloaded = num - fewest >= own.turn_imbalance and num > OVERLOAD * fewest
    return None if is_overloaded else replica


def _beside_siblings(rollout: Rollout) -> Replica | None:
    """Return the replica of a sibling, if it is fresh enough."""
    for sibling in rollout.group.rollouts:
        if sibling.replica is not None and not sibling.replica.prefills:
            is_fresh = sibling.replica.promises(rollout.group.oldest_version)
            return sibling.replica if is_fresh else None
    return None


def in_units(rollouts: list[Rollout], keeps_groups: bool) -> list[list[Rollout]]:
    """Return the units that stay together: groups, or single rollouts."""
    if not keeps_groups:
        return [[rollout] for rollout in rollouts]
    units: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        units.setdefault(rollout.group.id, []).append(rollout)
    return list(units.values())


class EvenShares(Dealt):
    """Assign rollouts in draw order, each to the least loaded replica.

    While all replicas are idle, other dispatch policies do the same.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        super().__init__(dispatch.order, dispatch.keeps_groups)

    def deal(self, state: State, units: list[list[Rollout]], replicas: list[Replica]) -> None:
        """Share the units out."""
        self.share_out(units, replicas)


class BatchByBatch(Dispatch):
    """Assign a batch as another dispatch policy does, and send each replica its share once it is idle.

    A batch is assigned when the last share of the batch before is sent. Rollouts that come back are
    assigned again.
    """

    ignores = ()

    def __init__(self, dealt: Dealt) -> None:
        super().__init__(dealt.order, dealt.keeps_groups)
        self.dealt = dealt
        self._shares: dict[int, list[Rollout]] = {}
        """What each replica starts with once it is idle."""
        self._places: dict[int, int] = {}
        """Replica of each rollout of the last assigned batch."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the shares of idle replicas."""
        return super().decide(state) if state.fleet.idle else ()

    def deal_to_idle(
        self, state: State, units: list[list[Rollout]], replicas: list[Replica]
    ) -> Mapping[int, int]:
        """See `Dispatch`."""
        return self.dealt.deal_to_idle(state, units, replicas)

    def _send(self, state: State) -> Iterator[Command]:
        if not self._is_dealt(state) and not self._deal(state):
            return
        for replica in [state.fleet.replicas[r] for r in state.fleet.idle if r in self._shares]:
            yield from self._begin(replica)

    def _begin(self, replica: Replica) -> Iterator[Command]:
        oldest = max(rollout.group.oldest_version for rollout in self._shares[replica.id])
        if not replica.promises(oldest):
            return  # the replica loads first
        for rollout in self._shares.pop(replica.id):
            if not rollout.group.is_dropped:
                yield self.send(rollout, replica)

    def _is_dealt(self, state: State) -> bool:
        """Return whether the first waiting rollout has a replica that still exists."""
        first = state.waiting.first()
        if first is None:
            return True
        place = self._places.get(first.id)
        replica = None if place is None else state.fleet.replicas.get(place)
        return replica is not None and place in self._shares and replica.leaves_at is None

    def _deal(self, state: State) -> bool:
        """Assign the waiting rollouts of the oldest step to all replicas, once an idle one may start.

        Replicas that are busy or have older weights get a share too: they load before they start
        it.
        """
        first = state.waiting.first()
        assert first is not None
        oldest = first.group.oldest_version
        if not any(replica.promises(oldest) for replica in state.fleet.idle.values()):
            return False
        self.dealt.places.clear()
        units = in_units(state.waiting.of_step(first.group.step), self.keeps_groups)
        self.dealt.deal(state, units, state.fleet.serving())
        self._shares, self._places = defaultdict(list), {}
        for unit in units:
            replica = self.dealt.places[unit[0].id]
            self._shares[replica] += unit
            self._places |= {rollout.id: replica for rollout in unit}
        return True


class FromOutside:
    """Runs a dispatch policy from outside this package, and checks each replica that it chooses.

    The policies of this package run without these checks, which take time.
    """

    def __init__(self, policy: Dispatch, name: str) -> None:
        self._policy = policy
        self.name = name
        policy.check_choices(self._check)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the commands of the policy.

        Raises:
            ExtensionError: the policy raised an error, or did not choose a replica.
        """
        with DISPATCH.blaming(self.name):
            yield from self._policy.decide(state)

    def _check(self, chosen: object, state: State, rollout: Rollout) -> Replica | None:
        """Return what `choose` returned: a replica that may take the rollout now, or None."""
        if chosen is None:
            return None
        oldest = rollout.group.oldest_version
        if not isinstance(chosen, Replica):
            what = f"{shown(chosen)}, which is not a replica"
        elif state.fleet.replicas.get(chosen.id) is not chosen:
            what = f"replica {chosen.id}, which does not run"
        elif not chosen.promises(oldest):
            what = f"replica {chosen.id}, whose weights are too old for rollout {rollout.id}"
        else:
            return chosen
        must = f"choose must return one of state.fleet.fresh({oldest}), or None"
        raise DISPATCH.fault(self.name, f"returned {what}; {must}")
