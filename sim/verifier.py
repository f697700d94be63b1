"""The simulated verifier pool: rewards cost time."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from streamrl.engine.messages import Verified, Verify
from streamrl.sim.reward_replica import RewardQueue, RewardReplica, ToScore
from streamrl.sim.simulated_rewards import SimRewards
from streamrl.sim.surroundings import Surroundings


class Verifier:
    """One process a worker, first come, first served; what a rollout takes of the host's cores comes before.

    Replicas of a reward model take several rollouts at a time.
    """

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._rewards = SimRewards(around.run_file)
        self._handling_time = around.costs.handling_time
        self._core = around.cores.time_of("handling")
        self._unhandled = simpy.Store(around.env)
        if self._handling_time:
            around.env.process(self._handle())
        self._time = around.run_file.verifier.time
        self._inbox = simpy.Store(around.env)
        self._queue = RewardQueue(around.env)
        self._models: list[RewardReplica] = []
        self._lengths: dict[int, int] = {}
        """Tokens of rollouts on their way to these, whose groups may be dropped before."""
        if (costs := around.costs.rewards) is not None:
            for _ in range(around.run_file.verifier.workers):
                self._models.append(RewardReplica(around, costs, self._queue, self._tell))
        elif self._time:
            for _ in range(around.run_file.verifier.workers):
                around.env.process(self._run())

    def verify(self, command: Verify) -> None:
        """Reward a rollout after those before it; a verifier that takes no time answers at once."""
        if self._models:
            drawn = self._around.rollouts[command.rollout]
            self._lengths[command.rollout] = drawn.prompt_tokens + drawn.length
        if self._handling_time:
            self._unhandled.put(command)
        else:
            self._pass_on(command)

    def reward_models(self) -> list[RewardReplica]:
        """Return the replicas of a reward model, those with work first."""
        return sorted(self._models, key=lambda model: not model.has_work)

    def _handle(self) -> Generator[simpy.Event, Any, None]:
        """Let rollouts take what they take of the cores, one after the other, as one process decides."""
        while True:
            command: Verify = yield self._unhandled.get()
            yield self._core.work(self._handling_time)
            self._pass_on(command)

    def _pass_on(self, command: Verify) -> None:
        if self._models:
            self._queue.put(ToScore(command, self._lengths.pop(command.rollout)))
        elif self._time:
            self._inbox.put(command)
        elif stall_time := self._stall_time:
            self._around.env.process(self._grade(command, stall_time))
        else:
            self._tell(command)

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            command: Verify = yield self._inbox.get()
            yield from self._grade(command, self._stall_time + self._time)

    def _grade(self, command: Verify, seconds: float) -> Generator[simpy.Event, Any, None]:
        yield self._around.env.timeout(seconds)
        self._tell(command)

    def _tell(self, command: Verify) -> None:
        self._around.emit(Verified(command.rollout, self._rewards.of(command.rollout)))

    @property
    def _stall_time(self) -> float:
        """Seconds for which it still stands still."""
        return max(0.0, self._around.hindrances.stalled_until - self._around.env.now)
