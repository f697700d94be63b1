"""Compute pipeline schedules of a trainer, 1F1B and interleaved, and when the trainer can take more work.

1F1B. Stage s of p holds at most p - s micro-batches between their forward and their backward pass.
A micro-batch enters a stage when the stage before has sent it and earlier work is done. A stage
runs forward passes until it is full, then backward and forward passes in turn (Narayanan et al.
2021, arXiv 2104.04473). New micro-batches keep the pipeline full if they come before the last one
has left the first stage. Otherwise it drains and fills again. Passes without a backward pass
(scores) go through in one direction.

Interleaved. Each GPU has several thin slices of the model, so that the pipeline fills sooner.
Device s of p holds chunks s, s + p, s + 2p … of p v slices. Forward passes run through groups of p
micro-batches, chunk after chunk. A device runs (p - s - 1) 2 + (v - 1) p of them before forward and
backward passes alternate (same paper, section 2.2; the order is Megatron-LM's).

Each data-parallel rank works on its own share, and waits for the others at the optimizer step. If a step trains on a whole
batch, one controller gathers the scores of all ranks after each scoring pass, and nothing else begins before.
Ranks that share experts, or gather weights for every micro-batch, run in lockstep: all wait for the
slowest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from math import inf
from statistics import fmean
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from streamrl.hardware.operator_tables import Floats
from streamrl.runfile.roles_config import TrainerConfig
from streamrl.sim.costs.training.micro_batches import (
    MicroBatch,
    distribute_rollouts,
    fewest_micro_batches,
    micro_batches,
)
from streamrl.sim.costs.training.stage_times import StageTimes

Seconds = Sequence[Sequence[float]]
"""(micro-batches, devices x chunks): seconds of each slice, in the order of the model."""


class _Op(NamedTuple):
    is_forward: bool
    chunk: int
    micro: int


def interleave(
    forward: Seconds,
    backward: Seconds | None,
    chunks: int,
    free_at: Sequence[float],
    sends: Sequence[float],
) -> list[float]:
    """Run micro-batches through the pipeline, and return when each device is free.

    Args:
        forward: seconds of forward passes.
        backward: seconds of backward passes; None for scoring.
        chunks: slices of each device.
        free_at: (devices,) when each can begin.
        sends: (micro-batches,) seconds of each between two slices.
    """
    devices = len(free_at)
    last = devices * chunks - 1
    orders = [_order(device, devices, chunks, len(forward)) for device in range(devices)]
    if backward is None:
        orders, backward = [[op for op in order if op.is_forward] for order in orders], []
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
                    ready = 0.0 if place == 0 else sent[op.micro][place - 1] + sends[op.micro]
                    seconds = forward[op.micro][place]
                elif place == last:
                    ready, seconds = sent[op.micro][last], backward[op.micro][last]
                else:
                    ready = returned[op.micro][place + 1] + sends[op.micro]
                    seconds = backward[op.micro][place]
                if ready == inf:
                    break
                free[device] = max(free[device], ready) + seconds
                (sent if op.is_forward else returned)[op.micro][place] = free[device]
                turns[device] += 1
                remaining -= 1
    return free


def _order(device: int, devices: int, chunks: int, num_micro: int) -> list[_Op]:
    """Return a device's passes in order; micro-batches are a multiple of devices, or all are warm-up."""
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


ROUNDING = 1e-12
"""Share of an instant by which two sums of the same durations may differ; such a delay does not
count.
"""


class _Batch(NamedTuple):
    """A micro-batch between its two passes."""

    backward: Sequence[float]
    send: float
    """Seconds between two stages."""


