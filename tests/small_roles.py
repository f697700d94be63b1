"""Roles that do little, in a module without pytest: a worker that imports a file of tests takes a second to start."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from pathlib import Path

import msgspec

from streamrl.executor.roles import RoleLostError

NAME = "STREAMRL_TEST_NURSERY"
RARE, RARER = "tabnanny", "pyclbr"
"""Modules that nothing else imports."""
WATCHED = ("torch", RARE, RARER)


class CounterConfig(msgspec.Struct, frozen=True):
    """Where counting begins."""

    first: int


class Point(msgspec.Struct, frozen=True):
    """Something with a type, to cross the wire."""

    x: int
    y: float


class Counter:
    """A role that counts, and remembers the order of its calls."""

    def __init__(self, config: CounterConfig) -> None:
        self._next = config.first
        self._began: list[int] = []

    async def count(self) -> int:
        self._next += 1
        return self._next - 1

    async def move(self, point: Point, by: int) -> Point:
        return Point(point.x + by, point.y)

    async def wait(self, number: int, seconds: float) -> list[int]:
        self._began.append(number)
        await asyncio.sleep(seconds)
        return list(self._began)

    async def block(self) -> None:
        time.sleep(600)

    async def compute(self) -> None:
        await asyncio.to_thread(time.sleep, 600)

    async def compute_alone(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    async def break_down(self) -> None:
        raise RoleLostError("no GPU is left")

    async def fail(self) -> None:
        raise KeyError("no such thing")

    async def stop(self) -> None:
        pass


class SlowStarter(Counter):
    """Answers nobody for three seconds while it is made, as a process does that imports torch on a busy machine."""

    def __init__(self, config: CounterConfig) -> None:
        time.sleep(3.0)
        super().__init__(config)


class Nothing(msgspec.Struct, frozen=True):
    """What a witness has to know."""


class Seen(msgspec.Struct, frozen=True):
    """What a worker finds."""

    parent: int
    session: int
    directory: str
    variable: str | None
    descriptors: list[int]
    had: list[str]
    """Of `WATCHED`, what was imported before it was made."""
    umask: int
    collects_garbage: bool


class Witness:
    """A role that tells where it is."""

    def __init__(self, config: Nothing) -> None:
        self._had = [name for name in WATCHED if name in sys.modules]

    async def look(self) -> Seen:
        print("seen", flush=True)
        return Seen(
            os.getppid(),
            os.getsid(0),
            str(Path.cwd()),
            os.environ.get(NAME),
            [int(each.name) for each in Path("/proc/self/fd").iterdir()],
            self._had,
            os.umask(0o022),
            gc.isenabled(),
        )

    async def stop(self) -> None:
        pass


class Speaker:
    """A role that, asked to, sends its controller what is no message; and one that fails and says so."""

    def __init__(self, config: dict[str, int]) -> None:
        pass

    async def babble(self) -> None:
        os.write(int(sys.argv[2]), b"\xc1" * 64)
        await asyncio.sleep(3600)

    async def fail(self) -> None:
        raise LookupError("nothing there")
