"""The KV cache of a simulated replica, and which attempts to generate it has room for.

Two admission policies decide which queued rollouts join the batch:

- on-demand: if its current tokens fit. If the cache fills up later, a rollout is preempted and
  recomputed.
- reserve: if the maximum length of all running rollouts fits. Fewer run, and none is preempted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, assert_never

import msgspec

from streamrl.engine.messages import Finish, Generate, Generated
from streamrl.runfile.roles_config import RolloutConfig
from streamrl.sim.prefix_cache import PrefixCache
from streamrl.sim.world_interface import Reached, SimRollout
from streamrl.workload.episodes import Episode


class Attempt(msgspec.Struct, eq=False):
    """One `Generate` command on this replica."""

    rollout: int
    prefix: int
    """Key of the shared prompt: the group, or the rollout itself if the back end shares no
    prefixes.
    """
    priority: int
    prompt_tokens: int
    begun_with: int
    """Output tokens that it already had when it arrived."""
    done: int
    """Output tokens so far, counted when it joined the batch."""
    length: int
    """Output tokens when it is finished."""
    brings_cache: bool = False
    """Whether its KV cache is transferred from another replica instead of being recomputed."""
    finish_at: int = 0
    """Decode step of the replica in which it finishes."""
    version: int = 0
    began_at: float | None = None
    prefill_time: float = 0.0
    computed: int = 0
    """Tokens of its prefix that are already prefilled while it waits for the rest."""
    observed: int = 0
    """Tokens of observations among its context."""
    new: int = 0
    """Tokens of the last observation, if no replica has computed it before."""
    is_cut: bool = False
    """Whether this turn ends at the maximum context."""
    reached: Reached | None = None
    cached: int | None = None
    """Tokens of its context that the prefix cache had; None before it was asked."""
    recompute_time: float = 0.0
    prefilled_on: int | None = None
    """Prefill replica from which its context is to be received."""
    transfer_time: float = 0.0
    """Seconds until its context was received."""

    @classmethod
    def of(cls, command: Generate, drawn: SimRollout, *, shares_prefixes: bool) -> Attempt:
        """Return the attempt for a command."""
        attempt = cls(
            rollout=command.rollout,
            prefix=drawn.group if shares_prefixes else command.rollout,
            priority=command.priority,
            prompt_tokens=drawn.prompt_tokens,
            begun_with=command.prefix,
            done=command.prefix,
            length=drawn.length,
            brings_cache=command.brings_cache,
        )
        if command.prefilled_on is not None:
            attempt.prefilled_on = command.prefilled_on
        if drawn.episode is not None:
            attempt.begin_turn(command.turn, command.observed, drawn.episode)
            attempt.reached = drawn.reached
        return attempt

    def begin_turn(self, turn: int, observed: int, episode: Episode) -> None:
        """Set what the turn after `turn` answered ones consists of."""
        self.observed, self.length = observed, episode.ends[turn]
        self.is_cut = episode.is_cut and turn + 1 == episode.num_turns
        if turn and self.done == episode.ends[turn - 1]:
            self.new = episode.observations[turn - 1]

    @property
    def own(self) -> int:
        """Context tokens after the prompt."""
        return self.observed + self.done

    @property
    def ahead(self) -> int:
        """Context tokens minus the replica's step number; constant while the rollout runs."""
        return self.prompt_tokens + self.observed + self.length - self.finish_at

    def ended(
        self, finish: Finish, now: float, cache_use: float | None = None, num_preempted: int = 0
    ) -> Generated:
        """Return the event of its end at `now` seconds, with the replica's cache statistics."""
        began_at = self.began_at
        run_time = 0.0 if began_at is None else now - began_at
        event = Generated(
            self.rollout,
            self.done,
            finish,
            self.version,
            run_time,
            self.prefill_time,
            cache_use,
            num_preempted,
        )
        if self.transfer_time:
            event = msgspec.structs.replace(event, transfer_time=self.transfer_time)
        if self.reached is None:
            return event
        times = {"cached_tokens": self.cached or 0, "recompute_time": self.recompute_time}
        turn: Generated = msgspec.structs.replace(event, **times)
        return turn


