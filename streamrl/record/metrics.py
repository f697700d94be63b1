"""What a run achieved and cost, from its trace alone: the same code for simulated and real runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median

import msgspec

from streamrl.engine.messages import (
    Failed,
    ReplicaLost,
    ReplicaStopped,
    Resize,
    StartReplica,
    StopReplica,
)
from streamrl.hardware.profiles import price_of
from streamrl.record.attribution import (
    UNDERFILLED,
    Attribution,
    SidesAttribution,
    attribute_sides,
)
from streamrl.record.flow import Flow, TrainerFlow, read_flow
from streamrl.record.trace import Trace, blaming_damage
from streamrl.record.underfilled import YieldSource
from streamrl.runfile.config import Run
from streamrl.runfile.sides import sides_of, trainer_names

SECONDS_PER_HOUR = 3600.0
TIER_OF_ACTIVITY = {
    "prefill": "prefill",
    "decode": "decode",
    UNDERFILLED: "decode",
    "score": "score",
    "train": "train",
}
"""Operation whose tiers an activity has; what verifiers take stands in the run file."""
TRAINING = ("score", "train")


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace says of seconds and dollars, which takes no look at every GPU's every second."""

    step_time: float
    """Median seconds of a step, the warm-up left out; of tail batching the median of whole cycles' mean step."""
    mean_step_time: float
    """Mean seconds of a step, the warm-up left out: what a run of many steps takes."""
    step_times: list[float]
    throughput: float
    """Output tokens generated a second, the warm-up left out."""
    goodput: float
    """Output tokens trained on a second, the warm-up left out."""
    samples_per_second: float
    """Rollouts trained on a second, the warm-up left out."""
    cost_per_step: float
    """Dollars of all allocated GPUs for a median step."""
    cost_per_million_tokens: float
    """Dollars for a million tokens trained on."""


class SideMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Where the GPU-seconds of one side went, what took none left out; both sum to 1 together."""

    busy: dict[str, float]
    """Share by activity."""
    idle: dict[str, float]
    """Share by cause."""


class TrainerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer achieved."""

    name: str
    num_steps: int
    mean_step_time: float | None
    """Mean seconds of a step, the warm-up left out; None where it made none. Steps of a trainer that follows come in
    bursts, as groups do, so their median says little."""
    trained: int
    """Rollouts that its steps were made of."""
    goodput: float
    """Output tokens trained on a second, the warm-up left out."""
    staleness: dict[int, int]
    """Rollouts by how many versions of the leader they were behind its newest when trained on."""
    lost: dict[str, int]
    """Rollouts that it never trains on, by reason."""


class Metrics(Speed, frozen=True, kw_only=True):
    """The figures that tables, JSON and comparisons are made of."""

    world: str
    num_steps: int
    total_time: float
    """Seconds from the first to the last entry."""
    num_gpus: dict[str, int]
    """GPUs allocated at the start by side, each once: "shared" ones generate and train in turn."""
    busy: dict[str, float]
    """Share of all GPU-seconds, by activity; "underfilled" is what full batches would not have needed to decode."""
    idle: dict[str, float]
    """Share of all GPU-seconds, by cause; `busy` and `idle` sum to 1."""
    underfilled_from: YieldSource = "unknown"
    """What a full batch yields is known from the decode curve, or observed; where it is not, `busy` has no
    "underfilled", and "decode" is all of it."""
    sides: dict[str, SideMetrics]
    """The same of each side alone; what replicas and the leading trainer share is one, "shared"."""
    staleness: dict[int, int]
    """Rollouts by how many versions they were behind when the leader trained on them."""
    rewards: list[float]
    """Mean reward of each step's rollouts."""
    dropped: dict[str, int]
    """Rollouts that the leader never trained on, by reason."""
    trainers: list[TrainerMetrics]
    """Every trainer, the one that leads first: all other figures of steps are its own."""
    tiers: dict[str, float]
    """Share of busy seconds, but those of verifiers, by where they came from: measured, composed, roofline."""


def measure(trace: Trace) -> Metrics:
    """Compute every figure of a trace.

    Raises:
        ValueError: the trace has no finished step, or is damaged.
    """
    with blaming_damage(trace):
        return _measure(trace)


def measure_speed(trace: Trace) -> Speed:
    """Compute the figures of a trace that steps and rollouts tell by themselves.

    Raises:
        ValueError: the trace has no finished step.
    """
    return _measure_speed(trace)[0]


def _measure(trace: Trace) -> Metrics:
    speed, flow = _measure_speed(trace)
    shares, leader = attribute_sides(trace), flow.leader
    return Metrics(
        world=trace.world,
        num_steps=len(speed.step_times),
        total_time=trace.entries[-1].time,
        num_gpus={side.name: side.num_gpus for side in sides_of(trace.run)},
        busy=shares.whole.busy,
        idle=shares.whole.idle,
        underfilled_from=shares.whole.underfilled_from,
        sides={name: _side(of_side) for name, of_side in shares.sides.items()},
        staleness=dict(sorted(leader.staleness.items())),
        rewards=[_mean([flow.rewards[r] for r in rollouts]) for rollouts in leader.trained],
        dropped=dict(leader.lost),
        trainers=list(_trainers(trace.run, flow)),
        tiers=_tiers(trace, shares),
        **msgspec.structs.asdict(speed),
    )


