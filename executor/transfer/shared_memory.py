"""Weights between processes: versioned, checksummed safetensors buckets in shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from streamrl.executor.checksums import file_checksum
from streamrl.executor.roles import Bucket, Manifest
from streamrl.executor.transfer.bucket_check import run_concurrently
from streamrl.executor.transfer.shared_directory import version_directory

BUCKET_BYTES = 256 * 2**20
"""Large enough that opening a file costs nothing beside its bytes, small enough to stage."""


def write_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    version: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> Manifest:
    """Write one weight version to `directory/v{version:06d}/` and return what a reader needs.

    Buckets fill in the order of `tensors` up to `bucket_bytes`; a larger tensor has one of its own.
    Names that share one tensor (tied weights) are written once and read back under every name. A
    file has its final name only when whole, and a reader of an earlier write keeps its bytes.
    Raises ValueError where a name comes twice.
    """
    target = version_directory(directory, version)
    target.mkdir(parents=True, exist_ok=True)
    return write_version(tensors, target, version, bucket_bytes)


def write_version(
    tensors: Iterable[tuple[str, torch.Tensor]],
    target: Path,
    version: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> Manifest:
    """Write one weight version into a directory; see `write_buckets`."""
    contents = enumerate(_fill_buckets(tensors, bucket_bytes))

    def write(numbered: tuple[int, Contents]) -> Bucket:
        index, own = numbered
        return _write_bucket(*own, target / f"bucket-{index:05d}.safetensors")

    return Manifest(version=version, buckets=list(run_concurrently(write, contents)))


def read_buckets(manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each name with its tensor, mapped from buckets that were verified.

    Tied names yield the same tensor. A tensor stays valid after its removal.
    """
    names = _names_by_owner(manifest)
    for bucket in manifest.buckets:
        with safe_open(bucket.path, framework="pt") as file:
            for owner in file.keys():  # noqa: SIM118 - a file handle, which does not iterate
                tensor = file.get_tensor(owner)
                yield owner, tensor
                for name in names.get(owner, []):
                    yield name, tensor


def cast_tensors(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with floating-point ones in `dtype`, tied ones still as one tensor."""
    uses = Counter(tensor.data_ptr() for tensor in tensors.values())
    tied: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        address = tensor.data_ptr()
        cast = tied.get(address)
        if cast is None or cast.shape != tensor.shape:
            cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if uses[address] > 1:
            tied[address] = cast
        yield name, cast


def partial_of(path: Path) -> Path:
    """Return the directory in which whoever replaces `path` writes what will be there."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def replaced_directory(path: Path) -> Iterator[Path]:
    """Yield you an empty directory that takes the place of `path` when you are done with it.

    `path` is at every moment a complete directory, old or new, or absent; it stays as it was where
    you raise. One writer at a time.
    """
    partial, old = partial_of(path), path.with_name(f".{path.name}.old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for file in (*partial.rglob("*"), partial):
        _flush(file)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


Contents = tuple[dict[str, torch.Tensor], dict[str, str]]
"""Tensors of one bucket by name, and names that stand for a tensor of this or an earlier bucket."""


def _fill_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[Contents]:
    owners = _Owners()
    contents: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    filled = 0
    for name, tensor in tensors:
        owner = owners.claim(name, tensor)
        if owner != name:
            aliases[name] = owner
            continue
        if contents and filled + tensor.nbytes > bucket_bytes:
            yield contents, aliases
            contents, aliases, filled = {}, {}, 0
        contents[name] = _standalone(tensor, contents)
        filled += tensor.nbytes
    if contents:
        yield contents, aliases


class _Owners:
    """The first name of every tensor that is still alive.

    An address alone would be a trap: a producer that makes its tensors one by one gets a freed
    address again, for other weights. While a tensor object lives, its storage is not freed.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.owners: dict[object, tuple[str, weakref.ref[torch.Tensor]]] = {}

    def claim(self, name: str, tensor: torch.Tensor) -> str:
        if name in self.names:
            raise ValueError(f"tensor {name!r} comes twice")
        self.names.add(name)
        key = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
        owner = self.owners.get(key)
        if owner is not None and owner[1]() is not None and tensor.numel() > 0:
            return owner[0]
        self.owners[key] = (name, weakref.ref(tensor))
        return name


def _standalone(tensor: torch.Tensor, contents: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensor in host memory with a storage that it shares with nothing in the bucket."""
    host = tensor.detach().to("cpu").contiguous()
    storage = host.untyped_storage()
    others = (other.untyped_storage().data_ptr() for other in contents.values())
    shared = storage.nbytes() != host.nbytes or storage.data_ptr() in others
    return host.clone() if shared else host


def _write_bucket(contents: dict[str, torch.Tensor], aliases: dict[str, str], path: Path) -> Bucket:
    partial = path.with_suffix(".partial")
    save_file(contents, partial, metadata=aliases)
    bucket = Bucket(str(path), partial.stat().st_size, file_checksum(partial))
    partial.replace(path)
    return bucket


def _names_by_owner(manifest: Manifest) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for bucket in manifest.buckets:
        with safe_open(bucket.path, framework="pt") as file:
            for name, owner in (file.metadata() or {}).items():
                names.setdefault(owner, []).append(name)
    return names


def _flush(path: Path) -> None:
    """Force a file or directory to disk, so that a rename cannot outlive the bytes it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
