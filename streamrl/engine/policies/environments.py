"""When environments start, answer and are closed, and when the time of an episode is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamrl.engine.entities import Rollout
from streamrl.engine.environments import DUE, Environments
from streamrl.engine.messages import Abort, Act, Close, Command, Truncate, WakeAt
from streamrl.engine.state import State


class RunEnvironments:
    """Close environments that are done, let others answer at once, and start new ones within their limits.

    An environment starts only when a replica has, or loads, weights that are fresh enough for its
    first turn. So no sandbox waits for weights. While an evaluation holds training, no environment of
    training starts. Episodes that have one go on, because the evaluation may need their sandboxes.
    """

    def decide(self, state: State) -> Iterable[Command]:
        """Yield closes, actions and starts."""
        own = state.environments
        if own is None or not (own.to_close or own.to_act or own.queue or own.held_out):
            return ()
        return self._run(state, own)

    def _run(self, state: State, own: Environments) -> Iterator[Command]:
        while (rollout := own.next_to_close()) is not None:
            yield Close(rollout.id)
        if state.stop_reason is not None:
            return
        while (rollout := own.next_to_act()) is not None:
            limit = own.time_limit(rollout, state.now)
            yield Act(rollout.id, rollout.turn + 1, time_limit=limit)
        while state.fleet.has_come_up and (rollout := own.next_to_start()) is not None:
            if not state.fleet.serves(rollout.group) or _is_held(state, rollout):
                return
            limit = own.time_limit(rollout, state.now)
            turn = rollout.turn + rollout.is_turn_over
            yield Act(rollout.id, turn, starts=True, time_limit=limit)


def _is_held(state: State, rollout: Rollout) -> bool:
    """Return whether an episode of training waits for an evaluation."""
    evaluations = state.evaluations
    return evaluations is not None and not rollout.is_held_out and evaluations.holds_training


class EndOverdue:
    """End each episode whose time is over with the tokens that it has."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the ends of overdue episodes, and an instant to look again."""
        own = state.environments
        first = None if own is None else own.next_deadline()
        is_over = state.is_stopping and not state.awaits_evaluation
        if own is None or first is None or is_over:
            return ()
        if first.deadline - DUE > state.now:
            return () if _is_set(state, first.deadline) else (WakeAt(first.deadline),)
        return self._end(state, own)

    def _end(self, state: State, own: Environments) -> Iterator[Command]:
        while (rollout := own.next_deadline()) is not None:
            if rollout.deadline - DUE > state.now:
                if not _is_set(state, rollout.deadline):
                    yield WakeAt(rollout.deadline)
                return
            yield Truncate(rollout.id)
            if rollout.replica is not None and not rollout.is_aborting:
                yield Abort(rollout.id, rollout.replica.id)


def _is_set(state: State, deadline: float) -> bool:
    """Return whether the engine is asked again at or before a deadline."""
    return state.next_wake is not None and state.next_wake <= deadline
