"""The prefix cache of a replica: keys and values of contexts that no rollout reads now.

While a tool runs, the context of its episode stays in the replica's KV memory until other rollouts
need the room. The least recently used context is evicted first, and the end of a context before its
beginning, as in vLLM's block manager. An episode whose prompt was evicted finds nothing, because
only a whole prefix can be used.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import NamedTuple


class _Found(NamedTuple):
    tokens: int
    loaded: int
    """Tokens among them that only host memory had."""


class PrefixCache:
    """Tokens of unused contexts, by the prompt or the rollout that they belong to."""

    def __init__(self, host: PrefixCache | None = None, room: float = inf) -> None:
        """Start empty, for `room` tokens; `host` has the copies in host memory, and None means that there are none."""
        self._host, self._room = host, room
        self.loaded = 0
        """Tokens of the last taken context that only host memory had."""
        self._kept: OrderedDict[tuple[str, int], int] = OrderedDict()
        """Least recently used first."""
        self.held = 0
        """Tokens of all of them."""

    @classmethod
    def in_host_memory(cls, capacity: float) -> PrefixCache:
        """Return an empty cache of copies, for so many tokens."""
        return cls(room=capacity)

    def keep_prompt(self, prefix: int, tokens: int) -> None:
        """Keep a prompt that no running rollout shares any more."""
        self._keep(("prompt", prefix), tokens)

    def keep_own(self, rollout: int, tokens: int) -> None:
        """Keep the tokens of a rollout after its prompt."""
        self._keep(("own", rollout), tokens)

    def take(self, prefix: int, rollout: int, prompt_tokens: int) -> int:
        """Remove the context of a rollout that runs again, and return its cached tokens.

        Args:
            prefix: key of its prompt.
            rollout: the rollout.
            prompt_tokens: tokens of the prompt; 0 if other running rollouts share it.
        """
        own, self.loaded = self._take(("own", rollout)), 0
        if not prompt_tokens:
            self.loaded = own.loaded
            return own.tokens
        prompt = self._take(("prompt", prefix))
        if prompt.tokens < prompt_tokens:
            self.loaded = prompt.loaded
            return prompt.tokens
        self.loaded = prompt.loaded + own.loaded
        return prompt.tokens + own.tokens

    def shrink(self, room: float) -> None:
        """Evict tokens until at most `room` are left."""
        kept = self._kept
        while self.held > room:
            key, tokens = next(iter(kept.items()))
            evicted = min(tokens, int(self.held - room) or 1)
            self.held -= evicted
            if evicted == tokens:
                del kept[key]
            else:
                kept[key] = tokens - evicted

    def clear(self) -> None:
        """Forget everything, because new weights make other keys and values."""
        self._kept.clear()
        self.held = 0
        if self._host is not None:
            self._host.clear()

    def _keep(self, key: tuple[str, int], tokens: int) -> None:
        if tokens > 0:
            self.held += tokens - self._kept.pop(key, 0)
            self._kept[key] = tokens
            self.shrink(self._room)
            if self._host is not None:
                self._host._keep(key, tokens)

    def _take(self, key: tuple[str, int]) -> _Found:
        """Remove a context, and return its tokens. Its copy stays in host memory."""
        tokens = self._remove(key)
        copied = 0 if self._host is None else self._host._kept.get(key, 0)
        return _Found(max(tokens, copied), max(0, copied - tokens))

    def _remove(self, key: tuple[str, int]) -> int:
        tokens = self._kept.pop(key, 0)
        self.held -= tokens
        return tokens
