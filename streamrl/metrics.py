"""What a run achieved and cost, from its trace alone: the same code for simulated and real runs."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import NamedTuple

import msgspec

from streamrl.attribution import Attribution, attribute
from streamrl.config import Run
from streamrl.messages import (
    Drop,
    Generated,
    PromptsDrawn,
    RunStarted,
    Stepped,
    Train,
    Verified,
)
from streamrl.profile import load_gpu
from streamrl.trace import Trace

SECONDS_PER_HOUR = 3600.0
TIER_OF_ACTIVITY = {"prefill": "prefill", "decode": "decode", "score": "score", "train": "train"}


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures that tables, JSON and comparisons are made of."""

    world: str
    num_steps: int
    total_time: float
    """Seconds from the first to the last entry."""
    step_time: float
    """Median seconds of a step, the warm-up left out."""
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
    num_gpus: dict[str, int]
    """Allocated GPUs by side."""
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
    flow = read_flow(trace)
    if not flow.stepped_at:
        raise ValueError("the trace has no finished step, so there is nothing to measure")
    run, shares = trace.run, attribute(trace)
    step_times = [b - a for a, b in zip([0.0, *flow.stepped_at], flow.stepped_at, strict=False)]
    warm_up = min(run.warm_up_steps, len(step_times) - 1)
    began = flow.stepped_at[warm_up - 1] if warm_up else 0.0
    span = flow.stepped_at[-1] - began
    trained = [rollout for rollouts in flow.trained[warm_up:] for rollout in rollouts]
    goodput = sum(flow.tokens[rollout] for rollout in trained) / span
    step_time = median(step_times[warm_up:])
    dollars = dollars_per_second(run)
    made = sum(tokens for time, tokens in flow.generated if began < time <= flow.stepped_at[-1])
    return Metrics(
        world=trace.world,
        num_steps=len(step_times),
        total_time=trace.entries[-1].time,
        step_time=step_time,
        step_times=step_times,
        throughput=made / span,
        goodput=goodput,
        samples_per_second=len(trained) / span,
        cost_per_step=step_time * dollars,
        cost_per_million_tokens=dollars / goodput * 1e6 if goodput else 0.0,
        num_gpus={"rollout": run.rollout.num_gpus, "trainer": run.trainer.num_gpus},
        busy=shares.busy,
        idle=shares.idle,
        staleness=dict(sorted(flow.staleness.items())),
        rewards=[_mean([flow.rewards[r] for r in rollouts]) for rollouts in flow.trained],
        dropped=dict(flow.dropped),
        tiers=_tiers(trace, shares),
    )


def dollars_per_second(run: Run) -> float:
    """Give what the allocated GPUs of both sides cost a second."""
    total = 0.0
    for pool_name, num_gpus in (
        (run.rollout.pool, run.rollout.num_gpus),
        (run.trainer.pool, run.trainer.num_gpus),
    ):
        pool = run.cluster.pools[pool_name]
        price = load_gpu(pool.gpu).price if pool.price is None else pool.price
        total += num_gpus * price / SECONDS_PER_HOUR
    return total


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
