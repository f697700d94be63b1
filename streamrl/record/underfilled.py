"""Decode seconds that full batches would not have needed: busy GPUs that yield less than they could.

A replica that still decodes the last few rollouts of a step reads all its weights for few tokens. Of such a second
the share

    1 - (tokens/s of this batch) / (tokens/s of a full batch)

is underfilled. What a full batch yields is known from

curve      the decode curve in the trace's header: of the largest batch that `rollout.max_running` and KV memory allow
           at the same mean context
observed   where the header has none: the median tokens/s of what the trace shows of batches of `max_running`, of a long
           one its first part
unknown    where it shows no such batch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from streamrl.hardware.tables import Floats
from streamrl.record.decode_yield import DecodeYield
from streamrl.record.decoding import Decoding, read_decoding
from streamrl.record.timeline import read_timeline
from streamrl.record.trace import Trace
from streamrl.runfile.config import Run

YieldSource = Literal["curve", "observed", "unknown"]
"""Where it is known from what a full batch yields."""
ROUNDING = 1e-9
"""Of the mean of what rollouts hold, which is summed up in another order where a trace is read in other parts: a batch that
fills memory to the last token does."""


class Lost(NamedTuple):
    """Stretches of one replica's time, and the share of each that a full batch would not have needed."""

    start: Floats
    end: Floats
    share: Floats


class Underfilled(NamedTuple):
    """What decoding lost to batches that were not full."""

    source: YieldSource
    replicas: dict[int, Lost]
    """By replica; empty where it is not known."""


def read_underfilled(trace: Trace) -> Underfilled:
    """Return what the batches of a run lost, from its trace alone."""
    return lost_of(read_decoding(trace), trace.decode, trace.run, read_timeline(trace).kinds)


def lost_of(
    decoding: Mapping[int, Decoding],
    curves: Sequence[DecodeYield],
    run: Run,
    kinds: Mapping[int, int],
    rates: Sequence[float | None] | None = None,
) -> Underfilled:
    """Return what batches lost.

    Args:
        decoding: by replica.
        curves: of each kind of replica, or none.
        run: the run file.
        kinds: which kind a replica is of, by its id; the first where absent.
        rates: without curves, tokens/s of full batches as `observed_rates` gives them; where absent, those of `decoding`,
            which must be all of a run then.
    """
    if curves:
        shares = {
            replica: _share_by(curves[kinds.get(replica, 0)], each, run)
            for replica, each in decoding.items()
        }
        return Underfilled("curve", {r: _lost(each, shares[r]) for r, each in decoding.items()})
    full = observed_rates(decoding, run, kinds) if rates is None else rates
    found = {}
    for replica, each in decoding.items():
        rate = full[kinds.get(replica, 0)]
        if rate is None:
            return Underfilled("unknown", {})
        found[replica] = _lost(each, np.clip(1 - each.rate / rate, 0.0, 1.0))
    return Underfilled("observed", found)


def observed_rates(
    decoding: Mapping[int, Decoding], run: Run, kinds: Mapping[int, int]
) -> list[float | None]:
    """Return the tokens/s of a full batch of each kind of replica, as `lost_of` shows some; None of one without."""
    return [
        _observed(
            [each for replica, each in decoding.items() if kinds.get(replica, 0) == kind], most
        )
        for kind, most in enumerate(own.max_running for own in run.rollout.kinds)
    ]


def _lost(decoding: Decoding, share: Floats) -> Lost:
    return Lost(decoding.start, decoding.end, share)


def _share_by(curve: DecodeYield, decoding: Decoding, run: Run) -> Floats:
    """Return the share lost by a decode curve; a prompt that a group shares is held once."""
    siblings = run.algorithm.group_size if run.shares_prefixes else 1
    own = decoding.context - decoding.prompt * (1 - 1 / siblings)
    running = np.minimum(decoding.num_running, curve.most_running)
    return share_lost(curve, running, decoding.context, own)


def share_lost(curve: DecodeYield, num_running: Floats, context: Floats, own: Floats) -> Floats:
    """Return the share of each decode second that a full batch of the same mean context would not have needed.

    Args:
        curve: of one replica.
        num_running: rollouts in the batch.
        context: mean tokens that one of them attends to.
        own: mean tokens that one of them holds beside what it shares.
    """
    full = _full_batch(curve, num_running, own)
    here = num_running / _step_time(curve, num_running, context)
    best = full / _step_time(curve, full, context)
    return np.clip(1.0 - here / best, 0.0, 1.0)


def _full_batch(curve: DecodeYield, num_running: Floats, own: Floats) -> Floats:
    """Return the largest batch of rollouts that each hold `own` tokens: no less than what runs."""
    most = np.full_like(own, curve.most_running)
    if curve.kv_capacity is not None:
        room = curve.kv_capacity / np.maximum(own, 1.0)
        most = np.minimum(most, np.floor(room * (1 + ROUNDING)))
    full: Floats = np.maximum(most, num_running)
    return full


def _step_time(curve: DecodeYield, num_running: Floats, context: Floats) -> Floats:
    base = np.interp(num_running, curve.batches, curve.base)
    slope = np.interp(num_running, curve.batches, curve.per_context_token)
    seconds: Floats = base + slope * num_running * context
    return seconds


def _observed(decoding: Sequence[Decoding], most: int) -> float | None:
    """Return the median tokens/s of full batches, each second of them counted once; None where there are none."""
    rates = [each.rate[each.num_running >= most] for each in decoding]
    seconds = [each.seconds[each.num_running >= most] for each in decoding]
    if not sum(map(len, rates)):
        return None
    rate, weight = np.concatenate(rates), np.concatenate(seconds)
    order = np.argsort(rate)
    below = np.cumsum(weight[order])
    middle = float(rate[order][np.searchsorted(below, below[-1] / 2)])
    return middle or None
