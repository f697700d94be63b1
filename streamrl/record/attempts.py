"""Follow the attempts of rollouts on replicas: when each ran, and with how many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from streamrl.engine.messages import (
    Drop,
    Failed,
    Generate,
    Generated,
    PromptsDrawn,
    Step,
)
from streamrl.hardware.operator_tables import Floats
from streamrl.record.message_reader import Handlers, MessageReader


class Attempts(NamedTuple):
    """Attempts that have ended, as arrays in the order of their ends."""

    replica: Floats
    rollout: Floats
    start: Floats
    """Instant at which each began to run; if it was not reported, that of its command."""
    end: Floats
    prefill_time: Floats
    """Seconds at the start until its prefix was computed."""
    prompt: Floats
    """Tokens of its prompt."""
    prefix: Floats
    """Output tokens from before it, and tokens of observations."""
    tokens: Floats
    """Output tokens at its end, and tokens of observations."""
    recompute_time: Floats
    """Seconds at the start in which tokens were computed that had been in a KV cache before."""
    is_known: Floats
    """1 if its running time and its tokens were reported, else 0."""
    transfer_time: Floats
    """Seconds at the start until its KV cache was there from a prefill replica; its prefill comes after them."""


def by_replica(replicas: Floats, rows: Floats) -> dict[int, Floats]:
    """Return the rows of each replica; replicas are in the order of their first rows."""
    numbers, first, counts = np.unique(replicas, return_index=True, return_counts=True)
    own = np.split(rows[np.argsort(replicas, kind="stable")], np.cumsum(counts)[:-1])
    return {int(numbers[index]): own[index] for index in np.argsort(first)}


class AttemptReader(MessageReader):
    """Pairs each `Generate` with the event that ends it, block by block."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[Generate, float, int]] = {}
        """By rollout of a running attempt: its command, the instant of the command, and its prompt tokens."""
        self._ended: list[tuple[float, ...]] = []
        """The numbers of each attempt, in the order of `Attempts`, except for its transfer."""
        self._transfers: list[tuple[int, float]] = []
        """For each of these attempts with a transfer: its place and the seconds."""
        self._prompts: dict[int, int] = {}
        """Prompt tokens by rollout that may have further attempts."""
        self._groups: dict[int, tuple[int, ...]] = {}
        """Their groups."""

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handler of each type of message that begins or ends an attempt."""
        yield {
            PromptsDrawn: self._draw,
            Generate: self._begin,
            Generated: self._end_reported,
            Failed: self._fail,
            Step: lambda command, _: self._forget(command.groups),
            Drop: lambda command, _: self._forget((command.group,)),
        }

    def sent_at(self) -> list[float]:
        """Return the instants of the commands of all running attempts."""
        return [sent_at for _, sent_at, _ in self._sent.values()]

    def replicas(self) -> set[int]:
        """Return the replicas of all running attempts."""
        return {command.replica for command, _, _ in self._sent.values()}

    def take(self) -> Attempts:
        """Return the attempts that ended since the last call."""
        num, width = len(self._ended), len(Attempts._fields) - 1
        numbers = np.fromiter(chain.from_iterable(self._ended), dtype=float, count=num * width)
        transfer_time = np.zeros(num)
        for place, seconds in self._transfers:
            transfer_time[place] = seconds
        self._ended, self._transfers = [], []
        return Attempts._make([*numbers.reshape(-1, width).T, transfer_time])

    def end_all(self, now: float) -> None:
        """End all running attempts, because the trace ends."""
        for rollout in list(self._sent):
            self._end_unreported(rollout, now)

    def _draw(self, event: PromptsDrawn, _: float) -> None:
        self._groups.update({drawn.group: drawn.rollouts for drawn in event.groups})
        self._prompts.update(
            {rollout: drawn.prompt_tokens for drawn in event.groups for rollout in drawn.rollouts}
        )

    def _begin(self, command: Generate, now: float) -> None:
        rollout = command.rollout
        self._sent[rollout] = command, now, self._prompts[rollout]

    def _end_reported(self, event: Generated, now: float) -> None:
        rollout = event.rollout
        command, _, prompt = self._sent.pop(rollout)
        start, seen = now - event.run_time, command.observed
        prefix, tokens = command.prefix + seen, event.tokens + seen
        times = event.prefill_time, event.recompute_time
        if event.transfer_time:
            self._transfers.append((len(self._ended), event.transfer_time))
        self._ended.append(
            (command.replica, rollout, start, now, times[0], prompt, prefix, tokens, times[1], True)
        )

    def _fail(self, event: Failed, now: float) -> None:
        if isinstance(event.command, Generate):
            self._end_unreported(event.command.rollout, now)

    def _end_unreported(self, rollout: int, now: float) -> None:
        command, sent_at, prompt = self._sent.pop(rollout)
        prefix = command.prefix + command.observed
        self._ended.append(
            (command.replica, rollout, sent_at, now, 0.0, prompt, prefix, prefix, 0.0, False)
        )

    def _forget(self, groups: tuple[int, ...]) -> None:
        """Forget groups that are trained on or dropped."""
        for group in groups:
            for rollout in self._groups.pop(group, ()):
                del self._prompts[rollout]
