"""A simulated replica of a reward model: takes what waits, scores it in one call, and again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import simpy

from streamrl.engine.messages import Failed, Verify
from streamrl.sim.costs.rewarding import ModelRewards, StatedRewards
from streamrl.sim.surroundings import Surroundings

Work = Generator[simpy.Event, Any, None]


class ToScore(NamedTuple):
    """A rollout that waits for its score, which its group may not live to see."""

    command: Verify
    length: int
    """Prompt and output tokens."""


class RewardQueue:
    """Rollouts that wait for the next replica that is idle, first come, first served."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._waiting: deque[ToScore] = deque()
        self._arrival = env.event()

    def put(self, rollout: ToScore) -> None:
        """Let a rollout wait."""
        self._waiting.append(rollout)
        arrival, self._arrival = self._arrival, self._env.event()
        arrival.succeed()

    def wait(self) -> Work:
        """Wait until there is one, and all are there that come at the same instant."""
        while not self._waiting:
            yield self._arrival
            yield self._env.timeout(0)

    def take(self, most: int) -> list[ToScore]:
        """Return so many that waited longest, or all."""
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]


class RewardReplica:
    """One process: waits, computes, and comes up again where it was lost."""

    def __init__(
        self,
        around: Surroundings,
        costs: StatedRewards | ModelRewards,
        queue: RewardQueue,
        tell: Callable[[Verify], None],
    ) -> None:
        """Begin to come up.

        Args:
            around: time, cores and rollouts.
            costs: seconds of its calls.
            queue: what it takes rollouts from, beside other replicas.
            tell: takes each rollout that is scored.
        """
        self._around, self._costs, self._queue, self._tell = around, costs, queue, tell
        self._most = around.run_file.verifier.max_rollouts_per_call
        self._time = around.cores.time_of("training")
        self._under_way: list[ToScore] = []
        self._process = around.env.process(self._run())

    @property
    def has_work(self) -> bool:
        """Whether it scores anything just now."""
        return bool(self._under_way)

    def lose(self, reason: str, hang_time: float = 0.0) -> None:
        """Let it die, or stop and be noticed after a while; call it from a process of your own."""
        self._process.interrupt((reason, hang_time))

    def _run(self) -> Work:
        env = self._around.env
        loss: tuple[str, float] | None = None
        while True:
            try:
                if loss is not None:
                    reason, hang_time = loss
                    yield env.timeout(hang_time)
                    self._fail(reason)
                    loss = None
                yield env.timeout(self._around.run_file.verifier.start_time)
                while True:
                    yield from self._queue.wait()
                    yield from self._score()
            except simpy.Interrupt as struck:
                self._time.leave()
                loss = struck.cause

    def _score(self) -> Work:
        """Score what waits, as much as a call has room for; nothing where another replica was first."""
        self._under_way = self._queue.take(self._most)
        if not self._under_way:
            return
        stall_time = self._around.hindrances.stalled_until - self._around.env.now
        if stall_time > 0:
            yield self._around.env.timeout(stall_time)
        lengths = [rollout.length for rollout in self._under_way]
        yield self._time.work(self._costs.call_time(lengths))
        scored, self._under_way = self._under_way, []
        for rollout in scored:
            self._tell(rollout.command)

    def _fail(self, reason: str) -> None:
        lost, self._under_way = self._under_way, []
        for rollout in lost:
            self._around.emit(Failed(rollout.command, reason))