@dataclass(slots=True)
class Pipeline:
    """The stages of one data-parallel rank, with a 1F1B schedule."""

    num_stages: int
    free_at: list[float] = field(default_factory=list)
    """When each stage has finished all its work."""
    open_until: float = 0.0
    """When the last micro-batch leaves the first stage; one that comes by then finds the pipeline
    full.
    """
    _waiting: list[deque[_Batch]] = field(default_factory=list)
    """Micro-batches whose backward pass each stage has yet to run."""
    _returned_at: list[deque[float]] = field(default_factory=list)
    """When the next stage has returned the gradients of those, for the passes it has finished."""

    def __post_init__(self) -> None:
        self.free_at = [0.0] * self.num_stages
        self._waiting = [deque() for _ in range(self.num_stages)]
        self._returned_at = [deque() for _ in range(self.num_stages)]

    def train(
        self, forward: Sequence[float], backward: Sequence[float], send: float, now: float
    ) -> None:
        """Run a micro-batch that arrives at `now`, with its seconds on each stage and between two stages."""
        if self.num_stages == 1:
            self.open_until = max(self.free_at[0], now) + forward[0] + backward[0]
            self.free_at[0] = self.open_until
            return
        if now > self.open_until * (1 + ROUNDING):
            self.drain()
        room, free_at = self.num_stages, self.free_at
        batch, ready_at = _Batch(backward, send), now
        for stage, (waiting, seconds) in enumerate(zip(self._waiting, forward, strict=True)):
            if len(waiting) == room:
                self._go_back(stage)
            free = free_at[stage]
            free_at[stage] = free = (free if free > ready_at else ready_at) + seconds
            ready_at = free + send
            waiting.append(batch)
            room -= 1
        self._returned_at[-1].append(free_at[-1])
        self.open_until = free_at[0]

    def score(self, forward: Sequence[float], send: float, now: float) -> None:
        """Run a micro-batch through in one direction."""
        self.drain()
        ready_at = now
        for stage in range(self.num_stages):
            start = max(self.free_at[stage], ready_at)
            self.free_at[stage] = start + forward[stage]
            ready_at = self.free_at[stage] + send
        self.open_until = self.free_at[0]

    def drain(self) -> float:
        """Run the remaining backward passes, and return when all stages are free."""
        for stage in range(self.num_stages - 1, -1, -1):
            while self._waiting[stage]:
                self._go_back(stage)
        return max(self.free_at)

    def pause(self, seconds: float, now: float) -> None:
        """Block every stage for `seconds` once it is free."""
        self.drain()
        self.free_at = [max(now, free) + seconds for free in self.free_at]

    def resume_at(self, instant: float) -> None:
        """Block all stages until `instant`, by which all are free."""
        self.free_at, self.open_until = [instant] * self.num_stages, instant

    def occupy(self, free_at: Sequence[float]) -> None:
        """Set when each stage is free after another schedule, and when the first one is open."""
        self.free_at, self.open_until = list(free_at), free_at[0]

    def _go_back(self, stage: int) -> None:
        backward, send = self._waiting[stage].popleft()
        free, returned_at = self.free_at[stage], self._returned_at[stage].popleft()
        # comparing takes a fraction of the time of `max`, and huge trainers make millions of passes
        free = (free if free > returned_at else returned_at) + backward[stage]
        self.free_at[stage] = free
        if stage:
            self._returned_at[stage - 1].append(free + send)


def _slowest(times: Floats, counts: Sequence[int]) -> list[list[float]]:
    """Return (micro-batches, slices) the seconds on the slowest rank, from those of all ranks in order."""
    is_there = np.arange(max(counts)) < np.array(counts)[:, None]
    by_rank = np.zeros((*is_there.shape, times.shape[1]))
    by_rank[is_there] = times
    slowest: list[list[float]] = by_rank.max(axis=0).tolist()
    return slowest


class TrainerSchedule(Protocol):
    """The schedule of a simulated trainer."""

    def score(self, lengths: Sequence[int], now: float) -> float:
        """Run forward passes over rollouts (tokens of prompt and output); return when more can come."""
        ...

    def train(self, lengths: Sequence[int], now: float) -> float:
        """Run forward and backward passes over rollouts; return when more can come."""
        ...

    def finish(self, now: float) -> float:
        """Return when everything is done."""
        ...


TimeOf: TypeAlias = Callable[[Sequence[int]], float]
"""Seconds of a command's rollouts, by the tokens of each."""


