"""Whose turn it is on devices that replicas and trainer share: one side computes, and the other sleeps meanwhile.

| side | its commands | asleep it |
|---|---|---|
| generation | `Generate`, `LoadWeights`, `StartReplica` | holds no keys and values, and its weights in host memory |
| training | `StartTrainer`, `Score`, `Train`, `Step`, `PushWeights`, `SaveCheckpoint` | holds weights, gradients and optimizer in host memory |

A command waits until nobody of the other side computes any more; turns are given in the order in which they were asked
for, so that neither side waits for ever. On a CPU turns are taken as well; there all memory is the host's, so that
sleeping frees what keys and values took and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple, Protocol

from streamrl.engine.messages import (
    Command,
    Generate,
    LoadWeights,
    PushWeights,
    SaveCheckpoint,
    Score,
    StartReplica,
    StartTrainer,
    Step,
    Train,
)
from streamrl.executor.roles import reason_of

Side = Literal["generation", "training"]


class Sleeper(Protocol):
    """A role that gives its memory back; it may be told to do what it does already."""

    async def sleep(self) -> None:
        """Give the device's memory back."""

    async def wake(self) -> None:
        """Take it again."""

    def kill(self, reason: str) -> None:
        """Let the worker be lost, and with it all that it holds."""


class ColocatedRole(NamedTuple):
    """Who is on a side, and what reports its loss."""

    role: Sleeper
    lose: Callable[[str], None]


def side_of(command: Command) -> Side | None:
    """Return whose turn a command needs; None for what needs no device."""
    match command:
        case Generate() | LoadWeights() | StartReplica():
            return "generation"
        case StartTrainer() | Score() | Train() | Step() | PushWeights() | SaveCheckpoint():
            return "training"
        case _:
            return None


class DeviceSharing:
    """One side at a time."""

    def __init__(self, members: Callable[[Side], Sequence[ColocatedRole]], limit: float) -> None:
        """Take what says who is on a side now, and the seconds that each may take to sleep or wake."""
        self._members = members
        self._limit = limit
        self._side: Side | None = None
        """Who is awake; None before anybody was, and where a change broke off."""
        self._num_taking = 0
        self._door = asyncio.Lock()  # lets in by order of arrival
        self._is_free = asyncio.Event()
        self._is_free.set()

    @asynccontextmanager
    async def of(self, command: Command) -> AsyncIterator[None]:
        """Hold the turn of a command's side until you are done with it."""
        side = side_of(command)
        if side is None:
            yield
            return
        async with self._door:
            if self._side != side:
                await self._is_free.wait()
                await self._change(side)
            self._num_taking += 1
            self._is_free.clear()
        try:
            yield
        finally:
            self._num_taking -= 1
            if not self._num_taking:
                self._is_free.set()

    async def _change(self, side: Side) -> None:
        self._side = None
        other: Side = "training" if side == "generation" else "generation"
        await asyncio.gather(*(self._settle(each, is_awake=False) for each in self._members(other)))
        await asyncio.gather(*(self._settle(each, is_awake=True) for each in self._members(side)))
        self._side = side

    async def _settle(self, member: ColocatedRole, *, is_awake: bool) -> None:
        """Wake a role, or let it sleep; one that cannot is lost, so that its memory is free in any case."""
        try:
            async with asyncio.timeout(self._limit):
                await (member.role.wake() if is_awake else member.role.sleep())
        except Exception as error:
            reason = f"did not {'wake' if is_awake else 'sleep'}: {reason_of(error)}"
            member.role.kill(reason)
            member.lose(reason)
