"""The real world: replicas, trainer and verifier at work, and a clock that nobody can turn.

The engine decides on counts; the book holds what is counted. Each command is one task here, and one
place turns what goes wrong in it into `Failed`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import assert_never

from executor.buffer import Book
from executor.carriers.handles import Handle, WorkerLostError
from executor.carriers.launch import Launcher
from executor.record import Checkpoint, RunDirectory
from executor.samples import Completion, Manifest
from executor.transfer.shared_memory import remove_version, shared_directory
from executor.verifier.verifier import Verifier
from streamrl.engine.engine import Engine
from streamrl.engine.messages import (
    Abort,
    CheckpointSaved,
    Command,
    DrawPrompts,
    Drop,
    Event,
    Failed,
    Generate,
    Generated,
    Interrupted,
    LoadWeights,
    PromptsDrawn,
    PushWeights,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    Resize,
    RunStarted,
    SaveCheckpoint,
    Score,
    Scored,
    StartReplica,
    StartTrainer,
    Step,
    Stepped,
    Stop,
    StopReplica,
    Take,
    Train,
    Trained,
    TrainerStarted,
    Verified,
    Verify,
    WakeAt,
    WeightsLoaded,
    WeightsPushed,
    Woke,
)
from streamrl.engine.state import State
from streamrl.engine.world import World
from streamrl.record.trace import Trace

STOP_TIME = 10.0  # seconds that work under way gets to end once a run is interrupted

Figures = dict[str, float]


class RealWorld(World):
    """Carries commands out in real seconds."""

    def __init__(
        self,
        trace: Trace,
        engine: Engine,
        launcher: Launcher,
        book: Book,
        verifier: Verifier,
        directory: RunDirectory,
        resume_from: Checkpoint | None = None,
        watch: Callable[[Event, State, float], None] = lambda event, state, now: None,
    ) -> None:
        super().__init__(engine, trace)
        self._run = trace.run
        self._launcher = launcher
        self._book = book
        self._verifier = verifier
        self._directory = directory
        self._resume_from = resume_from
        self._watch = watch
        self._weights = shared_directory("streamrl")
        self._manifests: dict[int, Manifest] = {}
        self._replicas: dict[int, Handle] = {}
        self._trainer: Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._began_at = 0.0
        self._over = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def now(self) -> float:
        """Seconds since the run's start."""
        return time.monotonic() - self._began_at

    async def run(self) -> Trace:
        """Execute to the end, and leave no process and no shared memory behind.

        Raises:
            RuntimeError: the run stopped before its last step; the message says why.
        """
        version, groups_done = 0, 0
        if self._resume_from is not None:
            _, version, groups_done = self._resume_from
        self._book.begin_at(groups_done)
        self._began_at = time.monotonic()
        try:
            await self._verifier.start()  # its scorer loads while replicas do
            self.emit(RunStarted(version, groups_done))
            await self._over.wait()
        finally:
            await self._close()
        if self._error is not None:
            raise self._error
        state = self.engine.state
        if not state.has_all_steps:
            raise RuntimeError(state.stop_reason or f"the run is stuck at {self.now:.1f} s")
        return self.trace

    def interrupt(self, reason: str) -> None:
        """Let the run end soon: what runs is aborted, what hangs is killed after `STOP_TIME`."""
        asyncio.get_running_loop().call_later(STOP_TIME, self._over.set)
        self.emit(Interrupted(reason))

    def emit(self, event: Event) -> None:
        """Let the engine handle `event`; notice when that ends the run."""
        super().emit(event)
        self._watch(event, self.engine.state, self.now)
        if self.engine.state.is_finished:
            self._over.set()

    def start(self, command: Command) -> None:
        """Begin `command` as a task; tasks begin in the order of these calls."""
        task = asyncio.get_running_loop().create_task(self._carry_out(command))
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    async def _carry_out(self, command: Command) -> None:
        """Do what `command` says and emit its event, or that it failed."""
        try:
            event = await self._do(command)
        except Exception as error:
            self._emit_failure(command, error)
        else:
            if event is not None:
                self.emit(event)

    async def _do(self, command: Command) -> Event | None:
        match command:
            case Generate():
                return await self._generate(command)
            case Verify():
                return await self._verify(command)
            case DrawPrompts(step, num_groups, oldest_version):
                return PromptsDrawn(step, oldest_version, self._book.draw(num_groups))
            case Take() | Resize() | Stop():
                return None
            case Drop(group):
                self._book.close_group(group)
                return None
            case Score(rollouts):
                await self._train("score", rollouts)
                return Scored(rollouts)
            case Train(rollouts):
                await self._train("train", rollouts)
                return Trained(rollouts)
            case Step():
                return await self._step(command)
            case PushWeights():
                return await self._push(command)
            case LoadWeights():
                return await self._load(command)
            case Abort(rollout):
                await self._replica_of(rollout).call("abort", rollout, returns=type(None))
                return None
            case StartReplica():
                return await self._start_replica(command)
            case StopReplica():
                return await self._stop_replica(command)
            case StartTrainer():
                return await self._start_trainer()
            case SaveCheckpoint():
                return await self._save(command)
            case WakeAt(instant):
                await asyncio.sleep(max(0.0, instant - self.now))
                return Woke(instant)
            case _:
                assert_never(command)

    # Replicas -------------------------------------------------------------------------------------

    async def _start_replica(self, command: StartReplica) -> Event:
        manifest = self._manifests.get(command.version)
        handle = await self._launcher.replica(command.replica, self._initial_model())
        self._replicas[command.replica] = handle
        await handle.call("start", manifest, command.version, returns=type(None))
        return ReplicaStarted(command.replica, command.version)

    async def _stop_replica(self, command: StopReplica) -> Event:
        await self._replicas[command.replica].close()
        self._launcher.free(command.replica)
        del self._replicas[command.replica]
        return ReplicaStopped(command.replica)

    async def _generate(self, command: Generate) -> Event:
        handle = self._replicas[command.replica]
        request = self._book.request(command)
        completion = await handle.call("generate", request, returns=Completion)
        if command.rollout not in self._book.drafts:  # dropped meanwhile
            num_tokens = command.prefix + len(completion.tokens)
        else:
            num_tokens = self._book.add(completion)
        return Generated(
            command.rollout,
            num_tokens,
            completion.finish,
            completion.versions[0][0] if completion.versions else 0,
            completion.run_time,
            completion.prefill_time,
        )

    async def _load(self, command: LoadWeights) -> Event:
        handle = self._replicas[command.replica]
        manifest = self._manifests[command.version]
        load_time = await handle.call("load", manifest, command.drain, returns=float)
        self._remove_old_weights()
        return WeightsLoaded(command.replica, command.version, load_time)

    def _replica_of(self, rollout: int) -> Handle:
        replica = self.engine.state.rollouts[rollout].replica
        assert replica is not None, f"rollout {rollout} runs nowhere"
        return self._replicas[replica.id]

    # Rewards --------------------------------------------------------------------------------------

    async def _verify(self, command: Verify) -> Event:
        rollout = command.rollout
        draft, text = self._book.drafts[rollout], self._book.text(rollout)
        draft.reward, draft.fault = await self._verifier.verify(text, self._book.record(rollout))
        self._directory.write_rollout(rollout, draft, text, {"time": self.now})
        return Verified(rollout, draft.reward)

    # Training -------------------------------------------------------------------------------------

    async def _start_trainer(self) -> Event:
        self._trainer = await self._launcher.trainer()
        checkpoint = self._resume_from and str(self._resume_from.path)
        return TrainerStarted(await self._trainer.call("start", checkpoint, returns=int))

    async def _train(self, method: str, rollouts: tuple[int, ...]) -> None:
        samples = self._book.samples(rollouts)
        await self._must_have_trainer().call(method, samples, returns=Figures)

    async def _step(self, command: Step) -> Event:
        groups = list(self.engine.state.batch.groups.values())
        trained = [rollout for group in groups for rollout in group.rollouts]
        figures = await self._must_have_trainer().call("step", command.version, returns=Figures)
        rewards = [rollout.reward for rollout in trained]
        faults = [self._book.drafts[rollout.id].fault for rollout in trained]
        self._directory.write_step(
            {
                "step": command.version,
                "time": self.now,
                "reward": sum(rewards) / len(rewards),
                "output_tokens": sum(rollout.tokens for rollout in trained),
                "unscored": len(faults) - faults.count(None),
                **figures,
            }
        )
        for group in groups:
            self._book.close_group(group.id)
        return Stepped(command.version)

    async def _push(self, command: PushWeights) -> Event:
        manifest = await self._must_have_trainer().call(
            "push", command.version, str(self._weights), returns=Manifest
        )
        self._manifests[command.version] = manifest
        return WeightsPushed(command.version, manifest.num_bytes)

    async def _save(self, command: SaveCheckpoint) -> Event:
        path = self._directory.checkpoint_path(command.version)
        await self._must_have_trainer().call("save", str(path), returns=type(None))
        self._directory.finish_checkpoint(command.version, command.groups_done)
        return CheckpointSaved(command.version)

    # Beginning and end ----------------------------------------------------------------------------

    def _initial_model(self) -> str:
        """Give the directory that a replica loads first; a manifest of newer weights comes on top."""
        if self._resume_from is not None:
            return str(self._resume_from.path)
        assert self._run.model.path is not None, "check_executable wants a path"
        return self._run.model.path

    def _must_have_trainer(self) -> Handle:
        assert self._trainer is not None, "the engine trains only after TrainerStarted"
        return self._trainer

    def _remove_old_weights(self) -> None:
        """Remove versions that no replica loads now, and none that comes up could be asked to."""
        state = self.engine.state
        loading = [r.loading for r in state.fleet.replicas.values() if r.loading is not None]
        oldest = min([state.pushed_version, *loading])
        for version in [version for version in self._manifests if version < oldest]:
            del self._manifests[version]
            remove_version(self._weights, version)

    def _emit_failure(self, command: Command, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, WorkerLostError) and isinstance(command, Generate | LoadWeights):
            self._lose(command.replica, reason)
        if isinstance(command, StartReplica):
            self._launcher.free(command.replica)
        if not isinstance(command, Abort | Take | Drop | Resize | Stop):
            self.emit(Failed(command, reason))

    def _lose(self, replica_id: int, reason: str) -> None:
        if replica_id in self.engine.state.fleet.replicas:
            self._launcher.free(replica_id)
            self.emit(ReplicaLost(replica_id, reason))

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()  # of the engine or of who watches, not of a command
            self._over.set()
        if not self._tasks:  # nothing will happen any more: finished, or stuck
            self._over.set()

    async def _close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        handles = [*self._replicas.values(), *([self._trainer] if self._trainer else [])]
        await asyncio.gather(*(handle.close() for handle in handles), return_exceptions=True)
        self._verifier.close()
        for version in list(self._manifests):
            remove_version(self._weights, version)
        if self._weights.exists():
            self._weights.rmdir()
