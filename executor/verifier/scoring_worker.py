"""A worker: a process that grades one answer after the other in its sandbox, until it is killed.

What it answers may have been written by the very answer it was to grade: it is read as data from a stranger.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from typing import NamedTuple, NoReturn

from streamrl.executor.libc import die_with_parent
from streamrl.executor.verifier.sandbox import Sandbox
from streamrl.executor.verifier.scorers import Grader

REWARD, ERROR, MEMORY = b"R", b"E", b"M"
"""The first byte of a verdict: 8 bytes of a float follow, a text, or nothing."""
MOST_BYTES = 4096  # of a verdict: what a pipe delivers in one piece
MOST_FILES = 1 << 16  # more than a fork server ever opens


class ScoringOutcome(NamedTuple):
    """What came of grading one answer."""

    reward: float
    """Within the scorer's bounds; 0 where there is none."""
    fault: str | None = None
    """Why there is no reward, in a word or two of our own; None where there is one."""
    detail: str = ""
    """What the scorer said, to be believed only if the answer is trusted."""


def work(requests: int, verdicts: int, graders: Sequence[Grader], sandbox: Sandbox) -> NoReturn:
    """Grade what arrives at `requests` until it is closed; the process ends here."""
    try:
        refusal = _prepare(sandbox, {requests, verdicts})
        with os.fdopen(requests, "rb") as lines:
            for line in lines:
                os.write(verdicts, refusal or _grade(line, graders))
    finally:
        os._exit(0)


def read_verdict(data: bytes, bounds: tuple[float, float]) -> ScoringOutcome:
    """Return what a worker answered; a fault where that is no verdict, or no score within `bounds`."""
    kind, text = data[:1], data[1:]
    if kind == REWARD and len(text) == 8:
        (reward,) = struct.unpack("=d", text)
        if isfinite(reward) and bounds[0] <= reward <= bounds[1]:
            return ScoringOutcome(reward)
    if data == MEMORY:
        return ScoringOutcome(0.0, "memory limit")
    if kind == ERROR:
        return ScoringOutcome(0.0, "error", text.decode(errors="replace"))
    return ScoringOutcome(0.0, "no reward")


def _prepare(sandbox: Sandbox, pipes: set[int]) -> bytes:
    """Leave everything behind but `pipes`; return what to answer where that was refused, else nothing."""
    die_with_parent()
    os.setpgid(0, 0)  # to be killed with what it starts, where it can start anything
    os.dup2(0, 1)  # nothing is read or written there
    os.dup2(0, 2)
    _close_all_but({0, 1, 2, *pipes, *sandbox.files})
    try:
        sandbox.enter()
    except Exception as error:
        return _error(error)
    return b""


def _grade(line: bytes, graders: Sequence[Grader]) -> bytes:
    """Return the verdict on a request; whatever an answer raises is part of it."""
    try:
        request = json.loads(line)
        grader = graders[request["scorer"]]
        reward = float(grader(request["record"])(request["answer"]))
    except MemoryError:
        return MEMORY
    except BaseException as error:
        return _error(error)
    return REWARD + struct.pack("=d", reward)


def _error(error: BaseException) -> bytes:
    said = ": ".join(filter(None, (type(error).__name__, str(error))))
    return ERROR + said.encode(errors="replace")[: MOST_BYTES - 1]


def _close_all_but(kept: set[int]) -> None:
    for before, after in pairwise([*sorted(kept), MOST_FILES]):
        os.closerange(before + 1, after)
