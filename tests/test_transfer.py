"""Weight buckets: what is written is what is read, or nothing is."""

from __future__ import annotations

import asyncio
import gc
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from streamrl.engine.messages import PushWeights, WeightsPushed
from streamrl.executor.directory_lock import remove_abandoned
from streamrl.executor.roles import Manifest
from streamrl.executor.transfer import shared_directory
from streamrl.executor.transfer.bucket_check import num_threads, run_concurrently, verify_buckets
from streamrl.executor.transfer.shared_directory import SharedDirectory, remove_version
from streamrl.executor.transfer.shared_memory import (
    cast_tensors,
    read_buckets,
    replaced_directory,
    write_buckets,
)
from streamrl.executor.transfer.transfer import Transfer


def make_tensors() -> dict[str, torch.Tensor]:
    """Tensors of several dtypes and shapes, one not contiguous, one empty, one a scalar."""
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(50, 8, generator=generator),
        "half": torch.randn(7, 3, generator=generator).bfloat16(),
        "transposed": torch.randn(5, 9, generator=generator).T,
        "ids": torch.arange(12),
        "empty": torch.empty(0, 4),
        "scale": torch.tensor(0.5),
    }


def assert_same(manifest: Manifest, expected: dict[str, torch.Tensor]) -> None:
    found = dict(read_buckets(manifest))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("bucket_bytes", [1, 100, 400, 2**20])
def test_every_tensor_is_read_as_written_at_any_bucket_size(
    tmp_path: Path, bucket_bytes: int
) -> None:
    manifest = write_buckets(make_tensors().items(), tmp_path, 3, bucket_bytes)
    assert manifest.version == 3
    assert_same(manifest, make_tensors())
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
    assert_same(sent, make_tensors())


def test_buckets_hold_at_most_their_bytes_unless_of_one_tensor(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.zeros(100) for i in range(10)} | {"large": torch.zeros(1000)}
    manifest = write_buckets(tensors.items(), tmp_path, 0, bucket_bytes=1200)
    header = 1000  # more than the longest safetensors header of these
    sizes = [bucket.num_bytes for bucket in manifest.buckets]
    assert len(sizes) == 5
    assert all(size < 1200 + header for size in sizes[:4]) and sizes[4] >= 4000
    assert sorted(Path(b.path).name for b in manifest.buckets) == sorted(
        path.name for path in (tmp_path / "v000000").iterdir()
    )


def test_buckets_are_the_same_whatever_number_is_written_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(10)}
    one, more = tmp_path / "one", tmp_path / "more"
    one.mkdir()
    more.mkdir()
    expected = write_buckets(tensors.items(), one, 0, bucket_bytes=400)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    manifest = write_buckets(tensors.items(), more, 0, bucket_bytes=400)
    assert [b.checksum for b in manifest.buckets] == [b.checksum for b in expected.buckets]
    assert [Path(b.path).name for b in manifest.buckets] == [
        Path(b.path).name for b in expected.buckets
    ]
    assert verify_buckets(manifest) == verify_buckets(expected) == expected.checksum
    assert_same(manifest, tensors)


def test_as_many_are_worked_on_at_a_time_as_there_are_threads_and_come_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = threading.Barrier(3, timeout=60)  # who is alone waits for ever
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    def wait(number: int) -> int:
        together.wait()
        return number

    assert list(run_concurrently(wait, range(6))) == [0, 1, 2, 3, 4, 5]
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    assert num_threads() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert num_threads() == 1


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_tied_weights_are_written_once_and_read_under_both_names(
    tmp_path: Path, bucket_bytes: int
) -> None:
    embed = torch.randn(100, 16)
    tensors = {"embed": embed, "norm": torch.ones(16), "head": embed.detach()}
    manifest = write_buckets(tensors.items(), tmp_path, 0, bucket_bytes)
    assert manifest.num_bytes < 1.5 * embed.nbytes
    assert_same(manifest, tensors)
    found = dict(read_buckets(manifest))
    assert found["embed"].data_ptr() == found["head"].data_ptr()


def test_views_of_one_storage_are_not_taken_for_tied(tmp_path: Path) -> None:
    storage = torch.arange(12.0)
    tensors = {"all": storage, "grid": storage.view(3, 4), "tail": storage[4:8]}
    assert_same(write_buckets(tensors.items(), tmp_path, 0), tensors)


