"""Serve requests to a running job: attach, detach and resize trainers, and pass on notices. A resume restores the trainers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

from streamrl.engine.messages import (
    Promote,
    RanksRequested,
    RunStarted,
    TrainerJoined,
    TrainerLeaving,
)
from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import LEADER, drawn_again
from streamrl.engine.world import World
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
    Notice,
    RanksRequest,
    read_attached,
    write_attached,
)
from streamrl.executor.subscribers.secondary_records import SecondaryRecords
from streamrl.executor.subscribers.trainers import Trainers
from streamrl.executor.trainer.trainer import StepSettings
from streamrl.record.run_directory import RUN
from streamrl.runfile.checks import check_run
from streamrl.runfile.files import encode_run, secondary_trainer_section, with_secondary_trainer
from streamrl.runfile.formatting import counted
from streamrl.runfile.result_files import write_file
from streamrl.targets.execute_limits import check_back_end_of, check_resize

logger = logging.getLogger(__name__)


class Membership:
    """Attaches, detaches and resizes trainers, records the membership for a resume, and passes on notices."""

    def __init__(
        self,
        trace: Trace,
        records: SecondaryRecords,
        trainers: Trainers,
        launcher: Launcher,
        buffer: RolloutBuffer,
        world: World[Trace],
        give_notices: Callable[[Notice], str],
    ) -> None:
        self._trace = trace
        self._records = records
        self._trainers = trainers
        self._launcher = launcher
        self._buffer = buffer
        self._world = world
        self._give_notices = give_notices
        attached = read_attached(records.path)
        names = trace.run.secondary_trainer_names
        self._num_in_file = len(names) - sum(s["name"] in names for s in attached.followers)
        """Secondary trainers in the original run file."""
        self.away = {names.index(name) + 1 for name in attached.away if name in names}
        """Numbers of detached trainers."""
        self._promoted: Promote | None = None
        if attached.promoted in names:
            number = 1 + names.index(attached.promoted)
            self._promoted = Promote(number, attached.leads_from)
        self._leaving: dict[int, asyncio.Event] = {}
        """Events of trainers that are being detached; each is set when its trainer has ended."""
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, resume_from: Checkpoint | None, *, is_evaluated: bool = False) -> RunStarted:
        """Return the start or resume position of every trainer, and set the buffer to the same position."""
        at = Position(version=0, groups_done=0)
        if resume_from is not None:
            at = resume_from.position
            self._buffer.begin_at(at.groups_done, at.done_ahead)
        saves = ((n, each.resumed_from) for n, each in enumerate(self._records.all, 1))
        followers = (each.position.as_saved(number) for number, each in saves if each is not None)
        promoted = self._resume_promoted(at.version)
        away = tuple(sorted(self.away))
        begun = RunStarted(
            at.version, at.groups_done, tuple(followers), away, promoted, is_evaluated
        )
        for saved in begun.followers:
            for group in drawn_again(begun, saved):
                self._buffer.leave(group, saved.trainer)
        return begun

    def _resume_promoted(self, version: int) -> int | None:
        """Return the trainer that replaces trainer 0 at `version`, or None.

        A checkpoint from before the promotion cancels it: trainer 0 becomes the primary trainer again.
        """
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
        """Make a secondary trainer the primary one; its own process is stopped first."""
        self._trainers.promote(command)
        self._promoted = command
        self.away.add(command.trainer)
        self._write()
        return TrainerLeaving(command.trainer)

    async def serve(self) -> None:
        """Serve requests from the run directory until cancelled."""
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
        except (ValueError, RuntimeError, OSError) as error:
            answer = ControlAnswer(str(error), is_refused=True)
            logger.warning(f"request refused: {error}")
        files.answer(path, answer)

    async def _carry_out(self, request: ControlRequest | ValueError) -> str:
        match request:
            case Attach(section):
                return self.attach(section)
            case Detach(name):
                return await self.detach(name)
            case Notice():
                return self._give_notices(request)
            case RanksRequest(data_parallel):
                return self.request_ranks(data_parallel)
            case ValueError():
                raise request
            case _:
                assert_never(request)

    def attach(self, section: dict[str, Any]) -> str:
        """Attach a trainer and return a message for the user.

        Raises:
            ValueError: the trainer is attached already, its settings are invalid, or all prompts are drawn already.
            RuntimeError: its pool has too few free GPUs.
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
        """Refuse a trainer when all prompts are drawn: it would get no rollouts."""
        state = self._world.engine.state
        if state.has_all_prompts:
            why = f"all prompts of algorithm.steps={state.num_steps} are drawn"
            raise ValueError(
                f"name {name!r}: {why}, and a new trainer gets only groups that are drawn later"
            )

    def _come_back(self, section: dict[str, Any]) -> int:
        run, name = self._trace.run, section["name"]
        number = 1 + run.secondary_trainer_names.index(name)
        if self._promoted is not None and number == self._promoted.trainer:
            raise ValueError(f"name {name!r}: the trainer of that name is now the primary trainer")
        if number not in self.away or number in self._leaving:
            raise ValueError(f"name {name!r}: a trainer of that name is attached already")
        if with_secondary_trainer(run, section).followers[-1] != run.followers[number - 1]:
            raise ValueError(
                f"name {name!r}: the detached trainer of that name had other settings; "
                "use the same settings, or another name"
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
        self._buffer.workload.join(run.followers)
        self._launcher.join(run.followers[-1], self._wanted_replicas())
        record = self._records.join(run.followers[-1].name)
        write_file(self._records.path / RUN, encode_run(run))
        self._trainers.join(StepSettings.of(run.as_seen_by(number)), record)
        self._buffer.join()
        self._trace.join(section)
        return number

    async def detach(self, name: str) -> str:
        """Detach a trainer; return a message for the user when it is saved and has ended.

        Raises:
            ValueError: no trainer of that name is attached.
        """
        names = self._trace.run.secondary_trainer_names
        number = 1 + names.index(name) if name in names else LEADER
        if number == LEADER or number in self.away:
            attached = [n for i, n in enumerate(names, start=1) if i not in self.away]
            known = f"attached are: {', '.join(attached)}" if attached else "none is attached"
            raise ValueError(f"no secondary trainer {name!r} is attached to this run; {known}")
        self.away.add(number)
        self._write()
        self._leaving[number] = ended = asyncio.Event()
        self._world.emit(TrainerLeaving(number))
        await ended.wait()
        return f"{name} has left: {self._trainers.describe(number)}"

    def request_ranks(self, data_parallel: int) -> str:
        """Change the primary trainer's data-parallel ranks after its current step; return a message for the user.

        Raises:
            ValueError: it has so many already, or its ranks cannot change.
            RuntimeError: its pool has too few free GPUs.
        """
        run, leader = self._trace.run, self._world.engine.state.leader
        check_resize(run.trainer, run.policies, run.lending, run.execute.launcher)
        most = run.algorithm.rollouts_per_step
        if not 1 <= data_parallel <= most:
            raise ValueError(
                f"--data-parallel must be 1 to {most}, the rollouts of a step, got {data_parallel}"
            )
        ranks = counted(data_parallel, "data-parallel rank")
        if data_parallel == leader.wanted_ranks:
            raise ValueError(f"the trainer has {ranks} already")
        self._launcher.reserve_ranks(data_parallel, self._wanted_replicas())
        version = leader.version
        self._world.emit(RanksRequested(data_parallel))
        return f"the trainer has {ranks} from step {version + 1} or {version + 2} on"

    def _wanted_replicas(self) -> list[int]:
        """Return the target number of replicas of each kind, with those whose machines are away."""
        return [kind.num_wanted for kind in self._world.engine.state.fleet.kinds]

    def see_stopped(self, number: int) -> None:
        """Record that a trainer has ended, or is lost and will not be restarted."""
        if number in self.away and (ended := self._leaving.pop(number, None)) is not None:
            ended.set()

    def _write(self) -> None:
        run = self._trace.run
        attached = tuple(secondary_trainer_section(f) for f in run.followers[self._num_in_file :])
        away = tuple(run.secondary_trainer_names[number - 1] for number in sorted(self.away))
        promoted, names = self._promoted, run.secondary_trainer_names
        leads = ("", 0) if promoted is None else (names[promoted.trainer - 1], promoted.version)
        write_attached(self._records.path, Attached(attached, away, *leads))
