"""What a run achieved and cost, from its trace alone: the same code for simulated and real runs."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import NamedTuple

import msgspec

from streamrl.engine.messages import (
    Drop,
    Failed,
    Generated,
    PromptsDrawn,
    ReplicaLost,
    ReplicaStopped,
    Resize,
    RunStarted,
    StartReplica,
    Stepped,
    StopReplica,
    Train,
    Verified,
)
from streamrl.hardware.profiles import price_of
from streamrl.record.attribution import Attribution, attribute
from streamrl.record.trace import Trace
from streamrl.runfile.config import Run
from streamrl.runfile.sides import sides_of

SECONDS_PER_HOUR = 3600.0
TIER_OF_ACTIVITY = {"prefill": "prefill", "decode": "decode", "score": "score", "train": "train"}


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


class Metrics(Speed, frozen=True, kw_only=True):
    """The figures that tables, JSON and comparisons are made of."""

    world: str
    num_steps: int
    total_time: float
    """Seconds from the first to the last entry."""
    num_gpus: dict[str, int]
    """GPUs allocated at the start by side, each once: "shared" ones generate and train in turn."""
    busy: dict[str, float]
    """Share of all GPU-seconds, by activity."""
    idle: dict[str, float]
    """Share of all GPU-seconds, by cause; `busy` and `idle` sum to 1."""
    staleness: dict[int, int]
    """Rollouts by how many versions they were behind when trained on."""
    rewards: list[float]
    """Mean reward of each step's rollouts."""
    dropped: dict[str, int]
    """Rollouts never trained on, by reason."""
    tiers: dict[str, float]
    """Share of busy seconds by where they came from: measured, composed, roofline."""


class Flow(NamedTuple):
    """What a trace says of its rollouts."""

    stepped_at: list[float]
    generated: list[tuple[float, int]]
    """Instant and new tokens of each attempt."""
    trained: list[list[int]]
    """Rollouts of each step."""
    tokens: dict[int, int]
    rewards: dict[int, float]
    staleness: Counter[int]
    dropped: Counter[str]


def measure(trace: Trace) -> Metrics:
    """Compute every figure of a trace.

    Raises:
        ValueError: the trace has no finished step.
    """
    speed, flow = _measure_speed(trace)
    shares = attribute(trace)
    return Metrics(
        world=trace.world,
        num_steps=len(speed.step_times),
        total_time=trace.entries[-1].time,
        num_gpus={side.name: side.num_gpus for side in sides_of(trace.run)},
        busy=shares.busy,
        idle=shares.idle,
        staleness=dict(sorted(flow.staleness.items())),
        rewards=[_mean([flow.rewards[r] for r in rollouts]) for rollouts in flow.trained],
        dropped=dict(flow.dropped),
        tiers=_tiers(trace, shares),
        **msgspec.structs.asdict(speed),
    )


def measure_speed(trace: Trace) -> Speed:
    """Compute the figures of a trace that steps and rollouts tell by themselves.

    Raises:
        ValueError: the trace has no finished step.
    """
    return _measure_speed(trace)[0]


def _measure_speed(trace: Trace) -> tuple[Speed, Flow]:
    flow = read_flow(trace)
    if not flow.stepped_at:
        raise ValueError("the trace has no finished step, so there is nothing to measure")
    run = trace.run
    step_times = [b - a for a, b in zip([0.0, *flow.stepped_at], flow.stepped_at, strict=False)]
    warm_up = min(run.warm_up_steps, len(step_times) - 1)
    began = flow.stepped_at[warm_up - 1] if warm_up else 0.0
    span = flow.stepped_at[-1] - began
    trained = [rollout for rollouts in flow.trained[warm_up:] for rollout in rollouts]
    goodput = sum(flow.tokens[rollout] for rollout in trained) / span
    step_time = _typical_time(run, step_times[warm_up:])
    dollars = dollars_per_second(run, mean_replicas(trace, began, flow.stepped_at[-1]))
    made = sum(tokens for time, tokens in flow.generated if began < time <= flow.stepped_at[-1])
    speed = Speed(
        step_time=step_time,
        mean_step_time=_mean(step_times[warm_up:]),
        step_times=step_times,
        throughput=made / span,
        goodput=goodput,
        samples_per_second=len(trained) / span,
        cost_per_step=step_time * dollars,
        cost_per_million_tokens=dollars / goodput * 1e6 if goodput else 0.0,
    )
    return speed, flow


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


def read_flow(trace: Trace) -> Flow:
    """Follow every rollout from its tokens to the step that trained on it."""
    flow = Flow([], [], [[]], {}, {}, Counter(), Counter())
    born: dict[int, int] = {}
    groups: dict[int, tuple[int, ...]] = {}
    version = 0
    for time, event, commands in trace.entries:
        match event:
            case RunStarted():
                version = event.version
            case Generated():
                new = event.tokens - flow.tokens.get(event.rollout, 0)
                flow.generated.append((time, new))
                flow.tokens[event.rollout] = event.tokens
                if new:
                    born.setdefault(event.rollout, event.version)
            case Verified():
                flow.rewards[event.rollout] = event.reward
            case Stepped():
                flow.staleness.update(version - born[rollout] for rollout in flow.trained[-1])
                version = event.version
                flow.stepped_at.append(time)
                flow.trained.append([])
            case PromptsDrawn():
                groups.update((drawn.group, drawn.rollouts) for drawn in event.groups)
            case _:
                pass  # says nothing of rollouts
        for command in commands:
            if isinstance(command, Train):
                flow.trained[-1].extend(command.rollouts)
            elif isinstance(command, Drop):
                flow.dropped[command.reason] += len(groups[command.group])
    flow.trained.pop()
    return flow


def _tiers(trace: Trace, shares: Attribution) -> dict[str, float]:
    """Weigh the tier of each activity with its share of the busy seconds."""
    if trace.world == "real":
        return {"measured": 1.0}
    busy = sum(shares.busy.values()) or 1.0
    tiers: dict[str, float] = {}
    for activity, operation in TIER_OF_ACTIVITY.items():
        found = trace.facts[operation]
        assert isinstance(found, dict), f"a simulation gives shares of tiers for {operation}"
        for tier, share in found.items():
            tiers[tier] = tiers.get(tier, 0.0) + share * shares.busy[activity] / busy
    return tiers


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
