"""Which trainers are done with which groups: what a world holds of a group is held until the last one is."""

from __future__ import annotations


class DoneWith:
    """Counts trainers by group, as far as some are done with it and others are not."""

    def __init__(self, num_trainers: int) -> None:
        self._num_trainers = num_trainers
        self._trainers: dict[int, set[int]] = {}
        """By group."""

    def leave(self, group: int, trainer: int) -> bool:
        """Enter that a trainer is done with a group; return whether all are."""
        done = self._trainers.setdefault(group, set())
        done.add(trainer)
        if len(done) < self._num_trainers:
            return False
        self.drop(group)
        return True

    def drop(self, group: int) -> None:
        """Enter that nobody trains on a group any more."""
        self._trainers.pop(group, None)
