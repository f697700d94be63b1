"""The control engine: takes an event and its time, and returns commands.

It has no clock, no I/O and no randomness. So a simulated run, a real run and a replay decide with
the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from streamrl.engine.messages import Command, Event
from streamrl.engine.policies.dispatch import FromOutside
from streamrl.engine.state import State
from streamrl.runfile.dispatch_choice import DISPATCH


class Policy(Protocol):
    """One kind of decision of the engine."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield what to do now. Each command enters `state` before the next one is computed.

        Most events concern few policies. A policy without commands returns `()` and creates no
        generator.
        """
        ...


class Engine:
    """Policies in order of precedence, and the state that they share."""

    def __init__(self, state: State, policies: Sequence[Policy]) -> None:
        self.state = state
        self._deciders = [policy.decide for policy in policies]
        self._outside = [policy for policy in policies if isinstance(policy, FromOutside)]

    def __str__(self) -> str:
        state, batch = self.state, self.state.leader.batch
        return (
            f"version {self.version}, {state.num_generating} rollouts generating, "
            f"{len(batch.groups)} groups taken, {len(batch.trainable)} rollouts trainable"
            f"{self._say_unsent()}"
        )

    def _say_unsent(self) -> str:
        """Name a dispatch policy from outside this package while it sends none of the waiting rollouts."""
        if self.state.num_generating or self.state.waiting.first() is None:
            return ""
        names = (f"{DISPATCH.key} {policy.name!r}" for policy in self._outside)
        return "".join(f"; {name} sends none of the waiting rollouts" for name in names)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do and no command is running."""
        return self.state.is_finished

    @property
    def version(self) -> int:
        """The newest policy version."""
        return self.state.leader.version

    @property
    def has_all_steps(self) -> bool:
        """Whether the run's last step is done."""
        return self.state.has_all_steps

    @property
    def has_failed(self) -> bool:
        """Whether an error ended the run that no retry can fix; a failed last checkpoint counts too."""
        return self.state.failure is not None or self.state.leader.num_failed_saves > 0

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends before its last step; None if it does not."""
        return self.state.stop_reason

    def handle(self, event: Event, now: float) -> list[Command]:
        """Record an event that happened at `now` seconds, and return the commands that answer it."""
        state = self.state
        state.observe(event, now)
        commands: list[Command] = []
        for decide in self._deciders:
            # most policies return (): iterating over it anyway costs more
            if decided := decide(state):
                for command in decided:
                    state.commit(command)
                    commands.append(command)
        return commands
