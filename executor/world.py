"""Run the engine's commands with real replicas, trainers and verifiers, in real time.

The engine decides on counts, and the buffer has the data. Each command is one asyncio task. `_carry_out` is the only
place that catches an error of a command and turns it into `Failed`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, assert_never

from streamrl.engine.engine import Engine
from streamrl.engine.fault_plan import FaultPlan
from streamrl.engine.fleet import DRAIN_TIME
from streamrl.engine.messages import (
    HELD_OUT,
    Abort,
    Act,
    Close,
    Command,
    DrawEvaluation,
    DrawPrompts,
    Drop,
    EndEvaluation,
    Evaluate,
    Event,
    Failed,
    Generate,
    Interrupted,
    Lend,
    Lent,
    LoadWeights,
    MachineReplaced,
    Postpone,
    Promote,
    PromptsDrawn,
    PushWeights,
    ReplicaLeaving,
    ReplicaLost,
    ReplicaStopped,
    Resize,
    ResizeTrainer,
    RunStarted,
    SaveCheckpoint,
    Score,
    Skip,
    StartReplica,
    StartTrainer,
    Step,
    Stop,
    StopReplica,
    StopTrainer,
    Take,
    TakeBack,
    TakenBack,
    Train,
    TrainerLost,
    TrainerStopped,
    Truncate,
    Verified,
    Verify,
    WakeAt,
    Woke,
)
from streamrl.engine.state import State
from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import LEADER
from streamrl.engine.world import World
from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.checkpoints import Checkpoint, is_whole
from streamrl.executor.colocation import (
    ColocatedRole,
    DeviceSharing,
    LentGpus,
    Side,
    side_of,
)
from streamrl.executor.environment.episodes import EpisodeRunner
from streamrl.executor.evaluation import HeldOut, HeldOutEpisodes
from streamrl.executor.faults import TRAINER, RealFaults, read_struck
from streamrl.executor.launchers.handles import WorkerLostError
from streamrl.executor.launchers.launcher import Launcher
from streamrl.executor.record import RunDirectory
from streamrl.executor.roles import (
    Scoring,
    TransferRole,
    UnreachedError,
    VerifierRole,
    WeightSource,
    reason_of,
)
from streamrl.executor.rollout.replica import Replica
from streamrl.executor.run_log import RunLog
from streamrl.executor.subscribers.attach_requests import Notice
from streamrl.executor.subscribers.membership import Membership
from streamrl.executor.subscribers.secondary_records import SecondaryRecords
from streamrl.executor.subscribers.stream import GroupStream
from streamrl.executor.subscribers.trainers import Trainers
from streamrl.executor.trainer.trainer import StepSettings
from streamrl.executor.watchdog import FACTOR, TICK, Attempts, Watchdog
from streamrl.runfile.choices import ExtensionError
from streamrl.workload.prompt_records import Record

logger = logging.getLogger(__name__)

CLOSING_TIME = 30.0
"""Seconds in which all workers end after a run. Then they are killed; see `CLOSE_TIME` of a worker."""
ProcessOfTrainer = (
    StartTrainer | ResizeTrainer | Score | Train | Step | SaveCheckpoint | PushWeights
)
"""Commands that a trainer's process carries out. `StopTrainer` is left out, because it ends the process."""
NO_EVENT = (Abort, Close, Truncate, Take, Skip, Postpone, Drop, Resize, Stop, EndEvaluation)
"""Commands that end in no event."""
STOP_TIME = 6.0
"""Least seconds that running commands have to end after an interruption; see `execute.grace`."""


