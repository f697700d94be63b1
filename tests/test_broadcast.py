"""A broadcast brings every far relay the bytes of a parcel, by way of one of them, and heals where it breaks."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from streamrl.executor.libc import listening_sockets
from streamrl.executor.transfer import broadcast as circle
from tests.test_relayed_transfer import FAR, OTHER, SIZE, Bench, run

THIRD = "third"
CHUNKS, TELLS = "receive", "broadcast"


def calls_of(bench: Bench) -> list[tuple[str, str]]:
    """Note from now on what the relays are asked for."""
    noted: list[tuple[str, str]] = []
    for name, handles in bench.relays.items():
        _note(name, handles[-1], noted)
    return noted


def _note(name: str, handle: Any, noted: list[tuple[str, str]]) -> None:
    call = handle.call

    async def counted(method: str, *arguments: object, returns: Any) -> Any:
        noted.append((name, method))
        return await call(method, *arguments, returns=returns)

    handle.call = counted


@pytest.mark.parametrize("places", [1, 2, 3])
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_every_place_hears_what_was_written_without_a_chunk(
    mode: str, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        circle, "BLOCK_BYTES", SIZE // 3
    )  # several blocks a piece, the last one smaller

    async def go(bench: Bench) -> None:
        if places == 1:
            bench.transfer.join(1, FAR)
        elif places == 3:
            bench.transfer.join(2, THIRD)
        await bench.push(1)
        await bench.check(1)
        noted = calls_of(bench)
        for version in (2, 3):
            event = await bench.push(version)
            await bench.check(version)
            assert (event.num_bytes < SIZE) == (mode == "delta") and event.wire_time > 0
        asked = [method for _, method in noted]
        assert asked.count(TELLS) == 2 * (places + 1) and CHUNKS not in asked
        assert "join_broadcast" not in asked, "circles last"

    run(go, Bench(mode, wire="gloo"))


def test_who_sits_beside_the_trainer_reads_its_files() -> None:
    async def go(bench: Bench) -> None:
        for version in (1, 2):
            await bench.push(version)
            await bench.check(version)
        noted = calls_of(bench)
        await bench.push(3)
        assert (OTHER, TELLS) in noted and (FAR, TELLS) not in noted

    run(go, Bench("full", is_here=True, wire="gloo"))


def test_a_late_place_is_sent_its_own_and_hears_from_then_on() -> None:
    async def go(bench: Bench) -> None:
        await bench.push(1)
        bench.transfer.join(2, THIRD)
        await bench.push(2)
        noted = calls_of(bench)
        await bench.push(3)
        assert {name for name, method in noted if method == TELLS} == {"near", FAR, OTHER, THIRD}
        await bench.check(3)

    run(go, Bench(wire="gloo"))


def test_what_was_garbled_in_a_broadcast_is_sent_again() -> None:
    async def go(bench: Bench) -> None:
        await bench.push(1)
        far = bench.relays[FAR][0]
        worker = far._role  # type: ignore[attr-defined]
        whole = worker._broadcast

        def garble(parcel: Any) -> None:
            whole(parcel)
            piece = worker._inbox(parcel.result.version) / "0"
            data = bytearray(piece.read_bytes())
            data[-1] ^= 1
            piece.write_bytes(data)

        worker._broadcast = garble
        await bench.push(2)
        await bench.check(2)
        worker._broadcast = whole
        await bench.push(3)
        await bench.check(3)

    run(go, Bench(wire="gloo"))


@pytest.mark.parametrize("who", [FAR, OTHER])
def test_a_relay_that_dies_between_or_in_broadcasts_costs_no_version(
    who: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FAR is the one that tells the others."""

    async def go(bench: Bench) -> None:
        await bench.push(1)
        bench.relays[who][0]._process.kill()  # type: ignore[attr-defined]
        await bench.push(2)
        await bench.check(2)
        dying = asyncio.ensure_future(bench.push(3))
        bench.relays[who][-1]._process.kill()  # type: ignore[attr-defined]
        await dying
        await bench.check(3)
        noted = calls_of(bench)
        await bench.push(4)
        await bench.check(4)
        assert CHUNKS not in [method for _, method in noted], "a circle without the dead is made"

    run(go, Bench(log=tmp_path / "relay.log", wire="gloo"))
    assert "failed, sending to each site" in caplog.text


def test_a_meeting_is_on_the_network_that_was_said_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(circle.INTERFACE, raising=False)
    assert circle.Rendezvous().address.startswith("127.0.0.1:")
    monkeypatch.setenv(circle.INTERFACE, "no-such-network")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=no-such-network"):
        circle.Rendezvous()


def test_after_a_meeting_nobody_else_may_connect_and_its_members_go_on() -> None:
    before = listening_sockets()

    def refused() -> int:
        """Return the number of ports that were opened, after a look at each: nobody answers there."""
        ports = {port for each, port in listening_sockets().items() if each not in before}
        for port in ports:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.05)
        return len(ports)

    async def go(bench: Bench) -> None:
        for version in (1, 2):
            await bench.push(version)
            await bench.check(version)
            assert refused() >= 3, "gloo's listeners, and that of the store"

    run(go, Bench(wire="gloo"))
