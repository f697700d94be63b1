"""Send weights from the trainer's process to replicas through a broadcast group, without files of the trainer.

    trainer: pack ---- buckets in host memory ---- send ==== group ==== receive ---- files in shared memory ---- replica

A bucket has the bytes of a safetensors file, so a received one is loaded like a written one. On GPUs buckets are packed,
checked and sent in device memory, one at a time. Packed and received ones wait in host memory. That of old versions is
used again, because the first write to new memory is slow.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from streamrl.executor.roles import BroadcastRank, Bucket, Manifest
from streamrl.executor.transfer.broadcast import BroadcastGroup, Rendezvous
from streamrl.executor.transfer.shared_directory import (
    SharedDirectory,
    reserve,
    warn_of_little_room,
)
from streamrl.executor.transfer.shared_memory import (
    BUCKET_BYTES,
    Contents,
    NamedTensors,
    fill_buckets,
)

FORMAT_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in the safetensors format (github.com/huggingface/safetensors, safetensors/src/tensor.rs)."""
ALIGNMENT = 8
"""Bytes to which safetensors pads its header."""
BLOCK_BYTES = 2**20
"""Bytes of a block of a checksum: as many as a CPU caches."""
BLOCKS_AT_ONCE = {"cpu": 1, "cuda": 64}
"""Blocks that are summed at once. A GPU needs many to be busy. The checksum does not depend on it."""
KEPT_BUCKETS = 2
"""Weight versions whose memory is kept for later ones."""


