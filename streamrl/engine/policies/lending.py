"""When GPUs change sides: those of the primary trainer generate while it waits, or those of replicas train meanwhile.

`LendTrainer`: at the beginning of a step the trainer lends its GPUs, if the coming step lacks enough rollouts. It takes them back once
a share of the step's rollouts is ready. The rollouts that run there then continue on other replicas, whose KV cache is
computed again. The rules and the default values are those of verl's `trainer.v1.separate_async.hybrid_rollout`
(github.com/verl-project/verl, verl/trainer/ppo/v1/trainer_separate_async.py):

    lend if     missing x wait_time x gain > switch_time
    gain        1 - capacity of other replicas / capacity of all replicas
    missing     rollouts that are not ready, up to the share
    wait_time   seconds for each missing rollout in the last four steps, if nothing had been lent
    switch_time mean of the last three switches, there and back

Two rules are our additions. Waits are summed over four steps, because batches that are generated together make steps of
alternating length. If no rollout waits when GPUs are lent, other replicas hand over the rollouts that they got last.

`BorrowReplicas`: once all rollouts of the coming step are ready and no replica has work, all replicas sleep and their
GPUs join the trainer as data-parallel ranks. They return after the step. Its rule is the same one, the other way round:

    borrow if   left x train_time x gain > switch_time
    gain        borrowed ranks / all ranks
    left        rollouts of the step that the trainer has not begun
    train_time  seconds of passes for each rollout in the last three steps, with the trainer's own ranks only
    switch_time mean of the last three changes, there and back

Replicas are borrowed only together. So whatever GPU a lost replica had, its replacement finds it free after the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import NamedTuple

from streamrl.engine.engine import Policy
from streamrl.engine.entities import Replica
from streamrl.engine.estimates import StepTimes
from streamrl.engine.messages import (
    Abort,
    Command,
    Generated,
    Lend,
    ResizeTrainer,
    TakeBack,
)
from streamrl.engine.policies.evaluation import take_optional
from streamrl.engine.state import State
from streamrl.engine.trainer_side import TrainerSide

STEP_UP, STEP_DOWN = 0.05, 0.03
"""Change of the share after `PATIENCE` steps in which the trainer waited, or did not wait, for rollouts."""
PATIENCE = 2
WINDOW = 3
"""Switches whose mean time counts."""
IDLE_SHARE = 0.05
"""Share of a step in which a trainer may wait without counting as waiting. verl has 2 s; a share suits steps of any
length.
"""
LEAST_LEFT = 0.01
"""Least capacity that other replicas are taken to have, as a share, while all of them are gone."""
STEPS = 4
"""Steps whose waits are summed: an even number, for steps that alternate."""


class StepWait(NamedTuple):
    """How long the trainer waited for rollouts in a step."""

    step_time: float
    """Seconds of the step."""
    waited: float
    """Seconds in which the trainer waited although it had its GPUs."""
    alone: float
    """Seconds in which it would have waited if it had lent nothing."""
    lacked: int
    """Rollouts that were not ready at the beginning."""


class LendTrainer:
    """Lend the primary trainer's GPUs at the beginning of a step, and take them back when enough rollouts are ready."""

    ignores = (Generated,)

    def __init__(self, until: float, fill: int, *, adapts: bool) -> None:
        self.until = until
        """Share of a step's rollouts that must be ready before the trainer takes its GPUs back."""
        self.fill = fill
        """Rollouts that the trainer needs at least, so that it has work when it has its GPUs again."""
        self.adapts = adapts
        self.holds_trainer = False
        """Whether the trainer's GPUs are lent, or will be once the replicas can load its weights."""
        self._step: tuple[int, int] | None = None
        """Version and number of losses of the primary trainer, which tell steps apart."""
        self._began_at = self._lent_time = 0.0
        self._num_ready = 0
        """Rollouts that were ready at the beginning of the step."""
        self._waits = deque[StepWait](maxlen=STEPS)
        self._to_lend, self._to_return = deque[float](maxlen=WINDOW), deque[float](maxlen=WINDOW)
        """Seconds of the last switches."""
        self._lending_since: float | None = None
        self._returning_since: float | None = None
        self._num_idle = self._num_calm = 0
        """Consecutive steps in which the trainer waited, or did not."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the commands that lend GPUs or take them back."""
        if not state.leader.is_ready and not state.fleet.lent:
            self.holds_trainer = False
            return ()
        return self._decide(state)

    def is_at_rest(self, state: State) -> bool:
        """Return whether no reward changes anything."""
        return not self.holds_trainer

    def _decide(self, state: State) -> Iterator[Command]:
        self._see_switches(state)
        leader = state.leader
        step = leader.version, leader.num_lost
        if step != self._step and leader.is_ready:
            self._learn(state, step)
            self._step = step
            self._began_at, self._lent_time = state.now, 0.0
            self._num_ready = _num_ready(state)
            self.holds_trainer = self._pays(state)
        if self.holds_trainer and self._is_over(state):
            self.holds_trainer = False
            self._lent_time = state.now - self._began_at
        if self.holds_trainer:
            yield from self._lend(state)
        else:
            yield from self._take_back(state)

    def _is_over(self, state: State) -> bool:
        enough = _num_ready(state) >= self._threshold(state)
        return enough or state.is_stopping or not state.leader.is_ready

    def _threshold(self, state: State) -> int:
        """Return the number of ready rollouts at which the trainer takes its GPUs back."""
        needed = state.leader.rollouts_per_step
        return min(needed, max(self.fill, round(self.until * needed)))

    # Whether to lend ------------------------------------------------------------------------------

    def _pays(self, state: State) -> bool:
        """Return whether lending saves more than both switches take; unknown times count as if it did."""
        missing = self._threshold(state) - self._num_ready
        if missing <= 0 or state.is_stopping:
            return False
        lacked = sum(each.lacked for each in self._waits)
        if not lacked or not self._to_lend or not self._to_return:
            return True
        wait_time = sum(each.alone for each in self._waits) / lacked
        switch_time = fmean(self._to_lend) + fmean(self._to_return)
        return missing * wait_time * _gain(state) > switch_time

    def _learn(self, state: State, step: tuple[int, int]) -> None:
        """Measure the last step, unless the trainer was lost in it."""
        before, last = self._step, state.leader.pace.last
        if before is None or step != (before[0] + 1, before[1]):
            return
        if last is None or last.step != step[0]:
            return
        step_time = state.now - self._began_at
        waited = max(0.0, step_time - self._lent_time - last.training_time)
        lacked = max(0, state.leader.rollouts_per_step - self._num_ready)
        alone = self._lent_time / max(LEAST_LEFT, 1 - _gain(state)) + waited
        self._waits.append(StepWait(step_time, waited, alone, lacked))
        if self.adapts:
            waited = sum(each.waited for each in self._waits)
            limit = IDLE_SHARE * sum(each.step_time for each in self._waits)
            self._adapt(state, has_waited=waited > limit)

    def _adapt(self, state: State, *, has_waited: bool) -> None:
        """Take GPUs back later if the trainer waited afterwards, and earlier if it did not."""
        self._num_idle = self._num_idle + 1 if has_waited else 0
        self._num_calm = 0 if has_waited else self._num_calm + 1
        least = min(1.0, self.fill / state.leader.rollouts_per_step)
        if self._num_idle >= PATIENCE:
            self.until = min(1.0, self.until + STEP_UP)
        elif self._num_calm >= PATIENCE:
            self.until = max(least, self.until - STEP_DOWN)

    def _see_switches(self, state: State) -> None:
        """Measure the switches that have ended."""
        lent = state.fleet.lent.values()
        if self._lending_since is not None and all(replica.is_serving for replica in lent):
            if lent:
                self._to_lend.append(state.now - self._lending_since)
            self._lending_since = None
        if self._returning_since is not None and not lent:
            self._to_return.append(state.now - self._returning_since)
            self._returning_since = None

    # Switches -------------------------------------------------------------------------------------

    def _lend(self, state: State) -> Iterator[Command]:
        """Yield the commands that lend GPUs to all sleeping replicas, once these can load the trainer's weights."""
        if not _is_pushed(state) or not state.leader.can_lend or not state.fleet.asleep:
            return
        self._lending_since = state.now
        for replica in list(state.fleet.asleep):
            yield Lend(replica, state.pushed_version)
        if state.waiting.first() is None:
            yield from _hand_over(state)

    def _take_back(self, state: State) -> Iterator[Command]:
        """Yield the aborts of rollouts on lent GPUs, then the commands that return these GPUs."""
        for replica in list(state.fleet.lent.values()):
            if not replica.is_serving:
                continue  # a switch is running
            self._returning_since = state.now
            yield from _aborts(replica, len(replica.rollouts))
            yield TakeBack(replica.id)


