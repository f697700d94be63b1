"""Call a role through one async handle, in this process or another one, and detect when its process is dead.

`await handle.call("method", ...)` returns the method's result. `remote` turns the Protocol of a role into such calls.
Calls on one handle begin in the order in which they are made. Every pending and later call raises `WorkerLostError`
in these cases:

- The process dies, or gives no sign of life for too long.
- The role reports that it cannot continue.
- The handle is closed.

A process is alive if it answers pings or uses CPU time. A stopped or deadlocked process does neither. Silence is
counted in pings, not in seconds. So a controller that was itself stopped for an hour does not kill its workers.

`RankHandles` combines the ranks of one trainer. Each call goes to all ranks, and samples are split by tokens, so that
ranks have about equal work. The gradient of a batch does not depend on the split. A scored rollout is trained on the
rank that scored it. Ranks wait for each other in collectives, so if one rank dies, all are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar, cast, get_type_hints, runtime_checkable

from streamrl.executor.launchers import processes
from streamrl.executor.launchers.worker import (
    PING,
    Answer,
    Call,
    decode,
    make_role,
    read_frame,
    write_frame,
)
from streamrl.executor.roles import AnswerError, RoleLostError, Sample
from streamrl.executor.tokens import count_ids, count_tokens
from streamrl.runfile.config import ExecuteConfig

logger = logging.getLogger(__name__)

PING_TIME = (
    1.0  # seconds between two pings: far shorter than any patience, far longer than an answer takes
)
PATIENCE = ExecuteConfig().patience
"""Default limit of silence, in seconds."""
FACTOR = 10
"""A process may be silent for this multiple of its longest silence so far. While it starts and imports libraries, the
limit is this multiple of `patience`."""


class Heartbeat:
    """Count the pings that one process has not answered, and decide when it counts as dead."""

    def __init__(self, pid: int | None, patience: float) -> None:
        """Watch a process of this machine, or a remote one (`pid` is None) whose CPU time is unknown."""
        self._pid = pid
        self._patience = patience
        self._num_silent = 0
        """Consecutive pings without a sign of life."""
        self._longest = 0.0
        self._has_started = False
        self._is_waiting = False
        self._work_time = 0

    @property
    def silence(self) -> float:
        """Seconds without a sign of life."""
        return self._num_silent * PING_TIME

    @property
    def is_over(self) -> bool:
        """Whether the process has been silent for too long."""
        most = max(self._patience, FACTOR * self._longest)
        return self.silence > (most if self._has_started else FACTOR * self._patience)

    def is_asked_for(self) -> bool:
        """Return whether to send a ping now; if one is still unanswered, count its silence instead."""
        if not self._is_waiting:
            self._is_waiting = True
            return True
        work_time = 0 if self._pid is None else processes.cpu_ticks(self._pid)
        if work_time != self._work_time:
            self._work_time = work_time
            self._num_silent = 0
        else:
            self._num_silent += 1
        return False

    def answer(self, has_started: bool = True) -> None:
        """Record the answer to the last ping, and whether the process has created its role."""
        if self._has_started:
            self._longest = max(self._longest, self.silence)
        self._has_started = has_started
        self._is_waiting = False
        self._num_silent = 0


CLOSE_TIME = 5.0  # seconds that a worker has to exit before it is killed

T = TypeVar("T")
Config = dict[str, object]
"""A role's configuration as plain data; the role's own class checks it."""


class WorkerLostError(ConnectionError):
    """The process of a role has died."""


@runtime_checkable
class Process(Protocol):
    """A handle on a process into which faults can be injected."""

    @property
    def is_lost(self) -> bool:
        """Whether the process is known to be dead or closed."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Run a method of the role."""

    def watch(self, tell: Callable[[WorkerLostError], None] | None) -> None:
        """Call `tell` if the process is lost."""

    def kill(self, reason: str) -> None:
        """Kill the process."""

    async def close(self) -> None:
        """End the process."""


