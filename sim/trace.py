"""Traces of simulations: one keeps all entries, the others measure and drop them block by block."""

from __future__ import annotations

from functools import cached_property
from typing import IO, Generic, TypeVar

from streamrl.engine.messages import Command, Event
from streamrl.engine.trace import BLOCK, Trace
from streamrl.record.metrics import Metrics, PaceReader, RunReader, measure_pace, measure_read
from streamrl.record.steady_state import LeaderSteps, Speed
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs


class StepTrace(Trace):
    """A trace that also lists the steps of the primary trainer as they end."""

    def __init__(
        self,
        run: Run,
        costs: Costs,
        *,
        is_endless: bool,
        file: IO[bytes] | None = None,
        keeps_entries: bool = True,
    ) -> None:
        super().__init__(
            run,
            "simulated",
            costs.facts,
            file,
            keeps_entries=keeps_entries,
            decode=costs.decode_yields(run.rollout.admission),
            is_endless=is_endless,
        )
        self.steps = LeaderSteps(run.environment is not None, run.evaluation)
        self._readers = dict.fromkeys(self.steps.reads, self.steps.record)


Reader = TypeVar("Reader", bound=PaceReader)


class BlockTrace(StepTrace, Generic[Reader]):
    """A trace that reads its entries block by block and drops them, so that memory hardly grows with the run."""

    reader_type: type[Reader]

    @cached_property
    def _reader(self) -> Reader:
        return self.reader_type(self)

    def record(self, time: float, event: Event, commands: list[Command]) -> None:
        """Add one entry; if the block is full, read and drop it."""
        super().record(time, event, commands)
        if len(self._own) >= BLOCK:
            self._reader.read(self._own)
            self._reader.settle()
            self._own.clear()

    def _finish(self) -> Reader:
        """Read the last entries, and return the reader."""
        self._reader.read(self._own)
        self._reader.finish()
        self._own.clear()
        return self._reader


class MeasuredTrace(BlockTrace[RunReader]):
    """A trace that measures its entries for all metrics."""

    reader_type = RunReader

    def measure(self) -> Metrics:
        """Compute all metrics of the finished run.

        Raises:
            ValueError: it has no finished step.
        """
        return measure_read(self._finish(), self.steps)


class SpeedTrace(BlockTrace[PaceReader]):
    """A trace that measures its entries for a `Speed` only, which takes less time."""

    reader_type = PaceReader

    def measure(self, counted_steps: tuple[int, int] | None = None) -> Speed:
        """Compute the speed of the finished run; see `streamrl.record.metrics.measure_speed`.

        Raises:
            ValueError: it has no finished step.
        """
        return measure_pace(self._finish(), self.steps, counted_steps)
