"""Alternate runs on this machine, so that all see the same changes of the host's speed.

All runs start at once, each in its own processes. The processes of one run continue for a second while
the others are stopped. Recorded times, minus the stops, are those of a run alone.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from streamrl.engine.messages import Event
from streamrl.engine.state import State
from streamrl.engine.systems import needs_costs
from streamrl.engine.trace import Trace, read_trace
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run, write_run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies

TURN = 1.0
"""Seconds of a turn. Slow spells of a host last several seconds."""


class Turns:
    """A run in its own processes, which a signal stops and continues."""

    def __init__(self, run: Run, directory: Path) -> None:
        """Start the run. Its input is in `directory`."""
        directory.mkdir(parents=True)
        write_run(run, directory / "run.toml")
        self._started = directory / "started"
        self._trace = Path(run.execute.output) / "trace.jsonl"
        own = [sys.executable, "-m", "benchmarks.in_turns", directory / "run.toml", self._started]
        with (directory / "log").open("wb") as log:
            self._process = subprocess.Popen(own, stdout=log, stderr=log)
        self._log = directory / "log"
        self._stops: list[tuple[float, float]] = []
        self._stop()

    def take(self) -> bool:
        """Let the run continue for a turn; return whether it is still running."""
        stopped_at = self._stopped_at
        self._signal(signal.SIGCONT)
        self._stops.append((stopped_at, time.monotonic()))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(TURN)
            return False
        self._stop()
        return True

    def end(self) -> None:
        """Kill the remaining processes of the run."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def trace(self) -> Trace:
        """Return the recorded trace, without the time in which the run was stopped.

        Raises:
            RuntimeError: the run failed; it has the log.
        """
        if self._process.returncode:
            raise RuntimeError(self._log.read_text(encoding="utf-8"))
        trace = read_trace(self._trace)
        start = float(self._started.read_text(encoding="utf-8"))
        times = [entry.time for entry in trace.entries]
        shifted = zip(trace.entries, gone_on([t + start for t in times], self._stops), strict=True)
        began = gone_on([start], self._stops)[0]
        trace.entries = [entry._replace(time=time - began) for entry, time in shifted]
        return trace

    def _stop(self) -> None:
        self._stopped_at = time.monotonic()
        self._signal(signal.SIGSTOP)

    def _signal(self, which: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            for one in (own, *own.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(which)


def gone_on(times: Sequence[float], stops: Sequence[tuple[float, float]]) -> list[float]:
    """Return times minus the earlier stops. Both sequences are in order."""
    clock, gone = [0.0], [0.0]
    for begin, end in stops:
        gone += [gone[-1] + begin - clock[-1]] * 2
        clock += [begin, end]
    beyond = max(*times, clock[-1]) - clock[-1]
    found = np.interp(times, [*clock, clock[-1] + beyond], [*gone, gone[-1] + beyond])
    return [float(time) for time in found]


def execute_in_turns(runs: Sequence[Run], directory: Path) -> list[Trace]:
    """Execute runs in turns, and return their traces without the time in which they were stopped.

    Their checkpoints are removed, because no run continues from them.
    """
    started = [Turns(run, directory / str(place)) for place, run in enumerate(runs)]
    try:
        going = started
        while going:
            going = [one for one in going if one.take()]
        traces = [one.trace() for one in started]
    finally:
        for one in started:
            one.end()
    for run in runs:
        shutil.rmtree(Path(run.execute.output) / "checkpoints")
    return traces


def main() -> None:
    """Execute one run file, and write the time at which its clock started."""
    run, started = load_run(Path(sys.argv[1])), Path(sys.argv[2])
    seen: list[Event] = []

    def see(event: Event, state: State, now: float) -> None:
        if not seen:
            started.write_text(repr(time.monotonic() - now), encoding="utf-8")
            seen.append(event)

    from streamrl.executor.execute import execute

    execute(
        fill_policies(run, Costs.load(run))
        if needs_costs(run.policies, run.rollout.others)
        else run,
        watch=see,
    )


if __name__ == "__main__":
    main()
