"""Weights that go from the trainer's process to replicas: what is packed is what is loaded, and a loss costs no version."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.engine.messages import LoadWeights, PushWeights, StartReplica
from streamrl.executor.launchers.handles import LocalProcess, WorkerLostError, remote
from streamrl.executor.launchers.launcher import REPLICA, TRAINER, worker_environment
from streamrl.executor.launchers.processes import begin_for
from streamrl.executor.roles import BroadcastRank, Manifest, TrainerRole, UnreachedError
from streamrl.executor.rollout.replica import Replica
from streamrl.executor.trainer.trainer import Trainer
from streamrl.executor.transfer import packed_weights, shared_directory, shared_gpu
from streamrl.executor.transfer.direct_transfer import DirectTransfer
from streamrl.executor.transfer.packed_weights import WeightReceiver, WeightSender, data_checksum
from streamrl.executor.transfer.shared_memory import read_buckets, write_buckets
from streamrl.runfile.files import load_run
from streamrl.targets.execute_limits import refusal_of
from tests.engines import HANG
from tests.test_deterministic import RUN_FILE
from tests.test_transfer import make_tensors
from tests.tiny_model import tiny_model

PATIENCE = 2.0
SHORT = 0.5
"""Patience with receivers that do not come."""
HEARTBEAT = 20.0
"""Seconds without a sign of life after which a process is lost: a busy machine lets it wait for some."""


class Circle:
    """A sender and receivers in threads of this process."""

    def __init__(self, num_receivers: int = 2, patience: float = PATIENCE) -> None:
        self.patience = patience
        self.sender = WeightSender("cpu")
        self.receivers = [WeightReceiver("cpu") for _ in range(num_receivers)]
        self.address = self.sender.listen()

    def seat(self, rank: int) -> BroadcastRank:
        return BroadcastRank(
            address=self.address, rank=rank, size=len(self.receivers) + 1, patience=self.patience
        )

    def send(self, manifest: Manifest, kept: list[int]) -> list[Exception]:
        """Send a version to all receivers, and return their errors."""
        errors: list[Exception] = []

        def receive(rank: int, receiver: WeightReceiver) -> None:
            try:
                receiver.receive(manifest, self.seat(rank), kept)
            except Exception as error:
                errors.append(error)

        threads = [
            threading.Thread(target=receive, args=pair) for pair in enumerate(self.receivers, 1)
        ]
        for thread in threads:
            thread.start()
        try:
            self.sender.send(manifest.version, self.seat(0))
        finally:
            for thread in threads:
                thread.join()
        return errors


@pytest.fixture
def circle() -> Iterator[Circle]:
    made = Circle()
    yield made
    for receiver in made.receivers:
        receiver.close()


@pytest.mark.parametrize("bucket_bytes", [200, 2**20])
def test_every_receiver_reads_what_was_packed_and_versions_reuse_files(
    circle: Circle, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("streamrl.executor.transfer.broadcast.BLOCK_BYTES", 512)
    tensors = make_tensors()
    tensors["tied"] = tensors["embed"]
    files: set[str] = set()
    for version in range(1, 5):
        tensors["scale"] = torch.tensor(float(version))
        manifest = circle.sender.pack(tensors.items(), version, [version - 1], bucket_bytes)
        assert circle.send(manifest, [version - 1]) == []
        for receiver in circle.receivers:
            found = receiver.files_of(manifest)
            assert found.checksum == manifest.checksum and not found.is_packed
            read = dict(read_buckets(found))
            assert read.keys() == tensors.keys()
            assert all(torch.equal(read[name], own) for name, own in tensors.items())
            files |= {bucket.path for bucket in found.buckets}
    written = write_buckets(tensors.items(), tmp_path, 1, bucket_bytes)
    assert len(written.buckets) == len(manifest.buckets)
    assert len(files) == 2 * 2 * len(manifest.buckets), "two versions in each receiver"
    with pytest.raises(ValueError, match="version 3 was not received"):
        circle.receivers[0].files_of(Manifest(version=3, buckets=[], is_packed=True))


def test_what_a_receiver_has_no_memory_for_is_received_on_a_disk(
    circle: Circle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first receiver has taken the memory: a write to a sparse file would kill the second one."""
    allocate, room = os.posix_fallocate, [3 * 2**19]
    memory = str(shared_directory.SHARED_MEMORY)

    def limited(descriptor: int, offset: int, size: int) -> None:
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(memory):
            if room[0] < size:
                raise OSError(errno.ENOSPC, "No space left on device")
            room[0] -= size
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    manifest = circle.sender.pack([("a", torch.arange(2**17))], 1, [])  # 1 MiB and a header
    assert circle.send(manifest, []) == []
    found = [receiver.files_of(manifest) for receiver in circle.receivers]
    for each in found:
        assert torch.equal(dict(read_buckets(each))["a"], torch.arange(2**17))
        assert Path(each.buckets[0].path).stat().st_blocks * 512 >= 2**20
    assert sum(each.buckets[0].path.startswith(memory) for each in found) == 1
    assert "--shm-size" in caplog.text


