"""Which trainers are done with which groups: what a world holds of a group is held until the last one is."""

from __future__ import annotations


class DoneWith:
    """Counts trainers by group, as far as some are done with it and others are not.

    A trainer that joins later is one of those that are waited for from the first group on that is drawn after it.
    """

    def __init__(self, num_trainers: int) -> None:
        self._first = [0] * num_trainers
        """The first group of each trainer."""
        self._trainers: dict[int, set[int]] = {}
        """By group."""

    def join(self, group: int) -> None:
        """Let one more trainer wait for every group from `group` on."""
        self._first.append(group)

    def leave(self, group: int, trainer: int) -> bool:
        """Enter that a trainer is done with a group; return whether all are."""
        done = self._trainers.setdefault(group, set())
        done.add(trainer)
        if len(done) < len(self._first) and len(done) < sum(f <= group for f in self._first):
            return False
        self.drop(group)
        return True

    def has_left(self, group: int, trainer: int) -> bool:
        """Return whether a trainer is done with a group that others may still train on."""
        return trainer in self._trainers.get(group, ())

    def drop(self, group: int) -> None:
        """Enter that nobody trains on a group any more."""
        self._trainers.pop(group, None)
