"""The cores that roles compute on: each has its own, or all share those of one host.

Where cores are shared a role works off its seconds at the speed that the company leaves it, and whenever somebody
begins or ends all others go on with what is left of theirs at another speed (processor sharing). Times are exact:
between two such instants speeds are constant.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import simpy

from streamrl.sim.costs.cpu_contention import ALONE, CoreSharing, RoleKind


class WorkTime(Protocol):
    """What one role waits with: seconds of work, which may take longer."""

    def work(self, seconds: float) -> simpy.Event:
        """Return what happens when so many seconds of work are done."""
        ...

    def leave(self) -> float:
        """Break the work off; return the seconds of it that are done."""
        ...


class Cores:
    """Give each role its time."""

    def __init__(self, env: simpy.Environment, sharing: CoreSharing | None = None) -> None:
        """Take the cores of a run.

        Args:
            env: simulated time.
            sharing: what roles lose that compute at the same time; None where nobody takes anything from another.
        """
        self._env = env
        self._shared = None if sharing is None else _SharedCores(env, sharing)

    def time_of(self, kind: RoleKind) -> WorkTime:
        """Return the time of a role that comes up."""
        return OwnTime(self._env) if self._shared is None else SharedTime(self._shared, kind)


class OwnTime:
    """Of a role that nobody slows down: a second of work takes a second."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._began_at = 0.0

    def work(self, seconds: float) -> simpy.Event:
        """See `WorkTime`."""
        self._began_at = self._env.now
        return self._env.timeout(seconds)

    def leave(self) -> float:
        """See `WorkTime`."""
        return self._env.now - self._began_at


class SharedTime:
    """Of a role that shares cores."""

    def __init__(self, cores: _SharedCores, kind: RoleKind) -> None:
        self.kind = kind
        self.left = 0.0
        """Seconds of work that are not done."""
        self._cores = cores
        self._seconds = 0.0
        self._done: simpy.Event

    def work(self, seconds: float) -> simpy.Event:
        """See `WorkTime`."""
        self._seconds = self.left = seconds
        self._done = self._cores.enter(self)
        return self._done

    def leave(self) -> float:
        """See `WorkTime`."""
        self._cores.leave(self)
        return self._seconds - self.left

    def go_on(self, seconds: float) -> None:
        """Take so many seconds of work as done."""
        self.left = max(0.0, self.left - seconds)

    def end(self) -> None:
        """Take all of it as done."""
        self.left = 0.0
        self._done.succeed()


class _SharedCores:
    """Who computes now, and who will be done first."""

    def __init__(self, env: simpy.Environment, sharing: CoreSharing) -> None:
        self._env = env
        self._sharing = sharing
        self._busy: dict[SharedTime, None] = {}
        self._speeds = ALONE
        self._since = 0.0
        """When speeds changed last."""
        self._next: simpy.Event | None = None
        """The end of the work that will be done first, unless somebody begins or leaves before."""

    def enter(self, role: SharedTime) -> simpy.Event:
        """Begin to work off what is left of a role's work; return what happens at its end."""
        self._go_on()
        self._busy[role] = None
        self._look_ahead()
        return self._env.event()

    def leave(self, role: SharedTime) -> None:
        """End a role's work, done or not."""
        if role in self._busy:
            self._go_on()
            del self._busy[role]
            self._look_ahead()

    def _go_on(self) -> None:
        """Work off what was done since speeds changed last."""
        elapsed, self._since = self._env.now - self._since, self._env.now
        for role in self._busy:
            role.go_on(elapsed * self._speeds[role.kind])

    def _look_ahead(self) -> None:
        """Set the speeds of those who compute now, and wait for the first to be done."""
        self._next = None
        if not self._busy:
            return
        busy = Counter(role.kind for role in self._busy)
        self._speeds = self._sharing.speeds(busy["generating"], busy["training"], busy["handling"])
        first = min(self._busy, key=self._time_left)
        self._next = self._env.timeout(self._time_left(first), first)
        assert self._next.callbacks is not None, "it has not happened yet"
        self._next.callbacks.append(self._end)

    def _time_left(self, role: SharedTime) -> float:
        return role.left / self._speeds[role.kind]

    def _end(self, event: simpy.Event) -> None:
        """End the work that is done first; an event that others have overtaken says nothing."""
        if event is self._next:
            role = event.value
            assert isinstance(role, SharedTime), "whose work it is the end of"
            self.leave(role)
            role.end()
