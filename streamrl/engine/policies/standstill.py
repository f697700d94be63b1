"""When a run that goes on and on without a step is given up."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.engine.messages import Command, Stop
from streamrl.engine.state import State

MINUTE = 60.0  # seconds


class GiveUp:
    """Stop a run that makes no progress, with the most frequent reason of what failed since its last step.

    It looks whenever something happens. Where nothing does, there is nothing to count: a hang is the world's to
    notice, and to report as a loss.
    """

    def __init__(self, max_dropped: int, max_step_time: float) -> None:
        self.max_dropped = max_dropped
        """Groups dropped in a row."""
        self.max_step_time = max_step_time
        """Seconds without a step."""

    def decide(self, state: State) -> Iterable[Command]:
        """Return the end of the run once a limit is reached."""
        setbacks = state.setbacks
        if state.is_stopping:
            return ()
        if setbacks.num_dropped >= self.max_dropped:
            limit = f"{setbacks.num_dropped:,} groups in a row were dropped (policies.max_dropped_groups)"
        elif setbacks.is_storm(state.now, MINUTE):
            limit = f"{len(setbacks.failed_at):,} rollouts failed within a minute (policies.max_failures_per_minute)"
        elif state.now - setbacks.last_step_at > self.max_step_time:
            limit = f"no step was made in {self.max_step_time:,.0f} s (policies.max_step_time)"
        else:
            return ()
        return (Stop(f"{limit}{setbacks}"),)
