"""Estimates that policies use: seconds of a decode step, lengths of recent rollouts, and times of the last step.

Estimated generation time (StreamRL, arXiv 2504.15930, Equations 1 and 2):

    a rollout of L tokens in a batch of b:      step_time(b) * L
    M rollouts of mean length L on a replica:   step_time(b) * L * ceil(M / b),  b = min(M, most running)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from streamrl.engine.fleet import Fleet
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import ReplicasConfig


class Latency:
    """Seconds of a decode step by batch size: linear between given points, constant beyond them."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """Take (batch, seconds) points in rising order of batch. The last batch is the most that a replica runs."""
        self._batches = [batch for batch, _ in points]
        self._seconds = [seconds for _, seconds in points]
        self.most_running = self._batches[-1]

    def step_time(self, batch: float) -> float:
        """Return the seconds of one decode step of `batch` rollouts."""
        right = bisect_right(self._batches, batch)
        if right == 0:
            return self._seconds[0]
        if right == len(self._batches):
            return self._seconds[-1]
        low, high = self._batches[right - 1], self._batches[right]
        share = (batch - low) / (high - low)
        return self._seconds[right - 1] + share * (self._seconds[right] - self._seconds[right - 1])

    def replica_time(self, num_rollouts: float, tokens: float) -> float:
        """Return the seconds in which one replica generates rollouts of `tokens` each, in full batches."""
        if num_rollouts <= 0:
            return 0.0
        batch = min(num_rollouts, self.most_running)
        return self.step_time(batch) * tokens * ceil(num_rollouts / batch)

    def time(self, num_rollouts: float, tokens: float, num_replicas: float) -> float:
        """Return the seconds in which replicas generate an equal share of the rollouts each.

        Raises:
            ValueError: there are rollouts and no replica.
        """
        if num_replicas < 1 and num_rollouts > 0:
            raise ValueError(f"{num_rollouts} rollouts need a replica, got {num_replicas}")
        return self.replica_time(num_rollouts / max(1, num_replicas), tokens)


# one step follows a drift fastest; a second one averages out which rollouts finish last
STEPS_KEPT = 2


def latency_of(policies: PoliciesConfig, wanted_by: str) -> Latency:
    """Return the seconds of a decode step of a run; raises `ValueError` if they are missing."""
    if policies.latency is None:
        raise ValueError(
            f"policies.latency is missing: {wanted_by} needs the seconds of a decode step"
        )
    return Latency(policies.latency)


def latencies_of(
    policies: PoliciesConfig, others: tuple[ReplicasConfig, ...], wanted_by: str
) -> Iterator[Latency]:
    """Yield the seconds of a decode step of each kind of replica."""
    yield latency_of(policies, wanted_by)
    for other in others:
        if other.latency is None:
            raise ValueError(f"rollout.others: latency is missing, which {wanted_by} needs")
        yield Latency(other.latency)


class RecentLengths:
    """The lengths of the rollouts of the last two steps."""

    def __init__(self, enough: int) -> None:
        """Take the number of rollouts of a step, which is the minimum sample.

        Short rollouts finish first, so fewer of them look shorter than the step is.
        """
        self._enough = enough
        self._arrived: deque[int] = deque(maxlen=STEPS_KEPT * enough)
        self._ordered: list[int] | None = None
        """Sorted lengths. Computed at the first request, because few runs need them."""

    @property
    def is_full(self) -> bool:
        """Whether there are enough lengths for an estimate."""
        return len(self._arrived) >= self._enough

    @property
    def ordered(self) -> list[int]:
        """The lengths, shortest first."""
        if self._ordered is None:
            self._ordered = sorted(self._arrived)
        return self._ordered

    def add(self, tokens: int) -> None:
        """Add the length of a finished rollout, and forget the oldest one beyond the limit."""
        arrived, ordered = self._arrived, self._ordered
        if ordered is not None:
            if len(arrived) == arrived.maxlen:
                del ordered[bisect_left(ordered, arrived[0])]
            insort(ordered, tokens)
        arrived.append(tokens)

    def expected_rest(self, done: float) -> float:
        """Return the remaining tokens of a rollout that has `done` tokens: the median of the longer ones.

        0 if no rollout was longer.
        """
        ordered = self.ordered
        first = bisect_right(ordered, done)
        if first == len(ordered):
            return 0.0
        return ordered[(first + len(ordered)) // 2] - done


def quantile(ordered: Sequence[int], share: float) -> int:
    """Return the length that a share of the lengths (sorted in rising order) does not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class StepTimes(NamedTuple):
    """Times of one step, in seconds."""

    step: int
    generation_time: float
    """From its first `Generate` to its last `Generated`. Where steps overlap, it begins only when
    the step before is generated.
    """
    training_time: float
    """Time in which the trainer worked on it."""
    num_replicas: int
    """Replicas that served when its generation began."""
    update_time: float = 0.0
    """Part of `training_time` in which the gradient was summed over ranks, and the weights were updated."""

    @property
    def lag(self) -> float:
        """Seconds by which generation is slower than training; negative if training is slower."""
        return self.generation_time - self.training_time


@dataclass(slots=True)
class StepTimer:
    """Measures the last complete step since the run began or was resumed."""

    last: StepTimes | None = None
    _newest: int = 0
    """Newest step with a rollout that was sent."""
    _begun: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By step: time of its first `Generate`, and the number of replicas that served then."""
    _ended_at: dict[int, float] = field(default_factory=dict)
    """By step: time of its last `Generated` so far."""
    _free_at: float = 0.0
    """Time of the last `Generated` of the last step."""
    _work_began_at: float = 0.0
    _training_time: float = 0.0

    def begin_generation(self, step: int, now: float, fleet: Fleet) -> None:
        """Enter that a rollout of `step` was sent to a replica."""
        if step > self._newest:
            self._newest = step
            self._begun[step] = (now, fleet.num_up)

    def end_generation(self, step: int, now: float) -> None:
        """Record that a rollout of `step` came back; it is ignored if that step is already made."""
        if step in self._begun:
            self._ended_at[step] = now

    def begin_work(self, now: float) -> None:
        """Record that the trainer began to work."""
        self._work_began_at = now

    def end_work(self, now: float) -> None:
        """Record that the trainer's work ended."""
        self._training_time += now - self._work_began_at

    def end_step(self, step: int, now: float) -> None:
        """Record that the trainer made policy version `step`."""
        update_time = now - self._work_began_at
        self.end_work(now)
        training_time, self._training_time = self._training_time, 0.0
        begun, ended_at = self._begun.pop(step, None), self._ended_at.pop(step, None)
        if begun is None or ended_at is None:
            return  # all its rollouts were drawn for other steps
        began_at, num_replicas = begun
        generation_time = max(0.0, ended_at - max(began_at, self._free_at))
        self._free_at = max(self._free_at, ended_at)
        self.last = StepTimes(step, generation_time, training_time, num_replicas, update_time)

    def forget(self) -> None:
        """Forget unfinished steps, because they are repeated."""
        self._newest = 0
        self._begun.clear()
        self._ended_at.clear()
        self._training_time = 0.0
