"""Weights over relays: every place has the bytes that the trainer wrote, in whatever form they came and whatever breaks."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from streamrl.engine.messages import PushWeights, WeightsPushed
from streamrl.executor.launchers.handles import Handle, InProcess, LocalProcess, WorkerLostError
from streamrl.executor.launchers.launcher import RELAY, worker_environment
from streamrl.executor.launchers.processes import begin_for
from streamrl.executor.roles import Manifest
from streamrl.executor.transfer import relayed_transfer
from streamrl.executor.transfer.bucket_check import verify_buckets
from streamrl.executor.transfer.relayed_transfer import RelayedTransfer
from streamrl.executor.transfer.shared_directory import SHARED_MEMORY
from streamrl.executor.transfer.shared_memory import read_buckets, write_buckets
from streamrl.runfile.policies_config import SyncConfig

FAR, OTHER = "far", "other"
SIZE = 100_000


class Bench:
    """A trainer's weights, and a transfer that brings them to replica 0 at one place and replica 1 at another."""

    def __init__(
        self, mode: str = "delta", is_here: bool = False, log: Path | None = None, **sync: Any
    ) -> None:
        self.weights = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
        self.relays: dict[str, list[Handle]] = {}
        self.log = log
        self.transfer = RelayedTransfer(
            self.write, SyncConfig(mode=mode, **sync), self.start, lambda: self.trainer_place
        )
        self.trainer_place = FAR if is_here else "trainer's"
        self.transfer.join(0, FAR)
        self.transfer.join(1, OTHER)

    async def write(self, version: int, directory: Path) -> Manifest:
        tensors = [("a", self.weights), ("b", torch.full((3,), float(version)))]
        return write_buckets(tensors, directory, version, SIZE)

    async def start(self, place: str | None) -> Handle:
        config = {"model": "", "dtype": "bfloat16"}
        handle: Handle = InProcess(RELAY, config)
        if self.log is not None:
            handle = await LocalProcess.start(
                RELAY, config, self.log, worker_environment(1), begin=begin_for("cpu")
            )
        self.relays.setdefault(place or "near", []).append(handle)
        return handle

    async def push(self, version: int) -> WeightsPushed:
        """Change a hundredth of the weights and push them."""
        changed = torch.randperm(SIZE, generator=torch.Generator().manual_seed(version))[:1000]
        self.weights = self.weights.clone()
        self.weights[changed] *= 1.01
        return await self.transfer.push(PushWeights(version, 0))

    async def check(self, version: int) -> None:
        """Hold what replicas load against what was written."""
        for replica in (0, 1):
            manifest = await self.transfer.fetch(version, replica)
            assert manifest is not None and manifest.version == version
            assert verify_buckets(manifest) == manifest.checksum
            found = dict(read_buckets(manifest))
            assert torch.equal(found["a"], self.weights)


def run(scenario: Callable[[Bench], Awaitable[None]], bench: Bench) -> None:
    async def go() -> None:
        try:
            await asyncio.wait_for(
                scenario(bench), 150
            )  # a broadcast may wait for its patience of 60 s
        finally:
            directories = [place.directory for place in bench.transfer._all_places()]
            await bench.transfer.close()
        assert directories and not any(directory.exists() for directory in directories)

    asyncio.run(go())


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_every_place_has_what_was_written(mode: str, is_here: bool) -> None:
    async def go(bench: Bench) -> None:
        sizes = []
        for version in range(1, 5):
            event = await bench.push(version)
            sizes.append(event.num_bytes)
            await bench.check(version)
            assert event.checksum == (await bench.transfer.fetch(version, 0)).checksum  # type: ignore[union-attr]
        assert sizes[0] > 2 * 2 * SIZE  # to two places, whole
        assert all((size < sizes[0] / 20) == (mode == "delta") for size in sizes[1:])

    run(go, Bench(mode, is_here))


def test_a_delta_is_made_once_for_all_places() -> None:
    async def go(bench: Bench) -> None:
        await bench.push(1)
        near = bench.relays["near"][0]
        calls: list[str] = []
        call = near.call

        async def counted(method: str, *arguments: object, returns: Any) -> Any:
            calls.append(method)
            return await call(method, *arguments, returns=returns)

        near.call = counted  # type: ignore[method-assign]
        await bench.push(2)
        assert calls.count("pack") == 1
        await bench.check(2)

    run(go, Bench())


def test_every_so_often_all_is_sent() -> None:
    async def go(bench: Bench) -> None:
        sizes = [(await bench.push(version)).num_bytes for version in range(1, 8)]
        whole = [size > 2 * SIZE for size in sizes]
        assert whole == [True, False, False, True, False, False, True]

    run(go, Bench(anchor_every=3))


