"""The simulated environments: they start cold or warm, act, time out, and may be lost.

Starts share a limit per second. A prepared (warm) environment starts faster; its replacement is
prepared with a cold start. The time of an action is that of the episode, up to its limit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np
import simpy

from streamrl.engine.messages import Act, Close, Event, Failed, Observed
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.sim.handling import EnvironmentProcesses
from streamrl.sim.world_interface import WorldInterface
from streamrl.workload.episodes import Episode, start_time_of

STREAM = 0x5342
"""Separates the random numbers of starts from those of episodes."""
LOST = "the environment was lost"
BYTES = 8


class Start(NamedTuple):
    """The start of an environment."""

    seconds: float
    """Until it is open or lost, with the wait for its turn."""
    is_lost: bool
    """Whether it exceeds `environment.start_time_limit`."""


class Starts:
    """When environments start: prepared ones first, and at most so many per second."""

    def __init__(self, config: EnvironmentConfig, seed: int) -> None:
        self._cold = start_time_of(config)
        self._warm_time = config.warm_start_time
        self._limit = float(config.start_time_limit)
        self._spacing = 1 / config.starts_per_second if config.starts_per_second else 0.0
        self._rng = np.random.default_rng([seed, STREAM])
        self._next_at = -inf
        """Earliest instant of the next start."""
        self._prepared = [0.0] * config.warm
        """Heap of the instants at which prepared environments are ready."""
        heapify(self._prepared)

    def begin(self, now: float, recorded: float | None) -> Start:
        """Begin a start.

        Args:
            now: the current instant.
            recorded: the seconds of this start in a recorded run; None: they are drawn.
        """
        begun = self._begin_one(now)
        if self._prepared and self._prepared[0] <= begun:
            heappop(self._prepared)
            heappush(self._prepared, self._begin_one(begun) + self._cold_time())
            return self._start(begun - now, float(self._warm_time))
        return self._start(begun - now, self._cold_time() if recorded is None else recorded)

    def _start(self, waited: float, seconds: float) -> Start:
        return Start(waited + min(seconds, self._limit), seconds > self._limit)

    def _begin_one(self, now: float) -> float:
        begun = max(now, self._next_at)
        self._next_at = begun + self._spacing
        return begun

    def _cold_time(self) -> float:
        return float(self._cold.sample(self._rng, 1)[0])


class Environments:
    """Timers of running actions: an environment uses no GPU, so it needs no process."""

    def __init__(self, around: WorldInterface, config: EnvironmentConfig) -> None:
        self._around = around
        self._processes = EnvironmentProcesses(around.env, around.cores)
        self._starts = Starts(config, around.run_file.seed)
        self._failed_share = config.failed_share
        self._seed = around.run_file.seed
        self._acting: dict[int, int] = {}
        """By rollout: number of its running action."""
        self._num_acts = 0

    def act(self, command: Act) -> None:
        """Start an environment, or let it answer a turn, or both."""
        self._num_acts += 1
        self._acting[command.rollout] = self._num_acts
        act = partial(self._act, command, self._num_acts)
        self._around.handling.then(act, self._handling_time(command))

    def _handling_time(self, command: Act) -> float:
        """Return the CPU seconds outside of the environment's process: of its start, and of each turn that goes on."""
        costs, num_answers = self._around.costs, len(self._episode(command).observations)
        goes_on = 0 < command.turn <= num_answers
        return command.starts * costs.episode_time + goes_on * costs.action_time

    def _act(self, command: Act, number: int) -> None:
        if self._acting.get(command.rollout) != number:
            return  # closed meanwhile
        seconds, is_lost = 0.0, self._is_lost(number)
        if command.starts:
            start = self._starts.begin(self._around.env.now, self._episode(command).start_time)
            seconds, is_lost = start.seconds, is_lost or start.is_lost
        if is_lost:
            self._after(seconds, number, Failed(command, LOST), command.rollout)
            return
        action_time, event = self._answer(command)
        ends_at = self._around.env.now + seconds + action_time
        costs = self._around.costs
        own = costs.environment_action_time if command.turn else 0.0
        own += command.starts * costs.environment_start_time
        self._processes.then(partial(self._end_at, ends_at, number, event, command.rollout), own)

    def close(self, command: Close) -> None:
        """Close an environment. Its running action ends now."""
        if self._acting.pop(command.rollout, None) is not None:
            self._around.emit(Observed(command.rollout, 0))

    def _answer(self, command: Act) -> tuple[float, Observed]:
        """Return the seconds of an action, repeated ones included, and what the environment answers."""
        episode, turn = self._episode(command), command.turn
        limit = inf if command.time_limit is None else command.time_limit
        times, observations = episode.action_times, episode.observations
        repeated = sum(times[: turn - 1]) if command.starts and turn else 0.0
        if not turn:
            return repeated, Observed(command.rollout, 0)
        if turn > len(observations):
            last = min(sum(times[turn - 1 :]), limit)
            return repeated + last, Observed(command.rollout, 0, is_over=True)
        time = times[turn - 1]
        answer = Observed(command.rollout, observations[turn - 1], has_timed_out=time > limit)
        return repeated + min(time, limit), answer

    def _episode(self, command: Act) -> Episode:
        episode = self._around.rollouts[command.rollout].episode
        assert episode is not None, "only episodes act"
        return episode

    def _end_at(self, instant: float, number: int, event: Event, rollout: int) -> None:
        """End an action whose CPU time is spent at an instant, or now if that is over."""
        self._after(max(0.0, instant - self._around.env.now), number, event, rollout)

    def _after(self, seconds: float, number: int, event: Event, rollout: int) -> None:
        def end(_: simpy.Event) -> None:
            if self._acting.get(rollout) == number:
                del self._acting[rollout]
                self._around.emit(event)

        timer: simpy.Event = self._around.env.timeout(seconds)
        callbacks: list[Callable[[simpy.Event], None]] | None = timer.callbacks
        assert callbacks is not None, "a new timer has not ended"
        callbacks.append(end)

    def _is_lost(self, number: int) -> bool:
        if not self._failed_share:
            return False
        digest = blake2b(f"{self._seed} lost {number}".encode(), digest_size=BYTES).digest()
        return int.from_bytes(digest, "little") / 2.0 ** (8 * BYTES) < self._failed_share
