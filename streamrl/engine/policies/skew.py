"""Skewness-aware dispatch: separate replicas for the rollouts expected to be longest.

StreamRL (arXiv 2504.15930), Algorithm 2. A long rollout decodes faster in a small batch, and short
rollouts fill the other replicas. `Latency` decides how many replicas the tail gets: the number with
the shortest generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from streamrl.engine.entities import Replica, Rollout
from streamrl.engine.estimates import Latency, latencies_of, quantile
from streamrl.engine.policies.dispatch import Dealt, Dispatch, Order, stay_together
from streamrl.engine.state import State
from streamrl.runfile.policies_config import PoliciesConfig, SkewObjective
from streamrl.runfile.roles_config import RolloutConfig

# quantiles of length that represent each part, as in Algorithm 2
TAIL_QUANTILE, REGULAR_QUANTILE = 0.9, 0.5

DRAIN_POINTS = 32  # lengths at which a draining batch is evaluated: 3 % of its rollouts apart
# minimum gain over even shares; `Latency` assumes one context length, and its error is about as
# large
LEAST_GAIN = 0.03


@dataclass(frozen=True, slots=True)
class Partition:
    """The tail of a step, and the tail's replicas."""

    last_of_tail: tuple[int, int]
    """Sort key of the shortest rollout of the tail: (negative expected tokens, id)."""
    tail: dict[int, Replica]
    """The tail's replicas by id."""


class SkewnessAware(Dealt):
    """Assign the tail of a step to its own replicas, and the others to the rest, longest first."""

    needs_latency = True
    needs_lengths = True
    has_tail = True

    @classmethod
    def make(
        cls, policies: PoliciesConfig, rollout: RolloutConfig, seed: int, order: Order
    ) -> Dispatch:
        """Return the policy with the seconds of a decode step of each kind of replica."""
        wanted_by = f"policies.dispatch {policies.dispatch!r}"
        latencies = list(latencies_of(policies, rollout.others, wanted_by))
        tail = (latencies, policies.tail_share, policies.skew_objective)
        return cls(order, stay_together(policies.group_placement), *tail)

    def __init__(
        self,
        order: Order,
        keeps_groups: bool,
        latencies: Sequence[Latency],
        tail_share: float,
        objective: SkewObjective,
    ) -> None:
        """Take the seconds of a decode step for each kind of replica, the share of the tail, and the objective."""
        super().__init__(order, keeps_groups)
        self.latencies = latencies
        self.tail_share = tail_share
        self.objective = objective
        self.partitions: dict[int, Partition | None] = {}
        """By step, for rollouts that are dispatched again; None where the step was not split."""

    def deal(self, state: State, units: list[list[Rollout]], replicas: list[Replica]) -> None:
        """Assign both parts; rollouts that come back or are drawn later join the part of their length."""
        units = sorted(units, key=_place)
        step = units[0][0].group.step
        if step not in self.partitions:
            self._forget_trained(state)
            self.partitions[step] = self._divide(state, units, replicas)
        partition = self.partitions[step]
        if partition is None:
            self.share_out(units, replicas)
            return
        tail = [replica for replica in replicas if replica.id in partition.tail]
        rest = [replica for replica in replicas if replica.id not in partition.tail]
        is_long = [_place(unit) <= partition.last_of_tail for unit in units]
        for part, own in ((True, tail), (False, rest)):
            members = [
                unit for unit, is_tail in zip(units, is_long, strict=True) if is_tail is part
            ]
            self.share_out(members, own or replicas)

    def _forget_trained(self, state: State) -> None:
        self.partitions = {s: p for s, p in self.partitions.items() if s > state.leader.version}

    def _divide(
        self, state: State, units: list[list[Rollout]], replicas: list[Replica]
    ) -> Partition | None:
        """Split a step's units, longest first, and the replicas; return None where a split gains nothing."""
        expected = [rollout.expected_tokens for unit in units for rollout in unit]
        tail, num_tail = _head(units, self.tail_share * len(expected))
        if not tail or len(replicas) < 2 or min(expected) == max(expected):
            return None
        replicas = sorted(replicas, key=self._pace)
        num_replicas = self._num_of_tail(state, expected, num_tail, replicas)
        own = {replica.id: replica for replica in replicas[:num_replicas]}
        return Partition(_place(tail[-1]), own) if own else None

    def _pace(self, replica: Replica) -> tuple[float, int]:
        """Return the sort key of a replica: seconds per token of a single rollout there."""
        return self.latencies[replica.kind].step_time(1), replica.id

    def _num_of_tail(
        self, state: State, expected: list[int], num_tail: int, replicas: list[Replica]
    ) -> int:
        """Return the number of tail replicas, for a tail of the first `num_tail` of `expected` tokens, longest first."""
        match self.objective:
            case "drain":
                tail, regular = sorted(expected[:num_tail]), sorted(expected[num_tail:])
                return self._best_drain(tail, regular, replicas)
            case "max" | "sum":
                lengths = state.recent.ordered if state.recent.is_full else sorted(expected)
                long, middle = quantile(lengths, TAIL_QUANTILE), quantile(lengths, REGULAR_QUANTILE)
                regular_part = (len(expected) - num_tail, middle)
                together = max if self.objective == "max" else sum
                return self._best_split((num_tail, long), regular_part, replicas, together)
            case _:
                assert_never(self.objective)

    def _best_split(
        self,
        tail: tuple[int, int],
        regular: tuple[int, int],
        replicas: list[Replica],
        together: Callable[[list[float]], float],
    ) -> int:
        """Return the number of tail replicas by Algorithm 2, from (rollouts, tokens of each) of both parts."""

        def cost(tail_replicas: int) -> tuple[float, float]:
            parts = ((tail, replicas[:tail_replicas]), (regular, replicas[tail_replicas:]))
            in_rounds = [self._time(own, partial(_rounds_time, part)) for part, own in parts]
            flowing = [self._time(own, partial(_flowing_time, part)) for part, own in parts]
            return together(in_rounds), max(flowing)

        return min(range(1, len(replicas)), key=cost)

    def _best_drain(self, tail: list[int], regular: list[int], replicas: list[Replica]) -> int:
        """Return the number of tail replicas, with batches that shrink while they drain; 0 for no split."""

        def drain(lengths: list[int], own: list[Replica]) -> float:
            return self._time(own, lambda latency, alike: drain_time(latency, lengths, alike))

        def cost(tail_replicas: int) -> float:
            if not tail_replicas:
                return (1 - LEAST_GAIN) * drain(sorted(tail + regular), replicas)
            return max(
                drain(tail, replicas[:tail_replicas]), drain(regular, replicas[tail_replicas:])
            )

        return min(range(len(replicas)), key=cost)

    def _time(self, replicas: list[Replica], time: Callable[[Latency, float], float]) -> float:
        """Return the longest time over kinds of replicas, each computed as if all replicas were of that kind."""
        everyone = sum(replica.share for replica in replicas)
        shares = {replica.kind: replica.share for replica in replicas}
        return max(time(self.latencies[kind], everyone / share) for kind, share in shares.items())