class SerialSchedule:
    """One rank without a pipeline, with fixed seconds per command."""

    def __init__(self, score_time: TimeOf, train_time: TimeOf) -> None:
        self._score_time, self._train_time = score_time, train_time
        self._free_at = 0.0

    def score(self, lengths: Sequence[int], now: float) -> float:
        """See `TrainerSchedule`."""
        self._free_at = max(now, self._free_at) + self._score_time(lengths)
        return self._free_at

    def train(self, lengths: Sequence[int], now: float) -> float:
        """See `TrainerSchedule`."""
        self._free_at = max(now, self._free_at) + self._train_time(lengths)
        return self._free_at

    def finish(self, now: float) -> float:
        """See `TrainerSchedule`."""
        return max(now, self._free_at)


class PipelinedSchedule:
    """Ranks with their pipelines."""

    def __init__(
        self,
        stages: StageTimes,
        trainer: TrainerConfig,
        *,
        scores: Sequence[float],
        trains: Sequence[float],
        share: float = 1.0,
        epochs: int = 1,
        mini_batch: float = inf,
        update_time: float = 0.0,
        transfer_times: tuple[float, float] = (0.0, 0.0),
        fills_micro_batches: bool = False,
        pads_training: bool = False,
        gathers_scores: bool = False,
    ) -> None:
        """Create a schedule in which every rank is free.

        Args:
            stages: seconds of micro-batches.
            trainer: how ranks share the work.
            scores: seconds to load each scoring model from host memory.
            trains: the same for every trained model.
            share: share of the rollouts that passes compute; rollouts of advantage 0 are skipped.
            epochs: times that rollouts are trained on.
            mini_batch: rollouts between two optimizer steps; the last step is a command of its own.
            update_time: seconds of the optimizer steps before the last.
            transfer_times: seconds in which the controller sends a rollout for a scoring pass, and for training.
            fills_micro_batches: whether rollouts of all ranks go into as few micro-batches as possible.
            pads_training: whether those of training are then padded to the most tokens of a pass.
            gathers_scores: whether scores of all ranks are gathered before anything else begins.
        """
        self._stages, self._trainer = stages, trainer
        self._scores, self._trains, self._share = scores, trains, share
        self._epochs, self._mini_batch, self._update_time = epochs, mini_batch, update_time
        self._scored_in, self._trained_in = transfer_times
        self._fills_micro_batches, self._pads_training = fills_micro_batches, pads_training
        self._gathers_scores = gathers_scores
        self._num_trained = 0
        """Rollouts since the last optimizer step."""
        self._batch: list[int] = []
        """Rollouts of the step so far, if more epochs follow."""
        self._goes_in_step = trainer.zero >= 2 or trainer.shards_experts
        num_clocks = 1 if self._goes_in_step else trainer.data_parallel
        self._ranks = [Pipeline(trainer.pipeline_parallel) for _ in range(num_clocks)]

    def score(self, lengths: Sequence[int], now: float) -> float:
        """See `TrainerSchedule`."""
        dealt = self._micro_batches_by_rank(lengths, now, self._trainer.scorer)
        times = self._by_clock(dealt, self._stages.scored_times, self._share)
        sends = self._sends(dealt)
        sent_in = self._scored_in * len(lengths)
        for switch_time in self._scores:
            self._wait(sent_in + switch_time, now)
            for rank, rows, between in zip(self._ranks, times, sends, strict=True):
                if self._trainer.virtual_stages > 1:
                    self._interleave(rank, rows, None, between, now)
                    continue
                for row, send in zip(rows, between, strict=True):
                    rank.score(row, send, now)
            if self._gathers_scores:
                self._meet()
        return self._open_until(now)

    def train(self, lengths: Sequence[int], now: float) -> float:
        """See `TrainerSchedule`."""
        if self._epochs > 1:
            self._batch += lengths
        self._wait(self._trained_in * len(lengths), now)
        self._train_in_mini_batches(lengths, now)
        return self._open_until(now)

    def finish(self, now: float) -> float:
        """Run the remaining epochs over the whole batch; see `TrainerSchedule`."""
        for _ in range(1, self._epochs if self._batch else 1):
            self._update()
            self._train_in_mini_batches(self._batch, now)
        self._num_trained, self._batch = 0, []
        return max(now, *(rank.drain() for rank in self._ranks))

    # Helpers --------------------------------------------------------------------------------------

    def _train_in_mini_batches(self, lengths: Sequence[int], now: float) -> None:
        rest = list(lengths)
        while rest:
            if self._num_trained >= self._mini_batch:
                self._update()
            room = self._mini_batch - self._num_trained
            part = rest if len(rest) <= room else rest[: int(room)]
            rest = rest[len(part) :]
            self._num_trained += len(part)
            self._train(part, now)

    def _train(self, lengths: Sequence[int], now: float) -> None:
        dealt = self._micro_batches_by_rank(
            lengths, now, self._trainer, is_full=self._pads_training
        )
        forward = self._by_clock(dealt, self._stages.forward_times, self._share)
        backward = self._by_clock(dealt, self._stages.backward_times, self._share)
        sends = self._sends(dealt)
        for switch_time in self._trains:
            self._wait(switch_time, now)
            for rank, rows, others, between in zip(
                self._ranks, forward, backward, sends, strict=True
            ):
                if self._trainer.virtual_stages > 1:
                    self._interleave(rank, rows, others, between, now)
                    continue
                for one, other, send in zip(rows, others, between, strict=True):
                    rank.train(one, other, send, now)

    def _update(self) -> None:
        """Run an optimizer step between two mini-batches."""
        self._meet(self._update_time)
        self._num_trained = 0

    def _meet(self, seconds: float = 0.0) -> None:
        """Let every rank and stage wait for the slowest, and for `seconds` more."""
        done_at = max(rank.drain() for rank in self._ranks) + seconds
        for rank in self._ranks:
            rank.resume_at(done_at)

    def _wait(self, seconds: float, now: float) -> None:
        """Block every stage for `seconds`."""
        if seconds:
            for rank in self._ranks:
                rank.pause(seconds, now)

    def _micro_batches_by_rank(
        self, lengths: Sequence[int], now: float, trainer: TrainerConfig, *, is_full: bool = False
    ) -> list[list[MicroBatch]]:
        """Return the micro-batches of each data-parallel rank, with the trainer's limits on a pass."""
        if self._goes_in_step:
            loads = [0.0] * trainer.data_parallel
        else:
            loads = [max(0.0, rank.free_at[0] - now) for rank in self._ranks]
        if self._fills_micro_batches:
            return fewest_micro_batches(lengths, loads, trainer, is_full=is_full)
        dealt = distribute_rollouts(lengths, loads, self._stages.rollout_time, trainer)
        return [micro_batches(part, trainer) for part in dealt]

    def _by_clock(
        self,
        dealt: Sequence[Sequence[MicroBatch]],
        times_of: Callable[[Sequence[MicroBatch]], Floats],
        share: float,
    ) -> list[list[list[float]]]:
        """Return, for each clock, the seconds of each micro-batch in every slice.

        Ranks in lockstep share one clock: a micro-batch takes as long as on the slowest rank.
        """
        times = times_of([b for part in dealt for b in part]) * share
        if self._goes_in_step:
            return [_slowest(times, [len(part) for part in dealt])]
        rows = iter(times.tolist())
        return [list(islice(rows, len(part))) for part in dealt]

    def _sends(self, dealt: Sequence[Sequence[MicroBatch]]) -> list[list[float]]:
        """Return, for each clock, the seconds that each micro-batch takes from stage to stage."""
        by_rank = [[self._stages.send * tokens for tokens, _, _ in part] for part in dealt]
        if not self._goes_in_step:
            return by_rank
        return [[max(each) for each in zip_longest(*by_rank, fillvalue=0.0)]]

    def _interleave(
        self,
        rank: Pipeline,
        forward: list[list[float]],
        backward: list[list[float]] | None,
        sends: Sequence[float],
        now: float,
    ) -> None:
        """Run a command's micro-batches alone; empty ones fill up to a multiple of the stages."""
        if not forward:
            return
        missing = -len(forward) % self._trainer.pipeline_parallel
        none = [[0.0] * self._trainer.num_slices] * missing
        free_at = interleave(
            forward + none,
            None if backward is None else backward + none,
            self._trainer.virtual_stages,
            [max(now, free) for free in rank.free_at],
            [*sends, *([0.0] * missing)],
        )
        rank.occupy(free_at)

    def _open_until(self, now: float) -> float:
        """Return when a mean rank can take more work; a rank without work can at once."""
        return fmean(max(now, rank.open_until) for rank in self._ranks)
