"""List the groups that each step generates and trains on, and compute how long idle replicas take for them.

The engine distributes the batch, and the ends of each replica's rollouts are computed alone.
Nothing trains and no weights are loaded meanwhile, so replicas never wait for each other. This
takes a tenth of the time of a full step's simulation.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.engine.entities import Group, Rollout
from streamrl.engine.messages import (
    Event,
    Generate,
    PromptsDrawn,
    ReplicaStarted,
    RunStarted,
    TrainerStarted,
)
from streamrl.engine.policies.dispatch import Dispatch, in_units
from streamrl.engine.presets import choose_system
from streamrl.engine.systems import build_dispatch, build_engine, build_state
from streamrl.engine.trainer_side import LEADER
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.config import Run
from streamrl.runfile.dispatch_choice import DISPATCH
from streamrl.runfile.roles_config import RolloutConfig
from streamrl.sim.costs.costs import Costs
from streamrl.sim.idle_replica import IdleReplica
from streamrl.sim.verifier import SimRewards
from streamrl.sim.world_interface import SimRollout, rollouts_of
from streamrl.workload.workload import Draw, Workload

LAST = 4
"""One in `LAST` simulated replicas is chosen because it may finish last."""


class Finish(NamedTuple):
    """The end of one rollout."""

    time: float
    """Seconds since the batch was distributed."""
    tokens: int
    """Output tokens."""
    group: int = 0
    """Group of the rollout."""
    replica: int = 0
    """Replica that generated it."""
    weight: float = 1.0
    """Number of replicas that this one represents; 0 if the end was copied from a similar rollout."""


class DrawnBatch(tuple[Draw, ...]):
    """The groups of a batch, in draw order. What plans generate them from is computed once for all plans."""

    @cached_property
    def rollouts(self) -> dict[int, SimRollout]:
        """Its rollouts by id, as replicas see them."""
        return rollouts_of(self)

    @cached_property
    def waiting(self) -> list[Rollout]:
        """Its rollouts by id, as dispatch policies see them before the first one is sent."""
        groups = (Group.draw(draw.drawn, step=1, oldest_version=0) for draw in self)
        return sorted(chain.from_iterable(group.rollouts for group in groups), key=_id)


def _id(rollout: Rollout) -> int:
    return rollout.id


def generate_batch(
    run: Run, costs: Costs, batch: DrawnBatch, most: int | None = None
) -> list[Finish]:
    """Return the end of every rollout of a batch, sorted by time; simulated ones have a weight above 0.

    Args:
        run: the run file.
        costs: costs of the run.
        batch: groups to generate.
        most: limit on simulated replicas; those that may finish last and a sample of the others are
            simulated.

    Raises:
        ValueError: a policy needs `policies.latency`, and it is missing, or sends nothing.
    """
    shares: dict[int, list[Generate]] = defaultdict(list)
    for command in Distribution(run, batch).commands():
        shares[command.replica].append(command)
    if not shares:
        why = "sends no rollout although all replicas are idle; mend its choose"
        raise DISPATCH.refusal(choose_system(run.policies).dispatch, why)
    rollouts = batch.rollouts
    replicas = [IdleReplica(run, costs, kind) for kind in range(run.rollout.num_kinds)]
    kinds, finishes = run.rollout.kind_of_each, list[Finish]()
    simulated = _chosen(run.rollout, costs, shares, rollouts, most or len(shares))
    for replica, weight in simulated.items():
        ends = replicas[kinds[replica]].ends(rollouts, shares[replica])
        finishes += [Finish(*end, replica, weight) for end in ends]
    others = [share for replica, share in sorted(shares.items()) if replica not in simulated]
    return sorted([*finishes, *_like_those(finishes, rollouts, chain.from_iterable(others))])


def _chosen(
    rollout: RolloutConfig,
    costs: Costs,
    shares: Mapping[int, Sequence[Generate]],
    rollouts: Mapping[int, SimRollout],
    most: int,
) -> dict[int, float]:
    """Choose the replicas to simulate, and return how many replicas each represents."""
    if len(shares) <= most:
        return dict.fromkeys(shares, 1.0)
    kinds, weights = rollout.kind_of_each, dict[int, float]()
    for kind, config in enumerate(rollout.kinds):
        capacity = costs.of_kind(kind).kv_capacity
        steps = {
            replica: _most_steps(config.max_running, capacity, rollouts, share)
            for replica, share in shares.items()
            if kinds[replica] == kind
        }
        weights |= _sampled(steps, ceil(most * len(steps) / len(shares)))
    return weights


def _like_those(
    finishes: Sequence[Finish],
    rollouts: Mapping[int, SimRollout],
    commands: Iterable[Generate],
) -> Iterator[Finish]:
    """Yield ends for the rollouts of replicas that were not simulated, each copied from a rollout of similar length.

    They only affect the time at which their group is complete.
    """
    known = sorted((each.tokens, each.time) for each in finishes if each.weight > 1)
    lengths = [tokens for tokens, _ in known]
    for number, command in enumerate(commands):
        drawn = rollouts[command.rollout]
        first, end = bisect_left(lengths, drawn.length), bisect_right(lengths, drawn.length)
        index = first + number % (end - first) if first < end else min(first, len(known) - 1)
        yield Finish(known[index][1], drawn.length, drawn.group, command.replica, 0.0)


def _most_steps(
    max_running: int,
    kv_capacity: float,
    rollouts: Mapping[int, SimRollout],
    share: Sequence[Generate],
) -> float:
    """Bound the decode steps of a replica's share: total work at full occupancy, plus the longest rollout.

    This is Graham's bound on list scheduling (1969). If memory limits the batch, the share with the
    most tokens ends last, and not the share with the longest rollout.
    """
    drawn = [rollouts[command.rollout] for command in share]
    held = sum(each.length * (each.prompt_tokens + each.length / 2) for each in drawn)
    tokens = sum(each.length for each in drawn)
    work = max(held / kv_capacity, tokens / max_running)
    return work + max(each.length for each in drawn)


def _sampled(steps: Mapping[int, float], most: int) -> dict[int, float]:
    """Choose the replicas to simulate by their decode steps, and return how many replicas each represents."""
    if len(steps) <= most:
        return dict.fromkeys(steps, 1.0)
    order = sorted(steps, key=lambda replica: (-steps[replica], replica))
    first, rest = order[: most // LAST], order[most // LAST :]
    stride = ceil(len(rest) / (most - len(first)))
    others = rest[stride // 2 :: stride]
    return {**dict.fromkeys(first, 1.0), **dict.fromkeys(others, len(rest) / len(others))}


@dataclass(frozen=True)
class Distribution:
    """The distribution of a batch to idle replicas."""

    run_file: Run
    batch: DrawnBatch

    def commands(self) -> Sequence[Generate]:
        """Return the commands by which replicas get the batch, those of each replica in order."""
        return list(self.dealt()) or self.sent_by_engine()

    def dealt(self) -> Iterator[Generate]:
        """Yield the commands as the dispatch policy gives them at once; none if only an engine can tell."""
        run = self.run_file
        policy = build_dispatch(run.policies, run.rollout, run.seed)[-1]
        if not isinstance(policy, Dispatch):
            return
        state = build_state(run)
        for replica_id, kind in enumerate(run.rollout.kind_of_each):
            state.fleet.start(replica_id, 0, kind)
            state.fleet.serve(replica_id, 0, 0)
        units = in_units(self.batch.waiting, policy.keeps_groups)
        places = policy.deal_to_idle(state, units, state.fleet.serving())
        for unit in units if places else ():
            replica = state.fleet.replicas[places[unit[0].id]]
            yield from (policy.send(rollout, replica) for rollout in unit)

    def sent_by_engine(self) -> list[Generate]:
        """Return the commands by which an engine sends its first batch."""
        num_prompts, num_replicas = len(self.batch), self.run_file.rollout.num_replicas
        algorithm = replace(self.run_file.algorithm, steps=1, prompts_per_step=num_prompts)
        engine = build_engine(replace(self.run_file, algorithm=algorithm))
        drawn = PromptsDrawn(1, 0, tuple(draw.drawn for draw in self.batch))
        replicas = (ReplicaStarted(replica, 0) for replica in range(num_replicas))
        events: Iterable[Event] = (RunStarted(0, 0), TrainerStarted(LEADER, 0), *replicas, drawn)
        commands = [command for event in events for command in engine.handle(event, 0.0)]
        return [command for command in commands if isinstance(command, Generate)]


class StepEnds(NamedTuple):
    """The ends of a step's rollouts, sorted by time."""

    at_once: list[Finish]
    """Ends of all drawn rollouts if all of them start at once, as when steps overlap."""
    in_turn: list[Finish]
    """Ends of the trained rollouts if a replacement is drawn only when its group has been
    rejected.

    Each round of replacements takes as long as it takes alone. All rounds together take at least as
    long as `at_once`.
    """


