"""Publish the tokens of rollouts as replicas generate them.

Replicas write tokens to disk while a rollout runs, and return the rest at its end. The stream has each token once, in
order. If an attempt fails, an item with `taken_back` withdraws its lost tokens, and they are generated again.

One task handles all events in their order, and reads files in a thread. The run never waits for it. It does nothing
while no reader wants tokens.
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
"""Minimum seconds between two reads of the files of running rollouts."""
READ_AT_ONCE = 16
"""Rollouts whose files are read before their new tokens are published."""
MOST_QUEUED = 10_000
"""Maximum number of queued items. Above it the readers with tokens are dropped."""

Span = tuple[int, int]
"""A policy version, and the first output token that it sampled."""


class Chunk(NamedTuple):
    """Consecutive output tokens of a rollout, from `start` on."""

    start: int
    tokens: list[int]
    versions: list[Span]


class _View(NamedTuple):
    """Snapshot of the state of a rollout's tokens."""

    rollout: int
    first: int
    """Number of tokens published so far."""
    num_tokens: int
    num_observed: int
    """Number of tokens of its observations, which are not published."""
    output: tuple[TokenBlock, ...]
    """Generated tokens of ended attempts."""
    versions: tuple[Span, ...]
    path: str | None
    """File of the attempt that may still run."""


class _Ended(NamedTuple):
    """An ended attempt, whose files must be kept until they are read."""

    event: Generated
    buffered: BufferedRollout


class TokenStream:
    """Publishes tokens of rollouts; see the module docstring."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        group_size: int,
        every: float,
        tell: Callable[[dict[str, Any]], Awaitable[None]],
        give_up: Callable[[], None],
    ) -> None:
        """Start without readers.

        Args:
            buffer: the buffer that holds the rollouts.
            group_size: rollouts for each prompt.
            every: seconds between two reads of the files of running rollouts.
            tell: sends one item to the readers.
            give_up: drops the readers; called when too many items are queued.
        """
        self._buffer = buffer
        self._group_size = group_size
        self._every = max(every, LEAST_TIME)
        self._tell = tell
        self._give_up = give_up
        self._told: dict[int, int] = {}
        """Number of published tokens of each unfinished rollout."""
        self._queue: deque[_Ended | Callable[[], object]] = deque()
        self._something = asyncio.Event()
        self._looks_at = 0.0
        self.is_wanted = False

    def want(self, is_wanted: bool) -> None:
        """Start publishing when a reader wants tokens; stop and clear the queue when none does."""
        if is_wanted and not self.is_wanted:
            self._looks_at = 0.0
            self._told.clear()
            self._something.set()
        self.is_wanted = is_wanted
        if not is_wanted:
            while self._queue:
                self._let_go(self._queue.popleft())

    # Events of the run ----------------------------------------------------------------------------

    def see(self, event: Event) -> None:
        """Queue an attempt that has ended or failed."""
        if not self.is_wanted:
            return
        if isinstance(event, Generated) and event.rollout in self._buffer.rollouts:
            buffered = self._buffer.rollouts[event.rollout]
            buffered.num_holders += 1
            self._add(_Ended(event, buffered))
        elif isinstance(event, Failed) and isinstance(event.command, Generate):
            self._add(partial(self._take_back, event.command.rollout))

    def then(self, do: Callable[[], object]) -> None:
        """Call `do` after all earlier items are published, and await its result if it is awaitable."""
        self._add(do)

    def forget(self, rollouts: Sequence[int]) -> None:
        """Queue that rollouts are dropped."""
        for rollout in rollouts if self.is_wanted else ():
            self._add(partial(self._end_dropped, rollout))

    def _add(self, item: _Ended | Callable[[], object]) -> None:
        self._queue.append(item)
        self._something.set()
        if len(self._queue) > MOST_QUEUED:
            self._give_up()

    # Publishing -----------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Publish tokens until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._queue:
                await self._wait(self._looks_at - loop.time())
            await self.flush()
            if self.is_wanted and loop.time() >= self._looks_at:
                await self._look_at_running()
                self._looks_at = loop.time() + self._every

    async def _wait(self, seconds: float) -> None:
        """Wait for an event, or until it is time to read the files of running rollouts."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds) if self.is_wanted else None):
                await self._something.wait()
        self._something.clear()

    async def flush(self) -> None:
        """Publish all queued items."""
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
        """Publish new tokens of running rollouts, a few rollouts at a time, and of those that end meanwhile."""
        running = [r for r, buffered in self._buffer.rollouts.items() if _runs(buffered)]
        for first in range(0, len(running), READ_AT_ONCE):
            await self._look_at(running[first : first + READ_AT_ONCE])
            await self.flush()

    async def _look_at(self, rollouts: Sequence[int]) -> None:
        known = self._buffer.rollouts
        running = [(r, known[r]) for r in rollouts if r in known and _runs(known[r])]
        views = [self._view(rollout, buffered, is_running=True) for rollout, buffered in running]
        chunks = await asyncio.to_thread(lambda: [read_new(view) for view in views])
        for view, chunk in zip(views, chunks, strict=True):
            now = known.get(view.rollout)
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
            buffered.num_observed,
            buffered.policy_output,
            tuple(buffered.versions),
            buffered.paths[-1] if is_running else None,
        )

    async def _take_back(self, rollout: int) -> None:
        """Withdraw published tokens that a failed attempt has lost."""
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
    """Return whether an attempt may be running that writes tokens to disk."""
    if not buffered.paths or buffered.finish is not None or buffered.text is not None:
        return False
    return not buffered.output or buffered.output[-1].path != buffered.paths[-1]


def read_new(view: _View) -> Chunk | None:
    """Return the unpublished tokens, or None if there are none or the rollout's files are gone."""
    tokens: list[int] = []
    versions = list(view.versions)
    if view.first < view.num_tokens:
        with suppress(OSError):
            tokens = read_blocks(view.output)[0][view.first : view.num_tokens].tolist()
        if not tokens:
            return None
    if view.path is not None:
        start = view.num_tokens + view.num_observed
        record = merge(read_records(view.path), view.rollout, start)
        if record is not None:
            tokens += record.ids[max(0, view.first - view.num_tokens) :].tolist()
            versions += [(v, view.num_tokens + start) for v, start in record.head.versions]
    if not tokens:
        return None
    return Chunk(view.first, tokens, _spans(versions, view.first, view.first + len(tokens)))


def _spans(versions: Sequence[Span], first: int, last: int) -> list[Span]:
    """Return the version spans of the tokens from `first` (inclusive) to `last` (exclusive)."""
    ends = [start for _, start in versions[1:]] + [last]
    return [
        (version, max(start, first))
        for (version, start), end in zip(versions, ends, strict=True)
        if end > first and start < last
    ]
