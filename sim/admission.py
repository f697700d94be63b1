"""The KV cache of a simulated replica, and which rollouts are let into it.

on-demand  while what a rollout has now fits: what outgrows the cache later is preempted and computed again
reserve    while the longest that it and all that run may become fits: fewer run, and none is ever preempted
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, assert_never

from streamrl.runfile.sides_config import RolloutConfig
from streamrl.sim.attempt import Attempt


@dataclass(slots=True, eq=False)
class KvCache:
    """Tokens whose keys and values a replica holds, a prompt once for all that share it."""

    capacity: int
    """Tokens that fit."""
    held: int = 0
    num_rollouts: int = 0
    prompt_tokens: int = 0
    """Of all prompts in it, each once."""
    _sharing: dict[int, int] = field(default_factory=dict)
    """Running rollouts by prefix: the first of a group prefills the prompt for all."""

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self.capacity - self.held

    @property
    def use(self) -> float:
        """Share that is held."""
        return self.held / self.capacity

    def lacks_prompt(self, attempt: Attempt) -> bool:
        """Whether no running rollout has brought the prompt."""
        return attempt.prefix not in self._sharing

    def enter(self, attempt: Attempt, tokens: int) -> None:
        """Hold `tokens` more for a rollout that joins the batch, its prompt among them where it lacked."""
        if self.lacks_prompt(attempt):
            self._sharing[attempt.prefix] = 0
            self.prompt_tokens += attempt.prompt_tokens
        self._sharing[attempt.prefix] += 1
        self.num_rollouts += 1
        self.held += tokens

    def grow(self, steps: int) -> None:
        """Hold a token more of each rollout for each decode step."""
        self.held += steps * self.num_rollouts

    def leave(self, attempt: Attempt) -> None:
        """Free what a rollout has, and the prompt with the last that shares it."""
        self.held -= attempt.done
        self.num_rollouts -= 1
        siblings = self._sharing[attempt.prefix] - 1
        if siblings:
            self._sharing[attempt.prefix] = siblings
            return
        del self._sharing[attempt.prefix]
        self.held -= attempt.prompt_tokens
        self.prompt_tokens -= attempt.prompt_tokens


class Admission(Protocol):
    """Which rollouts are let in."""

    def has_room(self, cache: KvCache, attempt: Attempt, fresh: int, riding: int) -> bool:
        """Whether a rollout may join whose prefill computes `fresh` tokens, while `riding` others make one each."""
        ...


class OnDemand:
    """Let in whatever fits now, with the one token that its prefill makes."""

    def has_room(self, cache: KvCache, attempt: Attempt, fresh: int, riding: int) -> bool:
        """Whether what is there now leaves room."""
        return cache.held + riding + fresh + 1 <= cache.capacity


class Reserve:
    """Keep room for `max_tokens` of every rollout that runs."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def has_room(self, cache: KvCache, attempt: Attempt, fresh: int, riding: int) -> bool:
        """Whether what all may become leaves room."""
        prompt = fresh - attempt.done
        longest = (cache.num_rollouts + 1) * self._max_tokens
        return cache.prompt_tokens + prompt + longest <= cache.capacity


def choose_admission(rollout: RolloutConfig) -> Admission:
    """Return the policy that a run file names."""
    match rollout.admission:
        case "on-demand":
            return OnDemand()
        case "reserve":
            return Reserve(rollout.max_tokens)
        case _:
            assert_never(rollout.admission)
