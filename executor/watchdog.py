"""Which commands hang, though the process that carries them out gives signs of life.

    limit = FACTOR x the larger of `patience` and what the slowest of its kind so far would have taken

What the slowest would have taken goes by units: seconds of decoding by `max_tokens` of output, those of forward and
backward passes by rollouts. Of a kind of which none has ended yet nothing is known, and nothing is said. Deadlines are
counted in ticks, so that a controller that was itself stopped for an hour finds nobody late.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from streamrl.engine.messages import (
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
"""How many times as long as the slowest so far a command may take: lengths, batches and disks vary by less."""
TICK = 1.0  # seconds between two looks


Kind: TypeAlias = tuple[type[Command], int | None]
"""Commands that take alike: those of each trainer apart, as each has a pace of its own."""


def kind_of(command: Command) -> Kind:
    """Return which commands take as long as one."""
    return type(command), getattr(command, "trainer", None)


class UnderWay(NamedTuple):
    """A command that was begun and has not ended."""

    command: Command
    began_at: float
    tick: int


@dataclass(slots=True)
class Slowest:
    """Seconds of the slowest command of one kind: for each of its units, and apart from them."""

    rest: float = 0.0
    per_unit: float = 0.0

    def enter(self, rest: float, per_unit: float) -> None:
        """Enter what another one took."""
        self.rest = max(self.rest, rest)
        self.per_unit = max(self.per_unit, per_unit)

    def time(self, units: int) -> float:
        """Return what it would have taken for as many units."""
        return self.rest + self.per_unit * units


@dataclass
class Watchdog:
    """Told when commands begin and end, and asked at every tick which have gone on for too long."""

    patience: float
    """Seconds; see `execute.patience`."""
    max_tokens: int
    """Of a rollout's output."""
    _tick: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _under_way: dict[int, UnderWay] = field(default_factory=dict)
    _slowest: dict[Kind, Slowest] = field(default_factory=dict)

    def begin(self, command: Command, now: float) -> int:
        """Enter that a command was begun at `now` seconds; return the number that it ends by."""
        number = next(self._numbers)
        self._under_way[number] = UnderWay(command, now, self._tick)
        return number

    def end(self, number: int, event: Event | None, now: float) -> None:
        """Enter that a command ended; where it did so in an event, and did not fail, it is measured."""
        command, began_at, _ = self._under_way.pop(number)
        if event is None or isinstance(command, WakeAt):
            return
        slowest = self._slowest.setdefault(kind_of(command), Slowest())
        seconds = now - began_at
        if isinstance(event, Generated):
            decode_time = event.run_time - event.prefill_time
            slowest.enter(seconds - decode_time, decode_time / max(1, event.tokens))
        else:
            slowest.enter(0.0, seconds / self._units(command))

    def tick(self) -> list[tuple[Command, float]]:
        """Enter that another tick is over; return the commands that hang, with the seconds that each was given."""
        self._tick += 1
        found = []
        for command, _, tick in self._under_way.values():
            limit = self.limit(command)
            if limit is not None and (self._tick - tick) * TICK > limit:
                found.append((command, limit))
        return found

    def limit(self, command: Command) -> float | None:
        """Return the seconds that a command may take; None where none of its kind has ended."""
        slowest = self._slowest.get(kind_of(command))
        if slowest is None:
            return None
        expected = slowest.time(self._units(command))
        generate = self._slowest.get((Generate, None))
        if isinstance(command, LoadWeights) and command.drain and generate is not None:
            expected += generate.time(self.max_tokens)  # it waits for what runs
        return FACTOR * max(self.patience, expected)

    def _units(self, command: Command) -> int:
        match command:
            case Generate():
                return self.max_tokens
            case Score(rollouts) | Train(rollouts):
                return len(rollouts)
            case _:
                return 1