def _measure_speed(trace: Trace) -> tuple[Speed, Flow]:
    flow = read_flow(trace)
    run, leader = trace.run, flow.leader
    if not leader.stepped_at:
        raise ValueError("the trace has no finished step, so there is nothing to measure")
    step_times = leader.step_times()
    warm_up = num_warm_up(run, leader)
    began = leader.stepped_at[warm_up - 1] if warm_up else 0.0
    ended = leader.stepped_at[-1]
    span = ended - began
    trained = leader.trained[warm_up:]
    goodput = flow.num_tokens(trained) / span
    step_time = _typical_time(run, step_times[warm_up:])
    dollars = dollars_per_second(run, mean_replicas(trace, began, ended))
    made = sum(tokens for time, tokens in flow.generated if began < time <= ended)
    speed = Speed(
        step_time=step_time,
        mean_step_time=_mean(step_times[warm_up:]),
        step_times=step_times,
        throughput=made / span,
        goodput=goodput,
        samples_per_second=sum(map(len, trained)) / span,
        cost_per_step=step_time * dollars,
        cost_per_million_tokens=dollars / goodput * 1e6 if goodput else 0.0,
    )
    return speed, flow


def num_warm_up(run: Run, trainer: TrainerFlow) -> int:
    """Return the steps that figures leave out; the last one never is."""
    return min(run.warm_up_steps, len(trainer.stepped_at) - 1)


def _trainers(run: Run, flow: Flow) -> Iterator[TrainerMetrics]:
    """Yield the figures of every trainer, each over its own time."""
    for name, trainer in zip(trainer_names(run), flow.trainers, strict=True):
        mean_step_time, goodput = None, 0.0
        if trainer.stepped_at:
            warm_up = num_warm_up(run, trainer)
            began = trainer.stepped_at[warm_up - 1] if warm_up else 0.0
            mean_step_time = _mean(trainer.step_times()[warm_up:])
            goodput = flow.num_tokens(trainer.trained[warm_up:]) / (trainer.stepped_at[-1] - began)
        yield TrainerMetrics(
            name=name,
            num_steps=len(trainer.stepped_at),
            mean_step_time=mean_step_time,
            trained=sum(map(len, trainer.trained)),
            goodput=goodput,
            staleness=dict(sorted(trainer.staleness.items())),
            lost=dict(trainer.lost),
        )


def _side(shares: Attribution) -> SideMetrics:
    return SideMetrics(
        busy={name: share for name, share in shares.busy.items() if share},
        idle={name: share for name, share in shares.idle.items() if share},
    )


def _typical_time(run: Run, step_times: list[float]) -> float:
    """Return the seconds of a median step.

    Where one step in a cycle takes the longest rollouts of all, the median step would not be what steps take:
    any cycle of steps has one, so their means are alike.
    """
    if run.policies.tail_batching == "none":
        return median(step_times)
    size = min(run.policies.tail_every, len(step_times))
    starts = range(0, len(step_times) - size + 1, size)
    return median(_mean(step_times[start : start + size]) for start in starts)


def dollars_per_second(run: Run, num_replicas: float | None = None) -> float:
    """Return what the allocated GPUs cost a second, shared ones once, with as many replicas as there were."""
    more = 0.0 if num_replicas is None else num_replicas - run.rollout.replicas
    total = 0.0
    for side in sides_of(run):
        price = price_of(run.cluster.pools[side.pool])
        added = more * run.rollout.tensor_parallel if side.kind == "rollout" else 0.0
        total += (side.num_gpus + added) * price / SECONDS_PER_HOUR
    return total


def mean_replicas(trace: Trace, start: float, end: float) -> float:
    """Return the replicas that were paid for on average between two instants: asked for, and not ended yet."""
    wanted, there = trace.run.rollout.replicas, 0
    seconds, before = 0.0, start
    for time, event, commands in trace.entries:
        until = min(max(time, start), end)
        seconds += max(wanted, there) * (until - before)
        before = until
        match event:
            case ReplicaStopped() | ReplicaLost() | Failed(StartReplica() | StopReplica()):
                there -= 1
            case _:
                pass  # ends no replica
        for command in commands:
            there += isinstance(command, StartReplica)
            wanted = command.num_replicas if isinstance(command, Resize) else wanted
    return seconds / (end - start)


def _tiers(trace: Trace, shares: SidesAttribution) -> dict[str, float]:
    """Weigh the tier of each operation with its share of the busy seconds."""
    if trace.world == "real":
        return {"measured": 1.0}
    tiers: dict[str, float] = {}
    weights: dict[str, float] = defaultdict(float)
    for operation, weight in _weights(trace.run, shares):
        weights[operation] += weight
    busy = sum(weights.values()) or 1.0
    for operation, weight in weights.items():
        found = trace.facts[operation]
        assert isinstance(found, Mapping), f"a simulation gives shares of tiers for {operation}"
        for tier, share in found.items():
            tiers[tier] = tiers.get(tier, 0.0) + share * weight / busy
    return tiers


def _weights(run: Run, shares: SidesAttribution) -> Iterator[tuple[str, float]]:
    """Yield each operation with its share of all GPU-seconds; trainers that follow have costs of their own."""
    others = dict.fromkeys(TRAINING, 0.0)
    for follower in run.followers:
        of_side = shares.sides[follower.name]
        part = of_side.gpu_seconds / (shares.whole.gpu_seconds or 1.0)
        own = {activity: part * of_side.busy[activity] for activity in TRAINING}
        others = {activity: others[activity] + own[activity] for activity in TRAINING}
        yield f"train {follower.name}", sum(own.values())
    for activity, operation in TIER_OF_ACTIVITY.items():
        yield operation, shares.whole.busy.get(activity, 0.0) - others.get(activity, 0.0)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
