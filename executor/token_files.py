"""Write and read files of output tokens, so that a resumed run continues rollouts of a process that died.

| file                   | content                                                            |
|------------------------|--------------------------------------------------------------------|
| `ROLLOUT.ATTEMPT`      | tokens of an attempt that has ended, or of an observation          |
| `ROLLOUT.ATTEMPT.part` | tokens of a running attempt; a record is appended every few seconds |

A file is a list of records. Each record has a head and tokens, both with a checksum. The head has the rollout, the
position of the tokens, and the versions that sampled them. A truncated or damaged record is discarded, with all
records after it.

`KeptTokens` finds the saved tokens of rollouts that were not trained on at the checkpoint. A resume repeats all steps
after the checkpoint, with different weights. So tokens sampled by later versions are discarded.
"""

from __future__ import annotations

import errno
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from streamrl.executor.roles import Completion, FinishReason
from streamrl.executor.tokens import (
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

FRAME = struct.Struct("<II")
"""Start of a record: the length of its head in bytes, and the CRC-32 of the head."""


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The description of the tokens of a record."""

    rollout: int
    start: int
    """Number of output tokens of the rollout before these."""
    num_tokens: int
    segments: tuple[TokenSegment, ...]
    versions: list[tuple[int, int]]
    """Spans `(version, start)`: the policy version that sampled from token `start` of the record on."""
    finish: FinishReason
    """How the attempt ended; "aborted" while it runs."""
    run_time: float
    """Seconds of the attempt so far; see `Completion`."""
    prefill_time: float
    experts: bytes = b""
    """Experts that routers chose for tokens of the context; see `expert_choices`. Empty if they are not recorded."""

    def encode(self, tokens: bytes) -> bytes:
        """Return the bytes of the head for a record with these tokens."""
        data = _ENCODER.encode((self, crc32(tokens)))
        return FRAME.pack(len(data), crc32(data)) + data


class TokenRecord(NamedTuple):
    """A head and its tokens."""

    head: Head
    ids: Ids
    logprobs: Logprobs


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(tuple[Head, int])


def attempt_of(path: str) -> int:
    """Return the attempt number in a file's name."""
    return int(path.rpartition(".")[2])


def part_of(path: str) -> str:
    """Return the path of the file for a running attempt."""
    return f"{path}.part"


def fresh_of(path: str) -> str:
    """Return the temporary path of a recovered attempt's file."""
    return f"{path}.new"


def add_record(path: str, record: TokenRecord) -> None:
    """Append a record to the file of a running attempt, completely or not at all; only this user can read it."""
    tokens = encode_tokens(record.ids, record.logprobs)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with os.fdopen(os.open(part_of(path), flags, 0o600), "ab", buffering=0) as file:
        size, data = os.fstat(file.fileno()).st_size, record.head.encode(tokens) + tokens
        try:
            written = file.write(data)
        except OSError:
            file.truncate(size)
            raise
        if written != len(data):  # no room for more
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), part_of(path))


def remove_files(path: str) -> None:
    """Remove all files of an attempt."""
    for each in (path, part_of(path), fresh_of(path)):
        with suppress(OSError):
            Path(each).unlink()


def remove_ended(path: str) -> None:
    """Remove the file of an ended attempt; if there is none, remove all files of the attempt."""
    try:
        os.unlink(path)  # noqa: PTH108 (every rollout passes here: a `Path` takes longer)
    except OSError:
        remove_files(path)


def read_records(path: str) -> list[TokenRecord]:
    """Return the records of an ended or running attempt; an empty list if it has no file."""
    for each in (path, part_of(path)):
        with suppress(OSError):
            if records := list(_split(Path(each).read_bytes())):
                return records
    return []


def _split(data: bytes) -> Iterator[TokenRecord]:
    """Yield records up to the first damaged one."""
    while len(data) >= FRAME.size:
        length, checksum = FRAME.unpack_from(data)
        end = FRAME.size + length
        said = data[FRAME.size : end]
        if crc32(said) != checksum:
            return
        try:
            head, checksum = _DECODER.decode(said)
        except (ValueError, RecursionError):
            return
        tokens = data[end : end + TOKEN_BYTES * head.num_tokens]
        if head.num_tokens < 1 or crc32(tokens) != checksum:
            return
        yield TokenRecord(head, *decode_tokens(tokens, head.num_tokens))
        data = data[end + len(tokens) :]


def read_choices(blocks: Iterable[TokenBlock]) -> list[bytes]:
    """Return the expert choices in the files of blocks, as `Head.experts` has them; empty where there are none."""
    return [
        record.head.experts
        for block in blocks
        if block.path is not None
        for record in read_records(block.path)
    ]


def merge(
    records: Iterable[TokenRecord], rollout: int, start: int, newest: int | None = None
) -> TokenRecord | None:
    """Merge the consecutive records of an attempt, from output token `start` of a rollout on.

    Args:
        records: records of one attempt.
        rollout: number of the rollout.
        start: number of tokens that the rollout has already.
        newest: tokens of later versions are discarded. None: keep all.

    Returns:
        One record, whose finish is "aborted" if tokens were discarded. None if no tokens remain.
    """
    ids, logprobs = np.empty(0, ID), np.empty(0, LOGPROB)
    segments: tuple[TokenSegment, ...] = ()
    versions: list[tuple[int, int]] = []
    last = None
    for head, more_ids, more_logprobs in records:
        if (head.rollout, head.start) != (rollout, start + len(ids)):
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
        rollout,
        start,
        end,
        _cut(segments, end),
        [span for span in versions if span[1] < end],
        finish,
        last.run_time,
        last.prefill_time,
        last.experts if end == len(ids) else b"",
    )
    return TokenRecord(head, ids[:end], logprobs[:end])


