"""The ledger of a run: check that each drawn rollout was trained on once or dropped with its reason.

The checks use the trace alone, and do not depend on the policies that decided:

1. Each trainer trained once on every drawn rollout, or gave it up with a reason. Rollouts without
either are open. Only an incomplete record, of a killed or endless run, may have open rollouts.
2. Every token that the primary trainer trained on came from a version that was not rolled back. Its
staleness was within the bound, where the run has one.
3. Every replica that serves a pushed version has reported the checksum of that push. It samples
only with versions that it reported to serve.

Rollouts of rolled-back steps are dropped with the reason "rolled back". Rollouts that a resume took
back are not in the ledger, because their prompts are drawn again. The reader forgets a rollout once
every trainer is done with it.

The trace header counts the starts of a run as `leg`: 1 is the first start, 2 the first restart.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import msgspec

from streamrl.engine.entities import kept_of
from streamrl.engine.messages import (
    UNFINISHED,
    CheckpointSaved,
    DrawnGroup,
    Drop,
    Generate,
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
from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import ABSENT, LEADER, ROLLED_BACK, drawn_again
from streamrl.record.message_reader import Handlers, MessageReader
from streamrl.record.served_versions import ServedVersions
from streamrl.runfile.gpu_pools import trainer_names

MOST_FAULTS = 3
"""Maximum faults reported one by one; the first ones explain the cause."""


class TrainerTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The drawn rollouts as one trainer sees them."""

    name: str
    trained: int
    """Rollouts of steps that were not rolled back."""
    dropped: dict[str, int]
    """Rollouts that it dropped, by reason."""
    open: int
    """Rollouts that were unfinished when the record ended."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the ledger of a run balances, and its totals."""

    is_balanced: bool
    drawn: int
    """Rollouts, without those that a resume took back."""
    trainers: list[TrainerTotals]
    """One entry for each trainer, the primary one first."""
    staleness: int
    """Maximum versions that a token was behind the version that trained on it."""
    max_staleness: int | None
    """Maximum that the run file allows, over all starts; None if its consumption has no bound."""
    checksummed: int | None
    """Versions for which every serving replica reported the pushed checksum; None in a simulation.
    """
    unverified: int = 0
    """Versions pushed without a checksum, as in records of earlier versions of this program."""
    legs: int = 1
    """Number of starts and resumes of the run."""
    first_leg: int = 1
    """The first start in the ledger, counted from 1; above 1 if earlier traces are missing."""
    taken_back: int = 0
    """Rollouts whose end a resume took back."""
    faults: list[str] = []
    """The first few faults."""
    num_faults: int = 0


@dataclass(slots=True)
class Faults:
    """Counts the faults of a ledger and keeps the first ones."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, fault: str, of: str = "") -> None:
        """Add a fault; `of` is a prefix that names its trainer."""
        self.count += 1
        if self.count <= MOST_FAULTS:
            self.first.append(of + fault)


KEPT_ACCOUNTS = 4
"""Complete checkpoints whose accounts are kept: more than a run keeps on disk."""


class SavedAccount(NamedTuple):
    """A trainer's account at the moment when a checkpoint was requested."""

    groups_done: int
    done_ahead: frozenset[int]
    trained: int
    dropped: Counter[str]


class SavedAccounts:
    """Keeps a trainer's account at each of its newest checkpoints, and at the one it resumed from.

    Accounts of all checkpoints that were requested later are kept too. Such a checkpoint may be on
    disk although no event reported it.
    """

    def __init__(self) -> None:
        self._accounts: dict[int, SavedAccount] = {}
        """By version, in the order of the requests."""
        self._complete: list[int] = []
        """Versions whose checkpoint is on disk, the newest last."""
        self._resumed: dict[int, SavedAccount] = {}
        """The account of the checkpoint that the run resumed from. That checkpoint stays on disk."""

    def __len__(self) -> int:
        """Return the number of kept accounts."""
        return len(self._accounts.keys() | self._resumed.keys())

    def request(self, version: int, account: SavedAccount) -> None:
        """Keep the account at the moment when a checkpoint is requested."""
        self._accounts.pop(version, None)
        self._accounts[version] = account

    def complete(self, version: int) -> None:
        """Record that the checkpoint of `version` is on disk; drop accounts that no resume can need."""
        if version not in self._accounts:
            return  # it was never requested, so no resume uses it
        kept = [*(other for other in self._complete if other != version), version]
        self._complete = kept[-KEPT_ACCOUNTS:]
        if len(kept) > KEPT_ACCOUNTS:
            requested = list(self._accounts)
            for old in requested[: requested.index(self._complete[0])]:
                del self._accounts[old]

    def resume(self, version: int) -> SavedAccount | None:
        """Return the account at the checkpoint that the run resumes from; None if it was never requested."""
        account = self._accounts.get(version, self._resumed.get(version))
        self._resumed = {} if account is None else {version: account}
        return account


