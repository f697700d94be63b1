"""Write and read weights in shared memory: versioned safetensors buckets with checksums."""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from streamrl.executor.checksums import file_checksum
from streamrl.executor.roles import Bucket, Manifest
from streamrl.executor.transfer.bucket_check import run_concurrently
from streamrl.executor.transfer.shared_directory import version_directory
from streamrl.runfile.errors import system_remedy

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Tensors with their names."""
BUCKET_BYTES = 256 * 2**20
"""Maximum bytes of a bucket: large compared with the cost of opening a file, small enough to stage."""

PROBE_BYTES = 2**20
"""Bytes that a disk must still take after a failed write; otherwise the disk is the reason. Small beside a checkpoint."""
LENGTH_BYTES = 8
"""Bytes with the length of the header of a safetensors file."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors files."""


def write_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    version: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> Manifest:
    """Write one weight version to `directory/v{version:06d}/`, and return its manifest.

    Buckets fill in the order of `tensors` up to `bucket_bytes`; a larger tensor gets its own bucket. Names that share
    one tensor (tied weights) are written once, and `read_buckets` yields each name. A file gets its final name only
    when it is complete. A reader of an earlier write keeps its bytes. Raises `ValueError` for a repeated name.
    """
    target = version_directory(directory, version)
    target.mkdir(exist_ok=True)  # fails if its owner ended and took the directory along
    return write_version(tensors, target, version, bucket_bytes)


def write_version(
    tensors: Iterable[tuple[str, torch.Tensor]],
    target: Path,
    version: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> Manifest:
    """Write one weight version to a directory; see `write_buckets`."""
    contents = enumerate(fill_buckets(tensors, bucket_bytes, _standalone))

    def write(numbered: tuple[int, Contents]) -> Bucket:
        index, own = numbered
        return _write_bucket(*own, target / f"bucket-{index:05d}.safetensors")

    return Manifest(version=version, buckets=list(run_concurrently(write, contents)))


def read_buckets(manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each name with its tensor; verify the buckets first.

    Tensors are memory-mapped. Tied names yield the same tensor. A tensor stays valid after its version is removed.
    """
    names = _names_by_owner(manifest)
    for bucket in manifest.buckets:
        for owner, tensor in tensors_of(Path(bucket.path)):
            yield owner, tensor
            for name in names.get(owner, []):
                yield name, tensor


def tensors_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each name of a safetensors file with its memory-mapped tensor.

    `get_tensor` and `load_file` of safetensors 0.5 to 0.8 lose two integers per tensor. A replica that loads
    thousands of versions would grow by that. So `safe_open` only checks the file, and torch maps the tensors.

    Source of the format: https://huggingface.co/docs/safetensors/index#format.

    Raises:
        ValueError: a tensor has a dtype that torch lacks, or does not begin at a multiple of its element size.
        safetensors.SafetensorError: the file is damaged.
    """
    with safe_open(path, framework="pt") as checked:
        names = list(checked.keys())
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
    storage: Any = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    for name in names:
        own, shape = header[name], header[name]["shape"]
        first = LENGTH_BYTES + length + own["data_offsets"][0]
        dtype = DTYPES.get(own["dtype"])
        if dtype is None or first % dtype.itemsize:
            raise ValueError(
                f"{path}: cannot map tensor {name!r} of dtype {own['dtype']} at byte {first}"
            )
        strides = torch.empty(shape, device="meta").stride()
        tensor = torch.empty(0, dtype=dtype)
        yield name, tensor.set_(storage, first // dtype.itemsize, shape, strides)


def cast_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, floating-point ones cast to `dtype`, and keep none of them.

    Names of one tensor must follow each other; they stay names of one tensor.
    """
    last: tuple[torch.Tensor, torch.Tensor] | None = None
    for name, tensor in tensors:
        if last is None or not _is_same(last[0], tensor):
            last = tensor, tensor.to(dtype) if tensor.is_floating_point() else tensor
        yield name, last[1]


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors that both exist are the same values in the same memory."""
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape


def partial_of(path: Path) -> Path:
    """Return the temporary directory in which a replacement of `path` is written."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def replaced_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that replaces `path` when the block ends.

    At any moment `path` is a complete directory (old or new) or absent. If the block raises, the old directory stays,
    and the new one is removed, because it may have filled the disk. Only one writer at a time may do this.

    Raises:
        OSError: the disk took no more; the error names the file.
    """
    partial, old = partial_of(path), path.with_name(f".{path.name}.old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        with blaming_disk(path):
            yield partial
            for file in (*partial.rglob("*"), partial):
                _flush(file)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.exists():
        path.rename(old)
    partial.rename(path)
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def blaming_disk(path: Path) -> Iterator[None]:
    """If the block fails while the disk takes no more of what replaces `path`, raise the disk's error instead.

    Libraries report a full disk in their own words, and without the file.

    Raises:
        OSError: the disk is full, or a quota or a limit of file sizes is reached; it names the file.
    """
    try:
        yield
    except Exception as error:
        refused = _refused_by_disk(partial_of(path))
        if refused is None:
            raise
        file, reason = refused
        own = path / file.relative_to(partial_of(path))
        text = f"{reason.strerror}{system_remedy(reason)}"
        raise OSError(reason.errno, text, str(own)) from error


def _refused_by_disk(directory: Path) -> tuple[Path, OSError] | None:
    """Return the file that was written last, and why the disk takes no more of it; None if it does."""
    files = [(file, file.stat()) for file in directory.rglob("*") if file.is_file()]
    newest = max(files, key=lambda each: (each[1].st_mtime_ns, each[1].st_ino), default=None)
    file, size = (directory / "probe", 0) if newest is None else (newest[0], newest[1].st_size)
    try:
        with file.open("ab") as probe:
            os.posix_fallocate(probe.fileno(), size, PROBE_BYTES)
    except OSError as error:
        return (directory if newest is None else file), error
    return None


Contents = tuple[dict[str, torch.Tensor], dict[str, str]]
"""Tensors of one bucket by name, and other names of tensors in this or an earlier bucket."""


def fill_buckets(
    tensors: NamedTensors,
    bucket_bytes: int,
    stored: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor],
) -> Iterator[Contents]:
    """Yield the contents of each bucket; `stored` returns how a tensor is kept beside those of its bucket."""
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
        contents[name] = stored(tensor, contents)
        filled += tensor.nbytes
    if contents:
        yield contents, aliases


class _Owners:
    """The first name of each tensor that still exists.

    The address alone does not identify a tensor: a producer that makes tensors one by one may get a freed address
    again. The weak reference shows whether the tensor still exists.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.owners: dict[object, tuple[str, weakref.ref[torch.Tensor]]] = {}

    def claim(self, name: str, tensor: torch.Tensor) -> str:
        if name in self.names:
            raise ValueError(f"tensor {name!r} comes twice; each name may occur once in a version")
        self.names.add(name)
        key = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
        owner = self.owners.get(key)
        if owner is not None and owner[1]() is not None and tensor.numel() > 0:
            return owner[0]
        self.owners[key] = (name, weakref.ref(tensor))
        return name


def _standalone(tensor: torch.Tensor, contents: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensor in host memory, in a storage that no other tensor of the bucket shares."""
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
    """Force a file or directory to disk, because after a crash a rename may outlast the bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