def _cut(segments: tuple[TokenSegment, ...], num_tokens: int) -> tuple[TokenSegment, ...]:
    """Return the segments of the first `num_tokens` tokens."""
    kept: list[TokenSegment] = []
    for segment in segments:
        left = num_tokens - count_tokens(kept)
        if left > 0:
            kept.append(TokenSegment(min(left, segment.num_tokens), segment.is_policy))
    return tuple(kept)


def take_over(rollout: int, path: str, start: int, newest: int | None = None) -> Completion | None:
    """Turn the saved tokens of a lost attempt into an ended attempt, also on disk; see `merge`.

    Returns:
        Its completion without text. None if no tokens remain; then its files are removed.
    """
    record = merge(read_records(path), rollout, start, newest)
    if record is None:
        remove_files(path)
        return None
    try:
        output = write_record(record, path)
        Path(part_of(path)).unlink(missing_ok=True)
    except OSError:  # such as a full disk
        remove_files(path)
        return None
    return completion_of(record.head, output, None)


def write_record(record: TokenRecord, path: str) -> TokenBlock:
    """Write the file of an ended attempt atomically."""
    write_attempt(record.head, record.ids, record.logprobs, fresh_of(path))
    Path(fresh_of(path)).replace(path)
    return TokenBlock(record.head.num_tokens, path)


def write_attempt(
    head: Head, ids: Sequence[int] | Ids, logprobs: Sequence[float] | Logprobs, path: str | None
) -> TokenBlock:
    """Write the head and tokens of an attempt to a file; without a path, return them in the block."""
    return write_block(ids, logprobs, path, head.encode)


def completion_of(head: Head, output: TokenBlock, text: str | None) -> Completion:
    """Return the completion of an attempt from the head of its output."""
    return Completion(
        rollout=head.rollout,
        output=output,
        segments=head.segments,
        text=text,
        versions=head.versions,
        finish=head.finish,
        run_time=head.run_time,
        prefill_time=head.prefill_time,
    )


class KeptTokens:
    """Owns a directory of token files from before a restart."""

    def __init__(
        self, directory: Path, newest: int, max_tokens: int, is_open: Callable[[int], bool]
    ) -> None:
        """Recover all attempts that can be continued, and remove all other files.

        Args:
            directory: the directory of token files; see the module docstring.
            newest: the version at which the run resumes.
            max_tokens: maximum output tokens of a rollout.
            is_open: returns whether a rollout still has to be trained on.
        """
        self._attempts: dict[int, list[Completion]] = {}
        for rollout, paths in sorted(_find(directory).items()):
            attempts = list(_take_over(rollout, paths, newest)) if is_open(rollout) else []
            if 0 < sum(each.output.num_tokens for each in attempts) <= max_tokens:
                self._attempts[rollout] = attempts
            else:
                _remove(paths)

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts with saved tokens."""
        return len(self._attempts)

    @property
    def num_tokens(self) -> int:
        """Number of saved output tokens."""
        return sum(each.output.num_tokens for kept in self._attempts.values() for each in kept)

    def take(self, rollout: int, oldest_version: int) -> list[Completion]:
        """Return the saved attempts of a rollout in order; discard them if their first version is too old."""
        attempts = self._attempts.pop(rollout, [])
        versions = [version for each in attempts for version, _ in each.versions]
        if versions and versions[0] < oldest_version:
            _remove([str(each.output.path) for each in attempts])
            return []
        return attempts


def remove_all(directory: Path) -> None:
    """Remove the files of every attempt, and the directory if it is empty then."""
    for paths in _find(directory).values():
        _remove(paths)
    with suppress(OSError):
        directory.rmdir()


def _find(directory: Path) -> dict[int, list[str]]:
    """Return the paths of each rollout's attempts, in order."""
    found: dict[int, dict[int, str]] = defaultdict(dict)
    for path in directory.glob("*.*"):
        numbers = path.name.removesuffix(".part").removesuffix(".new").split(".")
        is_ours = len(numbers) == 2 and all(each.isdecimal() for each in numbers)
        if is_ours and path.is_file():
            rollout, attempt = map(int, numbers)
            found[rollout][attempt] = str(path.with_name(f"{rollout}.{attempt}"))
    return {rollout: [of[n] for n in sorted(of)] for rollout, of in found.items()}


def _take_over(rollout: int, paths: list[str], newest: int) -> Iterator[Completion]:
    """Yield the consecutive attempts from the rollout's first token on, up to the first gap."""
    num_tokens, is_going_on = 0, True
    for path in paths:
        attempt = take_over(rollout, path, num_tokens, newest) if is_going_on else None
        if attempt is None:
            remove_files(path)
            is_going_on = False
            continue
        yield attempt
        num_tokens += attempt.output.num_tokens
        is_going_on = attempt.finish != "length"  # "stop" may end a turn, after which others follow


def _remove(paths: list[str]) -> None:
    for path in paths:
        remove_files(path)
