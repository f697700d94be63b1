"""What happens to work that failed, and to what is left when a run ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamrl.engine.entities import Group, Phase
from streamrl.engine.messages import Abort, Command, Drop, Stop
from streamrl.engine.state import State


class RetryThenDrop:
    """Try a rollout again until it has failed `max_attempts` times, then drop its group.

    A rollout is small and its failure may be its own; a trainer, a push or a load that fails stops the
    run, which can resume from its last checkpoint.
    """

    def __init__(self, max_attempts: int) -> None:
        self.max_attempts = max_attempts

    def decide(self, state: State) -> Iterable[Command]:
        """Yield drops for what failed too often."""
        return self._give_up(state) if state.failed or state.failure is not None else ()

    def _give_up(self, state: State) -> Iterator[Command]:
        if state.failure is not None and state.stop_reason is None:
            yield Stop(state.failure)
        hopeless = [r for r in state.failed.values() if r.failures >= self.max_attempts]
        for rollout in hopeless:
            if rollout.group.is_dropped:
                continue
            if any(r.phase in (Phase.TRAINING, Phase.TRAINED) for r in rollout.group.rollouts):
                yield Stop(f"rollout {rollout.id} fails, but its siblings are in the gradient")
                return
            yield from drop(rollout.group, f"failed {rollout.failures} times")


class WindDown:
    """Once the run stops or has all its steps, abort what runs and drop what is left, with the reason."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield aborts and drops until no group is left."""
        return self._clear(state) if state.is_stopping and state.groups else ()

    def _clear(self, state: State) -> Iterator[Command]:
        reason = state.stop_reason or "the run had all its steps"
        for group in list(state.groups.values()):
            yield from drop(group, reason)


def drop(group: Group, reason: str) -> Iterator[Command]:
    """Yield the aborts of what runs of `group`, then its drop."""
    for rollout in group.rollouts:
        if rollout.phase is Phase.GENERATING and not rollout.is_aborting:
            yield Abort(rollout.id)
    yield Drop(group.id, reason)
