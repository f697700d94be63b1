"""Write checksums of the files in a directory, and detect damaged files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

CHECKSUM_BYTES = 16
"""Size of a BLAKE2b-128 checksum. It detects any accidental corruption, and is nearly as fast as reading memory."""
CHECKSUMS = "checksums.json"


class Written(msgspec.Struct, frozen=True):
    """Size and checksum of a file when it was written."""

    num_bytes: int
    checksum: str


def file_checksum(path: Path) -> str:
    """Return the checksum of a file's bytes."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=CHECKSUM_BYTES))
    return digest.hexdigest()


def combine(checksums: Iterable[str]) -> str:
    """Return one checksum for an ordered list of files, from their checksums."""
    text = " ".join(checksums)
    return hashlib.blake2b(text.encode(), digest_size=CHECKSUM_BYTES).hexdigest()


def write_checksums(directory: Path) -> None:
    """Write sizes and checksums of all files in a directory and its subdirectories."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    written = {
        file.relative_to(directory).as_posix(): Written(file.stat().st_size, file_checksum(file))
        for file in files
    }
    (directory / CHECKSUMS).write_bytes(msgspec.json.encode(written))


def find_damage(directory: Path, *, reads_all: bool) -> str:
    """Return the first difference from the state that `write_checksums` recorded, or an empty string.

    Args:
        directory: the directory to check. Without recorded checksums it counts as undamaged.
        reads_all: whether to compare checksums of all bytes, not only sizes.
    """
    if not (directory / CHECKSUMS).exists():
        return ""
    return next(_damages(directory, reads_all), "")


def find_unlisted(directory: Path) -> str:
    """Return the first file that `write_checksums` did not record, as text; empty if there is none.

    Raises:
        ValueError: the recorded checksums cannot be read.
    """
    try:
        listed = {CHECKSUMS, *_read(directory)}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{directory / CHECKSUMS}: {error}") from None
    found = {
        file.relative_to(directory).as_posix()
        for file in directory.rglob("*")
        if file.is_symlink() or not file.is_dir()
    }
    others = sorted(found - listed)
    return f"{others[0]} was added" if others else ""


def _read(directory: Path) -> dict[str, Written]:
    data = (directory / CHECKSUMS).read_bytes()
    return msgspec.json.decode(data, type=dict[str, Written])


def _damages(directory: Path, reads_all: bool) -> Iterator[str]:
    try:
        written = _read(directory)
    except (OSError, ValueError, RecursionError) as error:
        yield f"{CHECKSUMS}: {error}"
        return
    for name, expected in written.items():
        file = directory / name
        if not file.is_file():
            yield f"{name} is missing"
        elif (size := file.stat().st_size) != expected.num_bytes:
            yield f"{name} has {size:,} of {expected.num_bytes:,} bytes"
        elif reads_all and file_checksum(file) != expected.checksum:
            yield f"{name} has other bytes than were written"
