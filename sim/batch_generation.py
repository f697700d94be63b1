"""Which groups each step generates and trains on, and the seconds in which idle replicas generate such a batch.

Seconds in which a run's replicas generate one batch, alone: the engine deals it, each replica is simulated.

Nothing trains meanwhile and no weights are loaded, so no replica waits for anyone, and each can be simulated
by itself: without SimPy's queue that takes a tenth of a step's simulation.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import ceil, inf
from typing import Any, NamedTuple

import simpy
from msgspec.structs import replace

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
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.cpu_contention import Cores
from streamrl.sim.replica import Replica
from streamrl.sim.verifier import SimRewards
from streamrl.sim.world_interface import Disruptions, SimRollout, rollouts_of
from streamrl.workload.workload import Draw, Workload

LAST = 4
"""One in so many of the replicas that are simulated is there because it may be the last."""


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
    """Replicas that this one stands for; 0 where its end is that of another like it."""


def generate_batch(
    run: Run, costs: Costs, batch: Sequence[Draw], most: int | None = None
) -> list[Finish]:
    """Return the end of every rollout of a batch, the first first; those with a weight were simulated.

    Args:
        run: the run file.
        costs: its seconds.
        batch: what is generated.
        most: replicas that are simulated: of more, those that may be the last, and some that stand for all others.

    Raises:
        ValueError: a policy reckons with `policies.latency` and nobody has filled it in.
    """
    shares: dict[int, list[Generate]] = defaultdict(list)
    for command in dispatch_batch(run, batch):
        shares[command.replica].append(command)
    rollouts = rollouts_of(batch)
    finishes: list[Finish] = []
    kinds, weights = run.rollout.kind_of_each, dict[int, float]()
    for kind in range(run.rollout.num_kinds):
        most_running, its = run.rollout.kinds[kind].max_running, costs.of_kind(kind)
        own = {r: share for r, share in shares.items() if kinds[r] == kind}
        steps = {
            r: _most_steps(most_running, its.kv_capacity, rollouts, share)
            for r, share in own.items()
        }
        weights |= _sampled(steps, ceil((most or len(shares)) * len(own) / len(shares)))
    for replica_id, weight in weights.items():
        alone, commands = _Alone(run, costs, rollouts), shares[replica_id]
        replica = Replica(alone, replica_id, 0, kinds[replica_id])
        for command in commands:
            replica.generate(command)
        alone.env.work()
        finishes += [each._replace(replica=replica_id, weight=weight) for each in alone.finishes]
    simulated = {finish.replica for finish in finishes}
    others = [share for replica, share in sorted(shares.items()) if replica not in simulated]
    return sorted([*finishes, *_like_those(finishes, rollouts, chain.from_iterable(others))])


def _like_those(
    finishes: Sequence[Finish],
    rollouts: Mapping[int, SimRollout],
    commands: Iterable[Generate],
) -> Iterator[Finish]:
    """Yield ends of rollouts whose replicas others stand for: each that of one of about its length, in turn.

    They count for nothing but the end of their group.
    """
    known = sorted((each.tokens, each.time) for each in finishes if each.weight > 1)
    lengths = [tokens for tokens, _ in known]
    for number, command in enumerate(commands):
        drawn = rollouts[command.rollout]
        first, end = bisect_left(lengths, drawn.length), bisect_right(lengths, drawn.length)
        place = first + number % (end - first) if first < end else min(first, len(known) - 1)
        yield Finish(known[place][1], drawn.length, drawn.group, command.replica, 0.0)


def _most_steps(
    max_running: int,
    kv_capacity: float,
    rollouts: Mapping[int, SimRollout],
    share: Sequence[Generate],
) -> float:
    """Bound the decode steps of a replica's share: all its work at what memory or places hold, and the longest rollout.

    That is Graham's bound on list scheduling (1969). Where memory is short a share with many tokens ends last, not the
    one with the longest rollout.
    """
    drawn = [rollouts[command.rollout] for command in share]
    held = sum(each.length * (each.prompt_tokens + each.length / 2) for each in drawn)
    tokens = sum(each.length for each in drawn)
    work = max(held / kv_capacity, tokens / max_running)
    return work + max(each.length for each in drawn)


def _sampled(steps: Mapping[int, float], most: int) -> dict[int, float]:
    """Return the replicas to simulate of those that need so many steps, each with how many it stands for."""
    if len(steps) <= most:
        return dict.fromkeys(steps, 1.0)
    order = sorted(steps, key=lambda replica: (-steps[replica], replica))
    first, rest = order[: most // LAST], order[most // LAST :]
    stride = ceil(len(rest) / (most - len(first)))
    others = rest[stride // 2 :: stride]
    return {**dict.fromkeys(first, 1.0), **dict.fromkeys(others, len(rest) / len(others))}


def dispatch_batch(run: Run, batch: Sequence[Draw]) -> list[Generate]:
    """Return what the run's policies send to its replicas when a batch is drawn and all of them are idle."""
    algorithm = replace(run.algorithm, steps=1, prompts_per_step=len(batch))
    engine = build_engine(replace(run, algorithm=algorithm))
    drawn = PromptsDrawn(1, 0, tuple(draw.drawn for draw in batch))
    replicas = (ReplicaStarted(replica_id, 0) for replica_id in range(run.rollout.num_replicas))
    events: Iterable[Event] = (RunStarted(0, 0), TrainerStarted(LEADER, 0), *replicas, drawn)
    commands = [command for event in events for command in engine.handle(event, 0.0)]
    return [command for command in commands if isinstance(command, Generate)]


