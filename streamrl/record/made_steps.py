"""What the steps of a trainer were made of: a few numbers of each, as columns, so that ten thousand take little room."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import NamedTuple


class Made(NamedTuple):
    """What a step was made of."""

    num_rollouts: int
    num_tokens: int
    """Output tokens of them."""
    reward: float
    """Mean of them; 0 of none."""
    behind: dict[int, int]
    """Rollouts by how many versions of the leader they were behind its newest when trained on."""


class MadeSteps:
    """The steps so far, from the first on."""

    def __init__(self) -> None:
        self.ended_at = array("d")
        """Instant of each."""
        self.num_rollouts = array("q")
        self.num_tokens = array("q")
        self.rewards = array("d")
        self._behind: dict[int, array[int]] = {}
        """By versions behind: rollouts of each step; those after the last that has any are left out."""

    def __len__(self) -> int:
        return len(self.ended_at)

    def append(self, time: float, made: Made) -> None:
        """Enter what the step was made of that ended at `time` seconds."""
        for lag, count in made.behind.items():
            column = self._behind.setdefault(lag, array("q"))
            column.extend([0] * (len(self) - len(column)))
            column.append(count)
        self.ended_at.append(time)
        self.num_rollouts.append(made.num_rollouts)
        self.num_tokens.append(made.num_tokens)
        self.rewards.append(made.reward)

    def staleness(self, first: int, last: int) -> Counter[int]:
        """Return rollouts by versions behind, of the steps at places `first` to `last`, that one left out."""
        counts = {lag: sum(column[first:last]) for lag, column in self._behind.items()}
        return Counter({lag: count for lag, count in counts.items() if count})

    def cut(self, length: int) -> Made:
        """Take all steps back but the first `length`; return what those were made of together, less their reward."""
        gone = Made(
            sum(self.num_rollouts[length:]),
            sum(self.num_tokens[length:]),
            0.0,
            dict(self.staleness(length, len(self))),
        )
        for seconds in (self.ended_at, self.rewards):
            del seconds[length:]
        for counts in (self.num_rollouts, self.num_tokens, *self._behind.values()):
            del counts[length:]
        return gone
