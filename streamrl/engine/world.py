"""Base class of the simulated and the real world, which carry out the engine's commands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from streamrl.engine.engine import Engine
from streamrl.engine.messages import Command, Event, ExpectationsChanged, Generated


class GroupReferences:
    """Counts the trainers that still need each group.

    A trainer that joins later counts from the first group that is drawn after it joined.
    """

    def __init__(self, num_trainers: int) -> None:
        self._first = [0] * num_trainers
        """The first group of each trainer."""
        self._trainers: dict[int, set[int]] = {}
        """By group: the trainers that are done with it."""

    def join(self, group: int) -> None:
        """Add a trainer that needs every group from `group` on."""
        self._first.append(group)

    def leave(self, group: int, trainer: int) -> bool:
        """Record that a trainer is done with a group; return whether all trainers are."""
        if len(self._first) == 1:
            return True
        done = self._trainers.setdefault(group, set())
        done.add(trainer)
        if len(done) < len(self._first) and len(done) < sum(f <= group for f in self._first):
            return False
        self.drop(group)
        return True

    def has_left(self, group: int, trainer: int) -> bool:
        """Return whether a trainer is done with a group that others may still train on."""
        return trainer in self._trainers.get(group, ())

    def drop(self, group: int) -> None:
        """Record that no trainer needs a group any more."""
        self._trainers.pop(group, None)


class Record(Protocol):
    """Receives every event and the commands that answered it: a trace."""

    def record(self, time: float, event: Event, commands: list[Command]) -> None:
        """Record one event, at `time` seconds since the run's start, and the commands that answered it."""
        ...


class RunInterruptedError(Exception):
    """A signal ended the run before its last step. The message says what is saved and how to resume."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
        """Number of the signal. A process that it ends has exit status 128 + this number, as in a
        shell.
        """


R = TypeVar("R", bound=Record)


class World(ABC, Generic[R]):
    """Carries out the engine's commands and reports events to it."""

    def __init__(
        self, engine: Engine, trace: R, learn: Callable[[Generated], ExpectationsChanged | None]
    ) -> None:
        """Take the engine, its record, and the function by which a workload learns from finished rollouts."""
        self.engine = engine
        self.trace = trace
        self._learn = learn
        self._prepare: dict[type[Event], Callable[[Any], Event | None]] = {}
        """By type of event: what turns it into the event that the engine handles; None where another
        one follows later.
        """
        self._unheard: deque[Event] = deque()
        self._is_handling = False

    @property
    @abstractmethod
    def now(self) -> float:
        """Seconds since the run's start."""

    @abstractmethod
    def start(self, command: Command) -> None:
        """Begin `command` and return. It ends in exactly one event, through `emit`."""

    def emit(self, event: Event) -> None:
        """Pass `event` to the engine, and start the commands that it returns.

        Starting a command may cause another event at once. That event is handled after the earlier
        commands, at the same instant. New expectations from a rollout's end are handled before the
        end itself.
        """
        unheard = self._unheard
        if (prepare := self._prepare.get(type(event))) is not None:
            prepared = prepare(event)
            if prepared is None:
                return
            event = prepared
        if type(event) is Generated and (news := self._learn(event)) is not None:
            unheard.append(news)
        unheard.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        now, handle, start = self.now, self.handle, self.start
        try:
            while unheard:
                for command in handle(unheard.popleft(), now):
                    start(command)
        finally:
            self._is_handling = False

    def handle(self, event: Event, now: float) -> list[Command]:
        """Return the engine's commands after `event`, and record both."""
        commands = self.engine.handle(event, now)
        self.trace.record(now, event, commands)
        return commands
