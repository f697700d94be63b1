"""The environments of a run's episodes: which episodes wait for one, have one, or are done with one.

An episode is a rollout. It waits in `queue` until its environment may start: in draw order, while
fewer than `environment.max_episodes` episodes are in flight and fewer than `environment.sandboxes`
environments are open. Then turns alternate:

    queued -> Act (start) -> waiting -> Generate -> queued -> Act -> waiting -> Generate -> ...

Episodes of an evaluation start before those of training, under the same limits.

The episode ends when its environment says so, at `environment.max_turns`, at
`environment.max_context`, at the replica's token limit, or when its time is over. A lost environment
ends no episode: the episode starts over, or repeats its actions in a new environment.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from streamrl.engine.entities import Rollout
from streamrl.engine.messages import Act, Observed
from streamrl.runfile.environment_config import EnvironmentConfig

DUE = 1e-6
"""Seconds before an instant at which it counts as reached, because sums of seconds are rounded."""


@dataclass(slots=True)
class Environments:
    """Queues and counts of episodes with environments; `state` updates it."""

    config: EnvironmentConfig
    is_sticky: bool
    """Whether the next turn goes to the replica of the turn before."""
    turn_imbalance: int | None = None
    """Fewest turns by which an overloaded replica is ahead of the least loaded one. Then the next turn
    goes elsewhere. None: it does not.
    """
    queue: list[tuple[int, Rollout]] = field(default_factory=list)
    """Heap of (rollout, episode) of training without an environment. Dropped ones are skipped."""
    held_out: deque[Rollout] = field(default_factory=deque)
    """Episodes of an evaluation without an environment, in order. Dropped ones are skipped."""
    to_act: deque[Rollout] = field(default_factory=deque)
    """Episodes whose turn has ended, in order of arrival."""
    to_close: deque[Rollout] = field(default_factory=deque)
    """Episodes that no longer need their environment."""
    num_open: int = 0
    """Environments that are starting or open."""
    num_under_way: int = 0
    """Episodes whose environment was started and that have not ended."""
    num_acting: int = 0
    """Environments of training that start or act."""
    num_acting_held_out: int = 0
    """Environments of an evaluation that start or act."""
    _deadlines: deque[tuple[float, Rollout]] = field(default_factory=deque)
    """Deadlines of episodes, in order. Those of ended and restarted episodes are skipped."""

    # Questions ------------------------------------------------------------------------------------

    @property
    def has_queue(self) -> bool:
        """Whether an episode of training waits for its environment."""
        return self._first_of_training() is not None

    def next_to_start(self) -> Rollout | None:
        """Return the next episode whose environment may start now, or None."""
        config = self.config
        if config.sandboxes is not None and self.num_open >= config.sandboxes:
            return None
        if config.max_episodes is not None and self.num_under_way >= config.max_episodes:
            return None
        return self._first_held_out() or self._first_of_training()

    def next_to_act(self) -> Rollout | None:
        """Return the next episode whose turn waits for an answer, or None."""
        while self.to_act:
            rollout = self.to_act[0]
            if rollout.phase == "queued" and rollout.is_turn_over and not rollout.group.is_dropped:
                return rollout
            self.to_act.popleft()
        return None

    def next_to_close(self) -> Rollout | None:
        """Return the next episode whose environment must be closed, or None."""
        while self.to_close and not self.to_close[0].has_environment:
            self.to_close.popleft()
        return self.to_close[0] if self.to_close else None

    def next_deadline(self) -> Rollout | None:
        """Return the episode whose time is over next, or None. While it acts, its `Act` has the limit."""
        while self._deadlines:
            deadline, rollout = self._deadlines[0]
            is_open = rollout.is_under_way and not rollout.is_truncated
            if is_open and rollout.deadline == deadline:
                return rollout
            self._deadlines.popleft()
        return None

    def time_limit(self, rollout: Rollout, now: float) -> float | None:
        """Return the seconds that an action may take; None if there is no limit."""
        limit = self.config.action_time_limit
        left = min(inf if limit is None else float(limit), max(0.0, rollout.deadline - now))
        return left if left < inf else None

    def is_last_turn(self, rollout: Rollout) -> bool:
        """Return whether the turn that has just ended is the last one that an episode may have."""
        return rollout.turn + 1 >= self.config.max_turns

    # Changes --------------------------------------------------------------------------------------

    def add(self, rollout: Rollout) -> None:
        """Let an episode wait for its environment to be started."""
        rollout.phase = "queued"
        if rollout.is_held_out:
            self.held_out.append(rollout)
        else:
            heappush(self.queue, (rollout.id, rollout))

    def end_turn(self, rollout: Rollout) -> None:
        """Record that the policy has ended a turn, which the environment answers next."""
        rollout.phase = "queued"
        rollout.is_turn_over = True
        self.to_act.append(rollout)

    def begin(self, rollout: Rollout, command: Act) -> None:
        """Record that an environment starts or acts.

        Raises:
            ValueError: another episode comes first.
        """
        held_out = rollout.is_held_out
        queued = self._first_held_out if held_out else self._first_of_training
        first = queued() if command.starts else self.next_to_act()
        if first is not rollout:
            raise ValueError(f"{command} is not the next action")
        if command.starts:
            if held_out:
                self.held_out.popleft()
            else:
                heappop(self.queue)
            rollout.has_environment = rollout.is_under_way = True
            self.num_open += 1
            self.num_under_way += 1
        else:
            self.to_act.popleft()
        rollout.phase = "acting"
        self.num_acting += not held_out
        self.num_acting_held_out += held_out

    def end_act(self, rollout: Rollout) -> None:
        """Record that an environment no longer starts or acts."""
        self.num_acting -= not rollout.is_held_out
        self.num_acting_held_out -= rollout.is_held_out

    def answer(self, rollout: Rollout, event: Observed, now: float) -> bool:
        """Record that an environment has started or answered; return whether the episode is over."""
        limit = self.config.episode_time_limit
        if rollout.deadline == inf and limit is not None:
            rollout.deadline = now + limit
            self._deadlines.append((rollout.deadline, rollout))
        if rollout.is_turn_over:
            rollout.is_turn_over = False
            rollout.turn += 1
            rollout.observed += event.tokens
        elif not rollout.turn:  # the environment may show something before the first turn
            rollout.observed += event.tokens
        is_full = rollout.context >= self.config.max_context
        return event.is_over or rollout.is_truncated or is_full

    def end(self, rollout: Rollout) -> None:
        """Record that an episode has ended, or was dropped."""
        if rollout.is_under_way:
            rollout.is_under_way = False
            self.num_under_way -= 1

    def lose(self, rollout: Rollout) -> None:
        """Record that an episode lost its environment, and let it wait for another one."""
        self.end(rollout)
        self.close(rollout)
        rollout.deadline = inf
        if self.config.after_loss == "restart":
            rollout.start_over()
        self.add(rollout)

    def close(self, rollout: Rollout) -> None:
        """Record that the environment of an episode is closed."""
        if rollout.has_environment:
            rollout.has_environment = False
            self.num_open -= 1

    def _first_held_out(self) -> Rollout | None:
        while self.held_out:
            rollout = self.held_out[0]
            if rollout.phase == "queued" and not rollout.group.is_dropped:
                return rollout
            self.held_out.popleft()
        return None

    def _first_of_training(self) -> Rollout | None:
        while self.queue:
            rollout = self.queue[0][1]
            if rollout.phase == "queued" and not rollout.group.is_dropped:
                return rollout
            heappop(self.queue)
        return None
