"""From a trace to the batch that each replica decoded at each instant: how many rollouts, and how long they were.

Events tell when a rollout joined and left a batch and how many tokens it had; between them its context is taken to
grow evenly. An attempt whose running time nobody reported, because its replica was lost or the trace ends, counts as
running since it was sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

import numpy as np

from streamrl.engine.messages import Drop, Failed, Generate, Generated, PromptsDrawn, Step
from streamrl.hardware.tables import Floats
from streamrl.record.entries import Entry
from streamrl.record.trace import Trace


class Decoding(NamedTuple):
    """Stretches of one replica's time in which its batch was the same, as arrays in order of time."""

    start: Floats
    end: Floats
    num_running: Floats
    context: Floats
    """Mean tokens of a running rollout's prompt and output, in the middle of the stretch."""
    prompt: Floats
    """Mean tokens of a running rollout's prompt."""
    rate: Floats
    """Tokens a second of all that run, each at the mean rate of its attempt."""

    @property
    def seconds(self) -> Floats:
        """How long each stretch is."""
        return self.end - self.start


class _Stay(NamedTuple):
    """A rollout in a replica's batch, from its first token to its end."""

    start: float
    end: float
    prompt: float
    context: float
    """At the start."""
    made: float
    is_known: bool
    """Whether it reported when it ran and what it made."""


def read_decoding(trace: Trace) -> dict[int, Decoding]:
    """Return what each replica decoded, by replica; one that never did is left out."""
    reader = DecodingReader()
    reader.read(trace.entries)
    return reader.finish()


class DecodingReader:
    """Reads what each replica decoded, block by block."""

    def __init__(self) -> None:
        self._stays: dict[int, list[_Stay]] = defaultdict(list)
        """Of each replica those that ended, and have a part in stretches that were not taken."""
        self._since: dict[int, float] = {}
        """By replica, the end of the last stretch that was taken."""
        self._prompts: dict[int, int] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._sent: dict[int, tuple[Generate, float, int]] = {}
        self._now = 0.0

    def read(self, entries: Iterable[Entry]) -> None:
        """Take the entries that come after those before."""
        for now, event, commands in entries:
            self._now = now
            match event:
                case Generated():
                    command, _, prompt = self._sent.pop(event.rollout)
                    self._stays[command.replica].append(_stay(command, event, now, prompt))
                case Failed(Generate(rollout)):
                    self._end_unknown(rollout)
                case PromptsDrawn():
                    for drawn in event.groups:
                        self._groups[drawn.group] = drawn.rollouts
                        self._prompts.update(dict.fromkeys(drawn.rollouts, drawn.prompt_tokens))
                case _:
                    pass  # begins and ends no decoding
            for each in commands:
                if isinstance(each, Generate):
                    self._sent[each.rollout] = each, now, self._prompts[each.rollout]
                elif isinstance(each, Step):
                    self._forget(each.groups)
                elif isinstance(each, Drop):
                    self._forget((each.group,))

    def take(self, until: float) -> dict[int, Decoding]:
        """Return once the stretches of each replica that ended by an instant before which nothing is left to be told."""
        taken = {}
        for replica, stays in self._stays.items():
            since = self._since.get(replica, -inf)
            decoding, last = _stretches(stays, since, until)
            if len(decoding.start):
                taken[replica] = decoding
            self._since[replica] = last
            stays[:] = [stay for stay in stays if stay.end > last]
        for replica in [replica for replica, stays in self._stays.items() if not stays]:
            del self._stays[replica]
        return taken

    def began_at(self, replica: int) -> float:
        """Return when the stretch began that a replica's next one goes on from; infinity where it decodes nothing."""
        return self._since[replica] if replica in self._stays else inf

    def finish(self) -> dict[int, Decoding]:
        """Return all stretches that are left; what still runs is taken to run until the last entry."""
        for rollout in list(self._sent):
            self._end_unknown(rollout)
        return self.take(inf)

    def _end_unknown(self, rollout: int) -> None:
        command, sent_at, prompt = self._sent.pop(rollout)
        stay = _Stay(sent_at, self._now, prompt, prompt + command.prefix, 0.0, is_known=False)
        self._stays[command.replica].append(stay)

    def _forget(self, groups: tuple[int, ...]) -> None:
        """Forget what nobody generates any more."""
        for group in groups:
            for rollout in self._groups.pop(group, ()):
                del self._prompts[rollout]


def _stay(command: Generate, event: Generated, now: float, prompt: int) -> _Stay:
    start = min(now, now - event.run_time + event.prefill_time)
    first = min(event.tokens, command.prefix + 1)  # prefill makes a token
    return _Stay(start, now, prompt, prompt + first, event.tokens - first, is_known=True)


def _stretches(stays: list[_Stay], since: float, until: float) -> tuple[Decoding, float]:
    """Cut a replica's time wherever a rollout joins or leaves, and sum over those between.

    Returns:
        The stretches between two instants, and the end of the last one.
    """
    start, end, prompt, context, made, is_known = np.array(stays, dtype=float).T
    rate = np.divide(made, end - start, out=np.zeros_like(made), where=end > start)
    times = np.concatenate([np.maximum(start, since), np.maximum(end, since)])
    order = np.argsort(times, kind="stable")
    order = order[: np.searchsorted(times[order], until, "right")]
    times = times[order]

    def running(of_each: Floats) -> Floats:
        changes = np.concatenate([of_each, -of_each])[order]
        total: Floats = np.cumsum(changes)[:-1]
        return total

    num_running = np.rint(running(np.ones_like(start)))
    middle = (times[:-1] + times[1:]) / 2
    contexts = running(context - rate * start) + running(rate) * middle
    num_known = np.rint(running(is_known))
    shown = (times[1:] > times[:-1]) & (num_running > 0)
    count = num_running[shown]
    decoding = Decoding(
        start=times[:-1][shown],
        end=times[1:][shown],
        num_running=count,
        context=contexts[shown] / count,
        prompt=running(prompt)[shown] / count,
        rate=running(rate)[shown] * count / np.maximum(num_known[shown], 1.0),
    )
    return decoding, float(times[-1]) if len(times) else since
