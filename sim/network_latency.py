"""The network latency between the controller, next to the trainer, and a replica in another datacenter.

Over a link, each command and each event takes the link's latency. Messages arrive in the order in
which they were sent. If a replica is lost, all its sent events arrive, but no command that was on
the way to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import simpy

from streamrl.engine.messages import Abort, Command, Event, Generate, LoadWeights

ReplicaCommand = Generate | LoadWeights | Abort
S = TypeVar("S", Generate, LoadWeights, Abort)


class DelayedChannel:
    """Delays commands to a replica and events from it by the same latency."""

    def __init__(self, env: simpy.Environment, seconds: float, emit: Callable[[Event], None]):
        """Create an empty channel.

        Args:
            env: simulated time.
            seconds: latency in one direction.
            emit: receives each event that has arrived.
        """
        self.seconds = seconds
        self._env = env
        self._emit = emit
        self._there: deque[tuple[float, list[tuple[ReplicaCommand, Callable[[Any], None]]]]] = (
            deque()
        )
        """Messages to the replica by the instant when they were sent: each command, and what takes
        it.
        """
        self._back: deque[tuple[float, list[Event]]] = deque()
        """Events from the replica by the instant when they were sent."""

    def send(self, command: S, take: Callable[[S], None]) -> None:
        """Pass a command to `take` after the latency."""
        there, now = self._there, self._env.now
        if not there or there[-1][0] != now:
            there.append((now, []))
            self._wait(self._arrive_there)
        there[-1][1].append((command, take))

    def emit(self, event: Event) -> None:
        """Pass on an event after the latency."""
        back, now = self._back, self._env.now
        if not back or back[-1][0] != now:
            back.append((now, []))
            self._wait(self._arrive_back)
        back[-1][1].append(event)

    def bring_back(self) -> None:
        """Deliver all events that are under way now."""
        while self._back:
            self._arrive_back()

    def cut(self) -> list[Command]:
        """Cancel all messages; return the commands that were under way, each of which must end in an event."""
        commands = [command for _, sent in self._there for command, _ in sent]
        self._there.clear()
        self._back.clear()
        return [command for command in commands if not isinstance(command, Abort)]

    def _wait(self, arrive: Callable[[simpy.Event], None]) -> None:
        """Let the messages of this instant arrive after the latency."""
        callbacks = self._env.timeout(self.seconds).callbacks
        assert callbacks is not None, "it has not happened yet"
        callbacks.append(arrive)

    def _arrive_there(self, arrival: simpy.Event) -> None:
        if self._there:
            for command, take in self._there.popleft()[1]:
                take(command)

    def _arrive_back(self, arrival: simpy.Event | None = None) -> None:
        if self._back:
            for event in self._back.popleft()[1]:
                self._emit(event)