def test_a_bucket_that_arrives_damaged_is_refused(
    circle: Circle, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = circle.sender.pack(make_tensors().items(), 1, [])
    circle.sender._packed[1][0][-1] ^= 1
    errors = circle.send(manifest, [])
    assert len(errors) == 2 and all("expected a bucket with" in str(error) for error in errors)


@pytest.mark.parametrize("size", [8, 13, 4096 + 5])
def test_a_checksum_sees_each_changed_or_moved_word_and_is_the_same_on_each_device(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    monkeypatch.setattr(packed_weights, "BLOCK_BYTES", 64)
    whole = data_checksum(data)
    for blocks in (1, 4, 2**14):
        monkeypatch.setitem(packed_weights.BLOCKS_AT_ONCE, "cpu", blocks)
        assert data_checksum(data) == whole
    changed = data.clone()
    changed[size // 2] ^= 128
    assert data_checksum(changed) != whole
    if size > 16:
        assert data_checksum(data.roll(8)) != whole
        assert data_checksum(data.roll(64)) != whole
    assert data_checksum(torch.nn.functional.pad(data, (0, 1))) != whole


@pytest.mark.parametrize("value", [0, -1, 0x3F80_0000_3F80_0000, None])
def test_a_checksum_sees_one_bit_that_flips_in_several_words(
    value: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "BLOCK_BYTES", 2**13)
    words = torch.full((2048,), value or 0)
    if value is None:
        words.random_(-(2**63), None)
    whole = data_checksum(words.view(torch.uint8))
    for bit in (0, 15, 31, 32, 47, 62, 63):
        flip = torch.tensor([1]) << bit
        for flipped in ([0, 1], [1, 901], [4, 6], [0, 1, 2, 3], slice(None), slice(1, None, 2)):
            changed = words.clone()
            changed[flipped] ^= flip
            assert data_checksum(changed.view(torch.uint8)) != whole, (bit, flipped)


def test_an_error_of_one_member_ends_the_waits_of_all() -> None:
    circle = Circle(patience=HEARTBEAT)
    manifest = circle.sender.pack([("a", torch.zeros(2**20))], 1, [])
    circle.receivers[1]._files_for = lambda manifest: [Path("/nowhere/file")]  # type: ignore[method-assign]
    began_at = time.monotonic()
    try:
        errors = circle.send(manifest, [])
    except ConnectionError:
        errors = [ConnectionError()]
    assert errors and time.monotonic() - began_at < circle.patience / 3


def test_gpu_memory_is_handed_over_by_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the calls, with memory of this process in place of a GPU's."""
    blocks: dict[str, torch.Tensor] = {}

    def share(block: torch.Tensor) -> shared_gpu.SharedBlock:
        blocks["1"] = block
        return shared_gpu.SharedBlock("gpu", block.numel(), ["1"])

    def copy(shared: shared_gpu.SharedBlock, block: torch.Tensor) -> None:
        block.copy_(blocks[shared.handle[0]])

    monkeypatch.setattr(shared_gpu, "share", share)
    monkeypatch.setattr(shared_gpu, "copy_shared", copy)
    circle = Circle()
    monkeypatch.setattr(
        Circle,
        "seat",
        lambda self, rank: BroadcastRank(
            address=self.address, rank=rank, size=3, channel="cuda-ipc", patience=PATIENCE
        ),
    )
    for version in (1, 2):
        manifest = circle.sender.pack(make_tensors().items(), version, [], bucket_bytes=100)
        assert circle.send(manifest, []) == []
        assert circle.receivers[1].files_of(manifest).checksum == manifest.checksum
    for receiver in circle.receivers:
        receiver.close()


# With processes of a trainer and replicas ---------------------------------------------------------


class Bench:
    """A trainer and replicas in processes of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        tiny_model(32).save_pretrained(directory / "model")
        self.handles: list[LocalProcess] = []
        self.replicas: dict[int, Replica] = {}

    async def process(self, role: str, **config: Any) -> LocalProcess:
        handle = await LocalProcess.start(
            role,
            {"model": str(self.directory / "model"), "temperature": 1.0, **config},
            self.directory / "log",
            worker_environment(1),
            HEARTBEAT,
            begin_for("cpu", "static"),
        )
        self.handles.append(handle)
        return handle

    async def start(self, num_replicas: int) -> DirectTransfer:
        handle = await self.process(TRAINER, learning_rate=1e-3, correction="token-tis")
        trainer = Trainer.__new__(Trainer)
        trainer._identity = handle
        trainer._handle = handle
        trainer._remote = remote(TrainerRole, handle)
        await trainer._remote.start(None)
        self.transfer = DirectTransfer(trainer, "gloo", HEARTBEAT)
        for number in range(num_replicas):
            await self.join(number)
        return self.transfer

    async def join(self, number: int) -> Replica:
        limits = {"max_running": 1, "max_tokens": 8, "max_prompt_tokens": 8, "seed": 0}
        handle = await self.process(REPLICA, backend="static", **limits)
        replica = self.replicas[number] = Replica(handle, buffer=None)  # type: ignore[arg-type]
        self.transfer.join(number, "", replica)
        await replica.start(StartReplica(number, 0), None)
        handle.watch(lambda _: self.transfer.leave(number))
        return replica

    async def check(self, number: int, checksum: str) -> None:
        """Let a replica load version 0."""
        loaded = await self.replicas[number].load(
            LoadWeights(number, 0, drain=True), self.transfer.fetch(0, number)
        )
        assert loaded.checksum == checksum

    def run(self, scenario: Callable[[], Any]) -> None:
        async def go() -> None:
            try:
                await asyncio.wait_for(scenario(), HANG)
            finally:
                await asyncio.gather(*(handle.close() for handle in self.handles))

        asyncio.run(go())


PUSH = PushWeights(0, 0)


def test_a_loss_in_mid_broadcast_costs_no_version_and_only_the_role_that_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)

    async def go() -> None:
        transfer = await bench.start(2)
        first = await transfer.push(PUSH)
        replica, process = bench.replicas[1], bench.handles[2]
        receive = replica.receive

        async def struck(*arguments: Any) -> None:
            if not process.is_lost:
                process.send_signal(signal.SIGKILL)
            await receive(*arguments)

        replica.receive = struck  # type: ignore[method-assign]
        again = await transfer.push(PUSH)
        assert again.checksum == first.checksum and again.num_bytes == first.num_bytes
        assert "sending to each replica" in caplog.text
        await bench.check(0, first.checksum)
        while 1 in transfer._targets:  # until its loss is noticed
            await asyncio.sleep(0.05)
        await bench.join(3)
        await bench.check(3, first.checksum)  # sent its own
        caplog.clear()
        assert (await transfer.push(PUSH)).checksum == first.checksum
        assert not caplog.text
        # the trainer waits for receivers that refuse, as long as they may take to join
        transfer._patience = transfer._least_patience = SHORT
        await refuse_all(transfer)
        bench.handles[0].send_signal(signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            await transfer.push(PUSH)
        assert not bench.handles[1].is_lost and not bench.handles[3].is_lost

    async def refuse_all(transfer: DirectTransfer) -> None:
        async def refuse(*arguments: Any) -> None:
            raise OSError("no room")

        for number in (0, 3):
            bench.replicas[number].receive = refuse  # type: ignore[method-assign]
        with pytest.raises(UnreachedError, match="no room") as error:
            await transfer.push(PUSH)
        assert error.value.replicas == [0, 3]

    bench.run(go)


class Source:
    """A trainer that packs versions in this process; `lose` starts it again without them."""

    def __init__(self) -> None:
        self.worker: object = object()
        self.packed: set[int] = set()
        self.version = 1
        self.turn = asyncio.Event()
        self.turn.set()

    def lose(self) -> None:
        self.worker, self.packed = object(), set()

    async def push(self, version: int, directory: Path) -> Manifest:
        raise NotImplementedError

    async def pack(self, version: int, kept: list[int]) -> Manifest:
        if version != self.version:
            raise ValueError(f"the current version is {self.version}")
        self.packed.add(version)
        return Manifest(version=version, buckets=[], is_packed=True)

    async def listen(self) -> str:
        return "somewhere"

    async def send(self, version: int, seat: BroadcastRank) -> None:
        await self.turn.wait()
        if version not in self.packed:
            raise ValueError(f"version {version} is not packed here")


class Target:
    """A replica that receives at once."""

    is_up = False

    async def receive(self, manifest: Manifest, seat: BroadcastRank, kept: list[int]) -> None:
        pass


def test_a_restarted_trainer_packs_what_it_is_asked_to_push_again() -> None:
    async def go() -> None:
        source = Source()
        transfer = DirectTransfer(source, "gloo", PATIENCE)
        transfer.join(0, "", Target())
        await transfer.push(PushWeights(1, 0))
        source.lose()
        with pytest.raises(ConnectionError, match="weights of step 1 were lost with the trainer"):
            await transfer.fetch(1, 0)
        await transfer.push(PushWeights(1, 0))
        assert source.packed == {1} and await transfer.fetch(1, 0) is not None

    asyncio.run(go())


def test_a_version_is_packed_before_a_slow_send_lets_the_trainer_make_the_next() -> None:
    async def go() -> None:
        source = Source()
        transfer = DirectTransfer(source, "gloo", PATIENCE)
        transfer.join(0, "", Target())
        await transfer.push(PushWeights(1, 0))
        source.version = 2
        source.turn.clear()
        sending = asyncio.create_task(transfer.fetch(1, 0))
        pushing = asyncio.create_task(transfer.push(PushWeights(2, 0)))
        await asyncio.sleep(0.01)
        source.version = 3
        source.turn.set()
        await sending
        assert (await pushing).version == 2

    asyncio.run(go())


def test_a_trainer_whose_broken_connection_is_noticed_first_is_what_is_lost() -> None:
    async def go() -> None:
        source, target = Source(), Target()
        transfer = DirectTransfer(source, "gloo", PATIENCE)
        target.is_up = True
        transfer.join(0, "", target)

        async def send(version: int, seat: BroadcastRank) -> None:
            await asyncio.sleep(0.01)
            raise WorkerLostError("gone")

        async def receive(manifest: Manifest, seat: BroadcastRank, kept: list[int]) -> None:
            raise ConnectionError("connection reset")

        source.send, target.receive = send, receive  # type: ignore[method-assign]
        with pytest.raises(WorkerLostError, match="gone"):
            await transfer.push(PushWeights(1, 0))

    asyncio.run(go())


# The key -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["sync.wire=broadcast"], ""),
        (["sync.wire=cuda-ipc"], "sync.wire must be 'broadcast' or 'chunks' on CPUs"),
        (["sync.wire=broadcast", "sync.mode=lora"], "sync.mode must be 'full' for sync.wire"),
        (
            ["sync.wire=cuda-ipc", "execute.device=cuda", "execute.deterministic=false"],
            "unless trainer and replicas share one GPU",
        ),
        (
            [
                *("sync.wire=broadcast", "execute.device=cuda", "execute.deterministic=false"),
                "policies.system=colocated",
            ],
            "'cuda-ipc' or 'chunks' if trainer and replicas share GPUs",
        ),
    ],
)
def test_a_wire_that_cannot_be_is_refused_in_one_line(
    changes: list[str], words: str, tmp_path: Path
) -> None:
    tiny_model(32).save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (tmp_path / "run.toml").write_text(RUN_FILE)
    refusal = refusal_of(load_run(tmp_path / "run.toml", changes))
    assert words in refusal and bool(words) == bool(refusal) and "\n" not in refusal
