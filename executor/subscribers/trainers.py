"""Hand each trainer of a run its own commands; trainer 0 decides the weights that replicas load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import assert_never

from streamrl.engine.messages import (
    Command,
    Event,
    Promote,
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
from streamrl.executor.launchers.handles import Handle
from streamrl.executor.launchers.launcher import Launcher
from streamrl.executor.trainer.advantages import AdvantageEstimator
from streamrl.executor.trainer.trainer import Trainer
from streamrl.runfile.config import Run


class Trainers:
    """Knows every trainer of a run by its number, and which of them are up."""

    def __init__(
        self,
        run: Run,
        buffer: RolloutBuffer,
        records: Iterable[TrainerRecord],
        launcher: Launcher,
        expose: Callable[[Handle], Handle],
        now: Callable[[], float],
    ) -> None:
        """Begin with none that is up.

        Args:
            run: has the settings of every trainer.
            buffer: holds the rollouts that trainers train on.
            records: one for each trainer, that of trainer 0 first.
            launcher: starts the workers.
            expose: lets faults reach trainer 0.
            now: returns seconds since the start of the run.
        """
        self._buffer = buffer
        self._launcher = launcher
        self._expose = expose
        self._now = now
        self._all = [
            _trainer_of(run.as_seen_by(number), buffer, record, now)
            for number, record in enumerate(records)
        ]
        self._up: set[int] = set()
        self._promoted: Promote | None = None
        """As which trainer the leading one is started, and at which version first."""

    def join(self, run: Run, record: TrainerRecord) -> None:
        """Take one more trainer, the last of those in `run`."""
        number = len(self._all)
        seen = run.as_seen_by(number)
        self._all.append(_trainer_of(seen, self._buffer, record, self._now))

    @property
    def leader(self) -> Trainer:
        """The one whose weights replicas load."""
        return self._all[LEADER]

    def promote(self, command: Promote) -> None:
        """Let the one that leads be what another was, from its next start on."""
        self._promoted = command
        self.leader.become(self._all[command.trainer])

    def see_asked(self, command: Command, version: int) -> None:
        """Tell a trainer which version the leader is at as it is asked to train on rollouts."""
        if isinstance(command, Train):
            self._all[command.trainer].note_primary_version(command, version)

    async def carry_out(self, command: TrainerCommand) -> Event:
        """Let the trainer that a command names do what it says; return the event that it ends in."""
        trainer = self._all[command.trainer]
        match command:
            case StartTrainer():
                return await self._start(command, trainer)
            case StopTrainer():
                self._up.discard(command.trainer)
                await trainer.stop()
                return TrainerStopped(command.trainer)
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
        handle = await self._launcher.trainer(number)
        if command.trainer == LEADER:
            handle = self._expose(handle)
        self._up.add(command.trainer)
        return await trainer.start(command, handle, checkpoint)

    def describe(self, number: int) -> str:
        """Return where one that has ended would go on."""
        saved = self._all[number].record.checkpoints.newest()
        return "it was never saved" if saved is None else f"it is saved at its step {saved.version}"

    def lose(self, number: int) -> bool:
        """Enter that a trainer is gone; return whether nobody knew."""
        is_new = number in self._up
        self._up.discard(number)
        return is_new

    def roll_back(self, number: int) -> None:
        """Write down that what a trainer has made since its last checkpoint is taken back."""
        self._all[number].record.roll_back(self._now())

    def kill(self, number: int, reason: str) -> None:
        """Let a trainer be lost, where its worker has come up."""
        self._all[number].kill(reason)

    def kill_all(self, reason: str) -> None:
        """Let every trainer be lost."""
        for trainer in self._all:
            trainer.kill(reason)

    async def stop(self) -> None:
        """End every worker."""
        await asyncio.gather(*(trainer.stop() for trainer in self._all), return_exceptions=True)


def _trainer_of(
    run: Run, buffer: RolloutBuffer, record: TrainerRecord, now: Callable[[], float]
) -> Trainer:
    return Trainer(run, buffer, AdvantageEstimator(run.algorithm, buffer), record, now)
