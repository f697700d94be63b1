"""Tells of the tokens of rollouts as they come: what replicas put on disk while they run, and what they hand over at the end.

In order, each token once. Tokens that are lost with an attempt, and so made anew, are taken back in so many words. One task
does all of it, in the order in which things happened, and reads files in a thread; nobody waits for it, and it does
nothing while nobody asks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from typing import Any, NamedTuple

from streamrl.engine.messages import Event, Failed, Generate, Generated
from streamrl.executor.buffer import BufferedRollout, RolloutBuffer
from streamrl.executor.token_files import merge, read_records
from streamrl.executor.tokens import TokenBlock, read_blocks

LEAST_TIME = 0.05
"""Seconds between two looks at what runs, at least."""
READ_AT_ONCE = 16
"""Rollouts whose files are read before what is new of them is told."""
MOST_QUEUED = 10_000
"""Things to tell that wait for files to be read; past them readers are given up, not the run."""

Span = tuple[int, int]
"""A policy version, and the output token from which on it sampled."""


class Chunk(NamedTuple):
    """Output tokens of a rollout that follow those before."""

    start: int
    tokens: list[int]
    versions: list[Span]


class _View(NamedTuple):
    """What is known of a rollout's tokens at an instant."""

    rollout: int
    first: int
    """Tokens that were told."""
    num_tokens: int
    output: tuple[TokenBlock, ...]
    """Of attempts that have ended."""
    versions: tuple[Span, ...]
    path: str | None
    """Of the attempt that may be under way."""


class _Ended(NamedTuple):
    """An attempt that has ended, whose files are held."""

    event: Generated
    buffered: BufferedRollout


