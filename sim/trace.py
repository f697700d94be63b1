"""Traces of simulations: one keeps all entries, the other measures and drops them block by block."""

from __future__ import annotations

from functools import cached_property
from typing import IO

from streamrl.engine.messages import Command, Event
from streamrl.engine.trace import BLOCK, Trace
from streamrl.record.metrics import Metrics, RunReader, measure_read
from streamrl.record.steady_state import OF_STEPS, LeaderSteps
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
        self.steps = LeaderSteps()
        self._readers = dict.fromkeys(OF_STEPS, self.steps.record)


class MeasuredTrace(StepTrace):
    """A trace that measures its entries block by block, so that memory hardly grows with the run."""

    @cached_property
    def _reader(self) -> RunReader:
        return RunReader(self)

    def record(self, time: float, event: Event, commands: list[Command]) -> None:
        """Add one entry; if the block is full, measure and drop it."""
        super().record(time, event, commands)
        if len(self._own) >= BLOCK:
            self._reader.read(self._own)
            self._reader.settle()
            self._own.clear()

    def measure(self) -> Metrics:
        """Compute all metrics of the finished run.

        Raises:
            ValueError: it has no finished step.
        """
        self._reader.read(self._own)
        self._reader.finish()
        self._own.clear()
        return measure_read(self._reader, self.steps)
