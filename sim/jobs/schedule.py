"""Simulate who has GPUs when: jobs start, finish steps, save, change their GPUs and end.

    submitted ─► waiting ─► running ─► done
                    ▲          │ at the end of a step, if its GPUs change
                    └─ saving ◄┘

A job holds its GPUs while it starts, runs and saves. Each step at one share takes the same time, which is the mean of a
simulation. So the simulation jumps from change to change, not from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Literal, NamedTuple, Protocol

MOST_CHANGES = 20_000
"""Maximum changes of a schedule. A time slice that is much too short would make more."""
MOMENT = 1e-6
"""Seconds within which two instants are the same."""


class JobSpeed(NamedTuple):
    """A job at one share of the pools."""

    step_time: float
    """Mean seconds of a step, with its part of checkpoints, evaluations and failed attempts."""
    start_time: float
    """Seconds from the GPUs to the first step at that pace: engines start, and the pipeline fills."""
    load_time: float
    """Seconds to read a checkpoint, before `start_time`; a new job has none."""
    save_time: float
    """Seconds to write a checkpoint."""
    busy: float = 0.0
    """GPU-seconds of a step in which GPUs work."""
    other_dollars: float = 0.0
    """Dollars of a step besides GPUs, such as traffic between pools."""


class ScheduledJob(NamedTuple):
    """One job to schedule."""

    name: str
    steps: int
    speeds: Mapping[int, JobSpeed]
    """By share; shares at which it does not fit are absent."""
    priority: float = 1.0
    deadline: float = inf
    """Seconds from the start of the schedule."""
    submitted_at: float = 0.0

    def best_share(self, most: int) -> int:
        """Return the share of at most `most` with the shortest step, the smallest of equals; 0 if none fits."""
        fitting = [share for share in self.speeds if share <= most]
        return min(fitting, key=lambda share: (self.speeds[share].step_time, share), default=0)

    def time_alone(self, num_shares: int) -> float:
        """Return the seconds that the job takes alone on the whole pools; infinite if it does not fit."""
        share = self.best_share(num_shares)
        if not share:
            return inf
        return self.speeds[share].start_time + self.steps * self.speeds[share].step_time


class Stretch(NamedTuple):
    """A time in which a job holds the same GPUs and does one thing."""

    job: int
    start: float
    end: float
    shares: int
    kind: Literal["switch", "run"]
    """switch: it starts, reads or writes a checkpoint. run: it makes steps."""
    steps: int = 0


class Schedule(NamedTuple):
    """The result of a simulated schedule."""

    stretches: list[Stretch]
    ends: list[float]
    """The end of each job, in seconds."""


Phase = Literal["later", "waiting", "running", "saving", "done"]


@dataclass
class JobState:
    """What a schedule knows of one job."""

    job: ScheduledJob
    steps_left: int
    phase: Phase = "later"
    shares: int = 0
    """Shares that it holds."""
    since: float = 0.0
    """When it got them."""
    steps_from: float = 0.0
    """When the first step on them begins."""
    until: float = inf
    """When its phase ends."""
    is_new: bool = True
    """Whether it has no checkpoint yet."""

    @property
    def is_present(self) -> bool:
        """Return whether it may have GPUs."""
        return self.phase not in ("later", "done")

    @property
    def speed(self) -> JobSpeed:
        """Return its speed at the shares that it holds."""
        return self.job.speeds[self.shares]

    def steps_until(self, instant: float) -> int:
        """Return the steps that have ended at an instant, on its present GPUs."""
        made = (instant - self.steps_from + MOMENT) / self.speed.step_time
        return max(0, min(self.steps_left, int(made)))

    def next_step_end(self, now: float) -> float:
        """Return the end of the step that runs at `now`. After a start, a job makes one step at least."""
        made = ceil((now - self.steps_from - MOMENT) / self.speed.step_time)
        return self.steps_from + max(1, min(self.steps_left, made)) * self.speed.step_time

    def end_at(self, shares: int, now: float) -> float:
        """Return when it would end if it had `shares` from now on; a changed share costs a restart."""
        if shares == 0:
            return NEVER
        speed = self.job.speeds[shares]
        if self.phase == "running" and shares == self.shares:
            return self.steps_from + self.steps_left * speed.step_time
        begin, left, loads = now, self.steps_left, not self.is_new
        if self.phase == "running":
            begin = self.next_step_end(now)
            left -= self.steps_until(begin)
            begin, loads = begin + self.speed.save_time, True
        elif self.phase == "saving":
            begin = self.until
        return begin + loads * speed.load_time + speed.start_time + left * speed.step_time

    # Changes --------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Hold no GPUs and wait for some."""
        self.phase, self.until, self.shares = "waiting", inf, 0

    def start(self, shares: int, now: float) -> None:
        """Take GPUs and start on them."""
        self.phase, self.shares, self.since = "running", shares, now
        loading = 0.0 if self.is_new else self.speed.load_time
        self.steps_from = now + loading + self.speed.start_time
        self.run_to_end()

    def run_to_end(self) -> None:
        """Keep the GPUs for all steps that are left."""
        self.until = self.steps_from + self.steps_left * self.speed.step_time

    def leave_after_step(self, now: float) -> None:
        """Give the GPUs up after the step that runs at `now`."""
        self.until = self.next_step_end(now)

    def end_steps(self, now: float) -> int:
        """Begin to save, or end if no step is left; return the steps that were made."""
        made = self.steps_until(now)
        self.steps_left -= made
        self.is_new, self.since = False, now
        if self.steps_left:
            self.phase, self.until = "saving", now + self.speed.save_time
        else:
            self.phase, self.until, self.shares = "done", now, 0
        return made


