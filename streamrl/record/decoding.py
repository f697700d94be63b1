"""From a trace to the batch that each replica decoded at each instant: how many rollouts, and how long they were.

Events tell when a rollout joined and left a batch and how many tokens it had; between them its context is taken to
grow evenly. An attempt whose running time nobody reported, because its replica was lost or the trace ends, counts as
running since it was sent.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from streamrl.engine.messages import Failed, Generate, Generated, PromptsDrawn
from streamrl.hardware.tables import Floats
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
    found = {replica: _stretches(stays) for replica, stays in _read_stays(trace).items()}
    return {replica: decoding for replica, decoding in found.items() if len(decoding.start)}


def _read_stays(trace: Trace) -> dict[int, list[_Stay]]:
    stays: dict[int, list[_Stay]] = defaultdict(list)
    prompts: dict[int, int] = {}
    sent: dict[int, tuple[Generate, float]] = {}
    now = 0.0
    for now, event, commands in trace.entries:
        match event:
            case Generated():
                command, _ = sent.pop(event.rollout)
                stays[command.replica].append(_stay(command, event, now, prompts[event.rollout]))
            case Failed(Generate(rollout)):
                lost, sent_at = sent.pop(rollout)
                stays[lost.replica].append(_unknown(lost, sent_at, now, prompts[rollout]))
            case PromptsDrawn():
                for group in event.groups:
                    prompts.update(dict.fromkeys(group.rollouts, group.prompt_tokens))
            case _:
                pass  # begins and ends no decoding
        sent |= {each.rollout: (each, now) for each in commands if isinstance(each, Generate)}
    for rollout, (left, sent_at) in sent.items():
        stays[left.replica].append(_unknown(left, sent_at, now, prompts[rollout]))
    return stays


def _stay(command: Generate, event: Generated, now: float, prompt: int) -> _Stay:
    start = min(now, now - event.run_time + event.prefill_time)
    first = min(event.tokens, command.prefix + 1)  # prefill makes a token
    return _Stay(start, now, prompt, prompt + first, event.tokens - first, is_known=True)


def _unknown(command: Generate, sent_at: float, now: float, prompt: int) -> _Stay:
    return _Stay(sent_at, now, prompt, prompt + command.prefix, 0.0, is_known=False)


def _stretches(stays: list[_Stay]) -> Decoding:
    """Cut a replica's time wherever a rollout joins or leaves, and sum over those between."""
    start, end, prompt, context, made, is_known = np.array(stays, dtype=float).T
    rate = np.divide(made, end - start, out=np.zeros_like(made), where=end > start)
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
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
    return Decoding(
        start=times[:-1][shown],
        end=times[1:][shown],
        num_running=count,
        context=contexts[shown] / count,
        prompt=running(prompt)[shown] / count,
        rate=running(rate)[shown] * count / np.maximum(num_known[shown], 1.0),
    )
