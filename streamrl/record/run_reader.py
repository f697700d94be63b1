"""Reads a run block by block, so that all of its figures can be told without its entries.

A trace in memory is read as one block; of one in a large file, and of a simulation that goes on for thousands of steps,
entries come and go block by block. What is kept is a few numbers of each step, and what is under way.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.engine.messages import Event, Interrupted, Stepped, Stop
from streamrl.engine.trainer_side import LEADER
from streamrl.record.attribution import AttributionReader
from streamrl.record.books import Books
from streamrl.record.entries import Entry
from streamrl.record.flow import Flow
from streamrl.record.rent import Pushes
from streamrl.record.replicas import PaidReplicas
from streamrl.record.trace import Trace


class PaceReader:
    """Reads what steps and rollouts tell of seconds and dollars."""

    def __init__(self, trace: Trace) -> None:
        """Take what a trace says of its run; its entries are read by `read`."""
        self.trace = trace
        self.flow = Flow(trace.run.num_trainers, trace.joined)
        self.replicas = PaidReplicas(trace.run.rollout.num_replicas)
        self.pushes = Pushes()
        self.stopped_for = ""
        """Why a run stopped by itself, or was interrupted; empty where neither."""
        self.end = 0.0
        """Instant of the last entry."""

    def read(self, entries: Sequence[Entry]) -> None:
        """Take the entries that come after those before."""
        self.flow.read(entries)
        self.replicas.read(entries)
        self.pushes.read(entries)
        stops = [c.reason for _, _, commands in entries for c in commands if type(c) is Stop]
        stops += [event.reason for _, event, _ in entries if type(event) is Interrupted]
        if stops:
            self.stopped_for = stops[-1]
        if entries:
            self.end = entries[-1].time


class RunReader(PaceReader):
    """Reads all that figures are made of: where every GPU-second went too, and whether the books balance."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.attribution = AttributionReader(trace)
        self.books = Books(trace)

    def read(self, entries: Sequence[Entry]) -> None:
        """Take the entries that come after those before."""
        self.books.read(entries)
        super().read(entries)
        self.attribution.mark([time for time, event, _ in entries if _is_leaders_step(event)])
        self.attribution.read(entries)

    def settle(self) -> None:
        """Add up what can be known by now, so that it need not be kept."""
        self.attribution.settle()

    def finish(self) -> None:
        """Add up what is left, once every entry is read."""
        self.attribution.finish()


def read_run(trace: Trace) -> RunReader:
    """Read a whole trace."""
    reader = RunReader(trace)
    for number, block in enumerate(trace.blocks()):
        if number:
            reader.settle()
        reader.read(block)
    reader.finish()
    return reader


def _is_leaders_step(event: Event) -> bool:
    return type(event) is Stepped and event.trainer == LEADER
