"""Groups that a step leaves out: the surplus of oversampling, and groups of equal rewards (dynamic sampling)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamrl.engine.entities import Group
from streamrl.engine.messages import Abort, Command, Postpone, Skip
from streamrl.engine.policies.retry import give_up
from streamrl.engine.presets import AdmissionWindow
from streamrl.engine.state import State
from streamrl.engine.trainer_side import UNIFORM

LEFT_OVER = "the step was full"
"""Why a group is given up that its step had no place for any more."""


class DropSurplus:
    """Once the leader's step has all its groups, abort and give up as many as were drawn too many.

    Those that are not complete go first, in order of their draw: the stragglers of the step.
    """

    def __init__(self, window: AdmissionWindow) -> None:
        self.window = window

    def decide(self, state: State) -> Iterable[Command]:
        """Yield aborts and drops until no more are outstanding than may be ahead."""
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
    """Once the leader's step has all its groups, let what is left of them go on for the next one.

    Where those of the next step may start under a version that replicas have, they just go on. Else what runs is
    aborted with the tokens it has, and goes on from these under the next version (a partial rollout).
    """

    def __init__(self, window: AdmissionWindow) -> None:
        self.window = window
        self._looked_at: tuple[int, int, int] | None = None
        """The leader's version, how often it was lost, and the groups drawn, when all were looked at."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield what holds groups back until the version is there that their new step asks for."""
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
    """Yield the aborts of what runs of a group, and the version that it waits for."""
    for rollout in group.rollouts:
        if rollout.replica is not None and not rollout.is_aborting:
            yield Abort(rollout.id, rollout.replica.id)
    yield Postpone(group.id, oldest)


def _is_full(state: State) -> bool:
    leader = state.leader
    return len(leader.batch.groups) == leader.prompts_per_step


def _outstanding(state: State) -> list[Group]:
    """Return what the leader may train on after its coming step, in order of draw."""
    leader = state.leader
    taken = leader.batch.groups
    return [g for g in state.groups.values() if g.id not in taken and leader.wants(g)]


class SkipUniform:
    """Let a trainer pass over groups of one reward, as they are complete, until a step has cost too many of them.

    What the trainer that leads passes over is drawn anew, as anything that it lost, so that its steps are full.
    """

    def __init__(self, trainer: int) -> None:
        self.trainer = trainer

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the groups that are left out; what comes beyond those that a step may cost is trained on."""
        trainer = state.trainers[self.trainer]
        if not trainer.uniform or state.is_stopping:
            return ()
        most_groups = (trainer.most_gen_batches - 1) * trainer.prompts_per_step
        num_left = most_groups - trainer.num_uniform
        if num_left <= 0:
            return ()
        found = [g for g in trainer.uniform.values() if not trainer.batch.has_begun(g)]
        return [Skip(group.id, trainer.id, UNIFORM) for group in found[:num_left]]
