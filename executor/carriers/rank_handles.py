"""Several ranks of one trainer behind one handle: each call goes to all of them, samples are dealt out among them.

The gradient of a batch is the same however its samples are dealt; by tokens, ranks have about as much to do. A rollout
that was scored is trained where it was scored. Ranks wait for each other inside, so that what ends one ends all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from streamrl.executor.carriers.handles import Handle, WorkerLostError
from streamrl.executor.samples import Sample
from streamrl.executor.tokens import count_ids, count_tokens

END_TIME = 30.0
"""Seconds that the others get to end a call that failed on one rank: longer than they take where none waits for it."""
DEALT = {"score", "train"}
"""Methods whose argument is samples."""
OTHER_RANK = "another rank"
"""In what a rank says that refuses nothing itself, as `streamrl.executor.trainer.rank_group` words it."""

T = TypeVar("T")


class RankHandles(Handle):
    """The ranks of one trainer."""

    def __init__(self, ranks: Sequence[Handle], forget: Callable[[], None]) -> None:
        """Take a handle on each rank, and what removes that through which they found each other."""
        self.ranks = list(ranks)
        self._forget_rendezvous = forget
        self._rank_of: dict[int, int] = {}
        """By rollout that was scored; the other one of its pair goes there too."""

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Call every rank, and return what the first one does."""
        shares: list[tuple[object, ...]] = [arguments] * len(self.ranks)
        if method in DEALT:
            samples: Any = arguments[0]
            shares = [(share,) for share in self.deal(method, samples)]
        calls = [
            asyncio.ensure_future(rank.call(method, *share, returns=returns))
            for rank, share in zip(self.ranks, shares, strict=True)
        ]
        try:
            return await self._first_of(calls, method)
        finally:
            for call in calls:
                call.cancel()

    async def _first_of(self, calls: Sequence[asyncio.Future[T]], method: str) -> T:
        """Return what the first rank answers once all have; raise what went wrong."""
        _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        errors = _errors(calls)
        if waiting and not any(isinstance(error, WorkerLostError) for error in errors):
            _, waiting = await asyncio.wait(waiting, timeout=END_TIME)
            errors = _errors(calls)
        lost = next((error for error in errors if isinstance(error, WorkerLostError)), None)
        if lost is not None or waiting:
            reason = f"a rank failed in {method}: {errors[0]}" if lost is None else str(lost)
            self.kill(f"was killed with the other ranks: {reason}")
            raise lost or WorkerLostError(reason)
        if errors:
            raise min(errors, key=lambda error: OTHER_RANK in str(error))
        return calls[0].result()

    def deal(self, method: str, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Return the samples of each rank: of the longest first, to whoever has the fewest tokens."""
        shares: list[list[Sample]] = [[] for _ in self.ranks]
        filled = [0] * len(self.ranks)
        for sample in sorted(samples, key=lambda sample: (-_tokens_of(sample), sample.rollout)):
            least = min(range(len(filled)), key=filled.__getitem__)
            partner = -1 if sample.partner is None else sample.partner
            rank = self._rank_of.pop(sample.rollout, self._rank_of.get(partner, least))
            if method == "score":
                self._rank_of[sample.rollout] = rank
            shares[rank].append(sample)
            filled[rank] += _tokens_of(sample)
        return shares

    def kill(self, reason: str) -> None:
        """Kill every rank."""
        for rank in self.ranks:
            rank.kill(reason)
        self._forget()

    async def close(self) -> None:
        """End every rank."""
        await asyncio.gather(*(rank.close() for rank in self.ranks))
        self._forget()

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            self._forget_rendezvous()


def _errors(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    """Return what went wrong so far, in order of ranks."""
    done = (call for call in calls if call.done() and not call.cancelled())
    return [error for call in done if (error := call.exception()) is not None]


def _tokens_of(sample: Sample) -> int:
    return count_ids(sample.prompt) + count_tokens(sample.output)