def test_tensors_made_one_by_one_are_not_taken_for_tied(tmp_path: Path) -> None:
    def produce() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(20):
            yield f"t{index}", torch.full((1000,), float(index))

    expected = {f"t{index}": torch.full((1000,), float(index)) for index in range(20)}
    assert_same(write_buckets(produce(), tmp_path, 0, bucket_bytes=1), expected)


def test_a_cast_keeps_tied_weights_tied(tmp_path: Path) -> None:
    embed = torch.randn(64, 16)
    tensors = {"embed": embed, "head": embed.detach(), "ids": torch.arange(3)}
    manifest = write_buckets(cast_tensors(tensors.items(), torch.bfloat16), tmp_path, 0)
    assert manifest.num_bytes < 1.5 * embed.nbytes / 2
    cast = embed.bfloat16()
    assert_same(manifest, {"embed": cast, "head": cast, "ids": torch.arange(3)})


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_bucket_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    manifest = write_buckets(make_tensors().items(), tmp_path, 0, bucket_bytes=100)
    bucket = manifest.buckets[-1]
    content = bytearray(Path(bucket.path).read_bytes())
    content[-1] ^= 1
    Path(bucket.path).write_bytes(content if damage == "flipped" else content[:-1])
    with pytest.raises(ValueError, match=f"{bucket.path}: expected .*{bucket.checksum}, found"):
        verify_buckets(manifest)


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a' comes twice"):
        write_buckets([("a", torch.ones(1)), ("a", torch.zeros(1))], tmp_path, 0)


def test_what_was_read_outlives_its_version_and_a_second_write_of_it(tmp_path: Path) -> None:
    found = dict(read_buckets(write_buckets([("a", torch.ones(5000))], tmp_path, 1)))
    write_buckets([("a", torch.zeros(5000))], tmp_path, 1)
    remove_version(tmp_path, 1)
    remove_version(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(found["a"], torch.ones(5000))


def test_reading_weights_many_times_leaves_nothing_behind(tmp_path: Path) -> None:
    """A replica reads each version; an object per tensor would add up over thousands of them."""
    tensors = make_tensors()
    manifest = write_buckets(tensors.items(), tmp_path, 1)

    def grown(times: int) -> int:
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(times):
            assert dict(read_buckets(manifest))
        gc.collect()
        return sys.getallocatedblocks() - before

    grown(3)
    assert grown(40) < 40 * len(tensors) / 2  # others allocate a little meanwhile


def test_a_shared_directory_is_fresh_and_private() -> None:
    first, second = SharedDirectory("run"), SharedDirectory("run")
    try:
        assert first.path != second.path and second.path.is_dir()
        assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
        if Path("/dev/shm").is_dir():
            assert first.path.parent == Path("/dev/shm")
    finally:
        for directory in (first, second, second):
            directory.remove()
    assert not first.path.exists() and not second.path.exists()


def test_what_has_no_room_in_shared_memory_goes_through_files(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_directory, "free_shared_memory", lambda: 64 * 2**20)
    small, large = SharedDirectory("run", 64 * 2**20), SharedDirectory("run", 65 * 2**20)
    try:
        assert small.path.parent == Path("/dev/shm") != large.path.parent
        (warning,) = caplog.messages
        assert warning.startswith("run of 68 MB go through files in") and "--shm-size" in warning
    finally:
        small.remove()
        large.remove()


def test_a_name_that_is_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="name must be letters"):
        SharedDirectory("../run")


OWNER = """
import sys, time
from contextlib import contextmanager
from pathlib import Path
from streamrl.executor.transfer.shared_directory import SharedDirectory
directory = SharedDirectory("owned")
path = directory.path
(path / "v000001").mkdir()
(path / "v000001" / "bucket").write_bytes(bytes(1000))
if sys.argv[1:] == ["unwatched"]:
    directory._watchdog.kill()
    directory._watchdog.wait()
print(path, flush=True)
time.sleep(60)
"""


def test_the_weights_of_a_killed_owner_are_gone_at_once() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    path = Path((owner.stdout or sys.stdin).readline().strip())
    try:
        assert (path / "v000001" / "bucket").exists()
    finally:
        owner.kill()
        owner.wait()
    end = time.monotonic() + 20
    while path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not path.exists()


