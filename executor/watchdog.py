"""Detect commands that hang although their process is alive, and spread the attempts of a push over time.

    limit = FACTOR x max(patience, time of the slowest command of this kind so far)
    limit = FIRST_FACTOR x patience, until one command of the kind has ended

The time of the slowest command is scaled by its units of work: decoding by output tokens (`max_tokens`), and forward and
backward passes by rollouts. Deadlines are counted in ticks. So a controller that was itself stopped for an hour does not
kill its workers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, TypeAlias

from streamrl.engine.messages import (
    Abort,
    Command,
    Event,
    Generate,
    Generated,
    LoadWeights,
    Score,
    Train,
    WakeAt,
)

FACTOR = 10
"""Limit of a command, as a multiple of the slowest one so far. Lengths, batches and disks vary by less."""
FIRST_FACTOR = 100
"""Limit of the first commands of a kind, as a multiple of the patience: 100 minutes by default. An assumption: starting
an engine, compiling kernels and generating the first rollouts take less."""
TICK = 1.0  # seconds between two checks


Kind: TypeAlias = tuple[type[Command], int | None]
"""Commands with similar times: the type of a command and its trainer, because trainers differ in speed."""


def kind_of(command: Command) -> Kind:
    """Return the kind whose times apply to a command."""
    return type(command), getattr(command, "trainer", None)


class RunningCommand(NamedTuple):
    """A command that has started and has not ended."""

    command: Command
    began_at: float
    tick: int


class HangingCommand(NamedTuple):
    """A command that runs for too long."""

    number: int
    """What `begin` returned."""
    command: Command
    limit: float
    """Seconds that it may take."""


@dataclass(slots=True)
class Slowest:
    """Seconds of the slowest command of one kind: per unit of work, and independent of units."""

    rest: float = 0.0
    per_unit: float = 0.0

    def enter(self, rest: float, per_unit: float) -> None:
        """Record the times of another command."""
        self.rest = max(self.rest, rest)
        self.per_unit = max(self.per_unit, per_unit)

    def time(self, units: int) -> float:
        """Return the seconds that `units` of work would take."""
        return self.rest + self.per_unit * units


@dataclass
class Watchdog:
    """Measures commands, and returns at every tick those that run for too long."""

    patience: float
    """Seconds; see `execute.patience`."""
    max_tokens: int
    """Maximum output tokens of a rollout."""
    _tick: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _running: dict[int, RunningCommand] = field(default_factory=dict)
    _slowest: dict[Kind, Slowest] = field(default_factory=dict)

    def begin(self, command: Command, now: float) -> int:
        """Record the start of a command at `now` seconds; return the number to pass to `end`."""
        number = next(self._numbers)
        self._running[number] = RunningCommand(command, now, self._tick)
        return number

    def end(self, number: int, event: Event | None, now: float) -> None:
        """Record the end of a command; its time counts only if it succeeded (`event` is given)."""
        command, began_at, _ = self._running.pop(number)
        if event is None or isinstance(command, WakeAt):
            return
        slowest = self._slowest.setdefault(kind_of(command), Slowest())
        seconds = now - began_at
        if isinstance(event, Generated):
            decode_time = event.run_time - event.prefill_time
            slowest.enter(seconds - decode_time, decode_time / max(1, event.tokens))
        else:
            slowest.enter(0.0, seconds / self._units(command))

    def tick(self) -> list[HangingCommand]:
        """Count a tick, and return each command that hangs."""
        self._tick += 1
        hanging = []
        for number, (command, _, tick) in self._running.items():
            limit = self.limit(command)
            if (self._tick - tick) * TICK > limit:
                hanging.append(HangingCommand(number, command, limit))
        return hanging

    def limit(self, command: Command) -> float:
        """Return the seconds that a command may take; a `WakeAt` has no limit."""
        if isinstance(command, WakeAt):
            return inf
        if isinstance(command, Abort):
            return FACTOR * self.patience
        slowest = self._slowest.get(kind_of(command))
        if slowest is None:
            return FIRST_FACTOR * self.patience
        expected = slowest.time(self._units(command))
        generate = self._slowest.get((Generate, None))
        if isinstance(command, LoadWeights) and command.drain and generate is not None:
            expected += generate.time(self.max_tokens)  # it waits for running rollouts
        return FACTOR * max(self.patience, expected)

    def _units(self, command: Command) -> int:
        match command:
            case Generate():
                return self.max_tokens
            case Score(rollouts) | Train(rollouts):
                return len(rollouts)
            case _:
                return 1


class Attempts:
    """Spreads the attempts of a command over the patience, after which a lost machine is noticed.

    The first repetition follows at once, because most causes are short. The others are evenly spread.
    """

    def __init__(self, most: int, patience: float) -> None:
        """Take the number of attempts after which the run stops, and the seconds of `execute.patience`."""
        self._most = most
        self._patience = patience
        self._num_failed = 0
        self._ended = asyncio.Event()
        self._is_over = False

    @property
    def pause(self) -> float:
        """Seconds to wait before the next attempt."""
        is_first = self._num_failed == 1 and self._most > 2
        return 0.0 if not self._num_failed or is_first else self._patience / max(1, self._most - 2)

    async def wait(self) -> None:
        """Wait before the next attempt, at most until `end_pause`."""
        if self._is_over:
            return
        self._ended.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.pause):
                await self._ended.wait()

    def end_pause(self) -> None:
        """End a pause at once."""
        self._ended.set()

    def end_pauses(self) -> None:
        """End a pause at once, and make no more: the run stops."""
        self._is_over = True
        self.end_pause()

    def fail(self) -> bool:
        """Count a failed attempt; return whether it was the last one."""
        self._num_failed += 1
        return self._num_failed >= self._most

    def succeed(self) -> None:
        """Begin to count again."""
        self._num_failed = 0
