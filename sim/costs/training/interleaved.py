"""The interleaved schedule: each GPU has several thin slices of the model, so that a pipeline fills sooner.

Device s of p holds chunks s, s + p, s + 2p … of p v slices. Forward passes run through groups of p micro-batches,
chunk after chunk; a device does (p - s - 1) 2 + (v - 1) p of them before forward and backward take turns
(Narayanan et al. 2021, arXiv 2104.04473, section 2.2; the order is Megatron-LM's).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from math import inf
from typing import NamedTuple


class _Op(NamedTuple):
    is_forward: bool
    chunk: int
    micro: int


def interleave(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    chunks: int,
    free_at: Sequence[float],
    send: float = 0.0,
) -> list[float]:
    """Put micro-batches through; return when each device is free.

    Args:
        forward: (micro-batches, devices x chunks) seconds of each slice, in the order of the model.
        backward: the same of backward passes.
        chunks: slices of each device.
        free_at: (devices,) when each can begin.
        send: seconds between two slices.
    """
    devices = len(free_at)
    last = devices * chunks - 1
    orders = [_order(device, devices, chunks, len(forward)) for device in range(devices)]
    free, turns = list(free_at), [0] * devices
    sent = [[inf] * (last + 1) for _ in forward]
    returned = [[inf] * (last + 1) for _ in forward]
    remaining = sum(map(len, orders))
    while remaining:
        for device, order in enumerate(orders):
            while turns[device] < len(order):
                op = order[turns[device]]
                place = op.chunk * devices + device
                if op.is_forward:
                    ready = 0.0 if place == 0 else sent[op.micro][place - 1] + send
                    seconds = forward[op.micro][place]
                elif place == last:
                    ready, seconds = sent[op.micro][last], backward[op.micro][last]
                else:
                    ready = returned[op.micro][place + 1] + send
                    seconds = backward[op.micro][place]
                if ready == inf:
                    break
                free[device] = max(free[device], ready) + seconds
                (sent if op.is_forward else returned)[op.micro][place] = free[device]
                turns[device] += 1
                remaining -= 1
    return free


def _order(device: int, devices: int, chunks: int, num_micro: int) -> list[_Op]:
    """Return what a device does, in order; micro-batches are a multiple of devices, or all are warm-up."""
    turns = range(num_micro * chunks)
    forward = [_at(turn, devices, chunks, is_forward=True) for turn in turns]
    backward = [_at(turn, devices, chunks, is_forward=False) for turn in turns]
    if num_micro % devices:
        raise ValueError(f"{num_micro} micro-batches on {devices} devices: not a multiple")
    before = min(len(forward), (devices - device - 1) * 2 + (chunks - 1) * devices)
    pairs = zip_longest(forward[before:], backward)
    return [*forward[:before], *(op for op in chain.from_iterable(pairs) if op is not None)]


def _at(turn: int, devices: int, chunks: int, *, is_forward: bool) -> _Op:
    group, rest = divmod(turn, devices * chunks)
    chunk, micro = divmod(rest, devices)
    return _Op(is_forward, chunk if is_forward else chunks - 1 - chunk, group * devices + micro)
