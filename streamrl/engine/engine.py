"""The control engine: told an event and the time, it answers with commands.

It has no clock, no input or output and no randomness, so a simulated run, a real run and a replay of
either decide with the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from streamrl.engine.messages import Command, Event
from streamrl.engine.state import State


class Policy(Protocol):
    """One thing the engine decides about."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield what to do now. Each command enters `state` before the next is asked for.

        Most events concern few policies: one that has nothing to say answers `()` without a generator.
        """
        ...


class Engine:
    """Policies, in order of precedence, over one state."""

    def __init__(self, state: State, policies: Sequence[Policy]) -> None:
        self.state = state
        self._deciders = [policy.decide for policy in policies]

    def __str__(self) -> str:
        state, batch = self.state, self.state.leader.batch
        return (
            f"version {self.version}, {state.num_generating} rollouts generating, "
            f"{len(batch.groups)} groups taken, {len(batch.trainable)} rollouts trainable"
        )

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do and nothing is under way."""
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
        """Whether something broke beyond what a retry can mend, be it the last checkpoint."""
        return self.state.failure is not None or self.state.leader.num_failed_saves > 0

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends before its last step, or None."""
        return self.state.stop_reason

    def handle(self, event: Event, now: float) -> list[Command]:
        """Enter what happened at `now` seconds and say what to do about it."""
        state = self.state
        state.observe(event, now)
        commands: list[Command] = []
        for decide in self._deciders:
            if decided := decide(state):  # most policies say nothing: a loop over `()` costs more
                for command in decided:
                    state.commit(command)
                    commands.append(command)
        return commands
