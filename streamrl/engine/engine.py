"""The control engine: takes an event and its time, and returns commands.

It has no clock, no I/O and no randomness. So a simulated run, a real run and a replay decide with
the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Protocol

from streamrl.engine.messages import (
    Act,
    Command,
    Event,
    Generate,
    Generated,
    Observed,
    Verified,
    Verify,
)
from streamrl.engine.policies.dispatch import FromOutside
from streamrl.engine.state import State
from streamrl.runfile.dispatch_choice import DISPATCH

FREQUENT = (Generated, Observed, Verified)
"""Nearly all events of a run are of these types, and most policies have nothing to do after them."""
ROUTINE = frozenset({Act, Generate, Verify})
"""Commands after which no other policy has anything new to do."""


class Policy(Protocol):
    """One kind of decision of the engine.

    A policy may have an attribute `ignores`: those types of `FREQUENT` that never give it anything
    to do. What ignores `Generated` also ignores `Observed`, because both let a rollout continue or end. It may have a method `is_at_rest(state)`: whether none of them will give it anything to
    do, as long as nothing else happens. The engine does not ask it after such events, unless a
    command has changed more of the state. A policy at rest that waits for an instant has a method
    `rests_until(state)`, which returns it in seconds.
    """

    def decide(self, state: State) -> Iterable[Command]:
        """Yield what to do now. Each command enters `state` before the next one is computed.

        Most events concern few policies. A policy without commands returns `()` and creates no
        generator.
        """
        ...


Decider = tuple[int, Callable[[State], Iterable[Command]]]
"""How a policy decides, after the number of policies up to it in order of precedence."""


class Engine:
    """Policies in order of precedence, and the state that they share."""

    def __init__(self, state: State, policies: Sequence[Policy]) -> None:
        self.state = state
        self._everyone: list[Decider] = [
            (place, policy.decide) for place, policy in enumerate(policies, start=1)
        ]
        self._attentive = {
            kind: [
                (decider, getattr(policy, "is_at_rest", _never))
                for decider, policy in zip(self._everyone, policies, strict=True)
                if _like(kind) not in getattr(policy, "ignores", ())
            ]
            for kind in FREQUENT
        }
        """By type of `FREQUENT`: the policies that do not ignore it, and whether each is at rest."""
        self._instants: list[Callable[[State], float]] = [
            policy.rests_until for policy in policies if hasattr(policy, "rests_until")
        ]
        """For each policy that waits for an instant, what returns it."""
        self._concerned: dict[type[Event], list[Decider]] = {}
        """By type of `FREQUENT`: the policies to ask, until more of the state changes."""
        self._rests_until = 0.0
        """Instant after which one of the other policies must be asked."""
        self._has_changed = True
        """Whether the last event led to a command that is not `ROUTINE`."""
        inner = (getattr(policy, "policy", policy) for policy in policies)
        self._outside = [policy for policy in inner if isinstance(policy, FromOutside)]

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
        concerned = self._concerned.get(type(event))
        if concerned is None or now > self._rests_until:
            concerned = self._find_concerned(type(event))
        self._has_changed = False
        for place, decide in concerned:
            # most policies return (): iterating over it anyway costs more
            if decided := decide(state):
                self._commit(decided, commands)
                if self._has_changed:
                    self._ask_after(place, commands)
                    break
        return commands

    def _find_concerned(self, kind: type[Event]) -> list[Decider]:
        """Return the policies that may have something to do after such an event, in order of precedence."""
        if kind not in FREQUENT:
            self._concerned.clear()
            return self._everyone
        if self._has_changed:
            return self._everyone
        state = self.state
        self._rests_until = min([rests_until(state) for rests_until in self._instants], default=inf)
        found = self._concerned[kind] = [
            decider for decider, is_at_rest in self._attentive[kind] if not is_at_rest(state)
        ]
        return found

    def _commit(self, decided: Iterable[Command], commands: list[Command]) -> None:
        """Add the commands of one policy."""
        commit, add = self.state.commit, commands.append
        for command in decided:
            commit(command)
            add(command)
            if type(command) not in ROUTINE:
                self._has_changed = True

    def _ask_after(self, place: int, commands: list[Command]) -> None:
        """Ask all policies after the one that changed more of the state."""
        self._concerned.clear()
        for _, decide in self._everyone[place:]:
            if decided := decide(self.state):
                self._commit(decided, commands)


def _like(kind: type[Event]) -> type[Event]:
    """Return the type by which policies ignore an event."""
    return Generated if kind is Observed else kind


def _never(state: State) -> bool:
    """Return that a policy is not at rest."""
    return False
