"""Compare the rollouts that a run trained on with those it generated: lengths and rewards by step.

| of a step  | rollouts                                                                              |
|------------|---------------------------------------------------------------------------------------|
| generated  | drawn for this step and finished: trained on in any step, or dropped                  |
| trained    | trained on in this step                                                               |
| left out   | drawn for this step and dropped, by reason                                            |

If a step trains on the groups drawn for it, "generated" and "trained" are the same. If it takes the
groups that finish first, its rollouts are shorter than the generated ones. This bias is largest in
the first steps, because long rollouts arrive steps later. Rollouts that are left out for their
rewards or for taking too long are never trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import msgspec

from streamrl.record.long_column import LongColumn


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """The number and the means of a set of rollouts."""

    rollouts: int
    mean_tokens: float | None = None
    """Mean number of output tokens; None if none of them finished."""
    mean_reward: float | None = None
    """None if none of them finished."""


class SelectionMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Generated rollouts compared with those that the primary trainer trained on."""

    generated: Share
    trained: Share
    left_out: dict[str, Share]
    """By reason."""
    length_ratio: list[float | None]
    """By step: mean length of the trained rollouts, divided by that of the generated ones."""
    reward_difference: list[float | None]
    """By step: mean reward of the trained rollouts minus that of the generated ones."""


class StepSums:
    """Sums of rollouts, tokens and rewards by step, as columns."""

    def __init__(self) -> None:
        self.num, self.tokens = LongColumn[int]("q"), LongColumn[int]("q")
        self.rewards = LongColumn[float]("d")

    def add(self, index: int, num: int, tokens: int, reward: float) -> None:
        """Add to the sums of a step; `index` is its index from 0."""
        missing = [0] * (1 + index - len(self.num))
        for column in (self.num, self.tokens, self.rewards) if missing else ():
            column.extend(missing)
        self.num[index] += num
        self.tokens[index] += tokens
        self.rewards[index] += reward

    def cut(self, length: int) -> tuple[int, int, float]:
        """Roll back all steps after the first `length`; return their sums."""
        gone = sum(self.num[length:]), sum(self.tokens[length:]), sum(self.rewards[length:])
        for column in (self.num, self.tokens, self.rewards):
            column.cut(length)
        return gone

    def share(self, first: int = 0, last: int | None = None) -> Share:
        """Return the total of steps `first` up to `last`, excluding `last`."""
        num, tokens = sum(self.num[first:last]), sum(self.tokens[first:last])
        return _share(num, tokens, sum(self.rewards[first:last]))

    def shares(self) -> Iterator[Share]:
        """Yield the total of each step."""
        return map(_share, self.num, self.tokens, self.rewards)


class Selection:
    """Counts rollouts once they are trained on or dropped."""

    def __init__(self) -> None:
        self._first_version = 0
        self._generated, self._trained = StepSums(), StepSums()
        self._left_out: dict[str, StepSums] = {}
        self._unfinished: dict[str, int] = {}
        """Rollouts that were dropped before they finished, by reason."""

    def begin_at(self, version: int) -> None:
        """Set the version with which the run starts."""
        self._first_version = version

    def train(self, version: int, drawn_for: int, num: int, tokens: int, reward: float) -> None:
        """Record rollouts that one step trained on.

        Args:
            version: the version that the step made.
            drawn_for: the step for which these rollouts were drawn.
            num: number of rollouts.
            tokens: sum of their output tokens.
            reward: sum of their rewards.
        """
        self._generated.add(self._index_of(drawn_for), num, tokens, reward)
        self._trained.add(self._index_of(version), num, tokens, reward)

    def leave_out(self, drawn_for: int, reason: str, tokens: int, reward: float | None) -> None:
        """Record a rollout that was dropped. Without a reward, its final length is unknown."""
        if reward is None:
            self._unfinished[reason] = self._unfinished.get(reason, 0) + 1
            return
        index = self._index_of(drawn_for)
        self._generated.add(index, 1, tokens, reward)
        self._left_out.setdefault(reason, StepSums()).add(index, 1, tokens, reward)

    def take_back(self, version: int, reason: str) -> None:
        """Record that steps after `version` were rolled back, and that their rollouts are dropped."""
        index = max(0, version - self._first_version)
        gone = self._trained.cut(index)
        if gone[0]:
            self._left_out.setdefault(reason, StepSums()).add(index, *gone)

    def _index_of(self, step: int) -> int:
        return max(0, step - self._first_version - 1)

    def metrics(self) -> SelectionMetrics:
        """Return the comparison of all steps so far."""
        generated = chain(self._generated.shares(), repeat(_share(0, 0, 0.0)))
        ratios: list[float | None] = []
        differences: list[float | None] = []
        for pair in zip(
            self._trained.shares(), generated, strict=False
        ):  # kept, they take megabytes
            ratios.append(_length_ratio(*pair))
            differences.append(_reward_difference(*pair))
        reasons = dict.fromkeys([*self._left_out, *self._unfinished])
        return SelectionMetrics(
            generated=self._generated.share(),
            trained=self._trained.share(),
            left_out={reason: self._share_of(reason) for reason in reasons},
            length_ratio=ratios,
            reward_difference=differences,
        )

    def _share_of(self, reason: str) -> Share:
        """Return the rollouts dropped for one reason; means cover those that finished."""
        finished = self._left_out.get(reason, StepSums()).share()
        unfinished = self._unfinished.get(reason, 0)
        return msgspec.structs.replace(finished, rollouts=finished.rollouts + unfinished)


def _share(num: int, tokens: int, rewards: float) -> Share:
    """Return the share of `num` rollouts from the sums of their tokens and rewards."""
    if not num:
        return Share(rollouts=0)
    return Share(rollouts=num, mean_tokens=tokens / num, mean_reward=rewards / num)


def _length_ratio(one: Share, other: Share) -> float | None:
    if one.mean_tokens is None or not other.mean_tokens:
        return None
    return one.mean_tokens / other.mean_tokens


def _reward_difference(one: Share, other: Share) -> float | None:
    if one.mean_reward is None or other.mean_reward is None:
        return None
    return one.mean_reward - other.mean_reward