@dataclass(slots=True)
class TrainerAccount:
    """The account of one trainer; `LedgerReader` updates it."""

    name: str
    report_fault: Callable[[str], None]
    """Called with each fault."""
    is_there: bool = True
    """False for a trainer that joins later, until it joins."""
    version: int = 0
    newest: int = 0
    """Newest version that it ever made, rolled back or not."""
    num_trained: int = 0
    """Rollouts in steps that were not rolled back."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rollouts that it dropped, by reason."""
    open: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rollouts of the groups that it has to train on, in draw order."""
    done_before: frozenset[int] = frozenset()
    """Groups that a resume draws again although its checkpoint contains them."""
    groups: tuple[int, ...] = ()
    """Groups of the running step, or of the last one."""

    _in_gradient: set[int] = field(default_factory=set)
    _unsaved: array[int] = field(default_factory=lambda: array("q"))
    """Rollouts of each step since the last checkpoint, up to the one that made `version`."""

    @property
    def num_open(self) -> int:
        """Number of rollouts that the trainer still has to train on."""
        return sum(map(len, self.open.values()))

    @property
    def num_ended(self) -> int:
        """Number of rollouts that the trainer trained on or dropped."""
        return self.num_trained + sum(self.dropped.values())

    def draw(self, groups: dict[int, tuple[int, ...]]) -> None:
        """Record drawn groups; each is open unless the trainer has already trained on it."""
        if self.is_there:
            self.open.update(groups)
            for group in self.done_before.intersection(groups):
                del self.open[group]

    def train(self, rollouts: tuple[int, ...]) -> None:
        """Record that the trainer accumulated the gradient of rollouts."""
        for rollout in self._in_gradient.intersection(rollouts):
            self.report_fault(f"rollout {rollout} was trained on twice in one step")
        self._in_gradient.update(rollouts)

    def end_step(self, version: int) -> set[int]:
        """Record that a step made `version`; return the rollouts that the trainer is done with."""
        made_of = {r for group in self.groups for r in self.open.pop(group, ())}
        trained, self._in_gradient = self._in_gradient, set()
        if trained != made_of:
            self._report_difference(version, trained - made_of, made_of - trained)
        self.version = version
        self.newest = max(self.newest, version)
        self.num_trained += len(made_of)
        self._unsaved.append(len(made_of))
        return made_of

    def _report_difference(self, version: int, others: set[int], missing: set[int]) -> None:
        """Report rollouts that a step trained on outside its open groups, and those it left out of them."""
        is_open = {r for rollouts in self.open.values() for r in rollouts}
        for rollout in sorted(others):
            why = "is in none of its groups" if rollout in is_open else "was not open any more"
            self.report_fault(f"step {version} trained on rollout {rollout}, which {why}")
        for rollout in sorted(missing):
            self.report_fault(f"step {version} lost rollout {rollout} of its own groups")

    def save(self, version: int) -> None:
        """Record that the trainer's checkpoint of `version` is on disk."""
        del self._unsaved[: max(0, len(self._unsaved) - (self.version - version))]

    def lose(self) -> None:
        """Record that the trainer was lost: every step since its last checkpoint is rolled back."""
        if num := sum(self._unsaved):
            self.num_trained -= num
            self.dropped[ROLLED_BACK] += num
        del self._unsaved[:]
        self._in_gradient = set()

    def leave_out(self, group: int, reason: str) -> tuple[int, ...]:
        """Drop a group; return its rollouts, or none if the trainer is already done with them."""
        rollouts = self.open.pop(group, ())
        if rollouts:
            self.dropped[reason] += len(rollouts)
            self._in_gradient.difference_update(rollouts)
        return rollouts

    def fall_back_to(self, version: int, saved: SavedAccount | None) -> None:
        """Return to the account at a checkpoint, without open groups; None stands for an empty account."""
        self.version, self.open = version, {}
        self.num_trained = 0 if saved is None else saved.trained
        self.dropped = Counter() if saved is None else saved.dropped.copy()
        self.groups, self._in_gradient, self.done_before = (), set(), frozenset()
        del self._unsaved[:]


