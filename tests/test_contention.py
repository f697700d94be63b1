"""Roles that are measured in company are measured in it alone, however long a part of their work takes."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from streamrl.executor.profiling.contention import (
    LEAST_PASSES,
    Work,
    run_beside,
    run_concurrently,
)

PASS, IN_COMPANY = 0.5, 2.0


async def tick() -> None:
    """Let all others go on, until who waits for one of them knows that it has ended."""
    for _ in range(5):
        await asyncio.sleep(0)


class Scene:
    """A replica and a trainer whose seconds say whether the other worked meanwhile."""

    def __init__(self, ticks_of_generation: int, ticks_of_a_pass: int) -> None:
        self._generates = 0
        self._ticks = ticks_of_generation, ticks_of_a_pass
        self.rounds = 0

    async def generate(self) -> list[float]:
        self.rounds += 1
        self._generates += 1
        for _ in range(self._ticks[0]):
            await tick()
        self._generates -= 1
        return [1.0, 3.0]

    async def train(self) -> list[float]:
        was_alone = False
        await asyncio.sleep(0)  # those who generate begin
        for _ in range(self._ticks[1]):
            was_alone |= not self._generates
            await tick()
        return [PASS if was_alone else IN_COMPANY]


@pytest.mark.parametrize(("of_generation", "of_a_pass"), [(50, 3), (12, 5), (7, 5)])
def test_a_pass_counts_that_has_company_all_the_time(of_generation: int, of_a_pass: int) -> None:
    scene = Scene(of_generation, of_a_pass)
    found = asyncio.run(run_concurrently([scene.generate], scene.train))
    assert found == (2.0, IN_COMPANY)
    assert 1 <= scene.rounds <= LEAST_PASSES


def test_a_pass_that_outlasts_generation_counts_as_it_is_and_replicas_end() -> None:
    scene = Scene(2, 50)
    assert asyncio.run(run_concurrently([scene.generate], scene.train)) == (2.0, PASS)
    assert scene.rounds == LEAST_PASSES


def test_who_has_no_company_makes_so_many_passes() -> None:
    numbers = count(1)

    async def train() -> list[float]:
        return [float(next(numbers))]

    async def generate() -> list[float]:
        return [2.0, 4.0]

    work: Work = train
    assert asyncio.run(run_concurrently([], work)).training == (1 + 2 + 3 + 4) / 4
    assert asyncio.run(run_concurrently([generate, generate], None)) == (3.0, 0.0)


def test_a_replica_that_was_never_full_is_left_out_and_all_begin_again_where_none_was() -> None:
    rounds = iter([[], [], [], [2.0]])

    async def generate() -> list[float]:
        return next(rounds)

    async def full() -> list[float]:
        return [4.0]

    assert asyncio.run(run_concurrently([generate, full], None)) == (4.0, 0.0)
    assert asyncio.run(run_concurrently([generate], None)) == (2.0, 0.0)


@pytest.mark.parametrize("trains", [False, True])
def test_roles_work_until_others_end_and_work_that_ends_later_is_left_out(trains: bool) -> None:
    ends = asyncio.Event()

    async def others() -> str:
        await ends.wait()
        return "all environments"

    def work(seconds: float) -> Work:
        numbers = count()

        async def one() -> list[float]:
            if (number := next(numbers)) == 3:
                ends.set()
            await tick()
            return [seconds + number, seconds]

        return one

    found = asyncio.run(run_beside(work(10.0), work(100.0) if trains else None, others()))
    assert found == ((10.5, 100.5 if trains else 0.0), "all environments")


def test_work_counts_that_is_the_only_one_although_others_end_first() -> None:
    async def others() -> None:
        return None

    async def generate() -> list[float]:
        for _ in range(3):
            await tick()
        return [3.0, 5.0]

    assert asyncio.run(run_beside(generate, None, others())) == ((4.0, 0.0), None)
