"""Run a command, and send its process a signal in one phase of a run.

python -m tests.signalled_run PHASE SIGNAL[,SIGNAL] ARGUMENTS of streamrl...
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable

from streamrl.cli import main
from streamrl.engine.messages import (
    Command,
    Evaluate,
    Generate,
    PushWeights,
    SaveCheckpoint,
    StartReplica,
    Train,
)
from streamrl.executor import execute
from streamrl.executor.world import RealWorld

COMMANDS: dict[str, type[Command]] = {
    "start": StartReplica,
    "generation": Generate,
    "training": Train,
    "push": PushWeights,
    "checkpoint": SaveCheckpoint,
    "evaluation": Evaluate,
}
"""Command in which each phase begins."""
PHASES = (*COMMANDS, "end")
LEAST_VERSION = 2
"""Step after which phases other than the start count."""
DELAY, BETWEEN = 0.01, 0.5
"""Seconds from the start of the command to the first signal, and between two signals."""


def send(signals: list[signal.Signals]) -> None:
    """Send this process the first signal now, and the others later."""
    for number, own in enumerate(signals):
        timer = threading.Timer(BETWEEN * number, os.kill, (os.getpid(), own))
        timer.daemon = True
        timer.start()


def signal_in(phase: str, signals: list[signal.Signals]) -> None:
    """Let the first run of this process send itself signals when it gets to a phase."""
    waiting = [signals]

    def strike(begin: Callable[[float, Callable[..., None], list[signal.Signals]], object]) -> None:
        if waiting:
            begin(DELAY, send, waiting.pop())

    if phase == "end":
        ends = execute.RunGuard.end

        def end(guard: execute.RunGuard) -> None:
            ends(guard)
            strike(lambda _, call, own: call(own))

        execute.RunGuard.end = end  # type: ignore[method-assign]
        return
    starts = RealWorld.start

    def start(world: RealWorld, command: Command) -> None:
        starts(world, command)
        least = 0 if phase == "start" else LEAST_VERSION
        if isinstance(command, COMMANDS[phase]) and world.engine.version >= least:
            strike(asyncio.get_running_loop().call_later)

    RealWorld.start = start  # type: ignore[method-assign]


if __name__ == "__main__":
    _, where, numbers, *sys.argv[1:] = sys.argv
    sys.argv[0] = "streamrl"
    signal_in(where, [signal.Signals[name] for name in numbers.split(",")])
    main()
