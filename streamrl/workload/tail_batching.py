"""Tail batching: the prompts expected to be longest, of several steps, make up one of these steps.

After RollPacker (arXiv 2509.21009): a step takes as long as its longest rollout, so one long step in
`tail_every` and short ones beside it generate sooner than steps that each have a few long rollouts.

    step of a cycle           is made of
    1 … tail_every - 1        the other groups, in data order
    tail_every                the `prompts_per_step` groups expected to be longest, in data order

What this changes in training is the order of the data and nothing else: over a cycle each group is trained on
once, as without it, but a step's mean length, and with it whatever goes with length such as difficulty, is not
that of the data. A group's number is its place in the new order: engine and policies draw, bound staleness and
consume as ever, nothing is put off once it has started, and a resumed run goes on where it was. RollPacker
starts more rollouts than it needs and puts off those that turn out long; here a ranker says so beforehand.
Groups that are dropped shift those after them by as many places, across the border of two steps.
"""

from __future__ import annotations

from collections.abc import Callable

Expect = Callable[[int, int], list[int]]
"""Gives the expected tokens of the longest rollout of each of `num` groups of the data from `first` on."""


class TailBatches:
    """Which group of the data stands at which place of the order that is trained on."""

    def __init__(self, prompts_per_step: int, tail_every: int, expect: Expect) -> None:
        self._num_long = prompts_per_step
        self._size = prompts_per_step * tail_every
        self._expect = expect
        self._cycles: dict[int, list[int]] = {}

    def source(self, group: int) -> int:
        """Return the place in the data of the group that is drawn as number `group`."""
        cycle, place = divmod(group, self._size)
        if cycle not in self._cycles:
            self._cycles[cycle] = self._order(cycle * self._size)
        return self._cycles[cycle][place]

    def _order(self, first: int) -> list[int]:
        """Put the longest groups of a cycle behind the others; of equals the later ones are put off."""
        expected = self._expect(first, self._size)
        places = sorted(range(self._size), key=lambda place: (expected[place], place))
        num_short = self._size - self._num_long
        order = sorted(places[:num_short]) + sorted(places[num_short:])
        return [first + place for place in order]
