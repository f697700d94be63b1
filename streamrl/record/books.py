"""Do the books of a run balance: what became of every rollout that was drawn, and of every version that was served?

What must hold, told from the trace alone, whoever decided it:

1. Each trainer has trained once on every rollout that was drawn, or has given it up with a reason. Others are open: only
   a record that breaks off, of a run that was killed or is simulated without an end, may have any of these.
2. Every token that the leader trained on came from a version that it still stood by, and inside the bound on staleness
   where the run has one.
3. Every replica that serves a version which was pushed has found the checksum that it was pushed with, and samples with
   no version but those that it said to serve.

Steps that a loss of their trainer took back are given up, "rolled back". What a resume took back is in no book: its
prompts are drawn again. A rollout is forgotten once every trainer is done with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from streamrl.engine.entities import kept_of
from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    DrawnGroup,
    Drop,
    Event,
    Generated,
    Interrupted,
    PromptsDrawn,
    RunStarted,
    SaveCheckpoint,
    Skip,
    Step,
    Stepped,
    Stop,
    Train,
    Trained,
    TrainerJoined,
    TrainerLost,
    TrainerStarted,
    TrainerStopped,
)
from streamrl.engine.presets import choose_system
from streamrl.engine.trainer_side import ABSENT, LEADER, drawn_again
from streamrl.record.balance import Balance, Faults, TrainerBalance
from streamrl.record.saved_books import SavedBook, SavedBooks
from streamrl.record.served import ServedVersions
from streamrl.record.trace import Trace
from streamrl.record.trainer_book import TrainerBook
from streamrl.runfile.sides import trainer_names

MISSED = "missed with a resume"
"""Why a trainer that follows has not trained on what the leader's checkpoint has, and its own has not."""
NO_TOKEN = sys.maxsize
"""Version of a rollout that has no token yet: later than any."""


@dataclass(slots=True)
class Draws:
    """Which group comes next in draw order."""

    next: int = 0
    done_ahead: frozenset[int] = frozenset()
    """Groups that are done, and so are left out."""
    is_known: bool = True
    """False of a resumed run of whose earlier legs nothing is known: there nobody can say what was done ahead."""

    def pass_to(self, group: int) -> str:
        """Enter that a group was drawn; return what is wrong with that, if anything."""
        expected = self.next
        while expected in self.done_ahead:
            expected += 1
        self.next = max(self.next, group + 1)
        if group < expected or group in self.done_ahead:
            return f"group {group} was drawn again, though it was done"
        if group > expected and self.is_known:
            return f"group {expected} was never drawn"
        return ""


