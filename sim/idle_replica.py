"""Compute when the rollouts of a replica end that is idle at first and gets all of them at once.

The batch only shrinks if all of them join in one pass and fit in the KV cache until they end. Then
one sum over the rollouts in order of length gives all ends. Otherwise `streamrl.sim.lone_batch`
follows the batch. With the costs of a measured machine the replica's process is simulated. It needs
no event queue, because its next event is the only one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import simpy

from streamrl.engine.messages import Event, Generate, Generated
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.cpu_contention import Cores
from streamrl.sim.handling import Handling
from streamrl.sim.lone_batch import LoneBatch
from streamrl.sim.replica import Replica
from streamrl.sim.world_interface import Disruptions, SimRollout


class End(NamedTuple):
    """The end of one rollout."""

    time: float
    """Seconds since the replica got it."""
    tokens: int
    """Output tokens."""
    group: int
    """Group of the rollout."""


@dataclass
class IdleReplica:
    """Any idle replica of one kind."""

    run_file: Run
    costs: Costs
    kind: int

    def __post_init__(self) -> None:
        self._own = self.costs.of_kind(self.kind)
        self._config = self.run_file.rollout.kinds[self.kind]
        self._shares_prefixes = self.run_file.of_kind(self.kind).shares_prefixes
        own = self._own
        is_measured = own.rides_along or own.refill_passes > 0 or own.padded_share > 0
        self._is_plain = not is_measured and own.tokens_per_pass == inf

    def ends(
        self, rollouts: Mapping[int, SimRollout], commands: Sequence[Generate]
    ) -> Sequence[End]:
        """Return the ends of the rollouts that a replica is told to generate."""
        if not self._is_plain or any(command.prefix for command in commands):
            return self.simulated_ends(rollouts, commands)
        drawn = [rollouts[command.rollout] for command in commands]
        prefill_time = self._prefill_time(drawn)
        if prefill_time is not None:
            return list(self._drain(drawn, prefill_time))
        queue = [rollouts[command.rollout] for command in sorted(commands, key=_in_queue)]
        batch = LoneBatch(self._own, self._config, queue, shares_prefixes=self._shares_prefixes)
        return [End(time, queue[place].length, queue[place].group) for time, place in batch.ends()]

    def simulated_ends(
        self, rollouts: Mapping[int, SimRollout], commands: Sequence[Generate]
    ) -> Sequence[End]:
        """Return the same by simulating the replica's process."""
        env = _OneProcess()
        cores = Cores(env)
        handling = Handling(env, cores.time_of("handling"), 0.0)
        alone = _Alone(self.run_file, self.costs, rollouts, env, cores, handling)
        replica = Replica(alone, 0, 0, self.kind)
        for command in commands:
            replica.generate(command)
        env.work()
        return alone.ends

    def _prefill_time(self, drawn: Sequence[SimRollout]) -> float | None:
        """Return the seconds of the pass that all rollouts join; None if one must wait, or may wait again."""
        num_rollouts, prompts = len(drawn), [each.prompt_tokens for each in drawn]
        if self._shares_prefixes:
            prompts = list({each.group: each.prompt_tokens for each in drawn}.values())
        tokens = sum(max(prompt, 1) for prompt in prompts) + num_rollouts - len(prompts)
        reserved = self._config.max_tokens if self._config.admission == "reserve" else 0
        held = sum(prompts) + sum(max(each.length, reserved) for each in drawn)
        if num_rollouts > self._config.max_running or held > self._own.kv_capacity:
            return None
        pairs = sum(prompt * prompt for prompt in prompts) / 2
        return self._own.prefill_time(tokens, pairs, 0, num_rollouts)

    def _drain(self, drawn: Sequence[SimRollout], now: float) -> Iterator[End]:
        """Yield the ends of rollouts that all have one token at `now`, by length.

        Times are computed as in `Replica`, so that they are equal to the last bit.
        """
        base, per_context_token = self._own.decode.base, self._own.decode.per_context_token
        step, num_running = 1, len(drawn)
        context = sum(each.prompt_tokens for each in drawn) + num_running
        for each in sorted(drawn, key=_length):
            if steps := each.length - step:
                read = steps * context + num_running * steps * (steps - 1) / 2
                now += steps * base[num_running] + per_context_token[num_running] * read
                context += steps * num_running
                step = each.length
            yield End(now, each.length, each.group)
            num_running -= 1
            context -= each.prompt_tokens + each.length


def _length(drawn: SimRollout) -> int:
    return drawn.length


def _in_queue(command: Generate) -> tuple[int, int]:
    return command.priority, command.rollout


@dataclass
class _Alone:
    """The world of a single replica that is simulated alone."""

    run_file: Run
    costs: Costs
    rollouts: Mapping[int, SimRollout]
    env: _OneProcess
    cores: Cores
    handling: Handling
    disruptions: Disruptions = field(default_factory=Disruptions)
    ends: list[End] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        assert isinstance(event, Generated), f"{event} without a command for it"
        self.ends.append(End(self.env.now, event.tokens, self.rollouts[event.rollout].group))


class _OneProcess(simpy.Environment):
    """Simulated time for one process: its next event is always the next event, so no queue is needed."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._pause = simpy.Timeout(self, 0.0)
        """Placeholder for any event that the process waits for."""
        self._seconds = 0.0
        """Seconds until that event; infinite if nothing will trigger it."""
        self._process: Generator[simpy.Event, Any, Any]

    def timeout(self, delay: float = 0, value: Any = None) -> simpy.Timeout:
        self._seconds = delay
        return self._pause

    def event(self) -> simpy.Event:
        self._seconds = inf
        return self._pause

    def process(self, generator: Generator[simpy.Event, Any, Any]) -> simpy.Process:
        self._process = generator
        return super().process(generator)

    def work(self) -> None:
        """Run the process until it waits forever."""
        for _ in self._process:
            if self._seconds == inf:
                break
            self.now += self._seconds
