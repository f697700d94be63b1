"""Check that the run survives the faults in its run file, and that they can be simulated."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.runfile.findings import Changes, Finding, Fix, Level
from streamrl.runfile.simulation_config import FaultConfig, FaultKind

LOSES_REPLICA: tuple[FaultKind, ...] = ("replica-dies", "replica-hangs")
LOSES_TRAINER: tuple[FaultKind, ...] = (
    "trainer-dies-training",
    "trainer-dies-pushing",
    "trainer-dies-saving",
)


def find(faults: tuple[FaultConfig, ...], most: int) -> Iterator[Finding]:
    """Find faults that end a run before its last step, and those that can only be executed.

    Args:
        faults: those that the run file plans.
        most: restarts that it allows.
    """
    for what, kinds in (("replicas", LOSES_REPLICA), ("the trainer", LOSES_TRAINER)):
        losses = _count(faults, kinds)
        if losses > most:
            text = (
                f"faults: {what} will be lost {losses} times, and policies.max_restarts={most}: "
                f"the run stops at loss {most + 1}"
            )
            yield _finding("error", "faults-stop", text)
            break
    if deaths := _count(faults, ("driver-dies",)):
        text = (
            f"faults: driver-dies can be executed but not simulated; execute is killed {deaths} "
            f"time{'s' * (deaths > 1)}, and goes on with --resume each time"
        )
        yield _finding("warning", "faults-of-the-driver", text)


def _count(faults: tuple[FaultConfig, ...], kinds: tuple[FaultKind, ...]) -> int:
    return sum(fault.count or 1 for fault in faults if fault.kind in kinds)


def _finding(level: Level, name: str, text: str) -> Finding:
    return Finding(level=level, topic="run file", name=name, text=text)


def _more_restarts(faults: tuple[FaultConfig, ...]) -> Iterator[Changes]:
    yield {
        "policies.max_restarts": max(
            _count(faults, kinds) for kinds in (LOSES_REPLICA, LOSES_TRAINER)
        )
    }


FIXES = {
    "faults-stop": Fix(lambda run: _more_restarts(run.faults), "plan fewer faults"),
    "faults-of-the-driver": Fix(
        lambda run: iter(()), "remove driver-dies to simulate, or execute the run"
    ),
}
