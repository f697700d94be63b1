"""What a recorded run generated, group by group, so that another run of the same work generates it again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamrl.engine.messages import DrawnGroup, Drop, Generated, PromptsDrawn
from streamrl.record.trace import read_trace

Lengths = npt.NDArray[np.int64]


class Recorded:
    """The groups of a trace file in the order in which they were drawn.

    A group that was lost has no lengths, and none takes its place: the run drew another one for it. One that was
    under way when the record ended has those of another.
    """

    def __init__(self, path: Path) -> None:
        """Read a trace.

        Raises:
            ValueError: it is none, or holds no group whose lengths are known.
        """
        self._path = path
        drawn: dict[int, DrawnGroup] = {}
        tokens: dict[int, int] = {}
        dropped: set[int] = set()
        for _, event, commands in read_trace(path).entries:
            if isinstance(event, PromptsDrawn):
                drawn.update((group.group, group) for group in event.groups)
            elif isinstance(event, Generated) and event.finish != "aborted":
                tokens[event.rollout] = event.tokens
            dropped.update(command.group for command in commands if isinstance(command, Drop))
        self._finished = [g for _, g in sorted(drawn.items()) if g.rollouts and _is_in(g, tokens)]
        if not self._finished:
            raise ValueError(f"{path} records no finished group")
        finished = {group.group for group in self._finished}
        self._groups = [
            group
            for number, group in sorted(drawn.items())
            if number in finished or number not in dropped
        ]
        self._tokens = tokens
        self._known = finished

    def block(self, first: int, num_groups: int, group_size: int) -> tuple[Lengths, Lengths]:
        """Return lengths [num_groups, group_size] and prompt tokens [num_groups]; past the recorded ones it starts over."""
        groups = self._picks(first, num_groups, group_size)
        lengths = [[self._tokens[rollout] for rollout in group.rollouts] for group in groups]
        return np.array(lengths), np.array([group.prompt_tokens for group in groups])

    def expected(self, first: int, num_groups: int, group_size: int) -> Lengths:
        """Return what the recorded run expected of these groups when it drew them, as `block` does lengths."""
        groups = self._picks(first, num_groups, group_size)
        return np.array([group.expected_tokens for group in groups])

    def prompts(self, first: int, num_groups: int, group_size: int) -> list[int]:
        """Return which line of the prompts file each of these groups is of; empty where the record does not say."""
        lines = [group.prompt for group in self._picks(first, num_groups, group_size)]
        return [line for line in lines if line is not None] if None not in lines else []

    @property
    def known_families(self) -> set[str]:
        """The families that recorded groups are of, as far as the record says."""
        return {group.family for group in self._groups if group.family is not None}

    def families(self, first: int, num_groups: int, group_size: int) -> list[str | None]:
        """Return the family of the prompt of each of these groups; None where the record does not say."""
        return [group.family for group in self._picks(first, num_groups, group_size)]

    def _picks(self, first: int, num_groups: int, group_size: int) -> list[DrawnGroup]:
        size = len(self._finished[0].rollouts)
        if size != group_size:
            raise ValueError(
                f"algorithm.group_size is {group_size}, but {self._path} records groups of {size}"
            )
        return [self._pick(place) for place in range(first, first + num_groups)]

    def _pick(self, place: int) -> DrawnGroup:
        """Return the group that was drawn there, or where its lengths are not known one of which they are."""
        if place < len(self._groups) and self._groups[place].group in self._known:
            return self._groups[place]
        return self._finished[place % len(self._finished)]


def _is_in(group: DrawnGroup, tokens: dict[int, int]) -> bool:
    return all(rollout in tokens for rollout in group.rollouts)
