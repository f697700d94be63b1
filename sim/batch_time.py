"""Seconds in which a run's replicas generate one batch, alone: the engine deals it, each replica is simulated.

Nothing trains meanwhile and no weights are loaded, so no replica waits for anyone, and each can be simulated
by itself: without SimPy's queue that takes a tenth of a step's simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from math import ceil, inf
from typing import Any, NamedTuple

import simpy
from msgspec.structs import replace

from sim.costs.costs import Costs
from sim.replica import Replica
from sim.surroundings import DrawnRollout, rollouts_of
from streamrl.engine.messages import (
    Event,
    Generate,
    Generated,
    PromptsDrawn,
    ReplicaStarted,
    RunStarted,
    TrainerStarted,
)
from streamrl.engine.systems import build_engine
from streamrl.engine.trainer_side import LEADER
from streamrl.runfile.config import Run
from streamrl.workload.workload import Draw

LONGEST = 4
"""One in so many of the replicas that are simulated is there for its longest rollout."""


class Finish(NamedTuple):
    """One rollout's end."""

    time: float
    """Seconds since the batch was dealt."""
    tokens: int
    """Output tokens."""
    group: int = 0
    """Whose rollout it is."""
    replica: int = 0
    """Who generated it."""
    weight: float = 1.0
    """Replicas that this one stands for."""


def generate_batch(
    run: Run, costs: Costs, batch: Sequence[Draw], most: int | None = None
) -> list[Finish]:
    """Return the end of every rollout of a batch, the first first.

    Args:
        run: the run file.
        costs: its seconds.
        batch: what is generated.
        most: replicas that are simulated: of more, those with the longest rollouts, and some that stand for all others.

    Raises:
        ValueError: a policy reckons with `policies.latency` and nobody has filled it in.
    """
    shares: dict[int, list[Generate]] = defaultdict(list)
    for command in deal(run, batch):
        shares[command.replica].append(command)
    rollouts = rollouts_of(batch)
    finishes: list[Finish] = []
    kinds = run.rollout.kind_of_each
    for replica_id, weight in _sampled(shares, rollouts, most or len(shares)).items():
        alone, commands = _Alone(run, costs, rollouts), shares[replica_id]
        replica = Replica(alone, replica_id, 0, kinds[replica_id])
        for command in commands:
            replica.generate(command)
        alone.env.work()
        finishes += [each._replace(replica=replica_id, weight=weight) for each in alone.finishes]
    return sorted(finishes)


def _sampled(
    shares: Mapping[int, list[Generate]], rollouts: Mapping[int, DrawnRollout], most: int
) -> dict[int, float]:
    """Return the replicas to simulate, each with how many it stands for."""
    if len(shares) <= most:
        return dict.fromkeys(shares, 1.0)
    longest = {
        replica: max(rollouts[command.rollout].length for command in commands)
        for replica, commands in shares.items()
    }
    order = sorted(shares, key=lambda replica: (-longest[replica], replica))
    first, rest = order[: most // LONGEST], order[most // LONGEST :]
    stride = ceil(len(rest) / (most - len(first)))
    others = rest[stride // 2 :: stride]
    return {**dict.fromkeys(first, 1.0), **dict.fromkeys(others, len(rest) / len(others))}


def deal(run: Run, batch: Sequence[Draw]) -> list[Generate]:
    """Return what the run's policies send to its replicas when a batch is drawn and all of them are idle."""
    engine = build_engine(replace(run, algorithm=replace(run.algorithm, steps=1)))
    drawn = PromptsDrawn(1, 0, tuple(draw.drawn for draw in batch))
    replicas = (ReplicaStarted(replica_id, 0) for replica_id in range(run.rollout.num_replicas))
    events: Iterable[Event] = (RunStarted(0, 0), TrainerStarted(LEADER, 0), *replicas, drawn)
    commands = [command for event in events for command in engine.handle(event, 0.0)]
    return [command for command in commands if isinstance(command, Generate)]


class _Alone:
    """The surroundings of a replica while nobody else is there."""

    def __init__(self, run: Run, costs: Costs, rollouts: Mapping[int, DrawnRollout]) -> None:
        self.env = _OneProcess()
        self.run_file = run
        self.costs = costs
        self.rollouts = rollouts
        self.finishes: list[Finish] = []

    def emit(self, event: Event) -> None:
        assert isinstance(event, Generated), f"{event} without a command for it"
        group = self.rollouts[event.rollout].group
        self.finishes.append(Finish(self.env.now, event.tokens, group))


class _OneProcess(simpy.Environment):
    """Simulated time for one process: what it waits for is what comes next, so nothing is queued for it."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._pause = simpy.Timeout(self, 0.0)
        """Stands for whatever the process waits for."""
        self._seconds = 0.0
        """Until that comes; infinitely many where nobody is there who could bring it about."""
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
        """Go on until the process waits for ever."""
        for _ in self._process:
            if self._seconds == inf:
                break
            self.now += self._seconds
