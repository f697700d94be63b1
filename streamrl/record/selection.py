"""What a run trained on beside what was generated for it: lengths and rewards by step, and what was left out, and why.

| of a step  | rollouts                                                                                        |
|------------|-------------------------------------------------------------------------------------------------|
| generated  | those that were drawn for it, as far as they ended: trained on, in whatever step, or given up   |
| trained    | those that the step was made of                                                                 |
| left out   | of those that were drawn for it, those that were given up, by reason                            |

If a step trains on the groups drawn for it, "generated" and "trained" are the same. If it takes the groups that finish
first, its rollouts are shorter than the generated ones, most of all at the start: long rollouts come steps later.
Rollouts left out for their rewards or for taking too long are never trained on.
"""

from __future__ import annotations

from array import array

import msgspec


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Some rollouts, together."""

    rollouts: int
    mean_tokens: float | None = None
    """Output tokens; None of none that ended."""
    mean_reward: float | None = None


class SelectionMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What was trained on beside what was generated, by the trainer that leads."""

    generated: Share
    trained: Share
    left_out: dict[str, Share]
    """By reason."""
    length_ratio: list[float | None]
    """Of each step: mean length of what it trained on, over that of what was generated for it."""
    reward_difference: list[float | None]
    """Mean reward of what a step trained on, less that of what was generated for it."""


class StepSums:
    """Rollouts, tokens and rewards by step, as columns."""

    def __init__(self) -> None:
        self.num, self.tokens, self.rewards = array("q"), array("q"), array("d")
        self._columns = self.num, self.tokens, self.rewards

    def add(self, place: int, num: int, tokens: int, reward: float) -> None:
        """Add to those of a step, by its place from 0."""
        for column in self._columns if place >= len(self.num) else ():
            column.extend([0] * (1 + place - len(column)))
        self.num[place] += num
        self.tokens[place] += tokens
        self.rewards[place] += reward

    def cut(self, length: int) -> tuple[int, int, float]:
        """Take all steps back but the first `length`; return what they held."""
        gone = sum(self.num[length:]), sum(self.tokens[length:]), sum(self.rewards[length:])
        for column in self._columns:
            del column[length:]
        return gone

    def share(self, first: int = 0, last: int | None = None) -> Share:
        """Return what steps hold together."""
        num = sum(self.num[first:last])
        return Share(
            rollouts=num,
            mean_tokens=sum(self.tokens[first:last]) / num if num else None,
            mean_reward=sum(self.rewards[first:last]) / num if num else None,
        )


class Selection:
    """Counts what becomes of rollouts, once that is known."""

    def __init__(self) -> None:
        self._first_version = 0
        self._generated, self._trained = StepSums(), StepSums()
        self._left_out: dict[str, StepSums] = {}
        self._unfinished: dict[str, int] = {}
        """Rollouts that were given up before they ended, by reason."""

    def begin_at(self, version: int) -> None:
        """Enter the version that the run begins with."""
        self._first_version = version

    def train(self, version: int, drawn_for: int, num: int, tokens: int, reward: float) -> None:
        """Enter rollouts of the step that made `version`, which were drawn for one step, with their sums."""
        self._generated.add(self._place(drawn_for), num, tokens, reward)
        self._trained.add(self._place(version), num, tokens, reward)

    def leave_out(self, drawn_for: int, reason: str, tokens: int, reward: float | None) -> None:
        """Record a rollout that was dropped. Without a reward, its final length is unknown."""
        if reward is None:
            self._unfinished[reason] = self._unfinished.get(reason, 0) + 1
            return
        place = self._place(drawn_for)
        self._generated.add(place, 1, tokens, reward)
        self._left_out.setdefault(reason, StepSums()).add(place, 1, tokens, reward)

    def take_back(self, version: int, reason: str) -> None:
        """Enter that steps after `version` are taken back, and what they were made of is given up."""
        place = max(0, version - self._first_version)
        gone = self._trained.cut(place)
        if gone[0]:
            self._left_out.setdefault(reason, StepSums()).add(place, *gone)

    def _place(self, step: int) -> int:
        return max(0, step - self._first_version - 1)

    def metrics(self) -> SelectionMetrics:
        """Return it in figures."""
        steps = range(len(self._trained.num))
        pairs = [(self._trained.share(n, n + 1), self._generated.share(n, n + 1)) for n in steps]
        reasons = dict.fromkeys([*self._left_out, *self._unfinished])
        return SelectionMetrics(
            generated=self._generated.share(),
            trained=self._trained.share(),
            left_out={reason: self._share_of(reason) for reason in reasons},
            length_ratio=[_length_ratio(*pair) for pair in pairs],
            reward_difference=[_reward_difference(*pair) for pair in pairs],
        )

    def _share_of(self, reason: str) -> Share:
        """Return the rollouts dropped for one reason; means cover those that finished."""
        found = self._left_out.get(reason, StepSums()).share()
        unfinished = self._unfinished.get(reason, 0)
        return msgspec.structs.replace(found, rollouts=found.rollouts + unfinished)


def _length_ratio(one: Share, other: Share) -> float | None:
    if one.mean_tokens is None or not other.mean_tokens:
        return None
    return one.mean_tokens / other.mean_tokens


def _reward_difference(one: Share, other: Share) -> float | None:
    if one.mean_reward is None or other.mean_reward is None:
        return None
    return one.mean_reward - other.mean_reward
