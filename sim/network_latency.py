"""The network latency between the controller, next to the trainer, and a replica in another datacenter.

Over a link, each command and each event takes the link's latency. Messages arrive in the order in
which they were sent. If a replica is lost, all its sent events arrive, but no command that was on
the way to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import simpy

from streamrl.engine.messages import Abort, Command, Event, Generate, LoadWeights

ReplicaCommand = Generate | LoadWeights | Abort
Message = TypeVar("Message", bound=tuple[float, *tuple[Any, ...]])
"""When it was sent, and its content."""
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
        self._there: deque[tuple[float, ReplicaCommand, Callable[[Any], None]]] = deque()
        """Messages to the replica: when each was sent, the command, and what takes it."""
        self._back: deque[tuple[float, Event]] = deque()

    def send(self, command: S, take: Callable[[S], None]) -> None:
        """Pass a command to `take` after the latency."""
        self._wait(self._there, self._arrive_there)
        self._there.append((self._env.now, command, take))

    def emit(self, event: Event) -> None:
        """Pass on an event after the latency."""
        self._wait(self._back, self._arrive_back)
        self._back.append((self._env.now, event))

    def bring_back(self) -> None:
        """Deliver all events that are under way now."""
        while self._back:
            self._emit(self._back.popleft()[1])

    def cut(self) -> list[Command]:
        """Cancel all messages; return the commands that were under way, each of which must end in an event."""
        lost: list[Command] = [c for _, c, _ in self._there if not isinstance(c, Abort)]
        self._there.clear()
        self._back.clear()
        return lost

    def _wait(
        self, line: Sequence[tuple[float, *tuple[Any, ...]]], arrive: Callable[[simpy.Event], None]
    ) -> None:
        """Let a message arrive after the latency, together with those that were sent at the same instant."""
        if line and line[-1][0] == self._env.now:
            return
        callbacks = self._env.timeout(self.seconds).callbacks
        assert callbacks is not None, "it has not happened yet"
        callbacks.append(arrive)

    def _arrive_there(self, arrival: simpy.Event) -> None:
        for _, command, take in _of_one_instant(self._there):
            take(command)

    def _arrive_back(self, arrival: simpy.Event) -> None:
        for _, event in _of_one_instant(self._back):
            self._emit(event)


def _of_one_instant(line: deque[Message]) -> Iterator[Message]:
    """Remove and yield the first message of a line, and those that were sent at the same instant."""
    sent_at = line[0][0] if line else None
    while line and line[0][0] == sent_at:
        yield line.popleft()