class Books:
    """Reads a run block by block, leg by leg; keeps what is open, and a few numbers of each checkpoint."""

    def __init__(self, trace: Trace) -> None:
        """Open the books.

        Args:
            trace: the record of the run's first leg, or of the first that is left; its entries are read by `read`.
        """
        self._faults = Faults()
        has_many = bool(trace.run.followers)
        self._trainers = [self._open(name, has_many) for name in trainer_names(trace.run)]
        self._leader = self._trainers[LEADER]
        self._draws = Draws()
        self._resumed_at = 0
        self._oldest: dict[int, int] = {}
        """Oldest version that a token of each rollout is of, while it is open to the leader."""
        self._aborted_at: dict[int, int] = {}
        """Tokens of those that are generated in several attempts."""
        self._staleness = 0
        self._has_ended = False
        """Whether the run has wound down, so that nothing may be open."""
        self._saved = [SavedBooks() for _ in self._trainers]
        self._taken_back = 0
        self._has_begun = False
        self._first_leg = trace.leg
        self._served = ServedVersions(self._faults.add) if trace.world == "real" else None
        self.begin_leg(trace)
        self._observe: dict[type[Event], Callable[[Any], None]] = {
            Generated: self._see_tokens,
            Trained: self._see_trained,
            Stepped: self._end_step,
            PromptsDrawn: self._see_drawn,
            CheckpointSaved: self._see_saved,
            TrainerStarted: self._see_started,
            TrainerLost: self._see_lost,
            TrainerStopped: self._see_lost,
            TrainerJoined: self._see_joined,
            RunStarted: self._begin,
            Interrupted: self._see_end,
            **(self._served.observe if self._served else {}),
        }
        self._obey: dict[type[Command], Callable[[Any], None]] = {
            Train: self._check_staleness,
            Step: self._begin_step,
            Drop: self._drop,
            Skip: self._skip,
            Stop: self._see_end,
            SaveCheckpoint: self._keep,
            **(self._served.obey if self._served else {}),
        }

    def _open(self, name: str, has_many: bool = True) -> TrainerBook:
        return TrainerBook(name, partial(self._faults.add, of=f"{name}: " if has_many else ""))

    def read(self, entries: Iterable[tuple[float, Event, Sequence[Command]]]) -> None:
        """Take the entries that come after those before."""
        observe, obey = self._observe.get, self._obey.get
        for _, event, commands in entries:
            if (see := observe(type(event))) is not None:
                see(event)
            for command in commands:
                if (take := obey(type(command))) is not None:
                    take(command)

    def balance(self) -> Balance:
        """Say how the books stand, once all is read."""
        leader, served = self._leader, self._served
        self._check_end()
        if served:
            served.check_end()
        if served and served.checksummed and served.unverified:
            versions = _list(sorted(served.unverified))
            self._faults.add(f"versions {versions} were served without a checksum")
        return Balance(
            is_balanced=not self._faults.count,
            drawn=leader.num_trained + sum(leader.dropped.values()) + leader.num_open,
            trainers=[
                TrainerBalance(
                    name=book.name,
                    trained=book.num_trained,
                    dropped=dict(book.dropped),
                    open=book.num_open,
                )
                for book in self._trainers
            ],
            staleness=self._staleness,
            max_staleness=self._max_staleness,
            checksummed=len(served.checksummed) if served else None,
            unverified=len(served.unverified) if served else 0,
            legs=self._leg,
            first_leg=self._first_leg,
            taken_back=self._taken_back,
            faults=list(self._faults.first),
            num_faults=self._faults.count,
        )

    # Legs -----------------------------------------------------------------------------------------

    def begin_leg(self, trace: Trace) -> None:
        """Take what a leg's trace says of its run file; its entries come next."""
        for name in trainer_names(trace.run)[len(self._trainers) :]:
            self._trainers.append(self._open(name))
            self._saved.append(SavedBooks())
        for number in trace.joined:
            self._trainers[number].is_there = False
        system = choose_system(trace.run.policies)
        self._leg = trace.leg
        self._is_in_line = system.consumption == "strict-fifo"
        """Whether the leader takes groups in the order of their draw."""
        self._max_staleness = system.staleness_bound if system.keeps_bound else None
        self._bound = sys.maxsize if self._max_staleness is None else self._max_staleness
        self._group_size = trace.run.algorithm.group_size
        self._num_steps = sys.maxsize if trace.is_endless else trace.run.algorithm.steps

    def _begin(self, event: RunStarted) -> None:
        """Enter that the run begins, or goes on: with a later leg all is as it was at its checkpoint."""
        if self._has_begun:
            self._check_end()
        saved = self._saved[LEADER].resume(event.version)
        self._draws, self._resumed_at = Draws(event.groups_done), event.version
        if saved is not None:
            self._draws.done_ahead = saved.done_ahead
        elif event.version and not self._has_begun and self._leg == self._first_leg:
            self._draws.is_known = False
        elif event.version:
            self._faults.add(f"a leg resumes from step {event.version}, which was never saved")
        if saved is not None and saved.groups_done != event.groups_done:
            known = f"but its checkpoint from group {saved.groups_done}"
            self._faults.add(f"a leg resumes from group {event.groups_done}, {known}")
        if self._served is not None:
            self._served.begin(event.version)
        ended = self._leader.num_ended
        self._leader.fall_back_to(event.version, saved)
        self._taken_back += ended - self._leader.num_ended
        for book in self._trainers[LEADER + 1 :]:
            book.fall_back_to(0, None)
        for begun in event.followers:
            self._begin_follower(event, begun)
        for book in filter(attrgetter("is_there"), self._trainers[LEADER + 1 :]):
            own = len(book.done_before - self._draws.done_ahead) * self._group_size
            if missed := self._leader.num_ended - (book.num_ended - own):
                book.dropped[MISSED] += missed
        self._oldest.clear()
        self._aborted_at.clear()
        self._has_begun, self._has_ended = True, False

    def _begin_follower(self, event: RunStarted, begun: SaveCheckpoint) -> None:
        """Enter that a trainer which follows goes on from a checkpoint of its own."""
        book = self._trainers[begun.trainer]
        saved = self._saved[begun.trainer].resume(begun.version)
        if saved is None and self._first_leg == 1:
            book.complain(f"goes on from step {begun.version}, which was never saved")
        book.fall_back_to(begun.version, saved)
        book.done_before = drawn_again(event, begun)

    def _keep(self, command: SaveCheckpoint) -> None:
        """Keep what a resume goes back to, once the checkpoint is there; that may be the last thing a run did."""
        ahead, book = frozenset(command.done_ahead), self._trainers[command.trainer]
        for group in book.open:
            if group < command.groups_done or group in ahead:
                book.complain(f"group {group} is done by a checkpoint, though it is open")
        kept = SavedBook(command.groups_done, ahead, book.num_trained, book.dropped.copy())
        self._saved[command.trainer].ask(command.version, kept)

    def _see_end(self, _: Stop | Interrupted) -> None:
        self._has_ended = True

    def _check_end(self) -> None:
        """Take note of what is open though the run wound down."""
        for book in self._trainers if self._has_ended else ():
            for group, rollouts in book.open.items():
                book.complain(f"rollouts {_list(rollouts)} of group {group} were lost")

    # Rollouts -------------------------------------------------------------------------------------

    def _see_drawn(self, event: PromptsDrawn) -> None:
        for drawn in event.groups:
            if fault := self._draws.pass_to(drawn.group):
                self._faults.add(fault)
            for book in self._trainers:
                book.draw(drawn)
            self._oldest.update(dict.fromkeys(drawn.rollouts, NO_TOKEN))
            if drawn.kept:
                self._see_kept(drawn)

    def _see_kept(self, drawn: DrawnGroup) -> None:
        """Enter tokens that rollouts have from before the run was resumed."""
        newest = self._resumed_at if self._leg > 1 else -1
        for rollout, tokens, version in kept_of(drawn):
            if version > newest:
                what = f"with tokens of version {version}, which was made before no resume"
                self._faults.add(f"rollout {rollout} was drawn {what}")
            else:
                self._oldest[rollout], self._aborted_at[rollout] = version, tokens

    def _see_tokens(self, event: Generated) -> None:
        if self._served is not None:
            self._served.see_sampled(event)
        rollout, version = event.rollout, event.version
        oldest = self._oldest.get(rollout, version)  # of one that was given up nobody wants to know
        if version < oldest and event.tokens > self._aborted_at.get(rollout, 0):
            self._oldest[rollout] = version
        if event.finish == "aborted" and rollout in self._oldest:
            self._aborted_at[rollout] = event.tokens

    def _check_staleness(self, command: Train) -> None:
        """Compare the tokens that the leader trains on with the version that it trains from."""
        if command.trainer != LEADER:
            return
        newest = self._leader.version
        versions = [self._oldest.get(rollout, newest) for rollout in command.rollouts]
        staleness = newest - min(versions, default=newest)
        if staleness > self._staleness:
            self._staleness = staleness
        if max(versions, default=newest) > newest or staleness > self._bound:
            self._blame(command.rollouts)

    def _blame(self, rollouts: tuple[int, ...]) -> None:
        """Take note of every rollout that may not be trained on with the tokens it has."""
        newest, bound = self._leader.version, self._bound
        for rollout in rollouts:
            oldest = self._oldest.get(rollout, newest)
            if oldest == NO_TOKEN:
                self._faults.add(f"rollout {rollout} was trained on without a token")
            elif oldest > newest:
                is_made = oldest <= self._leader.newest
                why = "was taken back" if is_made else "was never made by then"
                taken = f"with tokens of version {oldest}, which {why}"
                self._faults.add(f"rollout {rollout} was trained on {taken}")
            elif newest - oldest > bound:
                behind = f"{newest - oldest} versions behind, {bound} are allowed"
                self._faults.add(f"rollout {rollout} was trained on with tokens {behind}")

    # Trainers -------------------------------------------------------------------------------------

    def _see_started(self, event: TrainerStarted) -> None:
        self._trainers[event.trainer].version = event.version

    def _see_trained(self, event: Trained) -> None:
        self._trainers[event.trainer].train(event.rollouts)

    def _begin_step(self, command: Step) -> None:
        self._trainers[command.trainer].groups = command.groups

    def _end_step(self, event: Stepped) -> None:
        book = self._trainers[event.trainer]
        done = book.end_step(event.version)
        if book is not self._leader:
            return
        self._forget(done)
        newest = max(book.groups, default=0)
        if self._is_in_line and (first := next(iter(book.open), newest)) < newest:
            rollouts = _list(book.open[first])
            self._faults.add(f"rollouts {rollouts} of group {first} were lost: later ones trained")
        self._has_ended = self._has_ended or event.version >= self._num_steps

    def _see_saved(self, event: CheckpointSaved) -> None:
        self._trainers[event.trainer].save(event.version)
        self._saved[event.trainer].complete(event.version)

    def _see_joined(self, event: TrainerJoined) -> None:
        book = self._trainers[event.trainer]
        if not book.is_there:
            book.is_there = True
            if missed := self._leader.num_ended + self._leader.num_open:
                book.dropped[ABSENT] = missed

    def _see_lost(self, event: TrainerLost | TrainerStopped) -> None:
        self._trainers[event.trainer].lose()

    def _skip(self, command: Skip) -> None:
        rollouts = self._trainers[command.trainer].leave_out(command.group, command.reason)
        if not rollouts:
            self._faults.add(f"group {command.group} was given up twice, or after a step")
        if command.trainer == LEADER:
            self._forget(rollouts)

    def _drop(self, command: Drop) -> None:
        left = [book.leave_out(command.group, command.reason) for book in self._trainers]
        if not any(left):
            self._faults.add(f"group {command.group} was given up twice, or after a step")
        self._forget(left[LEADER])

    def _forget(self, rollouts: Iterable[int]) -> None:
        for rollout in rollouts:
            self._oldest.pop(rollout, None)
            if self._aborted_at:
                self._aborted_at.pop(rollout, None)


def _list(rollouts: Iterable[int]) -> str:
    return ", ".join(map(str, rollouts))
