"""What becomes of groups that would be trained on past the bound on staleness: they are dropped, and others drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from streamrl.engine.entities import Group
from streamrl.engine.messages import Command
from streamrl.engine.policies.retry import give_up
from streamrl.engine.state import State

STALE = "staler than policies.max_staleness"
"""Why a group is given up that would be trained on past the bound."""


class DropStale:
    """Give up every group that the leader has no place for before its oldest token passes the bound.

    For consumption in order of completion, which lets groups be overtaken. What the coming step holds is as stale as
    when it was taken. All others are looked at when a step is made, and when the coming one is full, so that what
    cannot be trained on in time is generated no further; and what is complete as it is taken, when all its tokens'
    versions are known.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        """Versions that a token may be behind."""
        self._looked_at: tuple[int, bool, int] | None = None
        """The leader's version, whether its step was full, and how often it was lost, when all were looked at."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield aborts and drops of what is too stale."""
        leader = state.leader
        if state.is_stopping:
            return ()
        num_lacking = leader.prompts_per_step - len(leader.batch.groups)
        looks_at = (leader.version, not num_lacking, leader.num_lost)
        if looks_at != self._looked_at:
            self._looked_at = looks_at
            return self._clear(state, [g for g in state.groups.values() if leader.wants(g)])
        if num_lacking and leader.line:
            return self._clear(state, self._next_taken(state, num_lacking))
        return ()

    def _clear(self, state: State, groups: Iterable[Group]) -> Iterator[Command]:
        for group in groups:
            if group.id not in state.leader.batch.groups and self._is_stale(state, group):
                yield from give_up(state, group, STALE)

    def _next_taken(self, state: State, num_lacking: int) -> list[Group]:
        """Return the groups of the leader's line up to those that fill its step."""
        line = state.leader.line
        fresh = 0
        for number, group in enumerate(line, start=1):
            fresh += not self._is_stale(state, group)
            if fresh == num_lacking:
                return list(islice(line, number))
        return list(line)

    def _is_stale(self, state: State, group: Group) -> bool:
        """Return whether a group outside of the coming step is past the bound when it could be trained on at best."""
        leader, oldest = state.leader, _oldest_token(group)
        is_full = len(leader.batch.groups) == leader.prompts_per_step
        return oldest is not None and leader.version + is_full - oldest > self.bound


def _oldest_token(group: Group) -> int | None:
    """Return the version of the oldest known token of a group; of one that runs, and has none known, the least it may be.

    None where nothing of it has begun.
    """
    born = [rollout.born for rollout in group.rollouts if rollout.born is not None]
    if born:
        return min(born)
    runs = any(rollout.replica is not None for rollout in group.rollouts)
    return group.oldest_version if runs else None