class WhileNotLending:
    """Runs the policy of the primary trainer's work, except while its GPUs are lent or will be."""

    def __init__(self, policy: Policy, lending: LendTrainer) -> None:
        self.policy = policy
        self.lending = lending
        take_optional(policy, self)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the trainer's next work, unless it waits."""
        return () if self.lending.holds_trainer else self.policy.decide(state)


class BorrowReplicas:
    """Let the GPUs of all replicas train while nothing is left to generate for the coming step, if that pays."""

    def __init__(self) -> None:
        self._version: int | None = None
        """Version whose next step borrows GPUs; None if none does."""
        self._last: StepTimes | None = None
        self._is_new = True
        """Whether the other ranks have never joined the running trainer. They then also load their models, so the first
        switch does not count.
        """
        self._num_alone: int | None = None
        """Rollouts of the step that the trainer's own ranks trained on, before the others joined."""
        self._train_times = deque[float](maxlen=WINDOW)
        self._to_borrow, self._to_return = deque[float](maxlen=WINDOW), deque[float](maxlen=WINDOW)
        """Seconds of the last switches."""
        self._borrowing_since: float | None = None
        self._returning_since: float | None = None
        self._leaving_time = 0.0
        """Seconds in which the borrowed ranks last left."""
        self._waking_since: float | None = None

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the commands that borrow GPUs or return them."""
        leader = state.leader
        self._see_switches(state)
        self._learn(leader)
        if self._version is not None and self._is_over(state):
            self._version = None
        if leader.has_borrowed:
            return self._return(state)
        if self._version is not None:
            return self._borrow(state)
        if state.fleet.asleep:
            return self._wake(state)
        if _has_nothing_to_generate(state) and self._pays(leader):
            return self._take(state)
        return ()

    def _is_over(self, state: State) -> bool:
        """Return whether the step is over, or a replica was lost before its GPUs joined."""
        leader, fleet = state.leader, state.fleet
        is_whole = leader.has_borrowed or len(fleet.replicas) == fleet.num_wanted
        return leader.version != self._version or not leader.is_ready or not is_whole

    def _pays(self, leader: TrainerSide) -> bool:
        """Return whether borrowing saves more than both switches take; unknown times count as if it did."""
        batch = leader.batch
        left = leader.rollouts_per_step - len(batch.in_gradient) - len(batch.in_hand)
        if not left or not (self._train_times and self._to_borrow and self._to_return):
            return left > 0
        gain = leader.borrowable / (leader.data_parallel + leader.borrowable)
        switch_time = fmean(self._to_borrow) + fmean(self._to_return)
        return left * fmean(self._train_times) * gain > switch_time

    def _learn(self, leader: TrainerSide) -> None:
        """Measure the last step."""
        last = leader.pace.last
        if last is None or last is self._last:
            return
        self._last = last
        own, needed = leader.wanted_ranks, leader.rollouts_per_step
        num_alone = needed if self._num_alone is None else self._num_alone
        together = (needed - num_alone) * own / (own + leader.borrowable)
        passes_time = last.training_time - last.update_time
        self._train_times.append(passes_time / (num_alone + together))
        self._num_alone = None

    def _see_switches(self, state: State) -> None:
        """Measure the switches that have ended; those of a lost trainer do not count."""
        leader, fleet = state.leader, state.fleet
        is_changing = isinstance(leader.command, ResizeTrainer)
        if not leader.is_ready:
            self._borrowing_since, self._is_new = None, True
        elif self._borrowing_since is not None and leader.has_borrowed and not is_changing:
            if not self._is_new:
                self._to_borrow.append(state.now - self._borrowing_since)
            self._borrowing_since, self._is_new = None, False
            self._num_alone = len(leader.batch.in_gradient)
        if self._returning_since is not None and not is_changing:
            self._leaving_time = state.now - self._returning_since
            self._returning_since = None
        if self._waking_since is not None and all(r.is_serving for r in fleet.replicas.values()):
            self._to_return.append(self._leaving_time + state.now - self._waking_since)
            self._waking_since = None

    def _take(self, state: State) -> Iterator[Command]:
        self._version = state.leader.version
        self._borrowing_since = state.now if state.leader.is_free else None
        for replica in list(state.fleet.replicas):
            yield TakeBack(replica)

    def _borrow(self, state: State) -> Iterator[Command]:
        """Yield the change of ranks, once all replicas sleep and the trainer is free."""
        leader, fleet = state.leader, state.fleet
        if leader.is_free and len(fleet.asleep) == len(fleet.replicas) and not state.is_stopping:
            if self._borrowing_since is None:
                self._borrowing_since = state.now
            yield ResizeTrainer(leader.id, leader.data_parallel + leader.borrowable)

    def _return(self, state: State) -> Iterator[Command]:
        """Yield the change of ranks after the step, unless the run ends with it."""
        leader = state.leader
        if self._version is None and leader.can_resize and not _needs_nobody(state):
            self._returning_since = state.now
            yield ResizeTrainer(leader.id, leader.wanted_ranks)

    def _wake(self, state: State) -> Iterator[Command]:
        """Yield the commands that let replicas generate again, once they can load the newest weights."""
        if not _is_pushed(state) or _needs_nobody(state):
            return
        self._waking_since = state.now
        for replica in list(state.fleet.asleep):
            yield Lend(replica, state.pushed_version)


def _needs_nobody(state: State) -> bool:
    """Return whether no replica generates any more, because the run ends."""
    return state.is_stopping and not state.awaits_evaluation


def _has_nothing_to_generate(state: State) -> bool:
    """Return whether all rollouts of the coming step are ready, and all replicas are idle with the newest weights."""
    fleet, leader, own = state.fleet, state.leader, state.evaluations
    if len(fleet.idle) != len(fleet.replicas) or _num_ready(state) < leader.rollouts_per_step:
        return False
    is_quiet = not state.num_drawing and not state.is_generating and state.waiting.first() is None
    is_whole = leader.is_ready and len(fleet.replicas) == fleet.num_wanted
    is_evaluating = own is not None and (own.is_pending or own.has_open_rollouts)
    return is_quiet and is_whole and state.is_synced and not is_evaluating and not state.is_stopping


def _is_pushed(state: State) -> bool:
    """Return whether replicas can load the trainer's weights."""
    is_lost = state.pushed_version > state.leader.version
    return state.pushing is None and not state.must_push and not is_lost


