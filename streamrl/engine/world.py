"""Base class of the simulated and the real world, which carry out the engine's commands, and when both may free a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from streamrl.engine.engine import Engine
from streamrl.engine.messages import Command, Event, ExpectationsChanged, Generated


class GroupReferences:
    """Counts trainers by group, as far as some are done with it and others are not.

    A trainer that joins later is one of those that are waited for from the first group on that is drawn after it.
    """

    def __init__(self, num_trainers: int) -> None:
        self._first = [0] * num_trainers
        """The first group of each trainer."""
        self._trainers: dict[int, set[int]] = {}
        """By group."""

    def join(self, group: int) -> None:
        """Let one more trainer wait for every group from `group` on."""
        self._first.append(group)

    def leave(self, group: int, trainer: int) -> bool:
        """Enter that a trainer is done with a group; return whether all are."""
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
        """Enter that nobody trains on a group any more."""
        self._trainers.pop(group, None)


class Record(Protocol):
    """What is told all that a world and its engine said to each other: a trace."""

    def record(self, time: float, event: Event, commands: list[Command]) -> None:
        """Take one event, at `time` seconds since the run's start, and the commands it led to."""
        ...


class RunInterruptedError(Exception):
    """A signal ended the run before its last step; the message says what is saved, and how to go on."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
        """Its number; a process that it ends has exit status 128 + this, as shells have it."""


R = TypeVar("R", bound=Record)


class World(ABC, Generic[R]):
    """Carries the engine's commands out and tells it what happened."""

    def __init__(
        self, engine: Engine, trace: R, learn: Callable[[Generated], ExpectationsChanged | None]
    ) -> None:
        """Take the engine, what records it, and what a workload learns from a rollout that ends."""
        self.engine = engine
        self.trace = trace
        self._learn = learn
        self._unheard: deque[Event] = deque()
        self._is_handling = False

    @property
    @abstractmethod
    def now(self) -> float:
        """Seconds since the run's start."""

    @abstractmethod
    def start(self, command: Command) -> None:
        """Begin `command` and return; it ends in exactly one event, through `emit`."""

    def emit(self, event: Event) -> None:
        """Let the engine handle `event`, and start what it answers.

        An event that starting a command brings about at once is handled after the commands before it,
        at the same instant. What a rollout's end tells of others is handled before the end itself.
        """
        unheard = self._unheard
        if isinstance(event, Generated) and (news := self._learn(event)) is not None:
            unheard.append(news)
        unheard.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        now = self.now
        try:
            while unheard:
                event = unheard.popleft()
                for command in self.handle(event, now):
                    self.start(command)
        finally:
            self._is_handling = False

    def handle(self, event: Event, now: float) -> list[Command]:
        """Return the engine's commands after `event`, and record both."""
        commands = self.engine.handle(event, now)
        self.trace.record(now, event, commands)
        return commands
