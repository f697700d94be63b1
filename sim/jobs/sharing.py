"""The ways in which jobs share GPUs, and the candidates of each way.

- equal-split: each job has the same constant part. With two jobs these are static halves.
- static-split: each job has a constant part. The best parts are chosen.
- time-slicing: jobs take turns on all GPUs, each for a time slice.
- lending: as static-split, and GPUs of jobs that are absent are lent to others. An owner gets them back when it comes.
- preemption: jobs are served in order of deadline, then priority, then shortest first. Each gets as many GPUs as it
  wants. A later job has what is left, and may have to wait. GPUs that are left over are lent.

Lending and preemption change the GPUs of a job only if it then ends sooner, with its restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import inf, prod
from typing import NamedTuple, assert_never

from streamrl.runfile.jobs_config import SharingName
from streamrl.sim.jobs.schedule import JobState, ScheduledJob, Sharing

NAMES: tuple[SharingName, ...] = (
    "equal-split",
    "static-split",
    "time-slicing",
    "lending",
    "preemption",
)
MOST_TRIED = 5000
"""Most combinations of sizes that are all simulated. Of more, sizes are improved step by step from an equal split."""
Sizes = tuple[int, ...]
"""The shares of each job: those that it owns, or those that it wants."""


class Candidate(NamedTuple):
    """One way to share."""

    name: SharingName
    sizes: Sizes
    make: Callable[[], Sharing]


@dataclass
class FixedSizes:
    """Each job has its own shares from its submission to its end."""

    sizes: Sizes

    def targets(self, now: float, states: Sequence[JobState]) -> list[int]:
        """Return the own shares of each job that is present."""
        return [
            size if state.is_present else 0 for size, state in zip(self.sizes, states, strict=True)
        ]

    def look_at(self, states: Sequence[JobState]) -> float:
        """Return infinity: only jobs that come and end change anything."""
        return inf


@dataclass
class TimeSlices:
    """Jobs take turns on all GPUs."""

    num_shares: int
    slice: float
    """Seconds from the GPUs of a job, its restart included, to the turn of the next."""
    _turn: int = -1

    def targets(self, now: float, states: Sequence[JobState]) -> list[int]:
        """Return all GPUs for the job whose turn it is."""
        if self._is_over(now, states):
            self._turn = self._next(states)
        targets = [0] * len(states)
        if self._turn >= 0:
            targets[self._turn] = states[self._turn].job.best_share(self.num_shares)
        return targets

    def _is_over(self, now: float, states: Sequence[JobState]) -> bool:
        if self._turn < 0 or not states[self._turn].is_present:
            return True
        state = states[self._turn]
        return state.phase == "running" and state.since + self.slice <= now

    def _next(self, states: Sequence[JobState]) -> int:
        """Return the next job that is present, in the order of the file; -1 if none is."""
        places = [(self._turn + 1 + offset) % len(states) for offset in range(len(states))]
        return next((place for place in places if states[place].is_present), -1)

    def look_at(self, states: Sequence[JobState]) -> float:
        """Return the end of the slice; infinity if no other job waits for it."""
        is_alone = sum(state.is_present for state in states) < 2
        if self._turn < 0 or is_alone or states[self._turn].phase != "running":
            return inf
        return states[self._turn].since + self.slice


@dataclass
class LentSizes:
    """Each present job has its own shares, and those of absent jobs are lent."""

    num_shares: int
    sizes: Sizes

    def targets(self, now: float, states: Sequence[JobState]) -> list[int]:
        """Return the own shares of each present job, and lent ones that let it end sooner."""
        own = FixedSizes(self.sizes).targets(now, states)
        return lend(now, states, own, self.num_shares)

    def look_at(self, states: Sequence[JobState]) -> float:
        """Return infinity: only jobs that come and end change anything."""
        return inf


@dataclass
class Preemption:
    """Jobs are served in order, each with the shares that it wants."""

    num_shares: int
    sizes: Sizes
    _order: list[int] = field(default_factory=list)

    def targets(self, now: float, states: Sequence[JobState]) -> list[int]:
        """Return what each job gets in its turn, and what is lent of the rest."""
        if not self._order:
            self._order = service_order([state.job for state in states], self.num_shares)
        targets, left = [0] * len(states), self.num_shares
        for place in self._order:
            state = states[place]
            if state.is_present:
                most = min(self.sizes[place], left)
                held = [state.shares] if 0 < state.shares <= most else []
                options = [state.job.best_share(most), *held]
                targets[place] = min(options, key=lambda share: (state.end_at(share, now), share))
                left -= targets[place]
        return lend(now, states, targets, self.num_shares)

    def look_at(self, states: Sequence[JobState]) -> float:
        """Return infinity: only jobs that come and end change anything."""
        return inf


def service_order(jobs: Sequence[ScheduledJob], num_shares: int) -> list[int]:
    """Return the jobs in the order in which preemption serves them."""

    def key(place: int) -> tuple[float, float, float, int]:
        job = jobs[place]
        return job.deadline, -job.priority, job.time_alone(num_shares), place

    return sorted(range(len(jobs)), key=key)


def lend(now: float, states: Sequence[JobState], own: Sequence[int], num_shares: int) -> list[int]:
    """Return the shares of each job if free ones are lent, one job after the other.

    Each loan is the one that brings the largest gain: less time beyond deadlines, else earlier ends, weighted
    by priority.
    """
    targets = list(own)
    while True:
        free = num_shares - sum(targets)
        found = max(_loans(now, states, targets, free), default=None)
        if found is None or found[:2] <= (0.0, 0.0):
            return targets
        targets[-found[2]] = found[3]


def _loans(
    now: float, states: Sequence[JobState], targets: Sequence[int], free: int
) -> Iterator[tuple[float, float, int, int]]:
    """Yield the gains of each possible loan, and minus the place of the job with the shares that it then has."""
    for place, (state, target) in enumerate(zip(states, targets, strict=True)):
        if state.is_present and (target or free):
            before = state.end_at(target, now) if target in (0, *state.job.speeds) else inf
            for share in state.job.speeds:
                if target < share <= target + free:
                    yield (*_gain(state.job, before, state.end_at(share, now)), -place, share)


def _gain(job: ScheduledJob, before: float, after: float) -> tuple[float, float]:
    """Return how much less a job is late, and its earlier end weighted by priority; both in seconds."""
    less_late = max(0.0, before - job.deadline) - max(0.0, after - job.deadline)
    return less_late, job.priority * (before - after)


# Candidates ---------------------------------------------------------------------------------------


def equal_sizes(num_jobs: int, num_shares: int) -> Sizes:
    """Return the same part for each job; 0 if there are more jobs than shares."""
    return (num_shares // num_jobs,) * num_jobs


def make_candidate(
    name: SharingName, sizes: Sizes, num_shares: int, time_slice: float
) -> Candidate:
    """Return a way to share with its sizes, which time-slicing does not need."""
    make: Callable[[], Sharing]
    match name:
        case "equal-split" | "static-split":
            make = partial(FixedSizes, sizes)
        case "time-slicing":
            make = partial(TimeSlices, num_shares, time_slice)
        case "lending":
            make = partial(LentSizes, num_shares, sizes)
        case "preemption":
            make = partial(Preemption, num_shares, sizes)
        case _:
            assert_never(name)
    return Candidate(name, sizes, make)


Value = tuple[float, ...]


def best_sizes(
    jobs: Sequence[ScheduledJob],
    num_shares: int,
    value_of: Callable[[Sizes], Value | None],
    *,
    exclusive: bool,
) -> Sizes | None:
    """Return the sizes of the lowest value, the largest of equals; None if none has a value.

    Args:
        jobs: the jobs; a size is one of the shares at which a job fits.
        num_shares: equal parts of the pools.
        value_of: the value of sizes; None if they cannot be.
        exclusive: whether all sizes together must fit, as each job owns its part.
    """
    options = [sorted(job.speeds) for job in jobs]
    most: float = num_shares if exclusive else inf
    if not all(options):
        return None
    if prod(map(len, options)) > MOST_TRIED:
        return _improved(options, most, num_shares, value_of)
    fitting = (sizes for sizes in product(*options) if sum(sizes) <= most)
    found = [(value, sizes) for sizes in fitting if (value := value_of(sizes)) is not None]
    return min(found, key=lambda pair: (pair[0], [-size for size in pair[1]]))[1] if found else None


def _improved(
    options: Sequence[Sequence[int]],
    most: float,
    num_shares: int,
    value_of: Callable[[Sizes], Value | None],
) -> Sizes | None:
    """Improve an equal split: change the size of one job, or move a part from one job to another."""
    part = max(1, num_shares // len(options))
    sizes = tuple(max((o for o in each if o <= part), default=each[0]) for each in options)
    value = value_of(sizes) if sum(sizes) <= most else None
    while True:
        near = {other for other in _neighbours(options, sizes) if sum(other) <= most}
        found = [(better, each) for each in sorted(near) if (better := value_of(each)) is not None]
        best = min(found, default=None)
        if best is None or (value is not None and best[0] >= value):
            return None if value is None else sizes
        value, sizes = best


def _neighbours(options: Sequence[Sequence[int]], sizes: Sizes) -> Iterator[Sizes]:
    """Yield sizes of which one or two jobs have the next larger or smaller one."""
    moves = [(place, step) for place in range(len(sizes)) for step in (-1, 1)]
    for one, other in product(moves, moves):
        changed = list(sizes)
        for place, step in dict.fromkeys((one, other)):
            at = options[place].index(sizes[place]) + step
            if 0 <= at < len(options[place]):
                changed[place] = options[place][at]
        yield tuple(changed)
