"""A trainer event by event: stages are processes that take passes in order, and wait for what each needs.

The long way to what `streamrl.sim.costs.training` computes with sums and maxima, without a line of its schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from statistics import fmean
from typing import Any

import simpy

Work = Generator[simpy.Event, Any, None]
Op = tuple[str, int, int]
"""forward or backward, micro-batch, and slice of the model."""
INSTANT = 1e-9
"""Seconds by which what comes at the very moment when a pipeline would drain comes before that."""


@dataclass(frozen=True)
class Micro:
    """A micro-batch: seconds of its passes, and where it can begin."""

    forward: Sequence[float]
    backward: Sequence[float] | None
    """None of a score."""
    send: float = 0.0
    ready_at: float = 0.0
    is_last: bool = False
    """Whether stages do all backward passes behind it, and what comes later fills them again."""


class PipelineRun:
    """One forward, one backward in turn, from the first micro-batch to the last."""

    def __init__(self, num_stages: int, micros: Sequence[Micro]) -> None:
        self.left_at = self.done_at = 0.0
        self._num_back = 0
        self._env, self._num_stages = simpy.Environment(), num_stages
        self._forward = [simpy.Store(self._env) for _ in range(num_stages + 1)]
        self._backward = [simpy.Store(self._env) for _ in range(num_stages)]
        self._env.process(self._arrive(micros))
        for stage in range(num_stages):
            self._env.process(self._stage(stage))
        self._env.run()
        assert self._num_back == sum(micro.backward is not None for micro in micros)

    def _arrive(self, micros: Sequence[Micro]) -> Work:
        for micro in micros:
            yield self._env.timeout(max(0.0, micro.ready_at - INSTANT - self._env.now))
            self._forward[0].put(micro)

    def _stage(self, stage: int) -> Work:
        under_way = 0
        while True:
            if under_way == self._num_stages - stage:
                yield from self._go_back(stage)
                under_way -= 1
            micro = yield self._forward[stage].get()
            yield from self._compute(micro.ready_at, micro.forward[stage])
            under_way += micro.backward is not None
            if stage == 0:
                self.left_at = self._env.now
                micro = replace(micro, is_last=self._is_last())
            if stage + 1 < self._num_stages:
                ready_at = self._env.now + micro.send
                self._forward[stage + 1].put(replace(micro, ready_at=ready_at))
            elif micro.backward is not None:
                self._backward[stage].put(replace(micro, ready_at=self._env.now))
            while micro.is_last and under_way:
                yield from self._go_back(stage)
                under_way -= 1

    def _is_last(self) -> bool:
        """Whether the stages drain behind the micro-batch that leaves the first."""
        coming = self._forward[0].items
        return not coming or coming[0].backward is None

    def _go_back(self, stage: int) -> Work:
        micro = yield self._backward[stage].get()
        yield from self._compute(micro.ready_at, micro.backward[stage])
        if stage:
            self._backward[stage - 1].put(replace(micro, ready_at=self._env.now + micro.send))
        else:
            self._num_back += 1

    def _compute(self, ready_at: float, seconds: float) -> Work:
        yield self._env.timeout(max(0.0, ready_at - self._env.now))
        yield self._env.timeout(seconds)
        self.done_at = self._env.now


class EventTrainer:
    """Data-parallel ranks, each with a pipeline, and commands one after the other."""

    def __init__(
        self,
        num_ranks: int,
        num_stages: int,
        dealt: Callable[[Sequence[int], Sequence[float]], list[list[Micro]]],
    ) -> None:
        """Take how rollouts become micro-batches of each rank, given the seconds that ranks are busy for."""
        self._num_stages, self._dealt = num_stages, dealt
        self._micros: list[list[Micro]] = [[] for _ in range(num_ranks)]

    def train(self, lengths: Sequence[int], now: float) -> float:
        """Take rollouts at `now`; return when a mean rank can take more."""
        loads = [max(0.0, run.left_at - now) for run in self._runs()]
        for rank, micros in zip(self._micros, self._dealt(lengths, loads), strict=True):
            rank += [replace(micro, ready_at=now) for micro in micros]
        return fmean(max(now, run.left_at) for run in self._runs())

    def finish(self) -> float:
        """Return when all is done."""
        return max(run.done_at for run in self._runs())

    def _runs(self) -> list[PipelineRun]:
        return [PipelineRun(self._num_stages, micros) for micros in self._micros]


class InterleavedRun:
    """Several slices of the model on each device, groups of micro-batches through one slice after the other."""

    def __init__(self, devices: int, slices: int, micros: Sequence[Micro]) -> None:
        self.done_at = 0.0
        self._env, self._devices, self._slices = simpy.Environment(), devices, slices
        self._micros = micros
        self._done: defaultdict[Op, simpy.Event] = defaultdict(self._env.event)
        processes = [self._env.process(self._device(device)) for device in range(devices)]
        self._env.run()
        assert all(process.triggered for process in processes), "a device waits for ever"

    def _device(self, device: int) -> Work:
        forward = list(self._passes(device, range(self._slices), "forward"))
        backward = list(self._passes(device, reversed(range(self._slices)), "backward"))
        warm_up = 2 * (self._devices - 1 - device) + (self._slices - 1) * self._devices
        for op in _one_and_one(forward, backward, warm_up):
            yield from self._compute(op, device)

    def _passes(
        self, device: int, slices: Sequence[int] | Iterator[int], kind: str
    ) -> Iterator[Op]:
        order = list(slices)
        for first in range(0, len(self._micros), self._devices):
            for piece in order:
                for micro in range(first, first + self._devices):
                    if kind == "forward" or self._micros[micro].backward is not None:
                        yield kind, micro, piece * self._devices + device

    def _compute(self, op: Op, device: int) -> Work:
        kind, index, place = op
        micro, last = self._micros[index], self._devices * self._slices - 1
        if kind == "forward":
            before = ("forward", index, place - 1) if place else None
            seconds, send = micro.forward[place], micro.send
        else:
            before = ("forward", index, last) if place == last else ("backward", index, place + 1)
            assert micro.backward is not None
            seconds, send = micro.backward[place], 0.0 if place == last else micro.send
        ready_at = micro.ready_at
        if before is not None:
            ready_at = (yield self._done[before]) + send
        yield self._env.timeout(max(0.0, ready_at - self._env.now))
        yield self._env.timeout(seconds)
        self._done[op].succeed(self._env.now)
        self.done_at = self._env.now


def _one_and_one(forward: list[Op], backward: list[Op], warm_up: int) -> Iterator[Op]:
    """Yield so many forward passes, then one forward and one backward in turn, then what is left."""
    ahead, behind = iter(forward), iter(backward)
    yield from islice(ahead, warm_up)
    for op in ahead:
        yield op
        yield from islice(behind, 1)
    yield from chain(ahead, behind)
