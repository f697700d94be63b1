"""A trainer's passes one after the other, as commands bring them: when it can take more, and when all is done.

Each data-parallel rank works off what it was dealt, and waits for the others at the step. Ranks that share out
experts, or gather weights for every micro-batch, go in step instead: all wait for the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, zip_longest
from math import inf
from statistics import fmean
from typing import Protocol, TypeAlias

from streamrl.hardware.tables import Floats
from streamrl.runfile.sides_config import TrainerConfig
from streamrl.sim.costs.training.interleaved import interleave
from streamrl.sim.costs.training.packing import MicroBatch, deal, micro_batches
from streamrl.sim.costs.training.pipeline import Pipeline
from streamrl.sim.costs.training.stage_times import StageTimes


class Line(Protocol):
    """What a simulated trainer asks for seconds."""

    def score(self, lengths: Sequence[int], now: float) -> float:
        """Put rollouts (tokens of prompt and output) through forward passes; return when more can come."""
        ...

    def train(self, lengths: Sequence[int], now: float) -> float:
        """Put rollouts through forward and backward passes; return when more can come."""
        ...

    def finish(self, now: float) -> float:
        """Return when everything is done."""
        ...


TimeOf: TypeAlias = Callable[[Sequence[int]], float]
"""Seconds of a command's rollouts, by the tokens of each."""


class SerialLine:
    """One rank without a pipeline, whose commands take so many seconds each."""

    def __init__(self, score_time: TimeOf, train_time: TimeOf) -> None:
        self._score_time, self._train_time = score_time, train_time
        self._free_at = 0.0

    def score(self, lengths: Sequence[int], now: float) -> float:
        """See `Line`."""
        self._free_at = max(now, self._free_at) + self._score_time(lengths)
        return self._free_at

    def train(self, lengths: Sequence[int], now: float) -> float:
        """See `Line`."""
        self._free_at = max(now, self._free_at) + self._train_time(lengths)
        return self._free_at

    def finish(self, now: float) -> float:
        """See `Line`."""
        return max(now, self._free_at)


class PipelinedLine:
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
    ) -> None:
        """Begin with every rank free.

        Args:
            stages: seconds of micro-batches.
            trainer: how ranks share the work.
            scores: for every model that scores rollouts, the seconds in which it comes from host memory.
            trains: the same for every model that is trained.
            share: of the seconds of passes that are spent; rollouts of advantage 0 are skipped.
            epochs: times that rollouts are trained on.
            mini_batch: rollouts between two optimizer steps; the last of a step is the trainer's own command.
            update_time: seconds of an optimizer step before that.
        """
        self._stages, self._trainer = stages, trainer
        self._scores, self._trains, self._share = scores, trains, share
        self._epochs, self._mini_batch, self._update_time = epochs, mini_batch, update_time
        self._num_trained = 0
        """Rollouts since the last optimizer step, or those of it that are under way."""
        self._batch: list[int] = []
        """Rollouts of the step so far, where there are epochs to come."""
        self._goes_in_step = trainer.zero >= 2 or trainer.deals_experts
        num_clocks = 1 if self._goes_in_step else trainer.data_parallel
        self._ranks = [Pipeline(trainer.pipeline_parallel) for _ in range(num_clocks)]

    def score(self, lengths: Sequence[int], now: float) -> float:
        """See `Line`."""
        dealt = self._dealt(lengths, now)
        times = self._by_clock(dealt, self._stages.scored_times, self._share)
        sends = self._sends(dealt)
        for switch_time in self._scores:
            self._wait(switch_time, now)
            for rank, rows, between in zip(self._ranks, times, sends, strict=True):
                if self._trainer.virtual_stages > 1:
                    self._interleave(rank, rows, None, between, now)
                    continue
                for row, send in zip(rows, between, strict=True):
                    rank.score(row, send, now)
        return self._open_until(now)

    def train(self, lengths: Sequence[int], now: float) -> float:
        """See `Line`."""
        if self._epochs > 1:
            self._batch += lengths
        self._train_in_mini_batches(lengths, now)
        return self._open_until(now)

    def finish(self, now: float) -> float:
        """See `Line`; now that the batch is whole, what it is trained on again follows."""
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
        dealt = self._dealt(lengths, now)
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
        """Make an optimizer step between two mini-batches: every rank waits for the slowest."""
        done_at = max(rank.drain() for rank in self._ranks) + self._update_time
        for rank in self._ranks:
            rank.resume_at(done_at)
        self._num_trained = 0

    def _wait(self, seconds: float, now: float) -> None:
        """Let every stage spend seconds in which nothing else can be done."""
        if seconds:
            for rank in self._ranks:
                rank.pause(seconds, now)

    def _dealt(self, lengths: Sequence[int], now: float) -> list[list[MicroBatch]]:
        """Return the micro-batches of each data-parallel rank."""
        trainer = self._trainer
        if self._goes_in_step:
            loads = [0.0] * trainer.data_parallel
        else:
            loads = [max(0.0, rank.free_at[0] - now) for rank in self._ranks]
        dealt = deal(lengths, loads, self._stages.rollout_time, trainer)
        return [micro_batches(part, trainer) for part in dealt]

    def _by_clock(
        self,
        dealt: Sequence[Sequence[MicroBatch]],
        times_of: Callable[[Sequence[MicroBatch]], Floats],
        share: float,
    ) -> list[list[list[float]]]:
        """Return, for each clock, the seconds of each micro-batch in every slice.

        Ranks that go in step keep one clock: a micro-batch takes as long as on the rank where it takes longest.
        """
        rows = iter((times_of([b for part in dealt for b in part]) * share).tolist())
        by_rank = [list(islice(rows, len(part))) for part in dealt]
        if not self._goes_in_step:
            return by_rank
        none = [0.0] * self._trainer.num_slices
        in_step = zip_longest(*by_rank, fillvalue=none)
        return [[[max(each) for each in zip(*ranks, strict=True)] for ranks in in_step]]

    def _sends(self, dealt: Sequence[Sequence[MicroBatch]]) -> list[list[float]]:
        """Return, for each clock, the seconds that each micro-batch takes from stage to stage."""
        by_rank = [[self._stages.send * tokens for tokens, _ in part] for part in dealt]
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
        """Put a command through by itself; micro-batches of no work make them a multiple of the stages."""
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
        """Return when a mean rank can take more; one that was dealt nothing can at once."""
        return fmean(max(now, rank.open_until) for rank in self._ranks)
