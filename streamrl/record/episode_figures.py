"""Measure the episodes of a run: their turns, the seconds of tools, the cached share of contexts, and how many are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from streamrl.engine.messages import (
    HELD_OUT,
    UNFINISHED,
    Act,
    Close,
    Drop,
    Failed,
    Generate,
    Generated,
    Observed,
    PromptsDrawn,
    Stepped,
    Verify,
)
from streamrl.engine.trainer_side import LEADER
from streamrl.record.interval_sums import IntervalSums
from streamrl.record.message_reader import Handlers, MessageReader


class EpisodeMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the episodes that ended in the counted steps."""

    episodes: int
    turns: float
    """Turns of an episode."""
    start_time: float
    """Seconds of the start of its environment."""
    tool_time: float
    """Seconds of all its actions."""
    action_time: float
    """Seconds of one action."""
    in_flight: float
    """Episodes whose environment was started and that have not ended: their mean number over the counted time."""
    cached_share: float | None
    """Share of the contexts of later turns that the prefix cache had; None if no replica reports it."""


class _Episode(msgspec.Struct):
    """What an episode in flight has done."""

    prompt_tokens: int
    turns: int = 0
    start_time: float = 0.0
    actions: int = 0
    tool_time: float = 0.0
    running: tuple[Act, float] | None = None
    """Its running action, and when that began."""
    context: int = 0
    """Tokens before its running turn; 0 for the first one."""


Amount: TypeAlias = Literal[
    "episodes", "turns", "start_time", "tool_time", "actions", "seconds", "context", "cached"
]


class EpisodeReader(MessageReader):
    """Follows every episode from the start of its environment to its end. A lost environment ends it too."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._prompts: dict[int, int] = {}
        """Prompt tokens of the episodes that have not ended."""
        self._open: dict[int, _Episode] = {}
        self._counted_to = 0.0
        """Instant up to which open episodes were counted."""
        self._sums = IntervalSums[Amount]()

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handler of each type of message that an episode consists of."""
        yield {
            PromptsDrawn: self._draw,
            Act: self._act,
            Observed: self._observe,
            Generate: self._generate,
            Generated: self._end_turn,
            Verify: lambda command, time: self._end(command.rollout, time),
            Close: lambda command, time: self._end(command.rollout, time),
            Failed: self._fail,
            Drop: self._drop,
            Stepped: self._mark_step,
        }

    def between(self, start: float, end: float) -> EpisodeMetrics | None:
        """Return the figures between the ends of two steps, in seconds; None without an episode."""
        sums = self._sums.between(start, end)
        num, context = sums.get("episodes", 0.0), sums.get("context", 0.0)
        if not num:
            return None
        cached = sums.get("cached", 0.0)
        tool_time = sums.get("tool_time", 0.0)
        return EpisodeMetrics(
            episodes=round(num),
            turns=sums["turns"] / num,
            start_time=sums["start_time"] / num,
            tool_time=tool_time / num,
            action_time=tool_time / max(1.0, sums["actions"]),
            in_flight=sums["seconds"] / (end - start),
            cached_share=cached / context if cached else None,
        )

    def _draw(self, event: PromptsDrawn, _: float) -> None:
        for group in event.groups:
            self._prompts.update(dict.fromkeys(group.rollouts, group.prompt_tokens))

    def _act(self, command: Act, time: float) -> None:
        rollout = command.rollout
        if command.starts and rollout < HELD_OUT:  # training alone has figures
            self._count(time)
            self._open[rollout] = _Episode(self._prompts.get(rollout, 0))
        if (episode := self._open.get(rollout)) is not None:
            episode.running = command, time

    def _observe(self, event: Observed, time: float) -> None:
        episode = self._open.get(event.rollout)
        if episode is None or episode.running is None:
            return
        (command, began_at), episode.running = episode.running, None
        if command.starts:
            episode.start_time = time - began_at
        else:
            episode.actions += 1
            episode.tool_time += time - began_at
        if event.is_over:
            self._end(event.rollout, time)

    def _generate(self, command: Generate, _: float) -> None:
        episode = self._open.get(command.rollout)
        if episode is not None:
            own = command.prefix + command.observed
            is_computed = command.turn > 0 and command.prefilled_on is None
            episode.context = episode.prompt_tokens + own if is_computed else 0

    def _end_turn(self, event: Generated, time: float) -> None:
        episode = self._open.get(event.rollout)
        if episode is None:
            return
        if episode.context:
            cached = min(event.cached_tokens, episode.context)
            self._add(time, {"context": episode.context, "cached": cached})
        episode.turns += event.finish not in UNFINISHED
        if event.finish == "length":
            self._end(event.rollout, time)

    def _fail(self, event: Failed, time: float) -> None:
        if isinstance(event.command, Act) and event.command.rollout in self._open:
            self._count(time)
            del self._open[event.command.rollout]

    def _drop(self, command: Drop, time: float) -> None:
        self._count(time)
        first = command.group * self._group_size
        for rollout in range(first, first + self._group_size):
            self._prompts.pop(rollout, None)
            self._open.pop(rollout, None)

    def _end(self, rollout: int, time: float) -> None:
        self._count(time)
        episode = self._open.pop(rollout, None)
        if episode is None:
            return
        del self._prompts[rollout]
        self._add(
            time,
            {
                "episodes": 1,
                "turns": episode.turns,
                "start_time": episode.start_time,
                "tool_time": episode.tool_time,
                "actions": episode.actions,
            },
        )

    def _count(self, time: float) -> None:
        """Add the seconds of all open episodes since the last time that this was called."""
        if self._open:
            self._add(time, {"seconds": (time - self._counted_to) * len(self._open)})
        self._counted_to = time

    def _add(self, time: float, amounts: dict[Amount, float]) -> None:
        self._sums.add(self._sums.slot_of(time), amounts)

    def _mark_step(self, event: Stepped, time: float) -> None:
        if event.trainer == LEADER:
            self._count(time)
            self._sums.marks.append(time)
