"""Encode what changed between two versions of a weight file in few bytes, and apply it.

A file is read as words of two or four bytes, the size of the values that replicas serve. A delta has these data for each
block of words:

    gaps      number of unchanged words before each changed word, one byte each; 255 means 255 unchanged words and no
              change after them
    changes   new word minus old word, modulo the word size, with the sign in the lowest bit (zigzag); first all lowest
              bytes, then all next ones, so that the zeros of small changes are adjacent

Both are compressed with Zstandard. At a small learning rate, a step moves a bfloat16 value to one of its neighbours, so
most changes are 1 or 2 in this form. The result is correct only if the base has exactly the bytes that the delta was
made from. The caller verifies this with the checksum of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

WIDTHS = (2, 4)
"""Bytes of a word: 2 for bfloat16 and float16, 4 for float32."""
BLOCK_WORDS = 1 << 22
"""Number of words that are compared at once, which limits the memory used."""
SKIP = 255
LEVEL = 1
"""Compression level of Zstandard; higher levels save a few percent and take several times as long."""

Words = npt.NDArray[np.unsignedinteger[Any]]


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Changes in `BLOCK_WORDS` consecutive words; the last block may be shorter."""

    num_changes: int
    gaps: bytes
    changes: bytes


class FileDelta(msgspec.Struct, frozen=True, array_like=True):
    """Changes of a file whose size is the same as before."""

    width: int
    num_bytes: int
    blocks: list[Block]
    tail: bytes
    """The new last bytes, if they do not fill a word."""


def encode_delta(base: Path, new: Path, width: int) -> bytes:
    """Encode the changes that turn `base` into `new`.

    Raises:
        ValueError: the files have different sizes, so they are not two versions of the same tensors.
    """
    size = new.stat().st_size
    if base.stat().st_size != size:
        raise ValueError(
            f"{new}: {size} bytes, but {base.stat().st_size} before; send the whole file"
        )
    old_words, words = _words(base, width), _words(new, width)
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    blocks = [
        _encode(old_words[at : at + BLOCK_WORDS], words[at : at + BLOCK_WORDS], compressor)
        for at in range(0, len(words), BLOCK_WORDS)
    ]
    with new.open("rb") as file:
        file.seek(len(words) * width)
        return msgspec.msgpack.encode(FileDelta(width, size, blocks, file.read()))


def decode_delta(base: Path, delta: bytes) -> Iterator[bytes]:
    """Yield the bytes of the new file, in order.

    Raises:
        ValueError: `delta` is corrupt, or was made from another file than `base`.
    """
    parsed = _read(delta)
    if base.stat().st_size != parsed.num_bytes:
        size = base.stat().st_size
        raise ValueError(f"{base}: {size} bytes, but its delta is for {parsed.num_bytes} bytes")
    words = _words(base, parsed.width)
    if len(parsed.blocks) != (expected := -(-len(words) // BLOCK_WORDS)):
        raise ValueError(f"{base}: its delta has {len(parsed.blocks)} blocks, expected {expected}")
    for number, block in enumerate(parsed.blocks):
        at = number * BLOCK_WORDS
        yield _decode(words[at : at + BLOCK_WORDS], block).tobytes()
    yield parsed.tail


def count_changes(delta: bytes) -> int:
    """Return the number of words that a delta changes."""
    return sum(block.num_changes for block in _read(delta).blocks)


def _words(path: Path, width: int) -> Words:
    count = path.stat().st_size // width
    if not count:
        return np.zeros(0, f"<u{width}")
    return np.memmap(path, f"<u{width}", "r", shape=(count,))


def _read(delta: bytes) -> FileDelta:
    try:
        parsed = msgspec.msgpack.decode(delta, type=FileDelta)
    except msgspec.MsgspecError as error:
        raise ValueError(f"corrupt delta: {error}") from None
    if parsed.width not in WIDTHS:
        raise ValueError(f"corrupt delta: width must be one of {WIDTHS}, got {parsed.width}")
    return parsed


def _encode(old: Words, new: Words, compressor: zstandard.ZstdCompressor) -> Block:
    changed = np.flatnonzero(old != new)
    gaps = np.diff(changed, prepend=-1) - 1
    ends = np.cumsum(gaps // SKIP + 1) - 1
    codes = np.full(int(ends[-1]) + 1 if len(ends) else 0, SKIP, np.uint8)
    codes[ends] = gaps % SKIP
    change = new[changed] - old[changed]
    signed = change.view(f"<i{new.itemsize}")
    zigzag = (change << 1) ^ (signed >> (8 * new.itemsize - 1)).view(change.dtype)
    planes = zigzag.view(np.uint8).reshape(-1, new.itemsize).T
    return Block(
        len(changed), compressor.compress(codes.tobytes()), compressor.compress(planes.tobytes())
    )


def _decode(old: Words, block: Block) -> Words:
    width = old.itemsize
    codes = np.frombuffer(_decompress(block.gaps, most=len(old)), np.uint8)
    planes = np.frombuffer(_decompress(block.changes, most=len(old) * width), np.uint8)
    is_change = codes != SKIP
    if np.count_nonzero(is_change) != block.num_changes or len(planes) != block.num_changes * width:
        raise ValueError(
            f"corrupt delta: header says {block.num_changes} changes, block has "
            f"{np.count_nonzero(is_change)} positions and {len(planes)} bytes"
        )
    changed = np.cumsum(codes, dtype=np.int64)[is_change] + np.arange(block.num_changes)
    if len(changed) and changed[-1] >= len(old):
        raise ValueError(f"corrupt delta: it changes word {changed[-1]} of only {len(old)} words")
    zigzag = np.ascontiguousarray(planes.reshape(width, -1).T).view(old.dtype).reshape(-1)
    new = np.array(old)
    new[changed] += (zigzag >> 1) ^ (-(zigzag & 1).view(f"<i{width}")).view(old.dtype)
    return new


def _decompress(data: bytes, most: int) -> bytes:
    """Return the decompressed data; raise if it has more than `most` bytes."""
    try:
        if zstandard.frame_content_size(data) > most:
            raise ValueError(f"corrupt delta: a block has more than {most} bytes")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(f"corrupt delta: {error}") from None