@dataclass(frozen=True)
class StepBatch:
    """The groups that are drawn for one step."""

    drawn: DrawnBatch
    """All groups in order: first the step's prompts, then one replacement for each rejected group."""
    passed_over: frozenset[int] = frozenset()
    """Ids of the groups that the trainer rejects."""

    @property
    def trained(self) -> list[Draw]:
        """The groups that the step trains on."""
        return [draw for draw in self.drawn if draw.drawn.group not in self.passed_over]

    def generate(self, generate: Callable[[DrawnBatch], list[Finish]]) -> StepEnds:
        """Return the ends of its rollouts on idle replicas, on which `generate` is `generate_batch`."""
        at_once = generate(self.drawn)
        if not self.passed_over:
            return StepEnds(at_once, at_once)
        ends: list[Finish] = []
        vacant = [0.0] * len(self.trained)
        for drawn in self._rounds():
            begins = dict(zip((draw.drawn.group for draw in drawn), vacant, strict=True))
            alone = generate(drawn)
            shifted = sorted(each._replace(time=each.time + begins[each.group]) for each in alone)
            complete = {each.group: each.time for each in shifted}
            vacant = sorted(complete[group] for group in complete if group in self.passed_over)
            ends += shifted
        slower = max(1.0, at_once[-1].time / max(each.time for each in ends))
        kept = (each for each in ends if each.group not in self.passed_over)
        in_turn = sorted(each._replace(time=each.time * slower) for each in kept)
        return StepEnds(at_once, in_turn)

    def _rounds(self) -> Iterator[DrawnBatch]:
        """Yield the first groups, then the replacements for those that were rejected, and so on."""
        left, num = iter(self.drawn), len(self.trained)
        while drawn := DrawnBatch(islice(left, num)):
            yield drawn
            num = sum(draw.drawn.group in self.passed_over for draw in drawn)


def step_batches(run: Run, workload: Workload) -> Iterator[StepBatch]:
    """Yield the batch of every step in order, assuming that groups are complete in the order of their ids."""
    algorithm, first = run.algorithm, 0
    while True:
        batch = StepBatch(DrawnBatch(workload.draw(first, algorithm.prompts_per_step)))
        if algorithm.leaves_out_uniform:
            batch = _filled(SimRewards(run), algorithm, workload, batch.drawn)
        yield batch
        first += len(batch.drawn)


def _filled(
    rewards: SimRewards, algorithm: AlgorithmConfig, workload: Workload, first: DrawnBatch
) -> StepBatch:
    """Draw a replacement for each rejected group, up to the limit of `max_gen_batches`."""
    drawn = [*first]
    most = (algorithm.max_gen_batches - 1) * algorithm.prompts_per_step
    passed_over: set[int] = set()
    for draw in drawn:  # the list grows during the loop
        if len(passed_over) == most:
            break
        group = draw.drawn
        if len({rewards.of(rollout) for rollout in group.rollouts}) == 1:
            passed_over.add(group.group)
            drawn += workload.draw(drawn[-1].drawn.group + 1, 1)
    return StepBatch(DrawnBatch(drawn), frozenset(passed_over))
