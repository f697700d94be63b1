"""Tokens on their way between processes: bytes that the controller passes on, or the file that holds them.

A block of output tokens is a file in the run's directory, one for each attempt, written by the replica that made it
and read by whoever trains on it or goes on after it; the controller says which and sees no more than its name. Where a
worker is told no file, the block carries the bytes itself. What is said of tokens stands before them in their file
(`streamrl.executor.token_files`), so that who finds it knows what they are.
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
    """The file whose last bytes they are; None: they are in `data`."""
    data: bytes = b""


class TokenSegment(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive output tokens of one origin; they may lie in several blocks."""

    num_tokens: int
    is_policy: bool
    """Whether the policy sampled them. Others, such as a tool's answer, are context for the model and no more:
    nothing is learned from them, and their log-probabilities mean nothing."""


def encode_ids(ids: Sequence[int] | Ids) -> bytes:
    """Return token ids as bytes."""
    return np.asarray(ids, ID).tobytes()


def decode_ids(data: bytes) -> Ids:
    """Return what `encode_ids` was given, as an array that cannot be written to."""
    return np.frombuffer(data, ID)


def count_ids(data: bytes) -> int:
    """Return the number of token ids in what `encode_ids` gave."""
    return len(data) // ID.itemsize


def count_tokens(parts: Iterable[TokenBlock | TokenSegment]) -> int:
    """Return the tokens of blocks, or of segments."""
    return sum(part.num_tokens for part in parts)


def encode_tokens(ids: Sequence[int] | Ids, logprobs: Sequence[float] | Logprobs) -> bytes:
    """Return output tokens as bytes: the ids of all, then the log-probabilities of all.

    Raises:
        ValueError: there are not as many log-probabilities as ids.
    """
    if len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} tokens but {len(logprobs)} log-probabilities")
    return np.asarray(ids, ID).tobytes() + np.asarray(logprobs, LOGPROB).tobytes()


def decode_tokens(data: bytes, num_tokens: int) -> tuple[Ids, Logprobs]:
    """Return ids and log-probabilities, each `[num_tokens]`, as arrays that cannot be written to."""
    ids = np.frombuffer(data, ID, num_tokens)
    return ids, np.frombuffer(data, LOGPROB, num_tokens, ids.nbytes)


def write_block(
    ids: Sequence[int] | Ids,
    logprobs: Sequence[float] | Logprobs,
    path: str | None,
    head_of: Callable[[bytes], bytes] = lambda tokens: b"",
) -> TokenBlock:
    """Put output tokens into a file that only this user can read, after their head, or, without a path, into the block.

    What was in the file is gone. No tokens need no file.

    Raises:
        ValueError: there are not as many log-probabilities as ids.
    """
    data = encode_tokens(ids, logprobs)
    if path is None or not data:
        return TokenBlock(len(ids), None, data)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(head_of(data) + data)
    return TokenBlock(len(ids), path)


def is_whole(block: TokenBlock) -> bool:
    """Return whether a block has the bytes of its tokens, without a look at them."""
    if block.path is None:
        return len(block.data) == TOKEN_BYTES * block.num_tokens
    with suppress(FileNotFoundError):
        return Path(block.path).stat().st_size >= TOKEN_BYTES * block.num_tokens
    return False


def read_block(block: TokenBlock) -> tuple[Ids, Logprobs]:
    """Return ids and log-probabilities of a block, each `[num_tokens]`, as arrays that cannot be written to.

    Raises:
        ValueError: the bytes are not those of as many tokens.
    """
    data = block.data if block.path is None else Path(block.path).read_bytes()
    size = TOKEN_BYTES * block.num_tokens
    if len(data) < size or (block.path is None and len(data) > size):
        where = block.path or "a block"
        raise ValueError(f"{where}: {len(data)} bytes are not those of {block.num_tokens} tokens")
    return decode_tokens(data[len(data) - size :], block.num_tokens)


def read_blocks(blocks: Iterable[TokenBlock]) -> tuple[Ids, Logprobs]:
    """Return ids and log-probabilities of blocks one after the other, in arrays of your own; see `read_block`."""
    parts = [(np.empty(0, ID), np.empty(0, LOGPROB)), *map(read_block, blocks)]
    ids, logprobs = zip(*parts, strict=True)
    return np.concatenate(ids), np.concatenate(logprobs)


def merge_segments(
    segments: tuple[TokenSegment, ...], others: Iterable[TokenSegment]
) -> tuple[TokenSegment, ...]:
    """Return segments and what follows them, neighbours of one origin as one."""
    merged = list(segments)
    for other in others:
        if merged and merged[-1].is_policy == other.is_policy:
            merged[-1] = TokenSegment(merged[-1].num_tokens + other.num_tokens, other.is_policy)
        else:
            merged.append(other)
    return tuple(merged)
