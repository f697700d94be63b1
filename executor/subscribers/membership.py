"""Attach trainers to a running job and detach them, so that a resume brings the same ones back."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, assert_never

from streamrl.engine.messages import Promote, RunStarted, TrainerJoined, TrainerLeaving
from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import LEADER, drawn_again
from streamrl.engine.world import World
from streamrl.executor.backend_limits import check_back_end_of
from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.checkpoints import Checkpoint, Position
from streamrl.executor.launchers.launcher import Launcher
from streamrl.executor.subscribers.attach_requests import (
    TICK,
    Attach,
    Attached,
    ControlAnswer,
    ControlFiles,
    ControlRequest,
    Detach,
    read_attached,
    write_attached,
)
from streamrl.executor.subscribers.secondary_records import SecondaryRecords
from streamrl.executor.subscribers.trainers import Trainers
from streamrl.runfile.checks import check_run
from streamrl.runfile.files import secondary_trainer_section, with_secondary_trainer

logger = logging.getLogger(__name__)


class Membership:
    """Lets trainers join and leave, and writes down who is there, so that a resume brings the same ones back."""

    def __init__(
        self,
        trace: Trace,
        records: SecondaryRecords,
        trainers: Trainers,
        launcher: Launcher,
        buffer: RolloutBuffer,
        world: World[Trace],
    ) -> None:
        self._trace = trace
        self._records = records
        self._trainers = trainers
        self._launcher = launcher
        self._buffer = buffer
        self._world = world
        attached = read_attached(records.path)
        names = trace.run.secondary_trainer_names
        self._num_in_file = len(names) - sum(s["name"] in names for s in attached.followers)
        """Trainers that follow by the run file itself."""
        self.away = {names.index(name) + 1 for name in attached.away if name in names}
        """Numbers of those that do not follow now."""
        self._promoted: Promote | None = None
        if attached.promoted in names:
            number = 1 + names.index(attached.promoted)
            self._promoted = Promote(number, attached.leads_from)
        self._leaving: dict[int, asyncio.Event] = {}
        """Set once one that was told to leave has ended."""
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, resume_from: Checkpoint | None) -> RunStarted:
        """Return where every trainer begins, or goes on, and who is away; the buffer draws from there."""
        at = Position(version=0, groups_done=0)
        if resume_from is not None:
            at = resume_from.position
            self._buffer.begin_at(at.groups_done, at.done_ahead)
        found = ((n, each.resumed_from) for n, each in enumerate(self._records.all, 1))
        followers = (each.position.as_saved(number) for number, each in found if each is not None)
        promoted = self._resume_promoted(at.version)
        away = tuple(sorted(self.away))
        begun = RunStarted(at.version, at.groups_done, tuple(followers), away, promoted)
        for saved in begun.followers:
            for group in drawn_again(begun, saved):
                self._buffer.leave(group, saved.trainer)
        return begun

    def _resume_promoted(self, version: int) -> int | None:
        """Return who leads in trainer 0's place at `version`; where that was saved before, its own checkpoint leads again."""
        promoted = self._promoted
        if promoted is None:
            return None
        if version > promoted.version:
            self._trainers.promote(promoted)
            return promoted.trainer
        self._promoted = None
        self.away.discard(promoted.trainer)
        self._write()
        return None

    def promote(self, command: Promote) -> TrainerLeaving:
        """Let a trainer take the leading one's place, once it has ended itself."""
        self._trainers.promote(command)
        self._promoted = command
        self.away.add(command.trainer)
        self._write()
        return TrainerLeaving(command.trainer)

    async def serve(self) -> None:
        """Carry out what is asked in the run's directory, as long as you let it."""
        files = ControlFiles(self._records.path)
        while True:
            await asyncio.sleep(TICK)
            for path, request in files.take():
                task = asyncio.create_task(self._answer(files, path, request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, files: ControlFiles, path: Path, request: ControlRequest | ValueError
    ) -> None:
        try:
            answer = ControlAnswer(await self._carry_out(request))
        except (ValueError, RuntimeError) as error:
            answer = ControlAnswer(str(error), is_refused=True)
            logger.warning(f"request to attach or detach a trainer refused: {error}")
        files.answer(path, answer)

    async def _carry_out(self, request: ControlRequest | ValueError) -> str:
        match request:
            case Attach(section):
                return self.attach(section)
            case Detach(name):
                return await self.detach(name)
            case ValueError():
                raise request
            case _:
                assert_never(request)

    def attach(self, section: dict[str, Any]) -> str:
        """Let a trainer follow from now on; return a line that says so.

        Raises:
            ValueError: it is there already, the run cannot have it, or nothing would come for it.
            RuntimeError: there is no room for it.
        """
        name = section.get("name")
        if name in self._trace.run.secondary_trainer_names:
            number = self._come_back(section)
        else:
            number = self._join(section)
        self._write()
        self._world.emit(TrainerJoined(number, section))
        return f"{name} follows from now on, as trainer {number}"

    def _check_prompts(self, name: object) -> None:
        """Refuse a trainer once all is drawn: of that nothing is kept for who was not there."""
        state = self._world.engine.state
        if state.has_all_prompts:
            why = f"all prompts of algorithm.steps={state.num_steps} are drawn"
            raise ValueError(
                f"name {name!r}: {why}, and who joins gets only what is drawn after that"
            )

    def _come_back(self, section: dict[str, Any]) -> int:
        run, name = self._trace.run, section["name"]
        number = 1 + run.secondary_trainer_names.index(name)
        if self._promoted is not None and number == self._promoted.trainer:
            raise ValueError(f"name {name!r}: the trainer of that name leads now")
        if number not in self.away or number in self._leaving:
            raise ValueError(f"name {name!r}: a trainer of that name follows already")
        if with_secondary_trainer(run, section).followers[-1] != run.followers[number - 1]:
            raise ValueError(
                f"name {name!r}: the trainer that was detached had other settings; attach it as it was, "
                "or by another name"
            )
        self._check_prompts(name)
        self.away.discard(number)
        return number

    def _join(self, section: dict[str, Any]) -> int:
        run = with_secondary_trainer(self._trace.run, section)
        number = len(run.followers)
        check_run(run)
        check_back_end_of(run, number)
        self._check_prompts(section["name"])
        self._buffer.workload.join(run)
        self._launcher.join(run)
        self._trainers.join(run, self._records.join(run))
        self._buffer.join()
        self._trace.join(section)
        return number

    async def detach(self, name: str) -> str:
        """Let a trainer follow no longer; return a line that says so once it is saved and has ended.

        Raises:
            ValueError: no such trainer follows.
        """
        names = self._trace.run.secondary_trainer_names
        number = 1 + names.index(name) if name in names else LEADER
        if number == LEADER or number in self.away:
            there = [n for i, n in enumerate(names, start=1) if i not in self.away]
            known = f"those that do: {', '.join(there)}" if there else "nobody does"
            raise ValueError(f"{name!r} follows no rollouts of this run; {known}")
        self.away.add(number)
        self._write()
        self._leaving[number] = ended = asyncio.Event()
        self._world.emit(TrainerLeaving(number))
        await ended.wait()
        return f"{name} has left: {self._trainers.describe(number)}"

    def see_stopped(self, number: int) -> None:
        """Enter that a trainer has ended, or is lost and comes up no more."""
        if number in self.away and (ended := self._leaving.pop(number, None)) is not None:
            ended.set()

    def _write(self) -> None:
        run = self._trace.run
        attached = tuple(secondary_trainer_section(f) for f in run.followers[self._num_in_file :])
        away = tuple(run.secondary_trainer_names[number - 1] for number in sorted(self.away))
        promoted, names = self._promoted, run.secondary_trainer_names
        leads = ("", 0) if promoted is None else (names[promoted.trainer - 1], promoted.version)
        write_attached(self._records.path, Attached(attached, away, *leads))
