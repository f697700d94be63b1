"""The way between who decides, on the trainer's side, and a replica in another datacenter: what is said arrives later.

Over a link each command, and each event that comes back, takes the link's latency. What is sent first arrives first; of
a replica that is lost all arrives that it had sent, and nothing that was on its way to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import simpy

from streamrl.engine.messages import Abort, Command, Event, Generate, LoadWeights

ReplicaCommand = Generate | LoadWeights | Abort
S = TypeVar("S", Generate, LoadWeights, Abort)


class DelayedChannel:
    """Commands there and events back, each under way for as long as the other."""

    def __init__(self, env: simpy.Environment, seconds: float, emit: Callable[[Event], None]):
        """Begin with nothing under way.

        Args:
            env: simulated time.
            seconds: one way.
            emit: takes note of an event that has arrived.
        """
        self.seconds = seconds
        self._env = env
        self._emit = emit
        self._there: deque[tuple[ReplicaCommand, Callable[[], None]]] = deque()
        self._back: deque[Event] = deque()

    def send(self, command: S, take: Callable[[S], None]) -> None:
        """Let `take` have a command once it has arrived."""
        self._there.append((command, lambda: take(command)))
        self._wait(self._arrive_there)

    def emit(self, event: Event) -> None:
        """Let an event be known once it has arrived."""
        self._back.append(event)
        self._wait(self._arrive_back)

    def bring_back(self) -> None:
        """Let all events arrive now that are under way."""
        while self._back:
            self._emit(self._back.popleft())

    def cut(self) -> list[Command]:
        """Let nothing arrive any more; return the commands that were under way, and end in an event of their own."""
        lost: list[Command] = [c for c, _ in self._there if not isinstance(c, Abort)]
        self._there.clear()
        self._back.clear()
        return lost

    def _wait(self, arrive: Callable[[simpy.Event], None]) -> None:
        callbacks = self._env.timeout(self.seconds).callbacks
        assert callbacks is not None, "it has not happened yet"
        callbacks.append(arrive)

    def _arrive_there(self, arrival: simpy.Event) -> None:
        if self._there:
            _, take = self._there.popleft()
            take()

    def _arrive_back(self, arrival: simpy.Event) -> None:
        if self._back:
            self._emit(self._back.popleft())