class Handle(ABC):
    """A role that can be called."""

    _lost: WorkerLostError | None = None
    """Why every call fails from now on; None while the role works."""

    _tell: Callable[[WorkerLostError], None] | None = None
    """Called once if the role is lost."""

    @property
    def is_lost(self) -> bool:
        """Whether the process is known to be dead or closed."""
        return self._lost is not None

    def watch(self, tell: Callable[[WorkerLostError], None] | None) -> None:
        """Call `tell` on the event loop if the role is lost from now on, even while it is idle; None: call nothing.

        A role that is closed is not lost.
        """
        self._tell = tell
        if tell is not None and self._lost is not None:
            self._tell_loss(self._lost)

    def _tell_loss(self, error: WorkerLostError) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            with contextlib.suppress(RuntimeError):  # no event loop is running: the run has ended
                asyncio.get_running_loop().call_soon(tell, error)

    @abstractmethod
    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Run a method of the role and return its result, as `returns`."""

    @abstractmethod
    def kill(self, reason: str) -> None:
        """Kill the process at once, and let every pending and later call raise `WorkerLostError`."""

    @abstractmethod
    async def close(self) -> None:
        """End the role and its process."""

    def _result_of(self, answer: Answer, returns: type[T]) -> T:
        """Return the result in the answer of another process.

        Raises:
            AnswerError: the call failed there.
            WorkerLostError: the role reports that it cannot continue; its process is killed.
        """
        if answer.kind == "result":
            return decode(answer.value, returns)
        if answer.kind == "error":
            raise AnswerError(decode(answer.value, str))
        self._check_alive(answer)
        assert self._lost is not None
        raise self._lost

    def _check_alive(self, answer: Answer) -> None:
        """Kill the process if its role reports that it cannot continue."""
        if answer.kind == "lost":
            self.kill(f"can do nothing any more: {decode(answer.value, str)}")


class InProcess(Handle):
    """A role in this process and this event loop."""

    def __init__(self, role_path: str, config: Config) -> None:
        self._role: Any = make_role(role_path, config)
        self._calls: set[asyncio.Task[Any]] = set()

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Await the method of the role."""
        if self._lost is not None:
            raise self._lost
        work: asyncio.Task[T] = asyncio.ensure_future(getattr(self._role, method)(*arguments))
        self._calls.add(work)
        try:
            return await work
        except RoleLostError as error:
            self.kill(f"can do nothing any more: {error}")
        except asyncio.CancelledError:
            if self._lost is None:
                raise
        finally:
            self._calls.discard(work)
        assert self._lost is not None
        raise self._lost

    def kill(self, reason: str) -> None:
        """Cancel running calls; a computation in a thread runs to its end, and its result is dropped."""
        self._lost = self._lost or WorkerLostError(f"role in this process {reason}")
        self._tell_loss(self._lost)
        for work in self._calls:
            work.cancel()

    async def close(self) -> None:
        """Stop the role."""
        self.watch(None)
        await self._role.stop()


