"""Files of output tokens that say what they hold, so that what a dead process left can be gone on with.

    ROLLOUT.ATTEMPT         what an attempt made, once it has ended
    ROLLOUT.ATTEMPT.part    what it has made so far: a record is added every few seconds

Both are records: a head, which says of which tokens of the rollout it is and which versions sampled them, and the
tokens. A record that was cut short by a crash is left out, with all that follow it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from executor.samples import Completion, FinishReason
from executor.tokens import (
    ID,
    LOGPROB,
    TOKEN_BYTES,
    Ids,
    Logprobs,
    TokenBlock,
    TokenSegment,
    count_tokens,
    decode_tokens,
    encode_tokens,
    merge_segments,
    write_block,
)

LENGTH = struct.Struct("<i")
MOST_HEAD = 2**24
"""Bytes beyond which a head is none."""


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What a record says of its tokens."""

    start: int
    """Output tokens of the rollout before them."""
    num_tokens: int
    segments: tuple[TokenSegment, ...]
    versions: list[tuple[int, int]]
    """Spans `(version, start)`: from token `start` of the record on, the policy version that sampled."""
    finish: FinishReason
    """How the attempt ended; aborted where it has not."""
    run_time: float
    """Seconds of the attempt so far, as of a `Completion`."""
    prefill_time: float

    def encode(self) -> bytes:
        """Return the bytes that stand before the tokens."""
        data = msgspec.msgpack.encode(self)
        return LENGTH.pack(len(data)) + data


class TokenRecord(NamedTuple):
    """A head and its tokens."""

    head: Head
    ids: Ids
    logprobs: Logprobs


_DECODER = msgspec.msgpack.Decoder(Head)


def attempt_of(path: str) -> int:
    """Return the number of the attempt that a file is of."""
    return int(path.rpartition(".")[2])


def part_of(path: str) -> str:
    """Return where what an attempt has made so far is kept while it runs."""
    return f"{path}.part"


def add_record(path: str, record: TokenRecord) -> None:
    """Add tokens to what an attempt has made so far, in a file that only this user can read."""
    data = record.head.encode() + encode_tokens(record.ids, record.logprobs)
    with os.fdopen(
        os.open(part_of(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb"
    ) as file:
        file.write(data)


def remove_files(path: str) -> None:
    """Remove what an attempt left."""
    for each in (path, part_of(path)):
        with suppress(FileNotFoundError):
            Path(each).unlink()


def read_records(path: str) -> list[TokenRecord]:
    """Return the records of an attempt's file, those of the attempt so far where it has not ended; none of no file."""
    for each in (path, part_of(path)):
        with suppress(FileNotFoundError):
            if records := list(_split(Path(each).read_bytes())):
                return records
    return []


def _split(data: bytes) -> Iterator[TokenRecord]:
    """Yield records as long as they are whole."""
    while len(data) >= LENGTH.size:
        (length,) = LENGTH.unpack_from(data)
        end = LENGTH.size + length
        if not 0 < length <= min(MOST_HEAD, len(data)):
            return
        try:
            head = _DECODER.decode(data[LENGTH.size : end])
        except msgspec.MsgspecError:
            return
        tokens = data[end : end + TOKEN_BYTES * head.num_tokens]
        if not _fits(head, tokens):
            return
        yield TokenRecord(head, *decode_tokens(tokens, head.num_tokens))
        data = data[end + len(tokens) :]


def _fits(head: Head, tokens: bytes) -> bool:
    """Whether a head speaks of these tokens."""
    starts = [start for _, start in head.versions]
    return (
        0 < head.num_tokens == len(tokens) // TOKEN_BYTES
        and count_tokens(head.segments) == head.num_tokens
        and starts[:1] == [0]
        and starts == sorted({*starts})
        and starts[-1] < head.num_tokens
    )


def merge(
    records: Iterable[TokenRecord], start: int, newest: int | None = None
) -> TokenRecord | None:
    """Put records together that follow each other from output token `start` of a rollout on.

    Args:
        records: of one attempt.
        start: tokens that the rollout has already.
        newest: version after which what was sampled is left out; None where none is.

    Returns:
        One record, whose attempt was aborted where something is left out; None where nothing is left.
    """
    ids, logprobs = np.empty(0, ID), np.empty(0, LOGPROB)
    segments: tuple[TokenSegment, ...] = ()
    versions: list[tuple[int, int]] = []
    last = None
    for head, more_ids, more_logprobs in records:
        if head.start != start + len(ids):
            break
        versions += [(version, each + len(ids)) for version, each in head.versions]
        segments = merge_segments(segments, head.segments)
        ids = np.concatenate([ids, more_ids])
        logprobs = np.concatenate([logprobs, more_logprobs])
        last = head
    if last is None:
        return None
    end = next((s for v, s in versions if newest is not None and v > newest), len(ids))
    if not end:
        return None
    finish: FinishReason = last.finish if end == len(ids) else "aborted"
    head = Head(
        start,
        end,
        _cut(segments, end),
        [span for span in versions if span[1] < end],
        finish,
        last.run_time,
        last.prefill_time,
    )
    return TokenRecord(head, ids[:end], logprobs[:end])


def _cut(segments: tuple[TokenSegment, ...], num_tokens: int) -> tuple[TokenSegment, ...]:
    """Return the segments of the first tokens."""
    kept: list[TokenSegment] = []
    for segment in segments:
        left = num_tokens - count_tokens(kept)
        if left > 0:
            kept.append(TokenSegment(min(left, segment.num_tokens), segment.is_policy))
    return tuple(kept)


def take_over(rollout: int, path: str, start: int, newest: int | None = None) -> Completion | None:
    """Make what is left of an attempt an attempt that has ended, on disk too; see `merge`.

    Returns:
        What it made, without its text; None where nothing is left, and no file.
    """
    record = merge(read_records(path), start, newest)
    remove_files(path)
    if record is None:
        return None
    output = write_block(record.ids, record.logprobs, path, record.head.encode())
    return completion_of(rollout, record.head, output, None)


def completion_of(rollout: int, head: Head, output: TokenBlock, text: str | None) -> Completion:
    """Return what an attempt made, of whose output `head` tells."""
    return Completion(
        rollout=rollout,
        output=output,
        segments=head.segments,
        text=text,
        versions=head.versions,
        finish=head.finish,
        run_time=head.run_time,
        prefill_time=head.prefill_time,
    )