class _Alone:
    """The surroundings of a replica while nobody else is there."""

    def __init__(self, run: Run, costs: Costs, rollouts: Mapping[int, SimRollout]) -> None:
        self.env = _OneProcess()
        self.cores = Cores(self.env)
        self.run_file = run
        self.costs = costs
        self.rollouts = rollouts
        self.disruptions = Disruptions()
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


class StepEnds(NamedTuple):
    """When rollouts of a step are finished, the first first."""

    at_once: list[Finish]
    """All that are drawn, where none waits to be: what a step has to do where others are under way meanwhile."""
    in_turn: list[Finish]
    """Those that are trained on, where a group is drawn as the one whose place it takes is passed over.

    Each round of such groups takes what it takes alone, from there on; all together take no less than at once.
    """


@dataclass(frozen=True)
class StepBatch:
    """The groups that are drawn for one step."""

    drawn: list[Draw]
    """All of them, in their order: as many as the step trains on, then one for each that is passed over."""
    passed_over: frozenset[int] = frozenset()
    """Ids of those that the trainer leaves out."""

    @property
    def trained(self) -> list[Draw]:
        """The groups that the step is made of."""
        return [draw for draw in self.drawn if draw.drawn.group not in self.passed_over]

    def generate(self, run: Run, costs: Costs, most: int | None = None) -> StepEnds:
        """Return the ends of its rollouts where replicas do nothing else; for `most` and what is raised see `generate_batch`."""
        at_once = generate_batch(run, costs, self.drawn, most)
        if not self.passed_over:
            return StepEnds(at_once, at_once)
        ends: list[Finish] = []
        vacant = [0.0] * len(self.trained)
        for drawn in self._rounds():
            begins = dict(zip((draw.drawn.group for draw in drawn), vacant, strict=True))
            alone = generate_batch(run, costs, drawn, most)
            found = sorted(each._replace(time=each.time + begins[each.group]) for each in alone)
            complete = {each.group: each.time for each in found}
            vacant = sorted(complete[group] for group in complete if group in self.passed_over)
            ends += found
        slower = max(1.0, at_once[-1].time / max(each.time for each in ends))
        kept = (each for each in ends if each.group not in self.passed_over)
        in_turn = sorted(each._replace(time=each.time * slower) for each in kept)
        return StepEnds(at_once, in_turn)

    def _rounds(self) -> Iterator[list[Draw]]:
        """Yield the groups that are drawn first, those for the passed over among them, and so on."""
        left, num = iter(self.drawn), len(self.trained)
        while drawn := list(islice(left, num)):
            yield drawn
            num = sum(draw.drawn.group in self.passed_over for draw in drawn)


def step_batches(run: Run, workload: Workload) -> Iterator[StepBatch]:
    """Yield what every step of a run generates, the first first, as if groups were complete in the order of their ids."""
    algorithm, first = run.algorithm, 0
    while True:
        batch = StepBatch(workload.draw(first, algorithm.prompts_per_step))
        if algorithm.leaves_out_uniform:
            batch = _filled(SimRewards(run), algorithm, workload, batch.drawn)
        yield batch
        first += len(batch.drawn)


def _filled(
    rewards: SimRewards, algorithm: AlgorithmConfig, workload: Workload, drawn: list[Draw]
) -> StepBatch:
    """Draw a group for each that is passed over, until a step has cost as many as it may."""
    drawn = [*drawn]
    most = (algorithm.max_gen_batches - 1) * algorithm.prompts_per_step
    passed_over: set[int] = set()
    for draw in drawn:  # which grows meanwhile
        if len(passed_over) == most:
            break
        group = draw.drawn
        if len({rewards.of(rollout) for rollout in group.rollouts}) == 1:
            passed_over.add(group.group)
            drawn += workload.draw(drawn[-1].drawn.group + 1, 1)
    return StepBatch(drawn, frozenset(passed_over))
