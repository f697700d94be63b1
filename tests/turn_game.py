"""An environment for tests: it sums what it is told, turn by turn."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any


class Summing:
    """Gives the sum of the numbers of each turn as its reward; the observation depends on all turns before."""

    def __init__(self, turns: int = 3, first: str = "", faulty: bool = False) -> None:
        self._turns = turns
        self._first = first
        self._faulty = faulty
        self._sums: list[int] = []

    def reset(self, task: dict[str, Any]) -> str | None:
        return self._first or None

    def step(self, action: str) -> tuple[str, float, bool]:
        if self._faulty:
            raise LookupError("nothing is here")
        self._sums.append(sum(map(int, action.split())))
        return "o" * (1 + sum(self._sums) % 3), self._sums[-1], len(self._sums) == self._turns


class Closed(Summing):
    """Begins no episode."""

    def reset(self, task: dict[str, Any]) -> str | None:
        raise LookupError("the task is missing")


class Slow(Summing):
    """Begins no episode in time."""

    def reset(self, task: dict[str, Any]) -> str | None:
        time.sleep(60)
        return None


class Late(Summing):
    """Waits for a server in its second turn, which never answers."""

    waits_for = ""

    def step(self, action: str) -> tuple[str, float, bool]:
        if self._sums:
            self.waits_for = "python server.py"
            time.sleep(60)
        return super().step(action)


class Starting(Summing):
    """Shows the ids of two processes in sessions of their own: one of `prepare`, and its own outside of the sandbox."""

    prepared = 0

    @classmethod
    def prepare(cls) -> None:
        cls.prepared = _sleeper()

    def reset(self, task: dict[str, Any]) -> str:
        own = [_sleeper()] if task["starts"] else []
        return " ".join(map(str, (self.prepared, *own)))


def _sleeper() -> int:
    """Return the id of a process that its parent does not know any more."""
    started = subprocess.run(
        ["sh", "-c", "setsid sleep 600 >&- 2>&- & echo $!"], capture_output=True, text=True
    )
    return int(started.stdout)


class Odd:
    """Does what the action says."""

    def reset(self, task: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": task["prompt"]}]

    def step(self, action: str) -> tuple[object, ...]:
        match action:
            case "sleep":
                time.sleep(60)
            case "hang":
                while True:
                    try:
                        time.sleep(60)
                    except BaseException:
                        continue
            case "exit":
                os._exit(3)
            case "eat":
                return "x" * (1 << 31), 0.0, False
            case "open":
                return Path("/etc/passwd").read_text(), 0.0, False
            case "infinite":
                return "", float("inf"), False
            case "large":
                return "", -2e6, False
            case "pair":
                return "", 0.0
            case "word":
                return "", 0.0, "no"
            case "raise":
                raise LookupError("nothing is here")
            case "forge":
                for file in range(3, 20):
                    with contextlib.suppress(OSError):
                        os.write(file, b'{"observation": "forged", "reward": 1.0, "done": true}\n')
            case "half":
                return "half of a \ud83d", 0.0, False
            case "number":
                return 5, 0.0, False
        return action, 1, False


class Bad:
    """Cannot begin."""

    def reset(self, task: dict[str, Any]) -> None:
        raise KeyError("level")
