"""Workers of a fork server: forked ahead, used up, dead, and in huge pages."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from streamrl.executor.verifier.fork_server import collapse
from streamrl.executor.verifier.verifier import Verifier
from tests.verifying import EASY, children, use


def test_an_answer_that_can_act_has_its_process_to_itself_and_the_next_one_finds_another_there() -> (
    None
):
    async def do(verifier: Verifier) -> None:
        await verifier.verify(*EASY)
        server = (await verifier.start()).pid
        used: list[int] = []
        for _ in range(3):
            (ready,) = children(server)
            used.append(ready)
            await verifier.verify("$x$ = one", 3, {"answer": "0.5"})
            async with asyncio.timeout(10):
                while not (others := [pid for pid in children(server) if pid != ready]):
                    await asyncio.sleep(0.01)
                while children(server) != others:  # what was used up is dead, and is buried later
                    await verifier.verify(*EASY)
        assert len({*used}) == 3

    use(do)


def test_a_worker_that_dies_idle_is_replaced_when_it_is_asked_for_and_not_before() -> None:
    """Whatever kills them as they start would keep the server at nothing else."""

    async def do(verifier: Verifier) -> None:
        await verifier.verify(*EASY)
        server = (await verifier.start()).pid
        (idle,) = children(server)
        os.kill(idle, signal.SIGKILL)
        await asyncio.sleep(0.3)
        assert {*children(server)} <= {idle}, "dead, and buried or not"
        assert (await verifier.verify(*EASY)).reward == 1.0

    use(do)


def free_huge_pages() -> int:
    """Return how many blocks of 2 MB are free (proc(5), buddyinfo: those of 512 and of 1,024 pages)."""
    zones = [line.split()[4:] for line in Path("/proc/buddyinfo").read_text().splitlines()]
    return sum(int(zone[9]) + 2 * int(zone[10]) for zone in zones)


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HUGE_PAGES.exists()
    or "[never]" in HUGE_PAGES.read_text()
    or tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1),
    reason="this kernel puts no memory into huge pages where it is asked to",
)
def test_what_is_forked_lies_in_huge_pages() -> None:
    async def do(verifier: Verifier) -> None:
        await verifier.verify(*EASY)
        server = (await verifier.start()).pid
        maps = Path(f"/proc/{server}/smaps").read_text()
        assert sum(map(int, re.findall(r"AnonHugePages: +(\d+) kB", maps))) >= 2_048 * wanted

    wanted = 2 if free_huge_pages() >= 10 else 1  # a kernel that has been up for long has few left
    use(do)


@pytest.mark.parametrize(
    "maps", ["7f0000000000-7f0000600000 rw-p 00000000 00:00 0\n", "\xe9\n", None]
)
def test_memory_that_cannot_be_put_into_huge_pages_stays_as_it_is(
    maps: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "maps"
    if maps is not None:
        path.write_bytes(maps.encode("latin-1"))
    monkeypatch.setattr("streamrl.executor.verifier.fork_server.MAPS", path)
    collapse()