MISSED = "missed with a resume"
"""Why a secondary trainer did not train on groups that are in the primary trainer's checkpoint but
not in its own.
"""
NO_TOKEN = sys.maxsize
"""Version of a rollout without tokens: later than any."""


@dataclass(slots=True)
class Draws:
    """The next group in draw order."""

    next: int = 0
    done_ahead: frozenset[int] = frozenset()
    """Groups that are already done, and so are skipped."""
    is_known: bool = True
    """False for a resumed run with unknown earlier restarts: groups done ahead are then unknown."""

    def pass_to(self, group: int) -> str:
        """Record that a group was drawn; return the fault in the draw order, or an empty text."""
        expected = self.next
        if group == expected and not self.done_ahead:
            self.next += 1
            return ""
        while expected in self.done_ahead:
            expected += 1
        self.next = max(self.next, group + 1)
        if group < expected or group in self.done_ahead:
            return f"group {group} was drawn again although it was done"
        if group > expected and self.is_known:
            return f"group {expected} was never drawn"
        return ""


class LedgerReader(MessageReader):
    """Reads the traces of a run and its restarts block by block, and builds the ledger.

    It keeps the open rollouts and a few numbers for each checkpoint.
    """

    def __init__(self, trace: Trace) -> None:
        """Start an empty ledger.

        Args:
            trace: the trace of the first start, or the earliest one that still exists. Only its
                header is read here; pass its entries to `read`.
        """
        self._faults = Faults()
        has_many = bool(trace.run.followers)
        self._trainers = [self._open(name, has_many) for name in trainer_names(trace.run.followers)]
        self._leader = self._trainers[LEADER]
        self._draws = Draws()
        self._resumed_at = 0
        self._oldest: dict[int, int] = {}
        """By rollout that is open to the primary trainer: the oldest version of its tokens."""
        self._aborted_at: dict[int, int] = {}
        """By rollout with several attempts: its number of tokens after the last abort, or the last turn."""
        self._staleness = self._most_bound = 0
        self._has_ended = False
        """Whether the run has wound down. Then no rollout may be open."""
        self._saved = [SavedAccounts() for _ in self._trainers]
        self._taken_back = 0
        self._has_begun = False
        self._first_leg = trace.leg
        self._first_version = 0
        """Version at which the first trace begins; above 0 if earlier traces are missing. Restarts may return to it."""
        self._served = ServedVersions(self._faults.add) if trace.world == "real" else None
        self.begin_trace(trace)

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handler of each type of message that changes an account."""
        yield {
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
            Train: self._check_staleness,
            Step: self._begin_step,
            Drop: self._drop,
            Skip: self._skip,
            Stop: self._see_end,
            SaveCheckpoint: self._keep,
        }
        if self._has_turns:
            yield {Generate: self._see_sent}
        if self._served is not None:
            yield from self._served.handlers()

    def _open(self, name: str, has_many: bool = True) -> TrainerAccount:
        return TrainerAccount(name, partial(self._faults.add, of=f"{name}: " if has_many else ""))

    def balance(self) -> Ledger:
        """Return the ledger, once all entries are read."""
        leader, served = self._leader, self._served
        self._check_end()
        if served:
            served.check_end()
        if served and served.checksummed and served.unverified:
            versions = _list(sorted(served.unverified))
            self._faults.add(f"versions {versions} were served without a checksum")
        return Ledger(
            is_balanced=not self._faults.count,
            drawn=leader.num_trained + sum(leader.dropped.values()) + leader.num_open,
            trainers=[
                TrainerTotals(
                    name=account.name,
                    trained=account.num_trained,
                    dropped=dict(account.dropped),
                    open=account.num_open,
                )
                for account in self._trainers
            ],
            staleness=self._staleness,
            max_staleness=None if self._most_bound == sys.maxsize else self._most_bound,
            checksummed=len(served.checksummed) if served else None,
            unverified=len(served.unverified) if served else 0,
            legs=self._leg,
            first_leg=self._first_leg,
            taken_back=self._taken_back,
            faults=list(self._faults.first),
            num_faults=self._faults.count,
        )

    # Starts and restarts --------------------------------------------------------------------------

    def begin_trace(self, trace: Trace) -> None:
        """Read the header of the next start's trace; its entries follow by `read`."""
        for name in trainer_names(trace.run.followers)[len(self._trainers) :]:
            self._trainers.append(self._open(name))
            self._saved.append(SavedAccounts())
        for number in trace.joined:
            self._trainers[number].is_there = False
        system = choose_system(trace.run.policies)
        self._leg = trace.leg
        self._has_turns = trace.run.environment is not None
        self._is_in_line = system.consumption == "strict-fifo"
        """Whether the primary trainer takes groups in the order in which they were drawn."""
        self._bound = system.staleness_bound if system.keeps_bound else sys.maxsize
        self._most_bound = max(self._most_bound, self._bound)
        self._group_size = trace.run.algorithm.group_size
        self._num_steps = sys.maxsize if trace.is_endless else trace.run.algorithm.steps

    def _begin(self, event: RunStarted, _: float) -> None:
        """Record a start of the run. A restart returns every account to its checkpoint."""
        if self._has_begun:
            self._check_end()
        elif self._leg == self._first_leg:
            self._first_version = event.version
        saved = self._saved[LEADER].resume(event.version)
        self._draws, self._resumed_at = Draws(event.groups_done), event.version
        if saved is not None:
            self._draws.done_ahead = saved.done_ahead
        elif event.version and event.version == self._first_version:
            self._draws.is_known = False
        elif event.version:
            self._faults.add(f"a restart resumes from step {event.version}, which was never saved")
        if saved is not None and saved.groups_done != event.groups_done:
            known = f"but its checkpoint continues from group {saved.groups_done}"
            self._faults.add(f"a restart resumes from group {event.groups_done}, {known}")
        if self._served is not None:
            self._served.begin(event.version)
        ended = self._leader.num_ended
        self._leader.fall_back_to(event.version, saved)
        self._taken_back += ended - self._leader.num_ended
        for account in self._trainers[LEADER + 1 :]:
            account.fall_back_to(0, None)
        for begun in event.followers:
            self._begin_secondary_trainer(event, begun)
        for account in filter(attrgetter("is_there"), self._trainers[LEADER + 1 :]):
            own = len(account.done_before - self._draws.done_ahead) * self._group_size
            if missed := self._leader.num_ended - (account.num_ended - own):
                account.dropped[MISSED] += missed
        self._oldest.clear()
        self._aborted_at.clear()
        self._has_begun, self._has_ended = True, False

    def _begin_secondary_trainer(self, event: RunStarted, begun: SaveCheckpoint) -> None:
        """Record that a secondary trainer resumes from its own checkpoint."""
        account = self._trainers[begun.trainer]
        saved = self._saved[begun.trainer].resume(begun.version)
        if saved is None and self._first_leg == 1 and not self._first_version:
            account.report_fault(f"resumes from step {begun.version}, which was never saved")
        account.fall_back_to(begun.version, saved)
        account.done_before = drawn_again(event, begun)

    def _keep(self, command: SaveCheckpoint, _: float) -> None:
        """Keep the account to which a resume from this checkpoint returns.

        The run may end before the checkpoint is reported.
        """
        ahead, account = frozenset(command.done_ahead), self._trainers[command.trainer]
        for group in account.open:
            if group < command.groups_done or group in ahead:
                account.report_fault(f"a checkpoint counts group {group} as done, but it is open")
        kept = SavedAccount(command.groups_done, ahead, account.num_trained, account.dropped.copy())
        self._saved[command.trainer].request(command.version, kept)

    def _see_end(self, _: Stop | Interrupted, _time: float) -> None:
        self._has_ended = True

    def _check_end(self) -> None:
        """Report rollouts that are open although the run has wound down."""
        for account in self._trainers if self._has_ended else ():
            for group, rollouts in account.open.items():
                account.report_fault(f"rollouts {_list(rollouts)} of group {group} were lost")

    # Rollouts -------------------------------------------------------------------------------------

    def _see_drawn(self, event: PromptsDrawn, _: float) -> None:
        groups = {drawn.group: drawn.rollouts for drawn in event.groups}
        for account in self._trainers:
            account.draw(groups)
        self._oldest.update(dict.fromkeys(chain.from_iterable(groups.values()), NO_TOKEN))
        for drawn in event.groups:
            if fault := self._draws.pass_to(drawn.group):
                self._faults.add(fault)
            if drawn.kept:
                self._see_kept(drawn)

    def _see_kept(self, drawn: DrawnGroup) -> None:
        """Record the tokens that rollouts kept from before the restart."""
        newest = self._resumed_at if self._leg > 1 else -1
        for rollout, tokens, version in kept_of(drawn):
            if version > newest:
                kept = f"with tokens of version {version}, which no earlier start had made"
                self._faults.add(f"rollout {rollout} was drawn {kept}")
            else:
                self._oldest[rollout], self._aborted_at[rollout] = version, tokens

    def _see_tokens(self, event: Generated, _: float) -> None:
        if self._served is not None:
            self._served.see_sampled(event)
        rollout, version = event.rollout, event.version
        oldest = self._oldest.get(rollout, version)  # a dropped rollout has no entry
        if version < oldest and event.tokens > self._aborted_at.get(rollout, 0):
            self._oldest[rollout] = version
        if (event.finish in UNFINISHED or self._has_turns) and rollout in self._oldest:
            self._aborted_at[rollout] = event.tokens

    def _see_sent(self, command: Generate, _: float) -> None:
        """Forget the tokens of an episode that starts over, because its environment was lost."""
        if not command.prefix and command.rollout in self._oldest:
            self._oldest[command.rollout] = NO_TOKEN
            self._aborted_at.pop(command.rollout, None)

    def _check_staleness(self, command: Train, _: float) -> None:
        """Check the staleness of the tokens that the primary trainer trains on."""
        if command.trainer != LEADER:
            return
        newest = self._leader.version
        versions = [self._oldest.get(rollout, newest) for rollout in command.rollouts]
        staleness = newest - min(versions, default=newest)
        if staleness > self._staleness:
            self._staleness = staleness
        if max(versions, default=newest) > newest or staleness > self._bound:
            self._report_versions(command.rollouts)

    def _report_versions(self, rollouts: tuple[int, ...]) -> None:
        """Report each rollout whose tokens have a version that must not be trained on."""
        newest, bound = self._leader.version, self._bound
        for rollout in rollouts:
            oldest = self._oldest.get(rollout, newest)
            if oldest == NO_TOKEN:
                self._faults.add(f"rollout {rollout} was trained on without a token")
            elif oldest > newest:
                is_made = oldest <= self._leader.newest
                why = "was rolled back" if is_made else "did not exist yet"
                taken = f"with tokens of version {oldest}, which {why}"
                self._faults.add(f"rollout {rollout} was trained on {taken}")
            elif newest - oldest > bound:
                behind = f"{newest - oldest} versions behind, but at most {bound} are allowed"
                self._faults.add(f"rollout {rollout} was trained on with tokens {behind}")

    # Trainers -------------------------------------------------------------------------------------

    def _see_started(self, event: TrainerStarted, _: float) -> None:
        self._trainers[event.trainer].version = event.version

    def _see_trained(self, event: Trained, _: float) -> None:
        self._trainers[event.trainer].train(event.rollouts)

    def _begin_step(self, command: Step, _: float) -> None:
        self._trainers[command.trainer].groups = command.groups

    def _end_step(self, event: Stepped, _: float) -> None:
        account = self._trainers[event.trainer]
        done = account.end_step(event.version)
        if account is not self._leader:
            return
        self._forget(done)
        newest = max(account.groups, default=0)
        if self._is_in_line and (first := next(iter(account.open), newest)) < newest:
            rollouts = _list(account.open[first])
            why = "later groups were trained on first"
            self._faults.add(f"rollouts {rollouts} of group {first} were lost: {why}")
        self._has_ended = self._has_ended or event.version >= self._num_steps

    def _see_saved(self, event: CheckpointSaved, _: float) -> None:
        self._trainers[event.trainer].save(event.version)
        self._saved[event.trainer].complete(event.version)

    def _see_joined(self, event: TrainerJoined, _: float) -> None:
        account = self._trainers[event.trainer]
        if not account.is_there:
            account.is_there = True
            if missed := self._leader.num_ended + self._leader.num_open:
                account.dropped[ABSENT] = missed

    def _see_lost(self, event: TrainerLost | TrainerStopped, _: float) -> None:
        self._trainers[event.trainer].lose()

    def _skip(self, command: Skip, _: float) -> None:
        rollouts = self._trainers[command.trainer].leave_out(command.group, command.reason)
        if not rollouts:
            self._faults.add(
                f"group {command.group} was dropped twice, or after a step trained on it"
            )
        if command.trainer == LEADER:
            self._forget(rollouts)

    def _drop(self, command: Drop, _: float) -> None:
        left = [account.leave_out(command.group, command.reason) for account in self._trainers]
        if not any(left):
            self._faults.add(
                f"group {command.group} was dropped twice, or after a step trained on it"
            )
        self._forget(left[LEADER])

    def _forget(self, rollouts: Iterable[int]) -> None:
        for rollout in rollouts:
            self._oldest.pop(rollout, None)
            if self._aborted_at:
                self._aborted_at.pop(rollout, None)


