"""Exchange tokens between processes, as files or as bytes in a message.

A block of output tokens is usually a file in the run directory, one for each attempt. The replica writes it. The
trainer, or the replica that continues the rollout, reads it. The controller chooses the name and never reads the
tokens. Without a file name, the block has the bytes itself. Each file starts with a head that describes its tokens
(`streamrl.executor.token_files`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
Logprobs: TypeAlias = npt.NDArray[np.float32]

ID, LOGPROB = np.dtype("<i4"), np.dtype("<f4")  # the same bytes on every machine
TOKEN_BYTES = ID.itemsize + LOGPROB.itemsize


class TokenBlock(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive output tokens: the ids of all, then the log-probabilities of all in nats."""

    num_tokens: int
    path: str | None
    """The file that ends with these tokens. None: they are in `data`."""
    data: bytes = b""


class TokenSegment(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive output tokens of one origin; they may span several blocks."""

    num_tokens: int
    is_policy: bool
    """Whether the policy sampled them. Other tokens, such as a tool's answer, are only context: they are not trained
    on, and their log-probabilities are undefined."""


def encode_ids(ids: Sequence[int] | Ids) -> bytes:
    """Return token ids as bytes."""
    return np.asarray(ids, ID).tobytes()


def decode_ids(data: bytes) -> Ids:
    """Return the token ids in bytes of `encode_ids`, as a read-only array."""
    return np.frombuffer(data, ID)


def count_ids(data: bytes) -> int:
    """Return the number of token ids in bytes of `encode_ids`."""
    return len(data) // ID.itemsize


def count_tokens(parts: Iterable[TokenBlock | TokenSegment]) -> int:
    """Return the number of tokens in blocks or segments."""
    return sum(part.num_tokens for part in parts)


def encode_tokens(ids: Sequence[int] | Ids, logprobs: Sequence[float] | Logprobs) -> bytes:
    """Return output tokens as bytes: the ids of all, then the log-probabilities of all.

    Raises:
        ValueError: the numbers of ids and log-probabilities differ.
    """
    if len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} tokens but {len(logprobs)} log-probabilities")
    return np.asarray(ids, ID).tobytes() + np.asarray(logprobs, LOGPROB).tobytes()


def decode_tokens(data: bytes, num_tokens: int) -> tuple[Ids, Logprobs]:
    """Return ids and log-probabilities, each `[num_tokens]`, as read-only arrays."""
    ids = np.frombuffer(data, ID, num_tokens)
    return ids, np.frombuffer(data, LOGPROB, num_tokens, ids.nbytes)


def write_block(
    ids: Sequence[int] | Ids,
    logprobs: Sequence[float] | Logprobs,
    path: str | None,
    head_of: Callable[[bytes], bytes] = lambda tokens: b"",
) -> TokenBlock:
    """Write output tokens and their head to a file that only this user can read; without a path, to the block.

    An existing file is overwritten. Without tokens no file is written.

    Raises:
        ValueError: the numbers of ids and log-probabilities differ.
    """
    data = encode_tokens(ids, logprobs)
    if path is None or not data:
        return TokenBlock(len(ids), None, data)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(head_of(data) + data)
    return TokenBlock(len(ids), path)


def is_whole(block: TokenBlock) -> bool:
    """Return whether a block is large enough for its tokens, without reading it."""
    if block.path is None:
        return len(block.data) == TOKEN_BYTES * block.num_tokens
    with suppress(FileNotFoundError):
        return Path(block.path).stat().st_size >= TOKEN_BYTES * block.num_tokens
    return False


def read_block(block: TokenBlock) -> tuple[Ids, Logprobs]:
    """Return ids and log-probabilities of a block, each `[num_tokens]`, as read-only arrays.

    Raises:
        ValueError: the block has too few or too many bytes.
    """
    data = block.data if block.path is None else Path(block.path).read_bytes()
    size = TOKEN_BYTES * block.num_tokens
    if len(data) < size or (block.path is None and len(data) > size):
        where = block.path or "a block"
        raise ValueError(f"{where}: {len(data)} bytes are not those of {block.num_tokens} tokens")
    return decode_tokens(data[len(data) - size :], block.num_tokens)


def read_blocks(blocks: Iterable[TokenBlock]) -> tuple[Ids, Logprobs]:
    """Return the concatenated ids and log-probabilities of blocks as new arrays; see `read_block`."""
    parts = [(np.empty(0, ID), np.empty(0, LOGPROB)), *map(read_block, blocks)]
    ids, logprobs = zip(*parts, strict=True)
    return np.concatenate(ids), np.concatenate(logprobs)


def merge_segments(
    segments: tuple[TokenSegment, ...], others: Iterable[TokenSegment]
) -> tuple[TokenSegment, ...]:
    """Return both lists of segments in order; adjacent segments of the same origin are merged."""
    merged = list(segments)
    for other in others:
        if merged and merged[-1].is_policy == other.is_policy:
            merged[-1] = TokenSegment(merged[-1].num_tokens + other.num_tokens, other.is_policy)
        else:
            merged.append(other)
    return tuple(merged)
