"""Measure the CPU seconds that the start of one environment takes: the fork of its process, its setup and its end."""

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
"""Rounds, starts of each round, and environments that are open at once."""
REAP_TIME = 5.0
"""Most seconds in which the host notices that the processes of a round have ended."""


class MeasuredEnvironment(NamedTuple):
    """An environment whose starts are measured."""

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


def start_time_of(environment: MeasuredEnvironment) -> float:
    """Return the median CPU seconds of a start, over rounds."""
    return median(asyncio.run(_rounds(environment)))


async def _rounds(environment: MeasuredEnvironment) -> list[float]:
    host = EnvironmentHost(environment.config)
    await host.start()
    records = islice(cycle(environment.records), ROUNDS * STARTS)
    try:
        return [await _round(host, list(islice(records, STARTS))) for _ in range(ROUNDS)]
    finally:
        host.close()


async def _round(host: EnvironmentHost, records: list[Record]) -> float:
    """Open and close an environment for each record, and return the CPU seconds of one."""
    places = asyncio.Semaphore(AT_ONCE)

    async def open_one(record: Record) -> None:
        async with places:
            session = Session(host)
            await session.reset(record)
            session.close()

    process = psutil.Process(host.pid)
    before, own_before = sum(process.cpu_times()[:4]), time.process_time()
    await asyncio.gather(*map(open_one, records))
    ends_at = time.monotonic() + REAP_TIME
    while process.children() and time.monotonic() < ends_at:
        await asyncio.sleep(0.05)
    taken = sum(process.cpu_times()[:4]) - before + time.process_time() - own_before
    return float(taken / len(records))
