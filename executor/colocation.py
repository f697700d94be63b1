"""Share devices between replicas and the trainer: one side computes while the other sleeps.

| side | commands | state while asleep |
|---|---|---|
| generation | `Generate`, `Evaluate`, `LoadWeights`, `StartReplica` | no KV cache; weights in host memory |
| training | `StartTrainer`, `Score`, `Train`, `Step`, `PushWeights`, `SaveCheckpoint` | weights, gradients and optimizer in host memory |

With `[lending]` only replicas on GPUs of the primary trainer share, and the engine decides when GPUs change sides
(`LentGpus`). The trainer sleeps while any of these replicas is awake.

A command waits until the other side has no running command. Commands get their turn in the order of arrival, so neither
side waits forever. On a CPU, sleeping frees only the KV cache, because everything is in host memory anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple, Protocol

from streamrl.engine.messages import (
    Command,
    Evaluate,
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
    """A role that can release its device memory; sleep and wake may be repeated."""

    async def sleep(self) -> None:
        """Release device memory."""

    async def wake(self) -> None:
        """Allocate it again."""

    def kill(self, reason: str) -> None:
        """Kill the worker, which frees its memory."""


class ColocatedRole(NamedTuple):
    """A role on one side, and a function that reports its loss."""

    role: Sleeper
    lose: Callable[[str], None]


def side_of(command: Command) -> Side | None:
    """Return the side of a command, or None if it needs no device."""
    match command:
        case Generate() | Evaluate() | LoadWeights() | StartReplica():
            return "generation"
        case StartTrainer() | Score() | Train() | Step() | PushWeights() | SaveCheckpoint():
            return "training"
        case _:
            return None


class DeviceSharing:
    """Lets one side at a time use the shared devices."""

    def __init__(self, members: Callable[[Side], Sequence[ColocatedRole]], limit: float) -> None:
        """Use `members` to list the roles of a side, and `limit` as the maximum seconds of a sleep or wake."""
        self._members = members
        self._limit = limit
        self._side: Side | None = None
        """The side that is awake; None at the start, and after a change that failed."""
        self._num_taking = 0
        self._door = asyncio.Lock()  # first come, first served
        self._is_free = asyncio.Event()
        self._is_free.set()

    @asynccontextmanager
    async def of(self, command: Command) -> AsyncIterator[None]:
        """Reserve the devices for the side of a command until the context ends."""
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
        limit = self._limit
        await asyncio.gather(
            *(settle(each, limit, is_awake=False) for each in self._members(other))
        )
        await asyncio.gather(*(settle(each, limit, is_awake=True) for each in self._members(side)))
        self._side = side


class LentGpus:
    """GPUs of the primary trainer, which sleeps while replicas have them."""

    def __init__(self, trainer: Callable[[], ColocatedRole], limit: float) -> None:
        """Use `trainer` to get the primary trainer, and `limit` as the maximum seconds of a sleep or wake."""
        self._trainer = trainer
        self._limit = limit
        self._holders: dict[int, None] = {}
        """Replicas that are awake, in order of their arrival."""
        self._is_asleep = False
        """Whether the trainer sleeps."""
        self._turn = asyncio.Lock()

    async def lend(self, replica: int) -> None:
        """Let the trainer sleep, because a replica is about to wake up on its GPUs."""
        self._holders[replica] = None
        async with self._turn:
            if not self._is_asleep:
                self._is_asleep = True
                await settle(self._trainer(), self._limit, is_awake=False)

    async def take_back(self, replica: int) -> None:
        """Record that a replica sleeps or is gone, and wake the trainer if it was the last one."""
        self.forget(replica)
        await self.wake_trainer()

    def forget(self, replica: int) -> None:
        """Record that a replica is lost. The trainer wakes up with its next command at the latest."""
        self._holders.pop(replica, None)

    def forget_trainer(self) -> None:
        """Record that the trainer is lost; the next one is awake when it has started."""
        self._is_asleep = False

    async def wake_trainer(self) -> None:
        """Wake the trainer, unless replicas have its GPUs."""
        async with self._turn:
            if self._is_asleep and not self._holders:
                self._is_asleep = False
                await settle(self._trainer(), self._limit, is_awake=True)


async def settle(member: ColocatedRole, limit: float, *, is_awake: bool) -> None:
    """Wake a role or let it sleep; if that fails, kill it, so that its memory is free in any case."""
    try:
        async with asyncio.timeout(limit):
            await (member.role.wake() if is_awake else member.role.sleep())
    except Exception as error:
        reason = f"did not {'wake' if is_awake else 'sleep'}: {reason_of(error)}"
        member.role.kill(reason)
        member.lose(reason)