def _list(rollouts: Iterable[int]) -> str:
    return ", ".join(map(str, rollouts))


def ledger_line(ledger: Ledger) -> str:
    """Return the totals of a ledger as one line: `ledger: 32 rollouts drawn: 32 trained once; …`."""
    return "ledger: " + "; ".join(_parts(ledger))


def describe_faults(ledger: Ledger) -> str:
    """Return the first faults of the ledger; empty if it balances."""
    more = ledger.num_faults - len(ledger.faults)
    return ", ".join(ledger.faults) + (f" and {more:,} more" if more else "")


def _parts(ledger: Ledger) -> Iterator[str]:
    if not ledger.is_balanced:
        yield f"does not balance: {describe_faults(ledger)}"
    if ledger.first_leg > 1:
        yield f"begins with start {ledger.first_leg}, because earlier traces are missing"
    primary, *secondaries = ledger.trainers
    yield f"{ledger.drawn:,} rollouts drawn: {_fates(primary)}"
    for trainer in secondaries:
        yield f"{trainer.name}: {_fates(trainer)}"
    bound = ", not bounded" if ledger.max_staleness is None else f" of {ledger.max_staleness}"
    yield f"staleness at most {ledger.staleness}{bound}"
    if ledger.checksummed is not None:
        yield f"{ledger.checksummed:,} versions checksummed"
    if ledger.unverified:
        yield f"{ledger.unverified:,} recorded without checksums"
    if ledger.legs > 1:
        yield f"{ledger.legs} starts, {ledger.taken_back:,} rollouts taken back by resumes"


def _fates(trainer: TrainerTotals) -> str:
    """Return how many rollouts one trainer trained on and dropped, and how many are open."""
    fates = [f"{trainer.trained:,} trained once"]
    if trainer.dropped:
        by_reason = (
            f"{' '.join(reason.split())}: {num:,}" for reason, num in trainer.dropped.items()
        )
        fates.append(f"{sum(trainer.dropped.values()):,} dropped ({', '.join(by_reason)})")
    if trainer.open:
        fates.append(f"{trainer.open:,} open")
    return ", ".join(fates)
