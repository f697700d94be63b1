"""Measure the CPU seconds that one environment takes in its own process, and how busy it keeps a core.

A start is the fork of the process, its setup and its end. An action is one call of `step`. Both are measured in rounds of
environments that are opened and closed one after the other: without actions, and with some. Every action is the same text,
because an untrained model writes nothing that can be measured twice.

The times are those that processes compute, without waits for a core. So they are steady on busy cores too, where the
profiler measures them: a process computes longer beside others that use the same caches.
"""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import cycle, islice
from typing import NamedTuple

import psutil

from streamrl.executor.environment.session import EnvironmentHost, Session
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.workload_config import WorkloadConfig
from streamrl.workload.prompt_records import Record, read_sources

STARTS, HALF_TIME = 96, 5.0
"""Environments of each half of a round, and the seconds after which no more of them are opened."""
ACTIONS, ACTION = 3, "1"
"""Most actions of an episode, which the environment may end earlier, and their text."""
ACTION_TIME = 10.0
"""Most seconds of an action. An environment that is stopped there has ended."""


class EnvironmentTimes(NamedTuple):
    """CPU seconds of an environment's process."""

    start: float
    action: float
    share: float
    """CPU seconds per second: of these processes, and of this one, which calls them."""


class MeasuredEnvironment(NamedTuple):
    """An environment whose starts and actions are measured."""

    config: EnvironmentConfig
    records: list[Record]
    """Prompts with which episodes begin."""

    @classmethod
    def of(
        cls, environment: EnvironmentConfig | None, workload: WorkloadConfig
    ) -> MeasuredEnvironment:
        """Return the environment of two sections of a run file.

        Raises:
            ValueError: there is none.
        """
        if environment is None or environment.implementation is None:
            raise ValueError("--environment needs a run file with environment.implementation")
        return cls(environment, read_sources(workload)[0].records)


class TimedEnvironments:
    """Opens and closes environments of one kind, and reads the CPU times of their processes."""

    def __init__(self, environment: MeasuredEnvironment) -> None:
        """Take the environment, whose records begin episodes in turn."""
        self._host = EnvironmentHost(environment.config)
        self._records = cycle(environment.records)

    async def start(self) -> None:
        """Start the process that forks environments.

        Raises:
            EnvironmentFaultError: their class cannot be used.
        """
        await self._host.start()

    def close(self) -> None:
        """End all processes."""
        self._host.close()

    async def round(self) -> EnvironmentTimes:
        """Open and close environments without actions, and then others with up to `ACTIONS` each."""
        began_at, own = time.perf_counter(), time.process_time()
        before = self._cpu_time()
        start, _ = await self._open(0)
        whole, num_actions = await self._open(ACTIONS)
        elapsed = time.perf_counter() - began_at
        taken = self._cpu_time() - before + time.process_time() - own
        action = max(0.0, whole - start) / num_actions if num_actions else 0.0
        return EnvironmentTimes(start, action, taken / elapsed)

    async def _open(self, most: int) -> tuple[float, float]:
        """Open and close environments with up to `most` actions each; return the mean CPU seconds and actions of one."""
        before, num_actions, num_opened = self._cpu_time(), 0, 0
        ends_at = time.monotonic() + HALF_TIME
        for record in islice(self._records, STARTS):
            if num_opened and time.monotonic() > ends_at:
                break
            session = Session(self._host)
            await session.reset(record)
            while session.num_steps < most and not session.is_over:
                await session.step(ACTION, ACTION_TIME)
            session.close()
            num_opened += 1
            num_actions += session.num_steps
        return (self._cpu_time() - before) / num_opened, num_actions / num_opened

    def _cpu_time(self) -> float:
        """Return the CPU seconds of the host, of its children, and of those that have ended."""
        host = psutil.Process(self._host.pid)
        while True:
            children = host.children()
            with suppress(psutil.NoSuchProcess):  # the host has noticed its end
                taken = sum(sum(each.cpu_times()[:4]) for each in (host, *children))
                if host.children() == children:
                    return float(taken)