def test_who_joins_late_is_sent_all_and_then_deltas() -> None:
    async def go(bench: Bench) -> None:
        bench.transfer.leave(1)
        await bench.push(1)
        await bench.push(2)
        bench.transfer.join(1, OTHER)
        assert OTHER not in bench.relays
        await bench.check(2)
        assert (await bench.push(3)).num_bytes < SIZE / 5
        await bench.check(3)

    run(go, Bench())


def test_a_place_that_lost_its_base_is_healed_by_all_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def go(bench: Bench) -> None:
        await bench.push(1)
        await bench.relays[FAR][0].call("keep", [], returns=type(None))
        event = await bench.push(2)
        assert 2 * SIZE < event.num_bytes < 3 * SIZE  # a whole one here, a delta there
        await bench.check(2)
        assert (await bench.push(3)).num_bytes < SIZE / 5

    run(go, Bench())
    assert "sent whole to far" in caplog.text


def test_what_is_garbled_on_the_way_is_refused_and_sent_whole() -> None:
    async def go(bench: Bench) -> None:
        await bench.push(1)
        far = bench.relays[FAR][0]
        call = far.call
        num_garbled = 0

        async def garble(method: str, *arguments: Any, returns: Any) -> Any:
            nonlocal num_garbled
            if method == "receive" and not num_garbled:
                num_garbled += 1
                *others, data = arguments
                arguments = (*others, bytes([data[0] ^ 1]) + data[1:])
            return await call(method, *arguments, returns=returns)

        far.call = garble  # type: ignore[method-assign]
        assert (await bench.push(2)).num_bytes > 2 * SIZE
        assert num_garbled == 1
        await bench.check(2)

    run(go, Bench())


def test_whole_weights_that_are_garbled_are_no_version() -> None:
    async def go(bench: Bench) -> None:
        await bench.push(1)
        far = bench.relays[FAR][0]
        call = far.call

        async def garble(method: str, *arguments: Any, returns: Any) -> Any:
            if method == "receive":
                *others, data = arguments
                arguments = (*others, data[:-1] + bytes([data[-1] ^ 1]))
            return await call(method, *arguments, returns=returns)

        far.call = garble  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="expected checksum"):
            await bench.push(2)
        far.call = call  # type: ignore[method-assign]
        await bench.transfer.push(PushWeights(2, 0))
        await bench.check(2)

    run(go, Bench("full"))


def test_a_version_that_is_made_anew_replaces_the_old_one() -> None:
    async def go(bench: Bench) -> None:
        await bench.push(1)
        await bench.push(2)
        first = bench.weights
        bench.weights = (
            bench.weights + 1
        )  # the trainer was lost and made other weights of that number
        await bench.transfer.push(PushWeights(2, 0))
        assert not torch.equal(first, bench.weights)
        await bench.check(2)
        await bench.push(3)
        await bench.check(3)

    run(go, Bench())


def test_once_prepared_a_push_reaches_the_trainer_before_what_is_begun_after_it() -> None:
    async def go(bench: Bench) -> None:
        order = []

        async def write(version: int, directory: Path) -> Manifest:
            order.append("push")
            return await bench.write(version, directory)

        async def step() -> None:
            order.append("step")

        bench.transfer._write = write
        await bench.transfer.prepare()
        await asyncio.gather(bench.transfer.push(PushWeights(1, 0)), step())
        assert order == ["push", "step"]

    run(go, Bench())


def test_a_push_starts_no_relay_where_a_replica_is_up() -> None:
    async def go(bench: Bench) -> None:
        async def refuse(place: str | None) -> Handle:
            raise WorkerLostError(f"{place} drains")

        await bench.transfer.prepare()
        for replica in (0, 1):
            await bench.transfer.reach(replica)
        bench.transfer._start_relay = refuse
        await bench.push(1)
        await bench.check(1)

    run(go, Bench())


def test_relays_of_several_sites_start_at_the_same_time() -> None:
    async def go(bench: Bench) -> None:
        all_begun = asyncio.Barrier(2)

        async def start(place: str | None) -> Handle:
            await all_begun.wait()
            return await bench.start(place)

        bench.transfer._start_relay = start
        await asyncio.gather(*map(bench.transfer.reach, (0, 1, 0)))
        assert [len(relays) for relays in bench.relays.values()] == [1, 1]

    run(go, Bench())