class RealWorld(World[Trace]):
    """Executes commands in real time."""

    def __init__(
        self,
        trace: Trace,
        engine: Engine,
        launcher: Launcher,
        buffer: RolloutBuffer,
        verifier: VerifierRole,
        make_transfer: Callable[[WeightSource], TransferRole],
        directory: RunDirectory,
        records: SecondaryRecords,
        resume_from: Checkpoint | None = None,
        watch: Callable[[Event, State, float], None] = lambda event, state, now: None,
        limit: Callable[[float], str | None] = lambda now: None,
        episodes: EpisodeRunner | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        """Take the parts of a run; `watch` sees each event, and `limit` returns why the run must end now, or None.

        A run without `episodes` has rollouts of one turn.
        """
        super().__init__(engine, trace, buffer.workload.learn)
        self._run = trace.run
        self._launcher = launcher
        self._buffer = buffer
        self._directory = directory
        self._records = records
        self._resume_from = resume_from
        self._watch = watch
        self._limit = limit
        self._held_out = held_out
        self._log = RunLog(engine.state, trace.run.secondary_trainer_names)
        self._replicas: dict[int, Replica] = {}
        self._kinds: dict[int, int] = {}
        """Kind of each replica that starts or runs."""
        self._stopping: set[int] = set()
        """Replicas that are being stopped: their end is no loss, even if they die before."""
        self._leaving: dict[int, asyncio.Event] = {}
        """Events of replicas whose machines will be taken away; each is set when its replica has ended."""
        self._verifier = verifier
        self._episodes = episodes
        struck = {each.fault for each in read_struck(directory.path)}
        plan = FaultPlan.of(trace.run, struck)
        self._faults = RealFaults(plan, directory.path, directory.leg, verifier)
        seen = map(trace.run.as_seen_by, range(trace.run.num_trainers))
        self._trainers = Trainers(
            map(StepSettings.of, seen),
            buffer,
            (directory, *records.all),
            launcher,
            partial(self._faults.expose, TRAINER),
            self._see_lost_trainer,
            lambda: self.now,
        )
        self._transfer = make_transfer(self._trainers.leader)
        self._attempts = Attempts(trace.run.policies.max_attempts, trace.run.execute.patience)
        self._stream = GroupStream(
            directory.path, trace.run.algorithm.group_size, trace.run.execute, buffer
        )
        self.members = Membership(
            trace,
            records,
            self._trainers,
            launcher,
            buffer,
            self,
            self.give_notices,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._working: dict[int, asyncio.Task[Any]] = {}
        """Tasks of running commands, by number of the watchdog."""
        self._given_up: dict[int, str] = {}
        """Commands that took too long, with the reason."""
        self._began_at = 0.0
        self._over = asyncio.Event()
        self._error: BaseException | None = None
        self._is_interrupted = False
        patience = trace.run.execute.patience
        self._watchdog = Watchdog(patience, trace.run.rollout.max_tokens)
        turns = DeviceSharing(self._members, FACTOR * patience)
        self._turns = turns if trace.run.policies.shares_gpus else None
        lent = LentGpus(lambda: self._members("training")[0], FACTOR * patience)
        self._lent = lent if trace.run.lending is not None else None

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._began_at

    async def run(self) -> Trace:
        """Execute the run to its end; end all processes and remove all shared memory.

        Raises:
            RuntimeError: the run stopped before its last step; the message says why.
        """
        self._began_at = time.monotonic()
        beside = [asyncio.create_task(self._watch_commands())]
        try:
            await self._stream.start()
            if self._run.verifier.rewards:
                await self._verifier.start()  # its scorer loads while replicas do
            begun = self._begin_files()
            beside.append(asyncio.create_task(self.members.serve()))
            for task in beside:
                task.add_done_callback(self._end_task)
            self.emit(begun)
            await self._over.wait()
        finally:
            for task in beside:
                task.cancel()
            await self._close()
        if self._error is not None:
            raise self._error
        if not self.engine.has_all_steps or self.engine.has_failed:
            reason = self.engine.stop_reason
            raise RuntimeError(reason or f"the run is stuck at {self.now:.1f} s: {self.engine}")
        return self.trace

    def _begin_files(self) -> RunStarted:
        """Write the files of this start, which no longer fails for lack of a part, and return its first event."""
        self._directory.begin()
        self._records.begin()
        resumed = self._resume_from
        is_evaluated = resumed is not None and self._directory.is_evaluated(resumed.version)
        return self.members.begin(resumed, is_evaluated=is_evaluated)

    @property
    def stop_time(self) -> float:
        """Seconds from an interruption to the end of running commands."""
        return max(STOP_TIME, self._run.execute.grace)

    def interrupt(self, reason: str) -> None:
        """End the run soon: abort rollouts and save the trainers.

        Hanging commands are killed after `stop_time`, or at a second call. A run that has ended stays as it is.
        """
        if self._is_interrupted or self._over.is_set():
            self._over.set()
            return
        self._is_interrupted = True
        self._attempts.end_pauses()
        self._buffer.keep_files()
        asyncio.get_running_loop().call_later(self.stop_time, self._over.set)
        self.emit(Interrupted(reason, saves=self._run.execute.grace > 0))

    def abandon(self, reason: str = "was killed: the run hangs") -> None:
        """Kill all processes and remove all shared memory; may be called from any thread if the event loop hangs."""
        for replica in self._replicas.values():
            replica.kill(reason)
        self._trainers.kill_all(reason)
        self._transfer.stop()
        self._end_scoring()

    def emit(self, event: Event) -> None:
        """Let the engine handle `event`, and check whether the run is over."""
        super().emit(event)
        self._stream.see(event)
        if isinstance(event, TrainerStopped | TrainerLost):
            self.members.see_stopped(event.trainer)
        self._watch(event, self.engine.state, self.now)
        if self.engine.is_finished:
            self._over.set()

    def handle(self, event: Event, now: float) -> list[Command]:
        """Return the engine's commands after `event`; record both, and log lifecycle events."""
        self._log.see(event)
        commands = super().handle(event, now)
        self._log.write(event, commands)
        return commands

    def start(self, command: Command) -> None:
        """Start `command` as a task; tasks start in the order of these calls."""
        if isinstance(command, LoadWeights | Lend | StartReplica):
            self._transfer.hold(command.version)
        if isinstance(command, StartReplica):
            self._kinds[command.replica] = command.kind
        if isinstance(command, StopReplica):
            self._stopping.add(command.replica)
            self._replicas[command.replica].expect_end()
        self._trainers.see_asked(command, self.engine.version)
        task = asyncio.get_running_loop().create_task(self._carry_out(command))
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    async def _carry_out(self, command: Command) -> None:
        """Execute `command`, and emit its event or `Failed`."""
        num_lost = self._trainers.num_lost[getattr(command, "trainer", LEADER)]
        try:
            async with self._turn(command):
                event = await self._do_watched(command)
        except ExtensionError:  # a repeated command would raise it again
            raise
        except Exception as error:
            self._emit_failure(command, error, num_lost)
        else:
            if event is not None:
                self.emit(event)
        finally:
            if isinstance(command, LoadWeights | Lend | StartReplica):
                self._transfer.release(command.version)

    def _turn(self, command: Command) -> AbstractAsyncContextManager[None]:
        """Return a context that reserves shared devices for a command, if replicas and trainer share them."""
        is_followers = getattr(command, "trainer", LEADER) != LEADER
        return nullcontext() if self._turns is None or is_followers else self._turns.of(command)

    def _members(self, side: Side) -> list[ColocatedRole]:
        if side == "training":
            return [ColocatedRole(self._trainers.leader, partial(self._lose_trainer, LEADER))]
        return [
            ColocatedRole(role, partial(self._lose_replica, number))
            for number, role in self._replicas.items()
        ]

    async def _do_watched(self, command: Command) -> Event | None:
        """Execute `command` under the watchdog, and inject planned faults."""
        event, task = None, asyncio.current_task()
        assert task is not None
        if self._lent is not None and side_of(command) == "training":
            await self._lent.wake_trainer()  # if the last replica on its GPUs was lost
        number = self._watchdog.begin(command, self.now)
        self._working[number] = task
        try:
            self._faults.strike(command, self.engine.version, self.now)
            event = await self._do(command)
        except asyncio.CancelledError:
            if number not in self._given_up:
                raise
            task.uncancel()
            raise WorkerLostError(self._given_up[number]) from None
        finally:
            self._watchdog.end(number, event, self.now)
            del self._working[number]
            self._given_up.pop(number, None)
        return event

    async def _do(self, command: Command) -> Event | None:
        """Send a command to its role, and return the resulting event, if any."""
        match command:
            case Generate():
                return await self._replica(command.replica).generate(command)
            case Verify():
                return await self._verify(command)
            case Act():
                return await self._episodes_of(command.rollout).act(command)
            case Close():
                self._episodes_of(command.rollout).close(command)
                return None
            case Truncate():
                self._truncate(command.rollout)
                return None
            case Take() | Postpone() | Resize():
                return None
            case Skip():
                self._buffer.skip(command)
                return None
            case Stop():
                self._attempts.end_pauses()
                self._buffer.keep_files()
                return None
            case Drop():
                self._stream.forget(command.group)
                self._buffer.drop(command)
                return None
            case (
                Score()
                | Train()
                | Step()
                | StartTrainer()
                | StopTrainer()
                | ResizeTrainer()
                | SaveCheckpoint()
            ):
                event = await self._trainers.carry_out(command)
                if isinstance(command, StartTrainer):
                    await self._transfer.prepare()
                return event
            case PushWeights():
                return await self._push(command)
            case LoadWeights():
                return await self._load(command)
            case Lend():
                return await self._lend(command)
            case TakeBack():
                return await self._take_back(command)
            case Abort():
                await self._abort(command)
                return None
            case DrawPrompts(step, num_groups, oldest_version):
                groups = self._buffer.draw(num_groups, oldest_version, step)
                return PromptsDrawn(step, oldest_version, groups)
            case StartReplica():
                return await self._start_replica(command)
            case StopReplica():
                return await self._stop_replica(command)
            case Promote():
                return self.members.promote(command)
            case DrawEvaluation():
                return self._own_held_out.draw(command, self.now)
            case Evaluate():
                return await self._evaluate(command)
            case EndEvaluation():
                await self._end_evaluation(command)
                return None
            case WakeAt(time_then):
                await asyncio.sleep(max(0.0, time_then - self.now))
                return Woke(time_then)
            case _:
                assert_never(command)

    def _episodes_of(self, rollout: int) -> EpisodeRunner:
        """Return the environments of training, or those of the evaluation that has the rollout."""
        if rollout >= HELD_OUT:
            return self._held_out_episodes.runner
        assert self._episodes is not None, "only a run with an environment acts"
        return self._episodes

    @property
    def _held_out_episodes(self) -> HeldOutEpisodes:
        episodes = self._own_held_out.episodes
        assert episodes is not None, "only a run with an environment evaluates episodes"
        return episodes

    def _truncate(self, rollout: int) -> None:
        if rollout >= HELD_OUT:
            self._held_out_episodes.truncate(rollout)
        else:
            self._buffer.truncate(rollout)

    async def _score(self, rollout: int, text: str, num_tokens: int, record: Record) -> Scoring:
        """Return the score of a text, with the rewards that an environment gave."""
        if self._episodes is None:
            return await self._verifier.verify(text, num_tokens, record)
        verifier = self._verifier if self._run.verifier.rewards else None
        return await self._episodes.score(rollout, verifier)

    async def _verify(self, command: Verify) -> Event:
        rollout = command.rollout
        if rollout >= HELD_OUT:
            return await self._own_held_out.verify(command)
        buffered = self._buffer.rollouts[rollout]
        has_turns = self._episodes is not None
        text = self._buffer.reread(rollout) if has_turns else self._buffer.text(rollout)
        record, began_at = self._buffer.record(rollout), self.now
        buffered.enter(await self._score(rollout, text, buffered.num_tokens, record))
        buffered.verify_time = self.now - began_at
        self._buffer.step_statistics.end(buffered.num_tokens, buffered.reward, record)
        self._directory.write_rollout(
            rollout, buffered, text, {**self._buffer.facts(buffered), "time": self.now}
        )
        self._stream.publish(rollout, buffered, text, record.get("prompt"))
        return Verified(rollout, buffered.reward)

    @property
    def _own_held_out(self) -> HeldOut:
        assert self._held_out is not None, "only a run with [evaluation] evaluates"
        return self._held_out

    async def _evaluate(self, command: Evaluate) -> Event:
        """Generate a rollout on a held-out prompt, and score it."""
        held_out = self._own_held_out
        if held_out.episodes is not None:
            full = held_out.episodes.without_room(command)
            if full is not None:
                return full
        request = held_out.request(command)
        held_out.on_replicas[request.rollout] = command.replica
        try:
            completion = await self._replica(command.replica).evaluate(request)
        finally:
            del held_out.on_replicas[request.rollout]
        return await held_out.score(command, completion)

    async def _end_evaluation(self, command: EndEvaluation) -> None:
        self._own_held_out.end(command, self.now)
        running = list(self._own_held_out.on_replicas.items())
        aborts = [
            self._replicas[replica].abort(rollout)
            for rollout, replica in running
            if replica in self._replicas
        ]
        await asyncio.gather(*aborts, return_exceptions=True)  # a lost replica fails by itself

    async def _push(self, command: PushWeights) -> Event:
        """Push weights; pause after a failure, and lose replicas that the last attempt does not reach.

        After the pauses, the loss of a machine has been noticed, or the machine is back. The engine repeats the push
        after the pause, with the version that the trainer has then.
        """
        num_lost = self._trainers.num_lost[LEADER]
        try:
            pushed = await self._transfer.push(command)
        except Exception as error:
            is_last = self._attempts.fail()
            is_there = self._trainers.num_lost[LEADER] == num_lost
            if is_there and not is_last:
                await self._attempts.wait()
            if not is_last or not isinstance(error, UnreachedError):
                raise
            for replica in error.replicas:
                if replica in self._replicas:
                    self._replicas[replica].kill(f"cannot be given weights: {error}")
                    self._lose_replica(replica, f"cannot be given weights: {error}")
            pushed = await self._transfer.push(command)
        self._attempts.succeed()
        return pushed

    async def _load(self, command: LoadWeights) -> Event:
        replica = self._replica(command.replica)
        fetched = self._transfer.fetch(command.version, command.replica)
        loaded = await replica.load(command, fetched)
        self._replica(command.replica)  # it may have been lost after its answer
        return loaded

    @property
    def _lent_gpus(self) -> LentGpus:
        assert self._lent is not None, "only a run with [lending] lends"
        return self._lent

    async def _lend(self, command: Lend) -> Event:
        """Let a replica generate on GPUs that the trainer had. A trainer whose own GPUs these are sleeps meanwhile."""
        began_at, replica = self.now, self._replica(command.replica)
        replica.hold()
        if self._lent is not None:
            await self._lent.lend(command.replica)
        fetched = self._transfer.fetch(command.version, command.replica)
        checksum = await replica.lend(command, fetched)
        self._replica(command.replica)  # it may have been lost after its answer
        return Lent(command.replica, command.version, self.now - began_at, checksum)

    async def _take_back(self, command: TakeBack) -> Event:
        """Let a replica sleep, and wake the trainer once all of its own GPUs are back."""
        replica = self._replica(command.replica)
        await replica.take_back()
        began_at = self.now
        if self._lent is not None:
            await self._lent.take_back(command.replica)
        self._replica(command.replica)  # it may have been lost meanwhile
        return TakenBack(command.replica, self.now - began_at)

    def _replica(self, number: int) -> Replica:
        """Return a replica; raise an error if it was lost after its command was created."""
        if number not in self._replicas:
            raise WorkerLostError(f"replica {number} is lost")
        return self._replicas[number]

    async def _abort(self, command: Abort) -> None:
        if command.replica in self._replicas:  # a lost replica emits `Failed` itself
            await self._replicas[command.replica].abort(command.rollout)

    async def _start_replica(self, command: StartReplica) -> Event:
        is_lent = command.kind == self._run.rollout.num_kinds
        if is_lent:
            await self._lent_gpus.lend(command.replica)
        model = self._initial_model(command.version)
        handle = await self._launcher.replica(command.replica, command.kind, model)
        handle = self._faults.expose(command.replica, handle)
        tells_pressure = self._run.policies.follows_pressure
        replica = Replica(handle, self._buffer, tells_pressure=tells_pressure)
        self._replicas[command.replica] = replica
        place = self._launcher.place_of(command.replica)
        self._transfer.join(command.replica, place, replica)
        manifest = await self._transfer.fetch(command.version, command.replica)
        started, _ = await asyncio.gather(
            replica.start(command, manifest), self._transfer.reach(command.replica)
        )
        if is_lent:
            await replica.take_back()
            await self._lent_gpus.take_back(command.replica)
        handle.watch(partial(self._see_lost_replica, command.replica))
        return started

    def _see_lost_replica(self, replica: int, error: WorkerLostError) -> None:
        self._lose_replica(replica, reason_of(error))

    def _see_lost_trainer(self, trainer: int, error: WorkerLostError) -> None:
        self._lose_trainer(trainer, reason_of(error))

    async def _stop_replica(self, command: StopReplica) -> Event:
        await self._replicas[command.replica].stop()
        self._free(command.replica)
        del self._replicas[command.replica]
        return ReplicaStopped(command.replica)

    def _end_scoring(self) -> None:
        self._close_verifiers()
        if self._episodes is not None:
            self._episodes.stop()

    def _close_verifiers(self) -> None:
        self._verifier.close()
        if self._held_out is not None:
            self._held_out.close()

    def _initial_model(self, version: int) -> str:
        """Return the model directory that a replica loads before the manifest of a version, if that was pushed.

        A manifest replaces all weights, so any weights of the model serve if the resumed checkpoint was removed.

        Raises:
            RuntimeError: the checkpoint of this version was removed, and the version was never pushed.
        """
        resumed = self._resume_from
        if resumed is not None and is_whole(resumed.path):
            return str(resumed.path)
        if resumed is not None and resumed.version == version:
            raise RuntimeError(
                f"{resumed.path}, from which the run was resumed, was removed or damaged while the run needs it; "
                "restore it, or resume the run again"
            )
        assert self._run.model.path is not None, "check_executable requires a path"
        return self._run.model.path

    # Failures and the end of the run --------------------------------------------------------------

    async def _watch_commands(self) -> None:
        """Give up commands that hang, and pass on notices of the launcher, until cancelled."""
        while True:
            await asyncio.sleep(TICK)
            if (reason := self._limit(self.now)) is not None and not self._is_interrupted:
                self.interrupt(reason)
            for replica, seconds in self._launcher.leaving().items():
                if replica in self._kinds and replica not in self._leaving:
                    self.give_notices(Notice((replica,), seconds, 0.0))
            for hanging in self._watchdog.tick():
                self._give_up(*hanging)

    def _give_up(self, number: int, command: Command, limit: float) -> None:
        """Kill the worker of a hanging command, which makes the command fail; one tick later, cancel the command."""
        if number in self._given_up:
            self._working[number].cancel()
            return
        reason = f"was killed: {type(command).__name__} took more than {limit:,.0f} s"
        self._given_up[number] = f"the role of {type(command).__name__} {reason}"
        match command:
            case (
                Generate()
                | Evaluate()
                | Abort()
                | LoadWeights()
                | Lend()
                | TakeBack()
                | StartReplica()
                | StopReplica()
            ):
                if command.replica in self._replicas:
                    self._replicas[command.replica].kill(reason)
            case _ if isinstance(command, ProcessOfTrainer):
                self._trainers.kill(command.trainer, reason)
            case Verify():
                self._close_verifiers()
                if self._episodes is not None:
                    self._episodes_of(command.rollout).kill(command.rollout)
            case Act():
                self._episodes_of(command.rollout).kill(command.rollout)
            case _:
                pass  # ends at once

    def _emit_failure(self, command: Command, error: Exception, num_lost: int) -> None:
        """Report a failure, and the loss of its role; `num_lost` counts the losses of its trainer before the command."""
        reason = reason_of(error)
        if isinstance(error, WorkerLostError):
            match command:
                case Generate() | Evaluate() | LoadWeights() | Lend() | TakeBack() | Abort():
                    self._lose_replica(command.replica, reason)
                case _ if isinstance(command, ProcessOfTrainer):
                    if self._trainers.num_lost[command.trainer] == num_lost:
                        self._lose_trainer(command.trainer, reason)
                case _:
                    pass  # has no worker process
        if isinstance(command, StartReplica):
            if command.replica in self._replicas:
                self._replicas.pop(command.replica).kill("did not come up")
            self._free(command.replica)
        if not isinstance(command, NO_EVENT):
            self.emit(self._recovered(command, error) or Failed(command, reason))

    def _recovered(self, command: Command, error: Exception) -> Event | None:
        """Return an event with the saved tokens of a lost replica's attempt, or None if there are none."""
        if not isinstance(command, Generate):
            return None
        return self._buffer.end_failed(command, is_lost=isinstance(error, WorkerLostError))

    def _lose_replica(self, replica_id: int, reason: str) -> None:
        """Report a replica's loss once, when the first of its commands fails."""
        if replica_id in self._stopping:
            return
        if self._replicas.pop(replica_id, None) is not None:
            self._free(replica_id)
            self.emit(ReplicaLost(replica_id, reason))

    def give_notices(self, notice: Notice) -> str:
        """Announce that machines are taken away; take them away when it is time, and return a message for the user.

        Raises:
            ValueError: a replica does not run, or has GPUs of the primary trainer.
        """
        lent = self._run.rollout.num_kinds
        own = sorted(number for number, kind in self._kinds.items() if kind != lent)
        chosen = list(dict.fromkeys(notice.replicas)) or own
        if self._turns is not None or self._run.trainer.borrows:
            raise ValueError("replicas share their GPUs with the trainer, which cannot leave")
        for replica in chosen:
            if self._kinds.get(replica) == lent:
                raise ValueError(f"replica {replica} is on GPUs of the trainer, which cannot leave")
            if replica not in own:
                running = ", ".join(map(str, own)) or "none"
                raise ValueError(f"replica {replica} does not run; running are: {running}")
        for replica in chosen:
            if notice.warning <= DRAIN_TIME:
                self._announce(replica, notice.warning)
            task = asyncio.get_running_loop().create_task(self._take_machine(replica, notice))
            self._tasks.add(task)
            task.add_done_callback(self._end_task)
        said = (
            f"replicas leave within {notice.warning:g} s: {', '.join(map(str, chosen)) or 'none'}"
        )
        if chosen and not set(own) - set(chosen) - set(self._leaving):
            begin = max(0.0, notice.warning - DRAIN_TIME)
            said += f"; no other runs, so nothing is generated from {begin:g} s on until a replacement is there"
            logger.warning(said)
        return said

    def _announce(self, replica: int, warning: float) -> None:
        self._leaving.setdefault(replica, asyncio.Event())
        self.emit(ReplicaLeaving(replica, warning))

    async def _take_machine(self, replica: int, notice: Notice) -> None:
        """End a replica as the loss of its machine would, and report the machine that replaces it."""
        if (early := notice.warning - DRAIN_TIME) > 0:
            await asyncio.sleep(early)
            if replica not in self._kinds:
                return  # it has ended meanwhile
            self._announce(replica, DRAIN_TIME)
        ended = self._leaving.get(replica)
        await asyncio.sleep(min(notice.warning, DRAIN_TIME))
        if replica in self._replicas:
            self._replicas[replica].kill("was killed: its machine was taken away")
        if ended is not None:
            await ended.wait()
        await asyncio.sleep(notice.replacement_time)
        self.emit(MachineReplaced(replica))

    def _free(self, replica: int) -> None:
        self._kinds.pop(replica, None)
        self._stopping.discard(replica)
        if (ended := self._leaving.pop(replica, None)) is not None:
            ended.set()
        if self._lent is not None:
            self._lent.forget(replica)
        self._transfer.leave(replica)
        self._launcher.free(replica)

    def _lose_trainer(self, trainer_id: int, reason: str) -> None:
        """Report a trainer's loss once, when the first of its commands fails."""
        if self._trainers.lose(trainer_id):
            if trainer_id == LEADER:
                self._attempts.end_pause()
                if self._lent is not None:
                    self._lent.forget_trainer()
            self.emit(TrainerLost(trainer_id, reason))
            self._trainers.roll_back(trainer_id)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()  # an error of the engine or of `watch`, not of a command
            self._over.set()
        if not self._tasks:  # no event can come any more: the run is finished, or stuck
            self._over.set()

    async def _close(self) -> None:
        """End all workers, and kill those that take too long."""
        for task in list(self._tasks):
            task.cancel()
        try:
            async with asyncio.timeout(CLOSING_TIME):
                await self._end_all()
        except TimeoutError:
            self.abandon("did not end with the run")

    async def _end_all(self) -> None:
        replicas = (replica.stop() for replica in self._replicas.values())
        await asyncio.gather(*replicas, self._trainers.stop(), return_exceptions=True)
        self._end_scoring()
        await asyncio.gather(self._stream.close(), self._transfer.close())
