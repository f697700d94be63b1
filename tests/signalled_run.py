"""Run a command, and send one of its processes a signal in one phase of a run.

python -m tests.signalled_run PHASE SIGNAL[,SIGNAL] ARGUMENTS of streamrl...
python -m tests.signalled_run WRITING SIGNAL@ROLE ARGUMENTS of streamrl...

The second form sends the signal while weights or a checkpoint are half written: there is the file system's word for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.processes import DRIVER, processes_of
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
from streamrl.executor.directory_lock import PREFIX
from streamrl.executor.transfer.shared_directory import SHARED_MEMORY, version_directory
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


WRITINGS: dict[str, type[PushWeights | SaveCheckpoint]] = {
    "writing-weights": PushWeights,
    "writing-checkpoint": SaveCheckpoint,
}
STOPPED = 3.0
"""Seconds between SIGSTOP and SIGCONT."""
MISSED = 99
"""Exit status of a run that wrote everything before the signal could be sent."""


def half_written(phase: str, version: int, output: Path) -> Iterator[Path]:
    """Yield what exists while a version's weights or its checkpoint are written, and not whole yet."""
    if phase == "writing-checkpoint":
        yield from output.glob(f"checkpoints/.v{version:06d}.partial")
        return
    for place in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        for own in place.glob(f"{PREFIX}*"):
            yield from own.glob(f"**/{version_directory(Path(), version)}/*.partial")


def strike_while_written(phase: str, own: signal.Signals, role: str) -> None:
    """Let the first run of this process send a role a signal while it writes."""
    starts, waiting = RealWorld.start, [own]

    def watch(version: int, output: Path, pids: list[int]) -> None:
        until = time.monotonic() + 30.0
        while not any(half_written(phase, version, output)):
            if time.monotonic() > until:
                os._exit(MISSED)
            time.sleep(0.001)
        words = f"kill -{own.name.removeprefix('SIG')} {pids[0]}"
        if own is signal.SIGSTOP:
            words += f"; sleep {STOPPED}; kill -CONT {pids[0]}"
        process = subprocess.Popen(["sh", "-c", words], start_new_session=True)
        if own is not signal.SIGSTOP:
            process.wait()

    def start(world: RealWorld, command: Command) -> None:
        if waiting and isinstance(command, WRITINGS[phase]) and command.version >= LEAST_VERSION:
            waiting.clear()
            of_run = command.version, world._directory.path, processes_of(os.getpid())[role]
            threading.Thread(target=watch, args=of_run, daemon=True).start()
        starts(world, command)

    RealWorld.start = start  # type: ignore[method-assign]


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
    if where in WRITINGS:
        number, _, role = numbers.partition("@")
        strike_while_written(where, signal.Signals[number], role or DRIVER)
    else:
        signal_in(where, [signal.Signals[name] for name in numbers.split(",")])
    main()