class LocalProcess(Handle):
    """A role in its own process on this machine, connected by a socket pair."""

    def __init__(
        self,
        process: processes.WorkerProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        patience: float,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._num_calls = 0
        self._listener = asyncio.create_task(self._listen())
        self._heartbeat = Heartbeat(process.pid, patience)
        self._beating = asyncio.create_task(self._beat())

    @classmethod
    async def start(
        cls,
        role_path: str,
        config: Config,
        log: Path,
        environment: dict[str, str],
        patience: float = PATIENCE,
        begin: processes.Begin = processes.spawn,
    ) -> LocalProcess:
        """Start the process, with its output in `log`; kill it after `patience` seconds without a sign of life."""
        ours, theirs = socket.socketpair()
        try:
            with log.open("ab") as output, theirs:
                whole = processes.whole_environment(environment)
                process = await begin(role_path, theirs, output, whole, patience)
        except BaseException as error:
            ours.close()  # a worker that is forked later finds its connection closed
            if isinstance(error, TimeoutError):
                raise WorkerLostError(f"a worker process does not start: {error}") from None
            raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        write_frame(writer, config)
        logger.debug("process %d of %s started; its output goes to %s", process.pid, role_path, log)
        return cls(process, reader, writer, patience)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        os.kill(self.pid, number)

    @property
    def exit_status(self) -> int | None:
        """The exit status of the process, negative for a signal; None while it is alive."""
        return self._process.returncode

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Send the call now and wait for its result."""
        return self._result_of(await self._send(method, arguments), returns)

    def kill(self, reason: str) -> None:
        """Kill the process, even a stopped one, and record the reason."""
        self._lose(reason)
        self._process.kill()

    async def close(self) -> None:
        """Close the connection, wait up to `CLOSE_TIME` for the exit, then kill."""
        self.watch(None)
        self._listener.cancel()
        self._lose("was closed")
        await asyncio.to_thread(self._end)

    def _end(self) -> int:
        """Wait for the process, then kill it; return its exit status."""
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(CLOSE_TIME)
            self._process.kill()
        return -signal.SIGKILL  # the kernel has not ended it yet

    def _send(self, method: str, arguments: tuple[object, ...]) -> asyncio.Future[Answer]:
        if self._lost is not None:
            raise self._lost
        self._num_calls += 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[self._num_calls] = answer
        write_frame(self._writer, Call(self._num_calls, method, list(arguments)))
        return answer

    async def _listen(self) -> None:
        try:
            while True:
                answer = decode(await read_frame(self._reader), Answer)
                if answer.id == PING:
                    self._heartbeat.answer()
                    self._check_alive(answer)
                    continue
                waiting = self._answers.pop(answer.id)
                if not waiting.done():  # a cancelled caller does not wait any more
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await asyncio.to_thread(self._end)
            self._lose(f"ended with status {status}")
        except (ValueError, KeyError) as error:
            self.kill(f"sent what is no answer and was killed: {error}")

    async def _beat(self) -> None:
        """Ping every `PING_TIME`; kill the process when it has been silent for too long."""
        while not self._heartbeat.is_over:
            if self._heartbeat.is_asked_for():
                write_frame(self._writer, Call(PING, "", []))
            await asyncio.sleep(PING_TIME)
        self.kill(f"gave no sign of life for {self._heartbeat.silence:.0f} s and was killed")

    def _lose(self, how: str) -> None:
        """Close the connection, and fail every pending and later call."""
        if self._lost is None:
            self._lost = WorkerLostError(f"worker process {self.pid} {how}")
            self._beating.cancel()
            self._writer.close()
            self._tell_loss(self._lost)
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(self._lost)
        self._answers.clear()


R = TypeVar("R")


def remote(role: Callable[..., R], handle: Handle) -> R:
    """Return an object with the async methods of a role's Protocol; each method is a call on `handle`.

    Args:
        role: the Protocol, typed as a callable because a type checker rejects an abstract class for `type[R]`.
        handle: reaches an implementation of the role. The caller must close it, because `stop` does not end the process.
    """
    methods = inspect.getmembers(role, inspect.iscoroutinefunction)
    return cast(R, SimpleNamespace(**{name: _caller(handle, each) for name, each in methods}))


def _caller(handle: Handle, method: Any) -> Callable[..., Awaitable[Any]]:
    """Return a function that calls one method, with the declared order of arguments and type of result."""
    name, signature = method.__name__, inspect.signature(method)
    returns = get_type_hints(method)["return"]

    def call(*arguments: object, **named: object) -> Awaitable[Any]:
        if named:  # bind only if needed: it takes longer than the rest of a call
            arguments = signature.bind(None, *arguments, **named).args[1:]
        return handle.call(name, *arguments, returns=returns)

    return call


END_TIME = 30.0
"""Seconds that other ranks get to end a call that failed on one rank. A rank that is not blocked needs less."""
SHARDED = {"score", "train"}
"""Methods whose argument is a list of samples, which is split over the ranks."""
OTHER_RANK = "another rank"
"""Text in the error of a rank that only repeats another rank's error; see `streamrl.executor.trainer.rank_group`."""


class RankHandles(Handle):
    """The ranks of one trainer behind one handle."""

    def __init__(
        self, ranks: Sequence[Handle], forget: Callable[[], None], num_alike: int = 1
    ) -> None:
        """Combine the handles of all ranks.

        Args:
            ranks: their handles, in order.
            forget: removes the rendezvous file.
            num_alike: ranks, next to each other, that get the same samples, because they share each layer or the tokens of each pass.
        """
        self.ranks = list(ranks)
        self._num_alike = num_alike
        self._forget_rendezvous = forget
        self._rank_of: dict[int, int] = {}
        """Rank of each scored rollout; its partner (of a preference pair) goes to the same rank."""
        self._leaving: asyncio.Task[None] | None = None
        """Ends the ranks that are no longer among these; None if there are none."""
        self.parked: list[Handle] = []
        """Ranks that are not among these, and sleep until they join (again)."""
        self._has_joined = False
        """Whether the parked ranks have joined before, so that they have their models."""

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Call every rank, and return the result of the first one."""
        shares: list[tuple[object, ...]] = [arguments] * len(self.ranks)
        if method in SHARDED:
            samples: Any = arguments[0]
            split = self.shard(method, samples)
            shares = [(share,) for share in split for _ in range(self._num_alike)]
        return await self._call_each(method, shares, returns)

    async def _call_each(
        self, method: str, shares: Sequence[tuple[object, ...]], returns: type[T]
    ) -> T:
        """Call every rank with its own arguments, and return the result of the first one."""
        calls = [
            asyncio.ensure_future(rank.call(method, *share, returns=returns))
            for rank, share in zip(self.ranks, shares, strict=True)
        ]
        try:
            return await self._first_of(calls, method)
        finally:
            for call in calls:
                call.cancel()

    async def regroup(
        self, num_kept: int, rendezvous: str, before: RankHandles | None = None
    ) -> None:
        """Make one group of these ranks; those from `num_kept` on are new. `before` are the ranks until now, if several.

        New ranks load their models first, or wake up, so that the others can still send weights to replicas meanwhile.

        Raises:
            WorkerLostError: a rank was lost, or failed. All of them are killed then.
        """
        added = RankHandles(self.ranks[num_kept:], lambda: None)
        if before is not None:
            self._rank_of = before._rank_of
            self._has_joined = before._has_joined
        try:
            if added.ranks:
                begin = "wake" if self._has_joined else "start_blank"
                await added._all(begin, [()] * len(added.ranks), type(None))
        except WorkerLostError as error:
            self.kill(f"was killed with the other ranks: {error}")
            raise
        arguments = (len(self.ranks), num_kept, rendezvous)
        await self._all("regroup", [arguments] * len(self.ranks), int)

    def let_go(self, ranks: Sequence[Handle]) -> None:
        """End ranks that are no longer among these, in the background; `close` waits for their end."""
        if ranks:
            self._leaving = asyncio.create_task(end_ranks(ranks))

    def park(self, ranks: Sequence[Handle]) -> None:
        """Let ranks that are no longer among these free their devices' memory, in the background, to join again later."""
        self.parked = list(ranks)
        self._has_joined = True
        self._leaving = asyncio.create_task(_sleep_ranks(ranks))

    async def _all(self, method: str, shares: Sequence[tuple[object, ...]], returns: type[T]) -> T:
        """Call every rank with its own arguments; if one fails, kill all and raise `WorkerLostError`."""
        try:
            return await self._call_each(method, shares, returns)
        except Exception as error:
            self.kill(f"was killed with the other ranks: {error}")
            if isinstance(error, WorkerLostError):
                raise
            raise WorkerLostError(f"a rank failed in {method}: {error}") from error

    async def _first_of(self, calls: Sequence[asyncio.Future[T]], method: str) -> T:
        """Return the first rank's answer once all ranks have answered; raise an error if a rank failed."""
        _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        errors = _errors(calls)
        if waiting and not any(isinstance(error, WorkerLostError) for error in errors):
            _, waiting = await asyncio.wait(waiting, timeout=END_TIME)
            errors = _errors(calls)
        lost = next((error for error in errors if isinstance(error, WorkerLostError)), None)
        if lost is not None or waiting:
            reason = f"a rank failed in {method}: {errors[0]}" if lost is None else str(lost)
            self.kill(f"was killed with the other ranks: {reason}")
            raise lost or WorkerLostError(reason)
        if errors:
            raise min(errors, key=lambda error: OTHER_RANK in str(error))
        return calls[0].result()

    def shard(self, method: str, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Return the samples of each rank: assign the longest first, each to the rank with the fewest tokens.

        Ranks with the same samples count as one.
        """
        num_shares = len(self.ranks) // self._num_alike
        shares: list[list[Sample]] = [[] for _ in range(num_shares)]
        filled = [0] * num_shares
        for sample in sorted(samples, key=lambda sample: (-_tokens_of(sample), sample.rollout)):
            least = min(range(len(filled)), key=filled.__getitem__)
            partner = -1 if sample.partner is None else sample.partner
            rank = self._rank_of.pop(sample.rollout, self._rank_of.get(partner, least))
            if method == "score":
                self._rank_of[sample.rollout] = rank
            shares[rank].append(sample)
            filled[rank] += _tokens_of(sample)
        return shares

    @property
    def is_lost(self) -> bool:
        """Whether a rank is known to be dead or closed."""
        return any(rank.is_lost for rank in self.ranks)

    def watch(self, tell: Callable[[WorkerLostError], None] | None) -> None:
        """Call `tell` once if a rank is lost; the other ranks are then killed."""
        self._tell = tell
        for rank in self.ranks:
            rank.watch(None if tell is None else self._lose_rank)

    def _lose_rank(self, error: WorkerLostError) -> None:
        self.kill(f"was killed with the other ranks: {error}")
        self._tell_loss(error)

    def kill(self, reason: str) -> None:
        """Kill every rank."""
        for rank in (*self.ranks, *self.parked):
            rank.kill(reason)
        self.forget_rendezvous()

    async def close(self) -> None:
        """End every rank."""
        self._tell = None
        if self._leaving is not None:
            await self._leaving
        await asyncio.gather(*(rank.close() for rank in (*self.ranks, *self.parked)))
        self.forget_rendezvous()

    def forget_rendezvous(self) -> None:
        """Remove the rendezvous file of these ranks."""
        with contextlib.suppress(OSError):
            self._forget_rendezvous()


async def end_ranks(ranks: Sequence[Handle]) -> None:
    """End ranks after the calls that still run on them."""
    stopping = (rank.call("stop", returns=type(None)) for rank in ranks)
    await asyncio.gather(*stopping, return_exceptions=True)
    await asyncio.gather(*(rank.close() for rank in ranks))


async def _sleep_ranks(ranks: Sequence[Handle]) -> None:
    """Let ranks sleep. A rank that fails is noticed when it is to join."""
    sleeping = (rank.call("sleep", returns=type(None)) for rank in ranks)
    await asyncio.gather(*sleeping, return_exceptions=True)


def _errors(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    """Return the errors so far, in order of ranks."""
    done = (call for call in calls if call.done() and not call.cancelled())
    return [error for call in done if (error := call.exception()) is not None]


def _tokens_of(sample: Sample) -> int:
    return count_ids(sample.prompt) + count_tokens(sample.output)