class WeightSender:
    """The packed versions of a trainer, and the group that it sends them to."""

    def __init__(self, device: str) -> None:
        """Pack and send nothing yet; `device` is the torch device of the weights."""
        self._device = torch.device(device)
        self._packed: dict[int, list[torch.Tensor]] = {}
        """Buckets of each version in host memory, as bytes."""
        self._spare: list[list[torch.Tensor]] = []
        self._member = _Member()

    def pack(
        self,
        weights: NamedTensors,
        version: int,
        kept: list[int],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> Manifest:
        """Pack weights, forget all other versions than `kept`, and return the manifest.

        Raises:
            ValueError: a name comes twice, or safetensors lacks a dtype.
        """
        for other in [v for v in self._packed if v not in kept or v == version]:
            self._spare.append(self._packed.pop(other))
        del self._spare[:-KEPT_BUCKETS]
        old = self._spare.pop() if self._spare else []
        buckets: list[Bucket] = []
        packed: list[torch.Tensor] = []
        for contents in fill_buckets(weights, bucket_bytes, _detached):
            data = _pack(contents, self._device)
            buckets.append(Bucket("", data.numel(), data_checksum(data)))
            packed.append(
                self._host_copy(data, old[len(packed)] if len(packed) < len(old) else None)
            )
        self._packed[version] = packed
        return Manifest(version=version, buckets=buckets, is_packed=True)

    def listen(self) -> str:
        """Open the rendezvous of the next group, and return its address."""
        return self._member.listen()

    def send(self, version: int, seat: BroadcastRank) -> None:
        """Send a packed version to the group of `seat`.

        Raises:
            ValueError: the version is not packed here.
            RuntimeError: a member of the group is gone.
        """
        if version not in self._packed:
            raise ValueError(f"version {version} is not packed here: the trainer has restarted")
        with self._member.group(seat) as group, separate_cuda_stream(self._device):
            for data in self._packed[version]:
                group.broadcast(data.to(self._device))

    def _host_copy(self, data: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
        """Return the bytes in host memory; that of `old` is used if it fits."""
        if self._device.type == "cpu":
            return data
        fits = old is not None and old.numel() == data.numel()
        host = old if fits else torch.empty(data.numel(), dtype=torch.uint8, pin_memory=True)
        assert host is not None
        return host.copy_(data)


class WeightReceiver:
    """The received versions of a replica, and the group that it receives them from."""

    def __init__(self, device: str) -> None:
        """Receive nothing yet; `device` is the torch device at which buckets arrive."""
        self._device = torch.device(device)
        self._directories: list[SharedDirectory] = []
        """Where files are: in shared memory, and on a disk once that is full."""
        self._received: dict[int, Manifest] = {}
        """Manifests of files, by version."""
        self._spare: list[list[Path]] = []
        self._numbers = itertools.count()
        self._member = _Member()

    def receive(self, manifest: Manifest, seat: BroadcastRank, kept: list[int]) -> None:
        """Receive the buckets of a packed manifest; forget received versions other than `kept`.

        Raises:
            ValueError: a bucket differs from the one that was packed.
            RuntimeError: a member of the group is gone.
        """
        for other in [v for v in self._received if v not in kept or v == manifest.version]:
            gone = self._received.pop(other)
            self._spare.append([Path(bucket.path) for bucket in gone.buckets])
        files = self._files_for(manifest)
        try:
            with self._member.group(seat) as group, separate_cuda_stream(self._device):
                for bucket, path in zip(manifest.buckets, files, strict=True):
                    self._receive_bucket(group, bucket, path)
        except BaseException:
            self._spare.append(files)
            raise
        buckets = [
            replace(bucket, path=str(path))
            for bucket, path in zip(manifest.buckets, files, strict=True)
        ]
        self._received[manifest.version] = replace(manifest, buckets=buckets, is_packed=False)

    def files_of(self, manifest: Manifest) -> Manifest:
        """Return the manifest of the received files of a packed version.

        Raises:
            ValueError: the version was not received, or has other weights.
        """
        files = self._received.get(manifest.version)
        if files is None or files.checksum != manifest.checksum:
            raise ValueError(f"version {manifest.version} was not received")
        return files

    def close(self) -> None:
        """Remove all files, and leave the group."""
        self._member.leave()
        for directory in self._directories:
            directory.remove()

    def _receive_bucket(self, group: BroadcastGroup, bucket: Bucket, path: Path) -> None:
        file = torch.from_file(str(path), shared=True, size=bucket.num_bytes, dtype=torch.uint8)
        is_cpu = self._device.type == "cpu"
        data = file if is_cpu else torch.empty_like(file, device=self._device)
        group.broadcast(data)
        if (found := data_checksum(data)) != bucket.checksum:
            raise ValueError(f"expected a bucket with checksum {bucket.checksum}, received {found}")
        if not is_cpu:
            file.copy_(data)

    def _files_for(self, manifest: Manifest) -> list[Path]:
        """Return a path for each bucket: files of a forgotten version with the same sizes, or new ones."""
        sizes = [bucket.num_bytes for bucket in manifest.buckets]
        for number, files in enumerate(self._spare):
            if [file.stat().st_size if file.exists() else 0 for file in files] == sizes:
                del self._spare[number]
                return files
        for files in self._spare:
            for file in files:
                file.unlink(missing_ok=True)
        self._spare.clear()
        if not self._directories:
            room = KEPT_BUCKETS * manifest.num_bytes
            self._directories.append(SharedDirectory("received", room))
        found = self._new_files(self._directories[-1], sizes)
        if found is None:  # other replicas of this machine have taken the memory meanwhile
            warn_of_little_room("received", manifest.num_bytes)
            self._directories.append(SharedDirectory("received", on_disk=True))
            found = self._new_files(self._directories[-1], sizes)
        if found is None:
            raise OSError(f"no room for weights of {manifest.num_bytes / 1e9:.2f} GB on the disk")
        return found

    def _new_files(self, directory: SharedDirectory, sizes: list[int]) -> list[Path] | None:
        """Return new files of these sizes, with all their memory; None if there is not enough."""
        target = directory.path / str(next(self._numbers))
        target.mkdir()
        files = [target / f"bucket-{number:05d}.safetensors" for number in range(len(sizes))]
        if all(reserve(file, size) for file, size in zip(files, sizes, strict=True)):
            return files
        shutil.rmtree(target)
        return None


class _Member:
    """A process's rendezvous and its current group; joining a group leaves the one before."""

    def __init__(self) -> None:
        self._opened: dict[str, Rendezvous] = {}
        """Rendezvous of groups that are still to be joined, by address, in the order of groups."""
        self._seat: BroadcastRank | None = None
        self._group: BroadcastGroup | None = None

    def listen(self) -> str:
        rendezvous = Rendezvous()
        self._opened[rendezvous.address] = rendezvous
        return rendezvous.address

    @contextlib.contextmanager
    def group(self, seat: BroadcastRank) -> Iterator[BroadcastGroup]:
        """Yield the group of a seat; an error inside ends the group, so that its other members notice."""
        if self._group is None or self._seat != seat:
            self.leave()
            rendezvous = self._rendezvous_of(seat.address) if seat.rank == 0 else None
            self._group, self._seat = BroadcastGroup(seat, rendezvous), seat
        try:
            yield self._group
        except BaseException:
            self.leave()
            raise

    def _rendezvous_of(self, address: str) -> Rendezvous:
        """Return a rendezvous that was opened here, and close earlier ones: their groups have failed."""
        if address not in self._opened:
            raise ConnectionError(f"no rendezvous at {address}: the group has failed")
        while True:
            first = next(iter(self._opened))
            rendezvous = self._opened.pop(first)
            if first == address:
                return rendezvous
            rendezvous.close()

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def data_checksum(data: torch.Tensor) -> str:
    """Return a checksum of bytes on any device: BLAKE2b over two sums of each block of 64-bit words.

    The first sum adds the words, so it sees every change of a single word. The second sum adds a key to each word and
    multiplies the result by its upper half. A flipped bit changes this product by an amount that depends on the other
    bits, so flips of the same bit in several words do not cancel.

    It detects accidental corruption, such as changed, moved or missing words. One CPU thread reads 4 GB/s, and BLAKE2b
    alone reads 1.4 GB/s there.
    """
    keys = _keys(BLOCK_BYTES, data.device)
    size = BLOCK_BYTES * BLOCKS_AT_ONCE[data.device.type]
    digest = hashlib.blake2b(data.numel().to_bytes(8, "little"), digest_size=16)
    for first in range(0, data.numel(), size):
        part = data[first : first + size]
        if rest := part.numel() % BLOCK_BYTES:
            part = torch.nn.functional.pad(part, (0, BLOCK_BYTES - rest))
        words = part.view(torch.int64).view(-1, keys.numel())
        keyed = words + keys
        products = (keyed >> 32).mul_(keyed)
        sums = torch.stack([words.sum(1), products.sum(1)], 1)
        digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()


@functools.lru_cache
def _keys(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the key of each word of a block: random, and the same in every process."""
    return torch.frombuffer(bytearray(hashlib.shake_128().digest(num_bytes)), dtype=torch.int64).to(
        device
    )


def _detached(tensor: torch.Tensor, others: object) -> torch.Tensor:
    return tensor.detach()


def _pack(contents: Contents, device: torch.device) -> torch.Tensor:
    """Return the bytes of a safetensors file with these tensors, on a device."""
    tensors, aliases = contents
    in_order = sorted(tensors.items(), key=lambda pair: -pair[1].element_size())  # aligned
    ends = list(itertools.accumulate(tensor.nbytes for _, tensor in in_order))
    header: dict[str, Any] = {"__metadata__": aliases} if aliases else {}
    for (name, tensor), end in zip(in_order, ends, strict=True):
        if tensor.dtype not in FORMAT_NAMES:
            raise ValueError(f"{name}: safetensors has no dtype {tensor.dtype}")
        header[name] = {
            "dtype": FORMAT_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end - tensor.nbytes, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = len(text).to_bytes(ALIGNMENT, "little") + text
    data = torch.empty(len(head) + (ends[-1] if ends else 0), dtype=torch.uint8, device=device)
    data[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for (_, tensor), end in zip(in_order, ends, strict=True):
        own = data[len(head) + end - tensor.nbytes : len(head) + end]
        own.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
    return data


@contextlib.contextmanager
def separate_cuda_stream(device: torch.device) -> Iterator[None]:
    """Run the calling thread's GPU work after the work queued so far, and independently of later work.

    Otherwise threads share one stream, and each copy to the host waits for all passes queued before it.
    """
    if device.type != "cuda":
        yield
        return
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