def test_what_a_killed_owner_leaves_is_gone_with_the_next_start_and_what_the_living_have_stays() -> (
    None
):
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER, "unwatched"], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        paths = [Path((owner.stdout or sys.stdin).readline().strip()) for owner in owners]
        owners[0].kill()
        owners[0].wait()
        assert all((path / "v000001" / "bucket").exists() for path in paths)
        SharedDirectory("next").remove()
        assert [path.exists() for path in paths] == [False, True]
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
    SharedDirectory("next").remove()
    assert not paths[1].exists()


def test_a_directory_without_a_lock_is_nobodys_to_remove(tmp_path: Path) -> None:
    (tmp_path / "streamrl-older").mkdir()
    remove_abandoned(tmp_path)
    assert (tmp_path / "streamrl-older").exists()


def test_a_writer_does_not_make_the_directory_of_an_owner_that_ended(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_buckets([("a", torch.ones(1))], tmp_path / "gone", 1)
    assert not (tmp_path / "gone").exists()


@contextmanager
def most_file_bytes(most: int) -> Iterator[None]:
    """Let the kernel refuse larger files, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", [torch.save, save_file])
def test_a_disk_that_takes_no_more_of_a_checkpoint_is_named_with_the_file(
    tmp_path: Path, write: Callable[[object, Path], None]
) -> None:
    old = tmp_path / "v000001"
    old.mkdir()
    with (
        most_file_bytes(100_000),
        pytest.raises(OSError, match=r"File too large; raise the limit .*v000001(/large)?'$"),
        replaced_directory(old) as partial,
    ):
        write({"weights": torch.zeros(100_000)}, partial / "large")
    assert list(tmp_path.iterdir()) == [old], "the partial checkpoint may have filled the disk"
    with pytest.raises(ValueError, match=r"^another$"), replaced_directory(old) as partial:
        (partial / "config.json").write_text("{}")
        raise ValueError("another")


def test_a_replaced_directory_is_the_old_or_the_new_one_whole(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with replaced_directory(target) as partial:
        (partial / "a").write_text("old")
        assert not target.exists()
    with pytest.raises(KeyboardInterrupt), replaced_directory(target) as partial:
        (partial / "b").write_text("unfinished")
        raise KeyboardInterrupt
    assert [path.name for path in target.iterdir()] == ["a"]
    with replaced_directory(target) as partial:
        assert list(partial.iterdir()) == []
        (partial / "a").write_text("new")
    assert (target / "a").read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_pushed_version_stays_while_it_is_the_newest_or_held() -> None:
    async def write(version: int, directory: Path) -> Manifest:
        return write_buckets([("a", torch.full((3,), float(version)))], directory, version)

    async def go() -> None:
        transfer = Transfer(write)
        try:
            for version in (1, 2, 3):
                transfer.hold(version)
                pushed = await transfer.push(PushWeights(version, 0))
                manifest = transfer.manifests[version]
                assert pushed == WeightsPushed(version, manifest.num_bytes, manifest.checksum)
            oldest = Path(transfer.manifests[1].buckets[0].path)
            assert oldest.exists()
            for version in (1, 3):  # the newest stays though nobody holds it
                transfer.release(version)
            assert list(transfer.manifests) == [2, 3] and not oldest.exists()
            (tensor,) = (tensor for _, tensor in read_buckets(transfer.manifests[2]))
            assert torch.equal(tensor, torch.full((3,), 2.0))
        finally:
            transfer.stop()
        assert not oldest.parent.parent.exists()

    asyncio.run(go())


def test_a_push_that_breaks_off_leaves_nothing_in_shared_memory() -> None:
    found: list[Path] = []

    async def break_off(version: int, directory: Path) -> Manifest:
        found.append(directory)
        (directory / "v000001").mkdir()
        (directory / "v000001" / "bucket-00000.partial").write_bytes(b"half")
        raise ConnectionError("the trainer died")

    transfer = Transfer(break_off)
    with pytest.raises(ConnectionError):
        asyncio.run(transfer.push(PushWeights(1, 0)))
    assert found[0].exists()
    transfer.stop()
    assert not found[0].exists()
