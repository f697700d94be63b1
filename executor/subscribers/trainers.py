"""Send each trainer of a run its own commands; replicas load the weights of trainer 0."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import assert_never

from streamrl.engine.messages import (
    Command,
    Event,
    Promote,
    ResizeTrainer,
    SaveCheckpoint,
    Score,
    StartTrainer,
    Step,
    StopTrainer,
    Train,
    TrainerStopped,
)
from streamrl.engine.trainer_side import LEADER, TrainerCommand
from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.checkpoints import TrainerRecord
from streamrl.executor.launchers.handles import Handle, WorkerLostError
from streamrl.executor.launchers.launcher import Launcher
from streamrl.executor.trainer.trainer import StepSettings, Trainer


class Trainers:
    """Holds the trainers of a run by number, and tracks which of them are running."""

    def __init__(
        self,
        settings: Iterable[StepSettings],
        buffer: RolloutBuffer,
        records: Iterable[TrainerRecord],
        launcher: Launcher,
        expose: Callable[[Handle], Handle],
        tell_loss: Callable[[int, WorkerLostError], None],
        now: Callable[[], float],
    ) -> None:
        """Create the trainers without starting them.

        Args:
            settings: those of each trainer, those of trainer 0 first.
            buffer: holds the rollouts that trainers train on.
            records: one for each trainer, that of trainer 0 first.
            launcher: starts the workers.
            expose: lets faults reach trainer 0.
            tell_loss: called with the number of a trainer whose worker is lost.
            now: returns seconds since the start of the run.
        """
        self._buffer = buffer
        self._launcher = launcher
        self._expose = expose
        self._tell_loss = tell_loss
        self._now = now
        self._all = [
            Trainer(own, buffer, record, now) for own, record in zip(settings, records, strict=True)
        ]
        self._up: set[int] = set()
        self.num_lost: Counter[int] = Counter()
        """Losses of each trainer so far."""
        self._promoted: Promote | None = None
        """The trainer that replaces the primary one, and the version of the replacement."""

    def join(self, settings: StepSettings, record: TrainerRecord) -> None:
        """Add a trainer."""
        self._all.append(Trainer(settings, self._buffer, record, self._now))

    @property
    def leader(self) -> Trainer:
        """The primary trainer, whose weights replicas load."""
        return self._all[LEADER]

    def promote(self, command: Promote) -> None:
        """Make the primary trainer continue as another trainer, from its next start on."""
        self._promoted = command
        self.leader.become(self._all[command.trainer])

    def see_asked(self, command: Command, version: int) -> None:
        """Record the primary trainer's version at the time of a `Train` command."""
        if isinstance(command, Train):
            self._all[command.trainer].note_primary_version(command, version)

    async def carry_out(self, command: TrainerCommand) -> Event:
        """Run a command on the trainer that it names, and return the resulting event."""
        trainer = self._all[command.trainer]
        match command:
            case StartTrainer():
                return await self._start(command, trainer)
            case StopTrainer():
                self._up.discard(command.trainer)
                await trainer.stop()
                return TrainerStopped(command.trainer)
            case ResizeTrainer():
                return await self._resize(command, trainer)
            case Score():
                return await trainer.score(command)
            case Train():
                return await trainer.train(command)
            case Step():
                return await trainer.step(command)
            case SaveCheckpoint():
                return await trainer.save(command)
            case _:
                assert_never(command)

    async def _start(self, command: StartTrainer, trainer: Trainer) -> Event:
        number, promoted = command.trainer, self._promoted
        checkpoint = None
        if number == LEADER and promoted is not None:
            number = promoted.trainer
        if (
            number != command.trainer
            and promoted is not None
            and command.version == promoted.version
        ):
            checkpoint = self._all[number].record.checkpoints.newest()
        elif command.version:
            checkpoint = trainer.record.checkpoints.read(command.version)
        self._up.add(command.trainer)  # a worker that dies while it starts is a loss too
        handle = await self._launcher.trainer(number, command.data_parallel)
        if command.trainer == LEADER:
            handle = self._expose(handle)
        started = await trainer.start(command, handle, checkpoint)
        handle.watch(partial(self._tell_loss, command.trainer))
        return started

    async def _resize(self, command: ResizeTrainer, trainer: Trainer) -> Event:
        event = await trainer.resize(command, self._launcher.resize_trainer)
        handle = trainer.handle
        assert handle is not None, "it was resized"
        if command.trainer == LEADER:
            self._expose(handle)
        handle.watch(partial(self._tell_loss, command.trainer))
        return event

    def describe(self, number: int) -> str:
        """Return text that says from which step an ended trainer would resume."""
        saved = self._all[number].record.checkpoints.newest()
        return "it was never saved" if saved is None else f"it is saved at its step {saved.version}"

    def lose(self, number: int) -> bool:
        """Record that a trainer is lost; return whether it was running until now."""
        is_new = number in self._up
        self.num_lost[number] += is_new
        self._up.discard(number)
        return is_new

    def roll_back(self, number: int) -> None:
        """Record that the steps of a trainer since its last checkpoint are discarded."""
        self._all[number].record.roll_back(self._now())

    def kill(self, number: int, reason: str) -> None:
        """Kill the worker of a trainer, if it has started."""
        self._all[number].kill(reason)

    def kill_all(self, reason: str) -> None:
        """Kill the workers of all trainers."""
        for trainer in self._all:
            trainer.kill(reason)

    async def stop(self) -> None:
        """End every worker."""
        await asyncio.gather(*(trainer.stop() for trainer in self._all), return_exceptions=True)
