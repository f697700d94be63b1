"""The cores that roles compute on: each role has its own, or all roles share those of one host.

On shared cores a role works at a speed that depends on the other active roles. When a role begins
or ends, all others continue their remaining work at a new speed (processor sharing). Speeds are
constant between two such events, so times are exact.
"""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Protocol

import simpy
from simpy.events import NORMAL

from streamrl.sim.costs.cpu_contention import ALONE, CoreSharing, RoleKind


class WorkTime(Protocol):
    """The clock of one role: its seconds of work may take longer than simulated seconds."""

    def work(self, seconds: float) -> simpy.Event:
        """Return an event that occurs when `seconds` of work are done."""
        ...

    def leave(self) -> float:
        """Stop the work, and return the seconds of it that are done."""
        ...


class Cores:
    """Creates the clocks of roles."""

    def __init__(self, env: simpy.Environment, sharing: CoreSharing | None = None) -> None:
        """Set up the cores of a run.

        Args:
            env: simulated time.
            sharing: slowdown of roles that compute at the same time; None if roles do not slow each
                other down.
        """
        self._env = env
        self._shared = None if sharing is None else _SharedCores(env, sharing)

    @property
    def num_shared(self) -> int:
        """Number of cores that all roles share; 1 if each role has its own."""
        return 1 if self._shared is None else self._shared.num_cores

    def time_of(self, kind: RoleKind) -> WorkTime:
        """Return the clock of a new role."""
        return OwnTime(self._env) if self._shared is None else SharedTime(self._shared, kind)


class OwnTime:
    """The clock of a role with its own cores: one second of work takes one second."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._began_at = 0.0
        self._end: simpy.Event | None = None
        """End of its last work. It is used again once it has occurred, because a new event costs more."""

    def work(self, seconds: float) -> simpy.Event:
        """See `WorkTime`."""
        env = self._env
        self._began_at = env.now
        if self._end is None or not self._end.processed or seconds < 0:
            self._end = env.timeout(seconds)
        else:
            self._end.callbacks = []
            env.schedule(self._end, NORMAL, seconds)
        return self._end

    def leave(self) -> float:
        """See `WorkTime`."""
        return self._env.now - self._began_at


class SharedTime:
    """The clock of a role on shared cores."""

    def __init__(self, cores: _SharedCores, kind: RoleKind) -> None:
        self.kind = kind
        self.left = 0.0
        """Seconds of work that remain."""
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
        """Count `seconds` of work as done."""
        self.left = max(0.0, self.left - seconds)

    def end(self) -> None:
        """Count all of the work as done."""
        self.left = 0.0
        self._done.succeed()


class _SharedCores:
    """The roles that compute now, and the one that will finish first."""

    def __init__(self, env: simpy.Environment, sharing: CoreSharing) -> None:
        self._env = env
        self._sharing = sharing
        self._busy: dict[SharedTime, None] = {}
        self._speeds = ALONE
        self._since = 0.0
        """Simulated time of the last change of speeds."""
        self._next: simpy.Event | None = None
        """End of the work that will finish first, unless another role begins or leaves earlier."""

    @property
    def num_cores(self) -> int:
        """Number of cores of the host."""
        return ceil(self._sharing.cores)

    def enter(self, role: SharedTime) -> simpy.Event:
        """Start the remaining work of a role, and return the event of its end."""
        self._go_on()
        self._busy[role] = None
        self._look_ahead()
        return self._env.event()

    def leave(self, role: SharedTime) -> None:
        """Remove a role, whether its work is done or not."""
        if role in self._busy:
            self._go_on()
            del self._busy[role]
            self._look_ahead()

    def _go_on(self) -> None:
        """Count the work that was done since speeds last changed."""
        elapsed, self._since = self._env.now - self._since, self._env.now
        for role in self._busy:
            role.go_on(elapsed * self._speeds[role.kind])

    def _look_ahead(self) -> None:
        """Set the speeds of the active roles, and wait for the first to finish."""
        self._next = None
        if not self._busy:
            return
        busy = Counter(role.kind for role in self._busy)
        roles, others = (busy["generating"], busy["training"]), (busy["handling"], busy["acting"])
        self._speeds = self._sharing.speeds(*roles, *others)
        first = min(self._busy, key=self._time_left)
        self._next = self._env.timeout(self._time_left(first), first)
        assert self._next.callbacks is not None, "it has not happened yet"
        self._next.callbacks.append(self._end)

    def _time_left(self, role: SharedTime) -> float:
        return role.left / self._speeds[role.kind]

    def _end(self, event: simpy.Event) -> None:
        """End the work that finishes first; ignore an event that is out of date."""
        if event is self._next:
            role = event.value
            assert isinstance(role, SharedTime), "whose work it is the end of"
            self.leave(role)
            role.end()
