"""Let a role die, hang, get stuck or be slow at one of its commands, and see what becomes of the run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from streamrl.engine.messages import Event, ReplicaLost, TrainerLost
from streamrl.executor.launchers.handles import Handle, RankHandles, WorkerLostError

Fault = Literal["dead", "hung", "broken", "stuck", "slow"]
"""dead: killed. hung: stopped, so that it answers no ping. broken: the engine of a replica has ended, but its process
answers. stuck: it answers pings, but never this call. slow: the call takes `SLOW_TIME` longer."""
Role = Literal["replica", "trainer"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
IDLE = "ping"
"""No command: the fault occurs while the role has no call."""
METHODS: dict[Role, tuple[str, ...]] = {
    "replica": ("start", "generate", "abort", "load", "receive", "cache", "sleep", "wake", IDLE),
    "trainer": (
        *("start", "score", "train", "step", "push", "pack", "listen", "send", "save", "sleep"),
        *("wake", "start_blank", "regroup", IDLE),
    ),
}
"""Every command of a role that the controller waits for."""
RESIZED = {
    "policies.system": "stream-async",
    "trainer.tensor_parallel": 1,
    "trainer.zero": 0,
    "trainer.resize": [{"step": 2, "data_parallel": 2}],
}
"""A run whose trainer gets another rank."""
NEEDS: dict[str, dict[str, Any]] = {
    "abort": {"policies.system": "fully-async", "policies.weight_sync": "abort-and-resume"},
    "cache": {"policies.concurrency": "kv-pressure"},
    "score": {"algorithm.kl_coefficient": 0.1},
    **{each: {"sync.wire": "broadcast"} for each in ("receive", "pack", "listen", "send")},
    "sleep": {"policies.system": "colocated"},
    "wake": {"policies.system": "colocated"},
    **dict.fromkeys(("start_blank", "regroup"), RESIZED),
}
"""Settings without which a run never sends a command."""
LOSSES: dict[Role, type[Event]] = {"replica": ReplicaLost, "trainer": TrainerLost}
SLOW_TIME = 1.0
LOOK_TIME = 0.02
CALLS: dict[str, int] = {
    **dict.fromkeys(("start", "cache", "abort", "listen", "start_blank", "regroup"), 1),
    **{"generate": 7, IDLE: 3},
}
"""Number of the call that is hit; the second one of other methods."""
AT_START = ("start", "cache")
"""Commands of a replica that has not come up yet: their failure is that of its start."""

T = TypeVar("T")


class Case(NamedTuple):
    """One cell of the matrix."""

    role: Role
    method: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.role}-{self.method}-{self.fault}"

    @property
    def is_lost(self) -> bool:
        """Return whether the role is lost and must be replaced.

        A rollout whose abort gets stuck ends by itself. Weights that a replica does not receive are sent again.
        """
        return self.fault != "slow" and (
            self.fault != "stuck" or self.method not in ("abort", "receive")
        )


CASES = [
    Case(role, method, fault)
    for role, methods in METHODS.items()
    for method, fault in product(methods, FAULTS)
    if (method != IDLE or fault not in ("stuck", "slow"))
    and (fault != "broken" or (role == "replica" and method not in AT_START))
]
"""All cells. An idle role has no call that could be stuck or slow. Only a replica that is up has an engine."""


class Strike:
    """One fault that hits the first role of its kind which gets so far."""

    def __init__(self, case: Case, break_engine: Callable[[Any], Awaitable[None]]) -> None:
        """Take the cell, and the function that ends the engine behind the handle of a replica."""
        self.case = case
        self.break_engine = break_engine
        self.has_struck = False
        self._num_calls = 0

    def expose(self, role: Role, handle: Handle) -> Handle:
        """Return a handle on a new role that can get the fault."""
        if role != self.case.role or self.has_struck:
            return handle
        if isinstance(handle, RankHandles):
            handle.ranks[-1] = Struck(handle.ranks[-1], self)
            return handle
        return Struck(handle, self)

    def is_due(self, method: str) -> bool:
        """Count a call; return whether the fault hits it."""
        if self.has_struck or method != self.case.method:
            return False
        self._num_calls += 1
        self.has_struck = self._num_calls >= CALLS.get(method, 2)
        return self.has_struck


class Struck(Handle):
    """A handle on a process that gets a fault."""

    def __init__(self, process: Any, strike: Strike) -> None:
        self._process = process
        self._strike = strike
        self._num_pending = 0

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Call the process, and let it suffer if it is time."""
        fault = self._strike.case.fault if self._strike.is_due(method) else None
        if fault not in (None, "stuck", "slow"):
            await self._hit()
        while fault == "stuck" and not self.is_lost:
            await asyncio.sleep(LOOK_TIME)
        self._num_pending += 1
        try:
            answer: T = await self._process.call(method, *arguments, returns=returns)
        finally:
            self._num_pending -= 1
        if fault == "slow":
            await asyncio.sleep(SLOW_TIME)
        if not self._num_pending and self._strike.is_due(IDLE):
            await self._hit()
        return answer

    async def _hit(self) -> None:
        fault = self._strike.case.fault
        if fault == "broken":
            await self._strike.break_engine(self._process)
        else:
            self._process.send_signal(signal.SIGKILL if fault == "dead" else signal.SIGSTOP)

    @property
    def is_lost(self) -> bool:
        """Whether the process is known to be dead or closed."""
        return bool(self._process.is_lost)

    def watch(self, tell: Callable[[WorkerLostError], None] | None) -> None:
        """Call `tell` if the process is lost."""
        self._process.watch(tell)

    def kill(self, reason: str) -> None:
        """Kill the process."""
        self._process.kill(reason)

    async def close(self) -> None:
        """End the process."""
        await self._process.close()
