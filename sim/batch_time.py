"""Seconds in which a run's replicas generate one batch, alone: the engine deals it, each replica is simulated.

Nothing trains meanwhile and no weights are loaded, so no replica waits for anyone, and each can be simulated
by itself: without SimPy's queue that takes a tenth of a step's simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec.structs import replace

from sim.costs.costs import Costs
from sim.rollout import Replica
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
from streamrl.runfile.config import Run
from streamrl.workload.workload import Draw

if TYPE_CHECKING:
    from sim.world import SimWorld


class Finish(NamedTuple):
    """One rollout's end."""

    time: float
    """Seconds since the batch was dealt."""
    tokens: int
    """Output tokens."""


def generate_batch(run: Run, costs: Costs, batch: Sequence[Draw]) -> list[Finish]:
    """Give the end of every rollout of a batch, the first first.

    Raises:
        ValueError: a policy reckons with `policies.latency` and nobody has filled it in.
    """
    shares: dict[int, list[Generate]] = defaultdict(list)
    for command in deal(run, batch):
        shares[command.replica].append(command)
    jobs = {
        rollout: (draw.drawn.group, draw.drawn.prompt_tokens, length)
        for draw in batch
        for rollout, length in zip(draw.drawn.rollouts, draw.lengths, strict=True)
    }
    finishes: list[Finish] = []
    for replica_id, commands in shares.items():
        alone = _Alone(run, costs)
        replica = Replica(cast("SimWorld", alone), replica_id, 0)
        for command in commands:
            replica.generate(command, *jobs[command.rollout])
        finishes += alone.run()
    return sorted(finishes)


def deal(run: Run, batch: Sequence[Draw]) -> list[Generate]:
    """Give what the run's policies send to its replicas when a batch is drawn and all of them are idle."""
    engine = build_engine(replace(run, algorithm=replace(run.algorithm, steps=1)))
    drawn = PromptsDrawn(1, 0, tuple(draw.drawn for draw in batch))
    replicas = (ReplicaStarted(replica_id, 0) for replica_id in range(run.rollout.replicas))
    events: Iterable[Event] = (RunStarted(0, 0), TrainerStarted(0), *replicas, drawn)
    commands = [command for event in events for command in engine.handle(event, 0.0)]
    return [command for command in commands if isinstance(command, Generate)]


class _Alone:
    """All that a replica needs of a world and of SimPy's environment while nobody else is there.

    What the replica's process waits for is then a number of seconds, or nothing that will ever come.
    """

    def __init__(self, run: Run, costs: Costs) -> None:
        self.run_file = run
        self.costs = costs
        self.env = self
        self.now = 0.0
        self._finishes: list[Finish] = []
        self._process: Generator[float, Any, None] | None = None

    def timeout(self, seconds: float) -> float:
        return seconds

    def event(self) -> float:
        return float("inf")

    def process(self, process: Generator[float, Any, None]) -> None:
        self._process = process

    def emit(self, event: Event) -> None:
        assert isinstance(event, Generated), f"{event} without a command for it"
        self._finishes.append(Finish(self.now, event.tokens))

    def run(self) -> list[Finish]:
        """Let the replica work until it is idle; give its rollouts' ends."""
        assert self._process is not None, "a replica begins its process when it is made"
        for seconds in self._process:
            if seconds == float("inf"):
                break
            self.now += seconds
        return self._finishes
