"""Where commands are carried out: in simulated time (`sim`) or in real time (`executor`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from streamrl.engine.engine import Engine
from streamrl.engine.messages import Command, Event, ExpectationsChanged, Generated


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
                commands = self.engine.handle(event, now)
                self.trace.record(now, event, commands)
                for command in commands:
                    self.start(command)
        finally:
            self._is_handling = False
