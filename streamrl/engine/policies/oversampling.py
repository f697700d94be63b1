"""Groups that a step leaves out: the surplus of oversampling, and groups of equal rewards (dynamic sampling)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamrl.engine.entities import Group
from streamrl.engine.messages import Abort, Command, Generated, Postpone, Skip, Verified
from streamrl.engine.policies.retry import give_up
from streamrl.engine.presets import AdmissionWindow
from streamrl.engine.state import State
from streamrl.engine.trainer_side import UNIFORM

LEFT_OVER = "the step was full"
"""Reason: the step of a surplus group was full."""


class DropSurplus:
    """Abort and drop the surplus groups once the primary trainer's step has all its groups.

    Incomplete groups, the stragglers of the step, are dropped first, in draw order.
    """

    ignores = (Generated, Verified)

    def __init__(self, window: AdmissionWindow) -> None:
        self.window = window

    def decide(self, state: State) -> Iterable[Command]:
        """Yield aborts and drops until no more groups are outstanding than the window allows."""
        if not _is_full(state) or state.is_stopping:
            return ()
        allowed = self.window.num_allowed(state.leader.version, state.num_steps)
        num_left = state.num_admitted - allowed
        return self._give_up(state, num_left) if num_left > 0 else ()

    def _give_up(self, state: State, num_left: int) -> Iterator[Command]:
        outstanding = _outstanding(state)
        stragglers = [group for group in outstanding if group.num_missing]
        complete = [group for group in reversed(outstanding) if not group.num_missing]
        for group in (*stragglers, *complete)[:num_left]:
            yield from give_up(state, group, LEFT_OVER)


class KeepSurplus:
    """Keep the surplus groups for the next step once the primary trainer's step has all its groups.

    If replicas have a version under which groups of the next step may start, they continue.
    Otherwise running rollouts are aborted with their tokens, and continue under the next version
    (partial rollouts).
    """

    ignores = (Generated, Verified)

    def __init__(self, window: AdmissionWindow) -> None:
        self.window = window
        self._looked_at: tuple[int, int, int] | None = None
        """State at the last check: the primary trainer's version, its number of losses, and the
        groups drawn.
        """

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the commands that hold groups back until the version of their new step is available."""
        if not _is_full(state) or state.is_stopping:
            return ()
        leader = state.leader
        looks_at = (leader.version, leader.num_lost, state.next_group)
        if looks_at == self._looked_at:
            return ()
        self._looked_at = looks_at
        return self._postpone(state)

    def _postpone(self, state: State) -> Iterator[Command]:
        prompts, coming = self.window.prompts_per_step, state.leader.version + 1
        last = (coming + 1) * prompts - 1
        for place, group in enumerate(_outstanding(state), start=coming * prompts):
            oldest = self.window.oldest(min(place, last))
            if group.num_missing and oldest > group.oldest_version:
                yield from _hold_back(group, oldest)


def _hold_back(group: Group, oldest: int) -> Iterator[Command]:
    """Yield the aborts of a group's running rollouts, and the version that it waits for."""
    for rollout in group.rollouts:
        if rollout.replica is not None and not rollout.is_aborting:
            yield Abort(rollout.id, rollout.replica.id)
    yield Postpone(group.id, oldest)


def _is_full(state: State) -> bool:
    leader = state.leader
    return len(leader.batch.groups) == leader.prompts_per_step


def _outstanding(state: State) -> list[Group]:
    """Return the groups that the primary trainer may train on after its coming step, in draw order."""
    leader = state.leader
    taken = leader.batch.groups
    return [g for g in state.groups.values() if g.id not in taken and leader.wants(g)]


class SkipUniform:
    """Let a trainer skip complete groups of equal rewards, up to the limit for one step.

    Groups that the primary trainer skips are drawn anew, so that its steps are full.
    """

    ignores = (Generated,)

    def __init__(self, trainer: int) -> None:
        self.trainer = trainer

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the skipped groups. Groups beyond a step's limit are trained on."""
        trainer = state.trainers[self.trainer]
        if not trainer.uniform or state.is_stopping:
            return ()
        most_groups = (trainer.most_gen_batches - 1) * trainer.prompts_per_step
        num_left = most_groups - trainer.num_uniform
        if num_left <= 0:
            return ()
        found = [g for g in trainer.uniform.values() if not trainer.batch.has_begun(g)]
        return [Skip(group.id, trainer.id, UNIFORM) for group in found[:num_left]]
