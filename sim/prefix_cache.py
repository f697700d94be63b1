"""The prefix cache of a replica: keys and values of contexts that no rollout reads now.

While a tool runs, the context of its episode stays in the replica's KV memory until other rollouts
need the room. The least recently used context is evicted first, and the end of a context before its
beginning, as in vLLM's block manager. An episode whose prompt was evicted finds nothing, because
only a whole prefix can be used.
"""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """Tokens of unused contexts, by the prompt or the rollout that they belong to."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], int] = OrderedDict()
        """Least recently used first."""
        self.held = 0
        """Tokens of all of them."""

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
        own = self._remove(("own", rollout))
        if not prompt_tokens:
            return own
        prompt = self._remove(("prompt", prefix))
        return prompt + own if prompt >= prompt_tokens else prompt

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

    def _keep(self, key: tuple[str, int], tokens: int) -> None:
        if tokens > 0:
            self.held += tokens - self._kept.pop(key, 0)
            self._kept[key] = tokens

    def _remove(self, key: tuple[str, int]) -> int:
        tokens = self._kept.pop(key, 0)
        self.held -= tokens
        return tokens
