"""When rewards are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamrl.engine.messages import Command, Verify
from streamrl.engine.state import State


class VerifyOnArrival:
    """Ask for a rollout's reward as soon as it is generated."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield what has arrived."""
        return _verify(state) if state.unverified else ()


def _verify(state: State) -> Iterator[Command]:
    while state.unverified:
        yield Verify(state.unverified[0].id)