def test_a_version_on_its_way_stays_where_an_older_one_is_let_go_of() -> None:
    async def go(bench: Bench) -> None:
        await bench.push(1)
        bench.transfer.hold(1)
        far = bench.relays[FAR][0]
        call = far.call

        async def late(method: str, *arguments: object, returns: Any) -> Any:
            result = await call(method, *arguments, returns=returns)
            if method == "unpack":  # 2 is here, and at no other place
                bench.transfer.release(1)
            return result

        far.call = late  # type: ignore[method-assign]
        await bench.push(2)
        await bench.check(2)

    run(go, Bench())


def test_a_relay_that_dies_is_replaced(tmp_path: Path) -> None:
    async def go(bench: Bench) -> None:
        await bench.push(1)
        bench.relays[FAR][0]._process.kill()  # type: ignore[attr-defined]
        await bench.push(2)  # reaches the other place
        await bench.check(2)  # and this one as soon as somebody there asks
        assert len(bench.relays[FAR]) == 2 and len(bench.relays[OTHER]) == 1
        bench.relays["near"][0]._process.kill()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionError) as caught:
            await bench.push(3)
        assert not isinstance(caught.value, WorkerLostError)  # no worker's loss: it is tried again
        await bench.transfer.push(PushWeights(3, 0))
        await bench.check(3)

    run(go, Bench(log=tmp_path / "relay.log"))


def test_a_relay_that_dies_while_the_trainer_writes_is_replaced(tmp_path: Path) -> None:
    async def go(bench: Bench) -> None:
        await bench.push(1)
        lost, write = bench.relays["near"][0], bench.transfer._write

        async def written_into_nothing(version: int, directory: Path) -> Manifest:
            bench.transfer._write = write
            lost._process.kill()  # type: ignore[attr-defined]
            shutil.rmtree(directory)
            return await write(version, directory)

        bench.transfer._write = written_into_nothing
        directory = bench.transfer._near.directory  # type: ignore[union-attr]
        with pytest.raises(ConnectionError) as caught:
            await bench.push(2)
        assert not isinstance(caught.value, WorkerLostError)  # no worker's loss: it is tried again
        assert not directory.exists()
        await bench.transfer.push(PushWeights(2, 0))
        await bench.check(2)

    run(go, Bench(log=tmp_path / "relay.log"))


def test_a_step_that_changes_nothing_is_a_version_all_the_same() -> None:
    async def go(bench: Bench) -> None:
        weights = [("a", bench.weights)]

        async def write(version: int, directory: Path) -> Manifest:
            return write_buckets(weights, directory, version)

        bench.transfer._write = write
        for version in (1, 2, 3):
            await bench.transfer.push(PushWeights(version, 0))
            await bench.check(version)

    run(go, Bench())


def test_relays_that_are_killed_leave_nothing(tmp_path: Path) -> None:
    async def go() -> None:
        bench = Bench(log=tmp_path / "relay.log")
        await bench.push(1)
        directories = [place.directory for place in bench.transfer._all_places()]
        assert all(directory.exists() for directory in directories)
        bench.transfer.stop()
        assert not any(directory.exists() for directory in directories)
        for handle in [each for some in bench.relays.values() for each in some]:
            await handle.close()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_the_relay_beside_the_trainer_goes_where_the_trainer_goes() -> None:
    async def go(bench: Bench) -> None:
        await bench.push(1)
        await bench.push(2)
        bench.trainer_place = OTHER
        await bench.push(3)
        assert len(bench.relays["near"]) == 2
        await bench.check(3)
        assert (await bench.push(4)).num_bytes < SIZE / 5
        await bench.check(4)

    run(go, Bench())


def test_places_that_none_has_are_sent_nothing() -> None:
    async def go(bench: Bench) -> None:
        for replica in (0, 1):
            bench.transfer.leave(replica)
        event = await bench.push(1)
        assert list(bench.relays) == ["near"]
        assert event.wire_time == 0 and event.num_bytes > 2 * SIZE

    run(go, Bench())


def test_more_than_a_chunk_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed_transfer, "CHUNK_BYTES", 1001)

    async def go(bench: Bench) -> None:
        await bench.push(1)
        await bench.check(1)

    run(go, Bench("full"))


def test_a_relay_reads_nothing_elsewhere() -> None:
    async def go(bench: Bench) -> None:
        await bench.push(1)
        near = bench.relays["near"][0]
        for path in ("/etc/passwd", "relative", f"{SHARED_MEMORY}/../etc/passwd"):
            with pytest.raises(ValueError, match="is not below"):
                await near.call("read", path, 0, 10, returns=bytes)

    run(go, Bench())


def test_a_dtype_that_has_no_width_is_refused() -> None:
    with pytest.raises((ValueError, msgspec.ValidationError), match="dtype must be one of"):
        InProcess(RELAY, {"model": "", "dtype": "int3"})
