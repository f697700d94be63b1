"""Inject the faults of a run file into an executed run: signals, a full disk, a lost push, invalid answers.

faults.jsonl in the run directory has a line for each injected fault. The line is written before the fault occurs, so
that a resumed run injects only the others.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, assert_never

import msgspec
from msgspec.structs import replace

from streamrl.engine.fault_plan import Fault, FaultPlan
from streamrl.engine.messages import Command, Generate, PushWeights, TakeBack
from streamrl.executor.directory_lock import OwnedDirectory
from streamrl.executor.launchers.handles import Handle, Process, RankHandles, WorkerLostError
from streamrl.executor.roles import Completion, VerifierRole
from streamrl.executor.verifier.fork_server_process import ForkServerProcess
from streamrl.runfile.simulation_config import FaultConfig, FaultKind

FAULTS = "faults.jsonl"
LOOK_TIME = 0.0005  # seconds between two checks whether a process has started to write
FULL_BYTES = 2**16  # size of a disk that is full from the start; at least one page on any machine
TRAINER: Literal["trainer"] = "trainer"

T = TypeVar("T")
CallOf = Callable[..., Awaitable[Any]]
Blow = Callable[[Process, CallOf, tuple[Any, ...]], Awaitable[Any]]
"""Calls a process with these arguments, and returns or raises the result as a fault changes it."""


class StruckFault(msgspec.Struct, frozen=True, kw_only=True):
    """A line of faults.jsonl: a planned fault that was injected."""

    fault: int
    """Its index in the plan."""
    kind: FaultKind
    step: int
    leg: int
    time: float
    """Seconds since the last restart of the run."""
    unix_time: float


def read_struck(directory: Path) -> list[StruckFault]:
    """Return the faults that were injected into a run.

    Raises:
        ValueError: a line of faults.jsonl cannot be read.
    """
    path, found = directory / FAULTS, []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), start=1):
        try:
            found.append(msgspec.json.decode(line, type=StruckFault))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not an injected fault: {error}") from None
    return found


def say_unstruck(faults: Sequence[FaultConfig], struck: Sequence[StruckFault]) -> str:
    """Return how many planned faults have not been injected, by kind; empty if all have."""
    planned: Counter[FaultKind] = Counter()
    for each in faults:
        planned[each.kind] += each.count or 1
    injected = Counter(kind for kind, _ in {(each.kind, each.fault) for each in struck})
    left = planned - injected
    if not left:
        return ""
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(left.items()))
    return f"{left.total()} of {planned.total()} planned faults did not strike, because their moment never came: {kinds}"


class Exposed(Handle):
    """A handle on a process, whose next call of a method can get a fault."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.blows: dict[str, Blow] = {}
        """Fault of the next call, by method."""

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Call the process, and return or raise the result as a fault changes it."""
        call = functools.partial(self.process.call, method, returns=returns)
        blow = self.blows.pop(method, None)
        answer: T = await (
            call(*arguments) if blow is None else blow(self.process, call, arguments)
        )
        return answer

    @property
    def is_lost(self) -> bool:
        """Whether the process is known to be dead or closed."""
        return self.process.is_lost

    def watch(self, tell: Callable[[WorkerLostError], None] | None) -> None:
        """Call `tell` if the process is lost."""
        self.process.watch(tell)

    def kill(self, reason: str) -> None:
        """Kill the process."""
        self.process.kill(reason)

    async def close(self) -> None:
        """End the process."""
        await self.process.close()


class RealFaults:
    """Injects the planned faults; call `expose` for each new worker and `strike` before each command."""

    def __init__(self, plan: FaultPlan, directory: Path, leg: int, verifier: VerifierRole) -> None:
        """Begin with a plan without the faults that were injected before a restart; see `read_struck`."""
        self._plan = plan
        self._path = directory / FAULTS
        self._leg = leg
        self._verifier = verifier
        self._workers: dict[int | Literal["trainer"], Exposed] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._slowness, self._slow_until = 1.0, 0.0
        """Factor by which pushes are slowed, and the time until which they are, in seconds since the start."""

    def expose(self, who: int | Literal["trainer"], handle: Handle) -> Handle:
        """Return a handle on a new worker that can inject faults."""
        if not self._plan.faults:
            return handle
        if isinstance(handle, RankHandles):  # a trainer's faults go to its last rank
            last: Any = handle.ranks[-1]
            if isinstance(last, Exposed):  # it was the last one before ranks were added or removed
                last = last.process
            handle.ranks[-1] = self.expose(who, last)
        if not isinstance(handle, Process):
            return handle
        self._workers[who] = Exposed(handle)
        return self._workers[who]

    def strike(self, command: Command, version: int, now: float) -> None:
        """Inject the planned fault of a command, if any, into the worker that will execute it."""
        fault = self._plan.strike(command, version, now)
        if fault is not None:
            self._write(fault, now)
            self._carry_out(fault.config, fault.number, command, now)
        if isinstance(command, PushWeights) and now < self._slow_until:
            self._workers[TRAINER].blows["push"] = slow_down(self._slowness)

    def _write(self, fault: Fault, now: float) -> None:
        line = StruckFault(
            fault=fault.number,
            kind=fault.config.kind,
            step=fault.step,
            leg=self._leg,
            time=now,
            unix_time=time.time(),
        )
        with self._path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _carry_out(self, fault: FaultConfig, number: int, command: Command, now: float) -> None:
        worker = self._workers[
            command.replica if isinstance(command, Generate | TakeBack) else TRAINER
        ]
        match fault.kind:
            case (
                "replica-dies"
                | "replica-dies-returning"
                | "trainer-dies-training"
                | "trainer-dies-lending"
            ):
                worker.process.send_signal(signal.SIGKILL)
            case "replica-hangs":
                worker.process.send_signal(signal.SIGSTOP)
            case "replica-garbles":
                worker.blows["generate"] = garble(number)
            case "trainer-dies-pushing":
                worker.blows["push"] = kill_as_it_writes
            case "trainer-dies-saving":
                worker.blows["save"] = kill_as_it_writes
            case "link-slows":
                assert fault.factor is not None and fault.duration is not None
                self._slowness, self._slow_until = fault.factor, now + fault.duration
            case "link-drops":
                worker.blows["push"] = drop
            case "disk-full":
                worker.blows["save"] = fill_disk
            case "verifier-stalls":
                assert fault.duration is not None
                task = asyncio.ensure_future(self._stall(fault.duration))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "reward-model-dies":
                self._signal_reward_model(signal.SIGKILL)
            case "reward-model-hangs":
                self._signal_reward_model(signal.SIGSTOP)
            case "driver-dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                assert_never(fault.kind)

    def _signal_reward_model(self, number: signal.Signals) -> None:
        for victim in self._verifier.reward_models()[:1]:  # empty if none is running
            assert isinstance(victim, Process), "execute_limits requires processes for faults"
            victim.send_signal(number)

    async def _stall(self, duration: float) -> None:
        """Stop the scoring processes, and continue those that are still alive after `duration` seconds."""
        process = await self._verifier.start()
        assert isinstance(process, ForkServerProcess)
        models = [each for each in self._verifier.reward_models() if isinstance(each, Process)]
        for number, wait_time in ((signal.SIGSTOP, duration), (signal.SIGCONT, 0.0)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            for model in models:
                if not model.is_lost:
                    model.send_signal(number)
            await asyncio.sleep(wait_time)


# Blows --------------------------------------------------------------------------------------------


async def kill_as_it_writes(process: Process, call: CallOf, arguments: tuple[Any, ...]) -> Any:
    """Kill a process when its first file appears, at the latest before its answer is used."""
    target = Path(arguments[-1])
    before = _entries(target)
    work = asyncio.ensure_future(call(*arguments))
    while not work.done() and _entries(target) == before:
        await asyncio.sleep(LOOK_TIME)
    process.send_signal(signal.SIGKILL)
    while not process.is_lost:  # answers to earlier calls still count
        await asyncio.sleep(LOOK_TIME)
    await work
    raise WorkerLostError("a worker was killed as it answered")


def _entries(target: Path) -> list[Path]:
    """Return the files of a directory and its parent; a writer may use a temporary name in the parent."""
    places = [place for place in (target, target.parent) if place.is_dir()]
    return sorted(name for place in places for name in place.iterdir())


def slow_down(factor: float) -> Blow:
    """Return a fault that makes a call take `factor` times as long."""

    async def wait(process: Process, call: CallOf, arguments: tuple[Any, ...]) -> Any:
        began_at = time.monotonic()
        answer = await call(*arguments)
        await asyncio.sleep((factor - 1) * (time.monotonic() - began_at))
        return answer

    return wait


async def drop(process: Process, call: CallOf, arguments: tuple[Any, ...]) -> Any:
    """Make a push, and raise an error as if the link had dropped it."""
    await call(*arguments)
    raise ConnectionError("a fault: the link dropped it")


async def fill_disk(process: Process, call: CallOf, arguments: tuple[Any, ...]) -> Any:
    """Let a process write to a full disk: a small tmpfs, if this user may mount one."""
    path = Path(arguments[-1])
    with OwnedDirectory("full") as full:
        if _mount(disk := full / "disk"):
            try:
                (disk / "filler").write_bytes(bytes(FULL_BYTES))
                await call(*arguments[:-1], str(disk / path.name))
            finally:
                subprocess.run(["umount", "--lazy", disk], check=True)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _mount(directory: Path) -> bool:
    """Return whether a disk of `FULL_BYTES` could be mounted in a new directory."""
    directory.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={FULL_BYTES}", "streamrl-fault"]
    with suppress(FileNotFoundError):  # the program `mount` is missing
        return not subprocess.run(["mount", *options, directory], capture_output=True).returncode
    return False


def garble(number: int) -> Blow:
    """Return a fault that makes a replica's answer invalid; `number` selects the kind of error."""

    async def change(process: Process, call: CallOf, arguments: tuple[Any, ...]) -> Completion:
        answer: Completion = await call(*arguments)
        output = answer.output
        changed: tuple[dict[str, Any], ...] = (
            {"rollout": answer.rollout + 1},
            {"output": replace(output, num_tokens=output.num_tokens + 10**6)},
            {"versions": []},
            {"segments": answer.segments * 2},
            {"output": replace(output, path=f"{output.path}-of-nobody")},
        )
        return replace(answer, **changed[number % len(changed)])

    return change