def drain_time(latency: Latency, lengths: list[int], num_replicas: float) -> float:
    """Return the seconds in which replicas that share `lengths` (sorted, shortest first) generate them, longest first.

    A batch shrinks as rollouts end, and so does the time of a decode step. If more rollouts wait
    than run, free slots are refilled. The work in full batches may then take longer than any
    rollout.
    """
    share = len(lengths) / num_replicas
    batch = min(share, latency.most_running)
    work = latency.step_time(batch) * sum(lengths) / num_replicas / batch
    seconds, before = 0.0, 0
    for part in range(DRAIN_POINTS):
        place = 1 - batch / share * (1 - (part + 0.5) / DRAIN_POINTS)
        tokens = quantile(lengths, place)
        seconds += latency.step_time(batch * (1 - part / DRAIN_POINTS)) * (tokens - before)
        before = tokens
    return max(work, seconds)


def _rounds_time(part: tuple[int, int], latency: Latency, num_replicas: float) -> float:
    """Return the seconds of (rollouts, tokens of each) in full batches, one after the other."""
    return latency.time(*part, num_replicas)


def _flowing_time(part: tuple[int, int], latency: Latency, num_replicas: float) -> float:
    """Return the seconds of (rollouts, tokens of each) where batches refill as rollouts finish, not round by round.

    With whole rounds many splits are equal; this time shows which of them has spare room.
    """
    num_rollouts, tokens = part
    share = num_rollouts / num_replicas
    batch = min(share, latency.most_running)
    return latency.step_time(batch) * tokens * max(1.0, share / batch)


def _place(unit: list[Rollout]) -> tuple[int, int]:
    """Return the sort key of a unit: its longest rollout, longest first, ties by id."""
    return -max([rollout.expected_tokens for rollout in unit]), unit[0].id


def _head(units: list[list[Rollout]], most: float) -> tuple[list[list[Rollout]], int]:
    """Return the first units with at most `most` rollouts in total, and that total."""
    head, count = [], 0
    for unit in units:
        if count + len(unit) > most:
            break
        head.append(unit)
        count += len(unit)
    return head, count