NEVER = 1e13
"""Stands for the end of a job without GPUs, where ends are compared."""


class Sharing(Protocol):
    """Who should have how many shares."""

    def targets(self, now: float, states: Sequence[JobState]) -> list[int]:
        """Return the shares that each job should have; together at most all. Absent jobs have 0."""

    def look_at(self, states: Sequence[JobState]) -> float:
        """Return when to ask again, even if no job comes or ends; infinity if there is no such time."""


def run_schedule(
    jobs: Sequence[ScheduledJob], num_shares: int, make_sharing: Callable[[], Sharing]
) -> Schedule | None:
    """Simulate jobs that share GPUs.

    Args:
        jobs: the jobs.
        num_shares: equal parts of the pools.
        make_sharing: makes the rule that says who should have how many.

    Returns:
        The schedule; None if a job never gets GPUs on which it fits, or changes are too many.
    """
    states = [JobState(job, job.steps, until=job.submitted_at) for job in jobs]
    return _Simulation(states, num_shares, make_sharing()).run()


@dataclass
class _Simulation:
    states: list[JobState]
    num_shares: int
    sharing: Sharing
    now: float = 0.0
    targets: list[int] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)

    def run(self) -> Schedule | None:
        for _ in range(MOST_CHANGES):
            if all(state.phase == "done" for state in self.states):
                return Schedule(self.stretches, [state.until for state in self.states])
            look_at = self.sharing.look_at(self.states)
            ends = [state.until for state in self.states if state.phase != "done"]
            self.now = max(self.now, min(*ends, look_at))
            if self.now == inf:
                return None
            has_changed = [
                self._advance(place, state)
                for place, state in enumerate(self.states)
                if state.phase != "done" and state.until <= self.now + MOMENT
            ]
            if any(has_changed) or look_at <= self.now:
                self.targets = self.sharing.targets(self.now, self.states)
            self._apply()
        return None

    def _advance(self, place: int, state: JobState) -> bool:
        """End a phase; return whether jobs came or went, so that shares are to be distributed again."""
        if state.phase == "later":
            state.wait()
            return True
        if state.phase == "saving":
            self._record(place, "switch", state.since, state.shares)
            state.wait()
            return False
        shares, since, steps_from = state.shares, state.since, state.steps_from
        made = state.end_steps(self.now)
        self._record(place, "switch", since, shares, end=steps_from)
        self._record(place, "run", steps_from, shares, made)
        return state.phase == "done"

    def _record(
        self,
        place: int,
        kind: Literal["switch", "run"],
        start: float,
        shares: int,
        steps: int = 0,
        end: float | None = None,
    ) -> None:
        """Record a stretch that ends now, or at `end`; nothing if it has no duration."""
        end = self.now if end is None else end
        if end > start:
            self.stretches.append(Stretch(place, start, end, shares, kind, steps))

    def _apply(self) -> None:
        """Start jobs that wait for free shares, and let others stop at the end of their step."""
        free = self.num_shares - sum(state.shares for state in self.states)
        pairs = [*zip(self.states, self.targets, strict=True)]
        for state, target in pairs:
            if state.phase == "waiting" and 0 < target <= free:
                free -= target
                state.start(target, self.now)
        for state, target in pairs:  # what jobs that wait or save will take
            if state.phase in ("waiting", "saving"):
                free -= max(0, target - state.shares)
        for state, target in pairs:
            if state.phase == "running":
                grows = max(0, target - state.shares)
                leaves = target != state.shares and grows <= max(0, free)
                free -= grows if leaves else 0
                if leaves:
                    state.leave_after_step(self.now)
                else:
                    state.run_to_end()