@dataclass(slots=True, eq=False)
class KvCache:
    """Counts the tokens in a replica's KV cache; a shared prompt counts once."""

    capacity: int
    """Tokens that fit."""
    held: int = 0
    num_rollouts: int = 0
    prompt_tokens: int = 0
    """Tokens of all cached prompts, each counted once."""
    unused: PrefixCache | None = None
    """Contexts that no rollout reads now; None without an environment or prefix caching."""
    sharing: dict[int, int] = field(default_factory=dict)
    """Running rollouts by prefix; the first one of a group prefills the prompt for all."""

    @property
    def use(self) -> float:
        """Share of the capacity that is in use."""
        return self.held / self.capacity

    def enter(self, attempt: Attempt, tokens: int) -> None:
        """Add a rollout that joins the batch with `tokens` new tokens, including its prompt if it was missing."""
        prefix, sharing = attempt.prefix, self.sharing
        siblings = sharing.get(prefix, 0)
        if not siblings:
            self.prompt_tokens += attempt.prompt_tokens
        sharing[prefix] = siblings + 1
        self.num_rollouts += 1
        self.held += tokens
        if self.unused is not None:
            self.make_room()

    def make_room(self) -> None:
        """Evict unused contexts, until the memory holds those of running rollouts."""
        assert self.unused is not None, "only a prefix cache is evicted"
        self.unused.shrink(self.capacity - self.held)

    def find(self, attempt: Attempt) -> int:
        """Return the tokens of a rollout's context that are cached, beside a prompt that others share now.

        From now on they count as those of the rollout.
        """
        if self.unused is None:
            return 0
        prompt = 0 if attempt.prefix in self.sharing else attempt.prompt_tokens
        return self.unused.take(attempt.prefix, attempt.rollout, prompt)

    def leave(self, attempt: Attempt, own: int) -> None:
        """Free the `own` tokens of a rollout, and the prompt if no other rollout shares it."""
        self.held -= own
        self.num_rollouts -= 1
        sharing, prefix, unused = self.sharing, attempt.prefix, self.unused
        if unused is not None:
            unused.keep_own(attempt.rollout, own)
        siblings = sharing[prefix] - 1
        if siblings:
            sharing[prefix] = siblings
            return
        del sharing[prefix]
        prompt_tokens = attempt.prompt_tokens
        self.held -= prompt_tokens
        self.prompt_tokens -= prompt_tokens
        if unused is not None:
            unused.keep_prompt(prefix, prompt_tokens)


class Admission(Protocol):
    """Decides which rollouts may join the batch."""

    def has_room(self, cache: KvCache, attempt: Attempt, fresh: int, riding: int) -> bool:
        """Return whether a rollout may join that prefills `fresh` tokens while `riding` others each make a token."""
        ...


class OnDemand:
    """Admits a rollout if its current tokens and the one of its prefill fit."""

    def has_room(self, cache: KvCache, attempt: Attempt, fresh: int, riding: int) -> bool:
        """Return whether the current tokens fit."""
        return cache.held + riding + fresh + 1 <= cache.capacity


class Reserve:
    """Reserves space for `max_tokens` of every running rollout."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def has_room(self, cache: KvCache, attempt: Attempt, fresh: int, riding: int) -> bool:
        """Return whether the maximum length of all rollouts fits."""
        prompt = fresh - attempt.done
        longest = (cache.num_rollouts + 1) * self._max_tokens
        return cache.prompt_tokens + prompt + longest <= cache.capacity


def choose_admission(rollout: RolloutConfig) -> Admission:
    """Return the admission policy that the run file names."""
    match rollout.admission:
        case "on-demand":
            return OnDemand()
        case "reserve":
            return Reserve(rollout.max_tokens)
        case _:
            assert_never(rollout.admission)