class TokenStream:
    """See the module."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        group_size: int,
        every: float,
        tell: Callable[[dict[str, Any]], Awaitable[None]],
        give_up: Callable[[], None],
    ) -> None:
        """Begin with nobody who asks.

        Args:
            buffer: what knows rollouts.
            group_size: rollouts of each prompt.
            every: seconds between two looks at what runs.
            tell: takes what there is to tell.
            give_up: called where there is too much of it.
        """
        self._buffer = buffer
        self._group_size = group_size
        self._every = max(every, LEAST_TIME)
        self._tell = tell
        self._give_up = give_up
        self._told: dict[int, int] = {}
        """Tokens that were told of each rollout that is not over yet."""
        self._queue: deque[_Ended | Callable[[], object]] = deque()
        self._something = asyncio.Event()
        self._looks_at = 0.0
        self.is_wanted = False

    def want(self, is_wanted: bool) -> None:
        """Begin to tell, or stop, as somebody asks or nobody does any more."""
        if is_wanted and not self.is_wanted:
            self._looks_at = 0.0
            self._told.clear()
            self._something.set()
        self.is_wanted = is_wanted
        if not is_wanted:
            while self._queue:
                self._let_go(self._queue.popleft())

    # What happens ---------------------------------------------------------------------------------

    def see(self, event: Event) -> None:
        """Take note of an attempt that ended."""
        if not self.is_wanted:
            return
        if isinstance(event, Generated) and event.rollout in self._buffer.rollouts:
            buffered = self._buffer.rollouts[event.rollout]
            buffered.num_holders += 1
            self._add(_Ended(event, buffered))
        elif isinstance(event, Failed) and isinstance(event.command, Generate):
            self._add(partial(self._take_back, event.command.rollout))

    def then(self, do: Callable[[], object]) -> None:
        """Call something once all is told that happened before, and wait for what it returns where that is awaitable."""
        self._add(do)

    def forget(self, rollouts: Sequence[int]) -> None:
        """Take note that rollouts are dropped."""
        for rollout in rollouts if self.is_wanted else ():
            self._add(partial(self._end_dropped, rollout))

    def _add(self, item: _Ended | Callable[[], object]) -> None:
        self._queue.append(item)
        self._something.set()
        if len(self._queue) > MOST_QUEUED:
            self._give_up()

    # Telling --------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Tell, as long as you let it."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._queue:
                await self._wait(self._looks_at - loop.time())
            await self.flush()
            if self.is_wanted and loop.time() >= self._looks_at:
                await self._look_at_running()
                self._looks_at = loop.time() + self._every

    async def _wait(self, seconds: float) -> None:
        """Wait until something happens, or what runs is to be looked at."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds) if self.is_wanted else None):
                await self._something.wait()
        self._something.clear()

    async def flush(self) -> None:
        """Tell all that has happened."""
        while self._queue:
            item = self._queue.popleft()
            try:
                if isinstance(item, _Ended):
                    await self._end(item)
                elif isawaitable(done := item()):
                    await done
            finally:
                self._let_go(item)

    def _let_go(self, item: _Ended | Callable[[], object]) -> None:
        if isinstance(item, _Ended):
            self._buffer.let_go(item.buffered)

    async def _end(self, ended: _Ended) -> None:
        rollout, finish = ended.event.rollout, ended.event.finish
        view = self._view(rollout, ended.buffered, is_running=False)
        view = view._replace(num_tokens=ended.event.tokens)  # a later attempt may have ended too
        chunk = await asyncio.to_thread(read_new, view)
        if finish != "aborted":
            self._told.pop(rollout, None)
            await self._tell_chunk(rollout, chunk or Chunk(view.first, [], []), finish)
        elif chunk is not None:
            await self._go_on(rollout, chunk)

    async def _look_at_running(self) -> None:
        """Tell what is new of what runs, a few rollouts at a time, and what ends meanwhile."""
        running = [r for r, buffered in self._buffer.rollouts.items() if _runs(buffered)]
        for first in range(0, len(running), READ_AT_ONCE):
            await self._look_at(running[first : first + READ_AT_ONCE])
            await self.flush()

    async def _look_at(self, rollouts: Sequence[int]) -> None:
        there = self._buffer.rollouts
        found = [(r, there[r]) for r in rollouts if r in there and _runs(there[r])]
        views = [self._view(rollout, buffered, is_running=True) for rollout, buffered in found]
        chunks = await asyncio.to_thread(lambda: [read_new(view) for view in views])
        for view, chunk in zip(views, chunks, strict=True):
            now = there.get(view.rollout)
            if chunk is not None and now is not None and view.path == now.paths[-1]:
                await self._go_on(view.rollout, chunk)

    async def _go_on(self, rollout: int, chunk: Chunk) -> None:
        self._told[rollout] = chunk.start + len(chunk.tokens)
        await self._tell_chunk(rollout, chunk)

    def _view(self, rollout: int, buffered: BufferedRollout, *, is_running: bool) -> _View:
        return _View(
            rollout,
            self._told.get(rollout, 0),
            buffered.num_tokens,
            buffered.output,
            tuple(buffered.versions),
            buffered.paths[-1] if is_running else None,
        )

    async def _take_back(self, rollout: int) -> None:
        """Tell that tokens of a failed attempt will be made anew."""
        buffered, told = self._buffer.rollouts.get(rollout), self._told.get(rollout, 0)
        if buffered is None or told <= buffered.num_tokens:
            return
        start = self._told[rollout] = buffered.num_tokens
        await self._tell({**self._names(rollout), "start": start, "taken_back": told - start})

    async def _end_dropped(self, rollout: int) -> None:
        told = self._told.pop(rollout, None)
        if told is not None:
            await self._tell_chunk(rollout, Chunk(told, [], []), "dropped")

    async def _tell_chunk(self, rollout: int, chunk: Chunk, finish: str | None = None) -> None:
        more = {} if finish is None else {"finish": finish}
        await self._tell({**self._names(rollout), **chunk._asdict(), **more})

    def _names(self, rollout: int) -> dict[str, int]:
        return {"rollout": rollout, "group": rollout // self._group_size}


def _runs(buffered: BufferedRollout) -> bool:
    """Return whether an attempt may be under way that puts tokens on disk."""
    if not buffered.paths or buffered.finish is not None or buffered.text is not None:
        return False
    return not buffered.output or buffered.output[-1].path != buffered.paths[-1]


def read_new(view: _View) -> Chunk | None:
    """Return the tokens that were not told yet; None where there are none, or the rollout is gone meanwhile."""
    tokens: list[int] = []
    versions = list(view.versions)
    if view.first < view.num_tokens:
        with suppress(OSError):
            tokens = read_blocks(view.output)[0][view.first : view.num_tokens].tolist()
        if not tokens:
            return None
    if view.path is not None:
        record = merge(read_records(view.path), view.rollout, view.num_tokens)
        if record is not None:
            tokens += record.ids[max(0, view.first - view.num_tokens) :].tolist()
            versions += [(v, view.num_tokens + start) for v, start in record.head.versions]
    if not tokens:
        return None
    return Chunk(view.first, tokens, _spans(versions, view.first, view.first + len(tokens)))


def _spans(versions: Sequence[Span], first: int, last: int) -> list[Span]:
    """Return the spans of tokens from `first` on, below `last`."""
    ends = [start for _, start in versions[1:]] + [last]
    return [
        (version, max(start, first))
        for (version, start), end in zip(versions, ends, strict=True)
        if end > first and start < last
    ]