def _num_ready(state: State) -> int:
    """Return the rollouts of the coming step that have a reward."""
    batch = state.leader.batch
    waiting = len(batch.unscored) + len(batch.trainable)
    return waiting + len(batch.in_hand) + len(batch.in_gradient)


def _gain(state: State) -> float:
    """Return the share of the generating capacity that is on the trainer's GPUs."""
    replicas = state.fleet.replicas.values()
    capacity = [(r.share, r.is_lent) for r in replicas if r.leaves_at is None]
    lent = sum(share for share, is_lent in capacity if is_lent)
    return lent / (sum(share for share, _ in capacity) or 1.0)


def _hand_over(state: State) -> Iterator[Command]:
    """Yield aborts of the rollouts that replicas got last and that are more than their part; lent GPUs get these."""
    replicas = [r for r in state.fleet.replicas.values() if r.promised is not None]
    part = state.num_generating / sum(replica.share for replica in replicas)
    for replica in replicas:
        if not replica.is_lent:
            yield from _aborts(replica, int(len(replica.rollouts) - part * replica.share))


def _aborts(replica: Replica, most: int) -> Iterator[Command]:
    """Yield aborts of the rollouts that a replica got last."""
    for rollout in list(reversed(replica.rollouts.values()))[: max(0, most)]:
        if not rollout.is_aborting:
            yield Abort(rollout.id, replica.id)
