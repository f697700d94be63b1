"""What ended and what was given up since the last step, so that a step's line tells of more than what it trained on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from streamrl.record.run_lines import FATES, OF_FAMILY
from streamrl.workload.prompt_families import told_family
from streamrl.workload.prompt_records import Record

GENERATED, TRAINED, DROPPED = FATES
OF_REASON = "dropped for "
"""What the keys of metrics.jsonl begin with that count what the leader gave up, by reason."""
OF_TOKENS = "tokens dropped for "
"""The same of their output tokens."""


class Turnout:
    """Counts rollouts by what became of them, lengths and rewards of those that ended, families where there are any."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lengths: list[int] = []
        self._rewards: list[float] = []
        self._dropped = Counter[str]()
        self._wasted = Counter[str]()
        self._families = Counter[str]()

    def end(self, num_tokens: int, reward: float, record: Record) -> None:
        """Enter a rollout that has its reward."""
        self._lengths.append(num_tokens)
        self._rewards.append(reward)
        self._count(GENERATED, [record])

    def give_up(self, records: Iterable[Record], reason: str) -> None:
        """Enter rollouts that the trainer which leads will not train on."""
        self._dropped[reason] += self._count(DROPPED, records)

    def waste(self, num_tokens: int, reason: str) -> None:
        """Enter output tokens of what was given up."""
        if num_tokens:
            self._wasted[reason] += num_tokens

    def take(self, trained: Iterable[Record]) -> dict[str, float]:
        """Return the figures since the last step, which was made of `trained`, and begin anew.

        | key                       | of                                                                   |
        |---------------------------|----------------------------------------------------------------------|
        | generated                 | rollouts that ended, with their reward                               |
        | generated_length_mean     | their output tokens                                                  |
        | generated_reward          | their mean reward                                                    |
        | dropped for REASON        | rollouts that were given up                                          |
        | tokens dropped for REASON | their output tokens, those that come with their abort when they do   |
        | generated/F, trained/F, dropped/F | rollouts of family F, where prompts have several              |
        """
        self._count(TRAINED, trained)
        found: dict[str, float] = {GENERATED: len(self._lengths)}
        if self._lengths:
            found["generated_length_mean"] = sum(self._lengths) / len(self._lengths)
            found["generated_reward"] = math.fsum(self._rewards) / len(self._rewards)
        found |= {OF_REASON + reason: count for reason, count in self._dropped.items()}
        found |= {OF_TOKENS + reason: tokens for reason, tokens in self._wasted.items()}
        found |= dict(sorted(self._families.items()))
        self._begin()
        return found

    def _count(self, fate: str, records: Iterable[Record]) -> int:
        num = 0
        for record in records:
            num += 1
            family = told_family(record)
            if family is not None:
                self._families[f"{fate}{OF_FAMILY}{family}"] += 1
        return num
