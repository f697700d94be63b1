"""Measure the CPU seconds that one environment takes in its own process.

A start is the fork of the process, its setup and its end. An action is one call of `step`. Both are measured in rounds of
environments that are opened and closed: rounds without actions, and rounds with some. Every action is the same text,
because an untrained model writes nothing that can be measured twice.
"""

from __future__ import annotations

import asyncio
import time
from itertools import cycle, islice
from statistics import median
from typing import NamedTuple

import psutil

from streamrl.executor.environment.session import EnvironmentHost, Session
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.workload_config import WorkloadConfig
from streamrl.workload.prompt_records import Record, read_sources

ROUNDS, STARTS, AT_ONCE = 5, 48, 8
"""Rounds of each kind, starts of each round, and environments that are open at once."""
ACTIONS, ACTION = 3, "1"
"""Most actions of an episode, which the environment may end earlier, and their text."""
ACTION_TIME = 10.0
"""Most seconds of an action. An environment that is stopped there has ended."""
REAP_TIME = 5.0
"""Most seconds in which the host notices that the processes of a round have ended."""


class EnvironmentTimes(NamedTuple):
    """CPU seconds of an environment's process."""

    start: float
    action: float


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


def times_of(environment: MeasuredEnvironment) -> EnvironmentTimes:
    """Return the median CPU seconds of a start and of an action, over rounds."""
    return asyncio.run(_times(environment))


async def _times(environment: MeasuredEnvironment) -> EnvironmentTimes:
    host = EnvironmentHost(environment.config)
    await host.start()
    records = cycle(environment.records)
    starts, actions = [], []
    try:
        for _ in range(ROUNDS):
            start, _ = await _round(host, list(islice(records, STARTS)), 0)
            whole, num_actions = await _round(host, list(islice(records, STARTS)), ACTIONS)
            starts.append(start)
            actions.append(max(0.0, whole - start) / num_actions)
    finally:
        host.close()
    return EnvironmentTimes(median(starts), median(actions))


async def _round(host: EnvironmentHost, records: list[Record], most: int) -> tuple[float, float]:
    """Open an environment for each record, let it answer up to `most` actions, and close it.

    Return the mean CPU seconds and the mean number of actions of an environment.
    """
    places = asyncio.Semaphore(AT_ONCE)

    async def open_one(record: Record) -> int:
        async with places:
            session = Session(host)
            await session.reset(record)
            while session.num_steps < most and not session.is_over:
                await session.step(ACTION, ACTION_TIME)
            session.close()
            return session.num_steps

    process = psutil.Process(host.pid)
    before = sum(process.cpu_times()[:4])
    num_actions = sum(await asyncio.gather(*map(open_one, records)))
    ends_at = time.monotonic() + REAP_TIME
    while process.children() and time.monotonic() < ends_at:
        await asyncio.sleep(0.05)
    taken = sum(process.cpu_times()[:4]) - before
    return float(taken / len(records)), num_actions / len(records)
