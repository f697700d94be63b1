"""Retry failed work, drop what fails for good, and stop a run that makes no progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamrl.engine.entities import Group
from streamrl.engine.messages import Abort, Close, Command, Drop, Generated, Skip, Stop, Verified
from streamrl.engine.state import State
from streamrl.engine.trainer_side import LEADER, ROLLED_BACK


class RetryThenDrop:
    """Retry a rollout until it has failed `max_attempts` times, then drop its group.

    A rollout is small, and its failure may concern it alone. A failed push, or a failed checkpoint
    of the primary trainer, changes nothing: after `max_attempts` in a row the run stops. Any other
    failure of the primary trainer, or of a load, stops the run at once. The run can be resumed from
    its last checkpoint.
    """

    def __init__(self, max_attempts: int, has_environment: bool = False) -> None:
        self.max_attempts = max_attempts
        # the end of a turn fails an episode whose time is over before its first token
        self.ignores = (Verified,) if has_environment else (Generated, Verified)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield drops of groups whose rollouts failed too often."""
        is_calm = not state.failure_counts.failed and state.failure is None
        return () if is_calm and not self._is_futile(state) else self._give_up(state)

    def _give_up(self, state: State) -> Iterator[Command]:
        if state.failure is not None and state.stop_reason is None:
            yield Stop(state.failure)
        elif self._is_futile(state) and state.stop_reason is None:
            what = f"a push or a checkpoint failed {self.max_attempts} times in a row (policies.max_attempts)"
            yield Stop(f"{what}{state.failure_counts}")
        hopeless = [
            r for r in state.failure_counts.failed.values() if r.failures >= self.max_attempts
        ]
        for rollout in hopeless:
            if rollout.group.is_dropped:
                continue
            if any(trainer.batch.has_begun(rollout.group) for trainer in state.trainers):
                yield Stop(f"rollout {rollout.id} fails, but its siblings are in the gradient")
                return
            yield from drop(rollout.group, f"failed {rollout.failures} times")

    def _is_futile(self, state: State) -> bool:
        """Whether a push or a checkpoint has reached the limit of attempts."""
        return (
            max(state.failure_counts.num_failed_pushes, state.leader.num_failed_saves)
            >= self.max_attempts
        )


class StartOver:
    """Drop the groups of versions that the primary trainer lost.

    Secondary trainers may still train on complete groups.
    """

    ignores = (Generated, Verified)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield aborts and drops until no group of the lost versions remains."""
        return self._clear(state) if state.outlived else ()

    def _clear(self, state: State) -> Iterator[Command]:
        for group in list(state.outlived.values()):
            yield from give_up(state, group, ROLLED_BACK)


class WindDown:
    """Abort running rollouts and drop the remaining groups once the run stops or has all its steps.

    A running step ends first and keeps its groups.
    """

    ignores = (Generated, Verified)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield aborts and drops until no group is left; only aborts while a trainer is still to be saved."""
        if not state.is_stopping or not state.groups:
            return ()
        return _abort_all(state) if state.awaits_save else self._clear(state)

    def _clear(self, state: State) -> Iterator[Command]:
        reason = state.stop_reason or "the run had all its steps"
        for group in list(state.groups.values()):
            stepping = [trainer.id for trainer in state.trainers if trainer.is_stepping_on(group)]
            if state.leader.wants(group) and not stepping:
                yield from drop(group, reason)
                continue
            for trainer in state.trainers:
                if trainer.wants(group) and trainer.id not in stepping:
                    yield Skip(group.id, trainer.id, reason)


def give_up(state: State, group: Group, reason: str) -> Iterator[Command]:
    """Yield the commands that remove a group from the primary trainer; secondary trainers keep complete groups."""
    others = (trainer for trainer in state.trainers if not trainer.leads)
    if not group.num_missing and any(trainer.wants(group) for trainer in others):
        yield Skip(group.id, LEADER, reason)
    else:
        yield from drop(group, reason)


def drop(group: Group, reason: str) -> Iterator[Command]:
    """Yield the aborts of a group's running rollouts, the closes of its environments, then its drop."""
    yield from _abort(group)
    for rollout in group.rollouts:
        if rollout.has_environment:
            yield Close(rollout.id)
    yield Drop(group.id, reason)


def _abort(group: Group) -> Iterator[Command]:
    for rollout in group.rollouts:
        if rollout.replica is not None and not rollout.is_aborting:
            yield Abort(rollout.id, rollout.replica.id)


def _abort_all(state: State) -> Iterator[Command]:
    for group in list(state.groups.values()):
        yield from _abort(group)


MINUTE = 60.0  # seconds
ROUNDING = 1e-6
"""Share of a limit by which a sum of seconds may differ from a difference."""


class StopWithoutProgress:
    """Stop a run without progress, with the most frequent failure reason since its last step.

    Without events there is nothing to count: the world must detect a hang and report it as a loss.
    """

    def __init__(self, max_dropped: int, max_step_time: float) -> None:
        self.max_dropped = max_dropped
        """Limit of consecutive dropped groups."""
        self.max_step_time = max_step_time
        """Limit of seconds without a step."""

    def decide(self, state: State) -> Iterable[Command]:
        """Return the stop of the run once a limit is reached."""
        failure_counts = state.failure_counts
        if state.is_stopping:
            return ()
        if failure_counts.num_dropped >= self.max_dropped:
            limit = f"{failure_counts.num_dropped:,} groups in a row were dropped (policies.max_dropped_groups)"
        elif failure_counts.is_storm(state.now, MINUTE):
            limit = f"{len(failure_counts.failed_at):,} rollouts failed within a minute (policies.max_failures_per_minute)"
        elif state.now - failure_counts.last_step_at > self.max_step_time:
            limit = f"no step was made in {self.max_step_time:,.0f} s (policies.max_step_time)"
        else:
            return ()
        return (Stop(f"{limit}{failure_counts}"),)

    def is_at_rest(self, state: State) -> bool:
        """Return whether no limit is reached. Rollouts that end reach none, except with time."""
        return not self.decide(state)

    def rests_until(self, state: State) -> float:
        """Return when a step takes too long, less what rounding may change."""
        return state.failure_counts.last_step_at + self.max_step_time * (1 - ROUNDING)
