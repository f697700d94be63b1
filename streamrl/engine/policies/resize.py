"""How many replicas, trainers and ranks of trainers run: restarts, promotion, and resizing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

from streamrl.engine.estimates import Latency, StepTimes
from streamrl.engine.messages import (
    Abort,
    Command,
    Generated,
    Promote,
    Resize,
    ResizeTrainer,
    StartReplica,
    StartTrainer,
    Stop,
    StopReplica,
    Verified,
    WakeAt,
)
from streamrl.engine.state import State
from streamrl.runfile.policies_config import PoliciesConfig


class Promotion(NamedTuple):
    """The secondary trainer that replaces the primary one."""

    trainer: int
    after: int
    """Losses of the primary trainer after which it is replaced."""

    @classmethod
    def of(
        cls, policies: PoliciesConfig, secondary_trainer_names: tuple[str, ...]
    ) -> Promotion | None:
        """Return the promotion in a run file; None if there is none."""
        if policies.promote is None:
            return None
        after = 0 if policies.on_leader_loss == "promote" else policies.max_restarts
        return cls(1 + secondary_trainer_names.index(policies.promote), after)


class KeepReplicas:
    """Start the trainers and replicas of the run, and replace those that are lost.

    The replacement of a replica gets a new id. A trainer restarts from its last checkpoint. After
    `max_restarts` losses the run stops, because the cause would repeat; for a secondary trainer,
    the run continues without it. If a promotion is configured, the secondary trainer replaces the
    primary one once the limit is passed, unless it failed or was detached. A surplus replica stops
    once it is idle, so no rollout is interrupted.
    """

    ignores = (Verified,)

    def __init__(self, max_restarts: int, promotion: Promotion | None = None) -> None:
        self.max_restarts = max_restarts
        self.promotion = promotion

    def decide(self, state: State) -> Iterable[Command]:
        """Yield starts of missing replicas and trainers, and stops of surplus ones."""
        return () if self.is_at_rest(state) else self._start(state)

    def is_at_rest(self, state: State) -> bool:
        """Return whether the wanted trainers and replicas are there, or nothing may start or stop."""
        fleet = state.fleet
        is_complete = not state.num_unready and not fleet.num_lacking
        may_start = not state.is_stopping or state.awaits_evaluation
        return is_complete or not state.has_started or not may_start

    def _start(self, state: State) -> Iterator[Command]:
        if not state.is_stopping:
            yield from self._start_trainers(state)
        is_lost = state.pushed_version > state.leader.version or state.has_new_weights
        # a replica would start on GPUs that the trainer has borrowed
        if not is_lost and not state.leader.has_borrowed:
            yield from self._start_replicas(state)

    def _start_trainers(self, state: State) -> Iterator[Command]:
        for trainer in state.trainers:
            if trainer.is_ready or trainer.command is not None or trainer.failure is not None:
                continue
            if trainer.is_away or trainer.is_lent:
                continue
            if trainer.leads and self.promotion is not None and self._waits(state, self.promotion):
                yield from _promote(state, self.promotion)
                continue
            if trainer.num_lost <= self.max_restarts:
                yield StartTrainer(trainer.id, trainer.version, trainer.started_ranks)
            elif trainer.leads:
                yield self._stop(
                    f"the trainer was restarted {self.max_restarts} times and lost again", state
                )

    def _waits(self, state: State, promotion: Promotion) -> bool:
        """Return whether the primary trainer must not start yet, because another trainer replaces it."""
        if state.promoted is not None:
            return state.trainers[state.promoted].is_up
        other = state.trainers[promotion.trainer]
        lives = other.failure is None and other.num_lost <= self.max_restarts
        return lives and not other.is_away and state.leader.num_lost > promotion.after

    def _start_replicas(self, state: State) -> Iterator[Command]:
        fleet = state.fleet
        while fleet.num_lacking > 0:
            kind = fleet.lacking()
            if fleet.kinds[kind].is_lent and not _may_start_lent(state):
                return
            if fleet.num_lost > self.max_restarts:
                yield self._stop(
                    f"{self.max_restarts} replicas were restarted and another was lost", state
                )
                return
            yield StartReplica(fleet.num_started, state.pushed_version, kind)
        while fleet.num_lacking < 0:
            idle = fleet.newest_idle()
            if idle is None or state.is_evaluating:
                return
            yield StopReplica(idle.id)

    def _stop(self, what: str, state: State) -> Stop:
        return Stop(f"{what} (policies.max_restarts){state.failure_counts}")


class ResizeTrainers:
    """Change the data-parallel ranks of a trainer between two of its steps, as the run file or the user wants."""

    ignores = (Generated, Verified)

    def decide(self, state: State) -> Iterable[Command]:
        """Return the due changes."""
        if state.is_stopping or not state.has_started:
            return ()
        return [
            ResizeTrainer(trainer.id, trainer.wanted_ranks)
            for trainer in state.trainers
            if trainer.wanted_ranks != trainer.data_parallel and trainer.can_resize
        ]


class EmptyLeavingReplicas:
    """Move the rollouts of replicas whose machines will be taken away, and stop these replicas in time.

    Rollouts that can finish do so. The others are aborted shortly before the machine goes, or when
    other replicas have newer weights. They continue elsewhere from the tokens that they have. A
    rollout of an evaluation cannot be aborted alone: it runs again if the machine goes first.
    """

    def decide(self, state: State) -> Iterable[Command]:
        """Yield aborts, stops, and the next instant to look."""
        return self._empty(state) if state.fleet.leaving else ()

    def is_at_rest(self, state: State) -> bool:
        """Return whether no machine is about to be taken away."""
        return not state.fleet.leaving

    def _empty(self, state: State) -> Iterator[Command]:
        own = state.evaluations
        evaluating = set() if own is None else set(own.sent.values())
        for replica in list(state.fleet.leaving.values()):
            coming = replica.version if replica.loading is None else replica.loading
            if state.now >= replica.empty_at or coming != state.pushed_version:
                for rollout in replica.rollouts.values():
                    if not rollout.is_aborting:
                        yield Abort(rollout.id, replica.id)
            elif state.next_wake is None or state.next_wake > replica.empty_at:
                yield WakeAt(replica.empty_at)
            has_work = replica.loading is not None or replica.rollouts
            if not has_work and replica.id not in evaluating:
                yield StopReplica(replica.id)


def _may_start_lent(state: State) -> bool:
    """Return whether a replica may start on GPUs of the primary trainer, which then waits."""
    return state.leader.can_lend and state.pushing is None


def _promote(state: State, promotion: Promotion) -> Iterator[Command]:
    """Yield the promotion, once the promoted trainer is up."""
    if state.promoted is None and state.trainers[promotion.trainer].is_ready:
        yield Promote(promotion.trainer, state.leader.version)


class AdjustReplicas:
    """Add replicas while generation lags behind training by more than they gain; optionally release some.

    StreamRL (arXiv 2504.15930), dynamic adjustment: with T_gen and T_train the seconds of the last
    steps, add `unit` replicas when T_gen - T_train >= T_gen(n) - T_gen(n + unit). The right side is
    the measured T_gen times the share that `Latency` (Equation 2) predicts. Releasing replicas is
    our addition.

    Only steps whose generation began with the current target of replicas count, so that the effect
    of the last decision is measured first.
    """

    ignores = (Generated, Verified)

    def __init__(
        self,
        latency: Latency,
        *,
        unit: int,
        most: int,
        window: int,
        shrink_after: int | None,
    ) -> None:
        """Take the replicas added at once, the maximum number of replicas, and the number of steps to average."""
        self.latency = latency
        self.unit = unit
        self.most = most
        self.window = window
        self.shrink_after = shrink_after
        self._steps = deque[StepTimes](maxlen=max(window, shrink_after or 0))
        """The last consecutive steps that began with the same number of replicas."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield a new number of replicas, if the last steps show that it is worth it."""
        last, steps = state.leader.pace.last, self._steps
        if last is None or (steps and last is steps[-1]) or state.is_stopping:
            return ()
        if steps and last.num_replicas != steps[-1].num_replicas:
            steps.clear()
        steps.append(last)
        return self._adjust(state)

    def _adjust(self, state: State) -> Iterator[Command]:
        wanted, steps = state.fleet.num_wanted, list(self._steps)
        if len(steps) < self.window or steps[-1].num_replicas != wanted:
            return
        if wanted + self.unit <= self.most and self.is_worth_growing(state, steps[-self.window :]):
            yield Resize(wanted + self.unit)
        elif wanted > self.unit and self._is_worth_shrinking(state, steps):
            yield Resize(wanted - self.unit)

    def is_worth_growing(self, state: State, steps: list[StepTimes]) -> bool:
        """Return whether generation lags by at least the gain of one more unit."""
        generation_time = median(step.generation_time for step in steps)
        left = self._ratio(state, self.unit)
        lag = median(step.lag for step in steps)
        return lag > 0 and lag >= generation_time * (1 - left)

    def _is_worth_shrinking(self, state: State, steps: list[StepTimes]) -> bool:
        """Return whether generation was faster for long enough, and stays faster with a unit less."""
        if self.shrink_after is None or len(steps) < self.shrink_after:
            return False
        more = self._ratio(state, -self.unit)
        return all(
            step.generation_time * more < step.training_time for step in steps[-self.shrink_after :]
        )

    def _ratio(self, state: State, by: int) -> float:
        """Return generation time with `by` more replicas, divided by the current one."""
        num_rollouts, wanted = state.leader.rollouts_per_step, state.fleet.num_wanted
        now = self.latency.time(num_rollouts, 1.0, wanted)
        return self.latency.time(num_rollouts, 1.0, wanted + by) / now
