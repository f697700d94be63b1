"""One rollout on one simulated replica, from the queue to its end."""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.engine.messages import Finish, Generate, Generated
from streamrl.sim.surroundings import DrawnRollout


@dataclass(slots=True, eq=False)
class Attempt:
    """One `Generate` on this replica."""

    rollout: int
    prefix: int
    """Whose prompt it shares: its group, or itself where the backend shares none."""
    priority: int
    prompt_tokens: int
    begun_with: int
    """Output tokens that it came with."""
    done: int
    """Output tokens made so far, counted when it joined the batch."""
    length: int
    """Output tokens at which it finishes."""
    brings_cache: bool = False
    """Whether its context comes from another replica, not to be computed."""
    finish_at: int = 0
    """Decode step of the replica with which it finishes."""
    version: int = 0
    began_at: float | None = None
    prefill_time: float = 0.0
    computed: int = 0
    """Tokens of its prefix that passes have computed while it waits for the rest."""

    @classmethod
    def of(cls, command: Generate, drawn: DrawnRollout, *, shares_prefixes: bool) -> Attempt:
        """Return the attempt that a command asks for."""
        return cls(
            rollout=command.rollout,
            prefix=drawn.group if shares_prefixes else command.rollout,
            priority=command.priority,
            prompt_tokens=drawn.prompt_tokens,
            begun_with=command.prefix,
            done=command.prefix,
            length=drawn.length,
            brings_cache=command.brings_cache,
        )

    @property
    def ahead(self) -> int:
        """Tokens of its context less the replica's step: the same from one to the next while it runs."""
        return self.prompt_tokens + self.length - self.finish_at

    def ended(
        self, finish: Finish, now: float, cache_use: float | None = None, num_preempted: int = 0
    ) -> Generated:
        """Return the event of its end at `now` seconds, with what its replica tells of the cache."""
        run_time = 0.0 if self.began_at is None else now - self.began_at
        rollout, tokens, version, prefill_time = (
            self.rollout,
            self.done,
            self.version,
            self.prefill_time,
        )
        return Generated(
            rollout, tokens, finish, version, run_time, prefill_time, cache_use, num_preempted
        )
