"""The simulated verifiers: workers, reward-model replicas, and the rewards of simulated rollouts."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple

import simpy

from streamrl.engine.messages import Failed, Verified, Verify
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.keys import trainer_key
from streamrl.runfile.roles_config import SecondaryTrainerConfig
from streamrl.sim.costs.reward_model import ModelRewards, StatedRewards
from streamrl.sim.world_interface import WorldInterface

REWARD = 0.0
"""Reward of a simulated rollout, because there is no text to score."""
BEST = 1.0
"""Reward of the best rollout in a group whose rewards differ."""
BYTES = 8
MEAN = "mean of "
"""Prefix that separates the random draws of means from those of differing rewards."""


class SimRewards:
    """Draws rewards with the statistics of the run file; a seed always gives the same rewards.

    It draws only those statistics that a trainer uses.
    """

    def __init__(self, run: Run) -> None:
        """Read the reward statistics of a run.

        Raises:
            RunError: a trainer selects groups by reward, and the run file has no reward statistics.
        """
        self._seed = run.seed
        self._size = run.algorithm.group_size
        self._share = run.workload.informative_share if run.leaves_out_uniform else 0.0
        pairs = run.workload.group_rewards if run.filters_by_reward else ()
        if run.filters_by_reward and not pairs:
            raise _unknown(run.followers)
        self._means = [mean for mean, _ in pairs]
        self._edges = list(accumulate(share for _, share in pairs))
        self._are_equal = not self._means and not self._share

    def of(self, rollout: int) -> float:
        """Return the reward of a rollout."""
        if self._are_equal:
            return REWARD
        group, place = divmod(rollout, self._size)
        mean = self._mean(group) if self._means else REWARD
        is_end = place == 0 or (place == self._size - 1 and bool(self._means))
        if not is_end or not self._share or self._draw(str(group)) >= self._share:
            return mean
        if not self._means:
            return BEST
        return mean + (BEST if place == 0 else -BEST) / 2 if self._size > 1 else mean

    def _mean(self, group: int) -> float:
        place = bisect_right(self._edges, self._draw(f"{MEAN}{group}"))
        return self._means[min(place, len(self._means) - 1)]  # rounding

    def _draw(self, what: str) -> float:
        """Return a random number in [0, 1)."""
        digest = blake2b(f"{self._seed} {what}".encode(), digest_size=BYTES).digest()
        number: float = int.from_bytes(digest, "little") / 2.0 ** (8 * BYTES)
        return number


def _unknown(followers: Sequence[SecondaryTrainerConfig]) -> RunError:
    number = next(n for n, each in enumerate(followers, start=1) if each.filters_by_reward)
    key = "workload.group_rewards"
    text = (
        f"{key} is missing, but {trainer_key(number)} selects groups by reward. "
        "Set each mean reward of a group and its share of groups, such as [[0.0, 0.25], [1.0, 0.75]]"
    )
    return RunError(key, None, list, text)


Work = Generator[simpy.Event, Any, None]


class ToScore(NamedTuple):
    """A rollout that waits for its score; its group may be dropped before."""

    command: Verify
    length: int
    """Prompt and output tokens."""


class RewardQueue:
    """Rollouts that wait for an idle replica, first come, first served."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._waiting: deque[ToScore] = deque()
        self._arrival = env.event()

    def put(self, rollout: ToScore) -> None:
        """Add a rollout to the queue."""
        self._waiting.append(rollout)
        arrival, self._arrival = self._arrival, self._env.event()
        arrival.succeed()

    def wait(self) -> Work:
        """Wait until there is a rollout, and until all rollouts of that instant have arrived."""
        while not self._waiting:
            yield self._arrival
            yield self._env.timeout(0)

    def take(self, most: int) -> list[ToScore]:
        """Return the `most` rollouts that have waited longest, or all if there are fewer."""
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]


class RewardReplica:
    """One process: wait, compute, and restart after a failure."""

    def __init__(
        self,
        around: WorldInterface,
        costs: StatedRewards | ModelRewards,
        queue: RewardQueue,
        tell: Callable[[Verify], None],
    ) -> None:
        """Start the replica.

        Args:
            around: time, cores and rollouts.
            costs: seconds of its calls.
            queue: rollouts to score, shared with other replicas.
            tell: receives each scored rollout.
        """
        self._around, self._costs, self._queue, self._tell = around, costs, queue, tell
        self._most = around.run_file.verifier.max_rollouts_per_call
        self._time = around.cores.time_of("training")
        self._under_way: list[ToScore] = []
        self._process = around.env.process(self._run())

    @property
    def has_work(self) -> bool:
        """Whether it is scoring now."""
        return bool(self._under_way)

    def lose(self, reason: str, hang_time: float = 0.0) -> None:
        """Let it die, or hang and be noticed after `hang_time` seconds; call this from another process."""
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
        """Score waiting rollouts, as many as fit in a call; do nothing if another replica took them first."""
        self._under_way = self._queue.take(self._most)
        if not self._under_way:
            return
        stall_time = self._around.disruptions.stalled_until - self._around.env.now
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


class Verifier:
    """One process per worker, first come, first served, after each rollout's CPU time on the host.

    Replicas of a reward model score several rollouts per call.
    """

    def __init__(self, around: WorldInterface) -> None:
        self._around = around
        self._rewards = SimRewards(around.run_file)
        self._time = around.run_file.verifier.time
        self._inbox = simpy.Store(around.env)
        self._queue = RewardQueue(around.env)
        self._models: list[RewardReplica] = []
        self._lengths: dict[int, int] = {}
        """Tokens of rollouts that wait for a reward model; their groups may be dropped before."""
        if (costs := around.costs.rewards) is not None:
            for _ in range(around.run_file.verifier.workers):
                self._models.append(RewardReplica(around, costs, self._queue, self._tell))
        elif self._time:
            for _ in range(around.run_file.verifier.workers):
                around.env.process(self._run())
        self._takes_time = bool(self._models or around.handling.seconds or self._time)

    def verify(self, command: Verify) -> None:
        """Score a rollout after earlier ones; a verifier without a duration answers at once."""
        around = self._around
        if not self._takes_time and not around.disruptions.stalled_until:
            rollout = command.rollout
            around.emit(Verified(rollout, self._rewards.of(rollout)))
            return
        if self._models:
            drawn = self._around.rollouts[command.rollout]
            self._lengths[command.rollout] = drawn.sequence_tokens
        around.handling.then(partial(self._pass_on, command))

    def reward_models(self) -> list[RewardReplica]:
        """Return the replicas of a reward model, busy ones first."""
        return sorted(self._models, key=lambda model: not model.has_work)

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
        """Seconds that remain of a stall."""
        return max(0.0, self._around.disruptions.stalled_until - self._around.env.now)
