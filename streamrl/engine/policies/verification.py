"""When rewards are computed."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.engine.messages import Command, Verify
from streamrl.engine.state import State


class VerifyOnArrival:
    """Ask for a rollout's reward as soon as it is generated."""

    def decide(self, state: State) -> Iterable[Command]:
        """Return a command for each that has arrived."""
        return [Verify(rollout.id) for rollout in state.unverified] if state.unverified else ()
