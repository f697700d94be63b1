"""What changed from one version of a file of weights to the next, as few bytes: where, and by how much.

A file is read as words of two bytes (or four), as wide as the values that replicas serve, and told block by block:

    gaps      words that stay between one that changed and the next, a byte each: 255 stands for 255 that stay and no
              change after them
    changes   the new word less the old one, modulo its width, with its sign in the lowest bit (zigzag); all lowest
              bytes first, then all next ones, so that the many zeros of small changes lie together

Both are compressed with Zstandard. A step at a small learning rate moves a bfloat16 to one of its neighbours, so that
most changes are 1 or 2 in that form. What comes out is right only on top of the very bytes that it was made from, which
is for the checksum of the result to say.
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
"""Bytes of a word: of bfloat16 and float16, and of float32."""
BLOCK_WORDS = 1 << 22
"""Words that are compared at once, so that what is held beside the file stays small."""
SKIP = 255
LEVEL = 1
"""Of Zstandard: higher ones win a few percent here, and take several times as long."""

Words = npt.NDArray[np.unsignedinteger[Any]]


class Block(msgspec.Struct, frozen=True, array_like=True):
    """What changed in `BLOCK_WORDS` consecutive words, or in as many as are left."""

    num_changes: int
    gaps: bytes
    changes: bytes


class FileDelta(msgspec.Struct, frozen=True, array_like=True):
    """What changed in a file, whose size did not."""

    width: int
    num_bytes: int
    blocks: list[Block]
    tail: bytes
    """The last bytes, which fill no word, as they are now."""


def encode_delta(base: Path, new: Path, width: int) -> bytes:
    """Return what makes the bytes of `new` from those of `base`.

    Raises:
        ValueError: they are not equally long, so that they are not two versions of the same tensors.
    """
    size = new.stat().st_size
    if base.stat().st_size != size:
        raise ValueError(f"{new}: {size} bytes, but {base.stat().st_size} before")
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
    """Yield the bytes of the file that a delta tells of, in order.

    Raises:
        ValueError: it is none, or tells of another file than `base`.
    """
    told = _read(delta)
    if base.stat().st_size != told.num_bytes:
        raise ValueError(f"{base}: {base.stat().st_size} bytes, its delta is of {told.num_bytes}")
    words = _words(base, told.width)
    if len(told.blocks) != -(-len(words) // BLOCK_WORDS):
        raise ValueError(f"{base}: a delta of {len(told.blocks)} blocks")
    for number, block in enumerate(told.blocks):
        at = number * BLOCK_WORDS
        yield _decode(words[at : at + BLOCK_WORDS], block).tobytes()
    yield told.tail


def count_changes(delta: bytes) -> int:
    """Return how many words a delta changes."""
    return sum(block.num_changes for block in _read(delta).blocks)


def _words(path: Path, width: int) -> Words:
    count = path.stat().st_size // width
    if not count:
        return np.zeros(0, f"<u{width}")
    return np.memmap(path, f"<u{width}", "r", shape=(count,))


def _read(delta: bytes) -> FileDelta:
    try:
        told = msgspec.msgpack.decode(delta, type=FileDelta)
    except msgspec.MsgspecError as error:
        raise ValueError(f"what should be a delta is none: {error}") from None
    if told.width not in WIDTHS:
        raise ValueError(f"width must be one of {WIDTHS}, got {told.width}")
    return told


def _encode(old: Words, new: Words, compressor: zstandard.ZstdCompressor) -> Block:
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // SKIP + 1) - 1
    codes = np.full(int(ends[-1]) + 1 if len(ends) else 0, SKIP, np.uint8)
    codes[ends] = gaps % SKIP
    change = new[places] - old[places]
    signed = change.view(f"<i{new.itemsize}")
    zigzag = (change << 1) ^ (signed >> (8 * new.itemsize - 1)).view(change.dtype)
    planes = zigzag.view(np.uint8).reshape(-1, new.itemsize).T
    return Block(
        len(places), compressor.compress(codes.tobytes()), compressor.compress(planes.tobytes())
    )


def _decode(old: Words, block: Block) -> Words:
    width = old.itemsize
    codes = np.frombuffer(_decompress(block.gaps, most=len(old)), np.uint8)
    planes = np.frombuffer(_decompress(block.changes, most=len(old) * width), np.uint8)
    is_change = codes != SKIP
    if np.count_nonzero(is_change) != block.num_changes or len(planes) != block.num_changes * width:
        raise ValueError(f"a block of {block.num_changes} changes tells of another number")
    places = np.cumsum(codes, dtype=np.int64)[is_change] + np.arange(block.num_changes)
    if len(places) and places[-1] >= len(old):
        raise ValueError(f"a change of word {places[-1]} of {len(old)}")
    zigzag = np.ascontiguousarray(planes.reshape(width, -1).T).view(old.dtype).reshape(-1)
    new = np.array(old)
    new[places] += (zigzag >> 1) ^ (-(zigzag & 1).view(f"<i{width}")).view(old.dtype)
    return new


def _decompress(data: bytes, most: int) -> bytes:
    """Return what was compressed, at most so many bytes of it."""
    try:
        if zstandard.frame_content_size(data) > most:
            raise ValueError(f"a block of more than {most} bytes")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(f"what should be a delta is none: {error}") from None
