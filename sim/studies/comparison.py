"""Compare two runs simulated side by side, and find the link bandwidth at which they cost the same."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.engine.trace import Trace
from streamrl.record.charges import PaidGpus
from streamrl.record.metrics import measure_speed
from streamrl.record.run_comparison import (
    Against,
    BreakEvenBandwidth,
    PairedSteps,
    compare_traces,
    find_paired_steps,
)
from streamrl.record.steady_state import Steady, describe_unfinished
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds
from streamrl.runfile.gpu_pools import find_link
from streamrl.runfile.keys import pool_key
from streamrl.runfile.simulation_config import SimulateConfig
from streamrl.runfile.units import Bandwidth
from streamrl.sim.steady_state import Enough, open_world
from streamrl.sim.studies.comparable_runs import IncomparableError, check_same_work
from streamrl.sim.world import SimWorld, collecting_seldom

LEAST_BANDWIDTH = 10e6 / 8
"""Lowest bandwidth of the search in bytes per second: 10 Mbps."""
FREE_BANDWIDTH = 1e15
"""Bandwidth of a link that is almost free, in bytes per second: 65 GB take 65 us."""
NEAR_EVEN = 0.1
"""Share of the requested interval. Costs that differ by less count as equal in the search."""
NEAR_BANDWIDTH = 0.005
"""Ratio of two bandwidths, minus one. Below it, the search stops."""
MOST_TRIALS = 20

Watch = Callable[[str, int, int], None]
"""Called with the current work, the amount that is done, and its limit."""


def find_break_even_bandwidth(
    a: Run, link: int, against: Against, watch: Watch = lambda what, done, most: None
) -> BreakEvenBandwidth:
    """Find the bandwidth of one of A's links at which a token costs as much with A as with B.

    A is simulated again for each bandwidth, over the counted steps. On logarithmic scales, costs
    fall when bandwidth rises, with a slope between -1 and 0. So a line through two points, together
    with this bound, finds the bandwidth.

    Args:
        a: the run.
        link: index of the link in its run file.
        against: comparison of A with B, as the files are.
        watch: receives progress.
    """
    own = a.cluster.links[link]
    near_even, num_tried = NEAR_EVEN * a.simulate.interval, 0

    def excess(place: float) -> float:
        """Return the logarithm of A's costs over B's, for the logarithm of a bandwidth."""
        nonlocal num_tried
        num_tried += 1
        watch("bandwidth", num_tried, MOST_TRIALS)
        cost = against.steps_ratio * _cost_at(a, link, exp(place), against)
        return log(cost / against.b.cost_per_million_tokens)

    def answer(bandwidth: float | None, is_cheaper: bool = False) -> BreakEvenBandwidth:
        return BreakEvenBandwidth(
            between=own.between,
            bandwidth=float(own.bandwidth),
            break_even=bandwidth,
            is_cheaper=is_cheaper,
            least=LEAST_BANDWIDTH,
        )

    now, here = log(own.bandwidth), log(against.cost_ratio.value)
    if abs(here) <= near_even / 10:
        return answer(float(own.bandwidth))
    if here > 0:
        low, above, high = now, here, log(FREE_BANDWIDTH)
        if (below := excess(high)) >= 0:
            return answer(None)
    else:
        low, high, below = log(LEAST_BANDWIDTH), now, here
        if (above := excess(low)) <= 0:
            return answer(None, is_cheaper=True)
    return answer(exp(_crossing(excess, (low, above), (high, below), near_even)))


def _crossing(
    excess: Callable[[float], float],
    low: tuple[float, float],
    high: tuple[float, float],
    near: float,
) -> float:
    """Return the zero of a function whose slope is at least -1, from a point above zero and one below.

    The method is false position with the Illinois rule: a side that stays twice in a row counts half.
    """
    (left, above), (right, below) = low, high
    place, bound = left, left + above
    for _ in range(MOST_TRIALS - 1):
        place = max(bound, left + (right - left) * above / (above - below))
        if right - left < NEAR_BANDWIDTH:
            break
        value = excess(place)
        if abs(value) <= near:
            break
        if value > 0:
            left, above, below = place, value, below / 2
            bound = left + value
        else:
            right, below, above = place, value, above / 2
    return place


def _cost_at(a: Run, link: int, bandwidth: float, against: Against) -> float:
    """Return the dollars per million tokens with another bandwidth of one link, over the same steps."""
    links = list(a.cluster.links)
    links[link] = replace(links[link], bandwidth=Bandwidth(bandwidth))
    world = open_world(replace(a, cluster=replace(a.cluster, links=links)))
    last = against.counted_steps[1]
    trace = world.run(is_enough=lambda: len(world.steps) > last)
    if len(world.steps) < last:
        made = f"{len(world.steps)} of {last} steps"
        raise RuntimeError(
            f"the simulated run stopped after {made} with {bandwidth:.3g} B/s on cluster.links[{link}]"
        )
    return measure_speed(trace, against.counted_steps).cost_per_million_tokens


class Pair(NamedTuple):
    """Two runs that were simulated side by side."""

    traces: tuple[Trace, Trace]
    steps: PairedSteps
    note: str
    """Reason why their difference is less exact than requested; empty if there is none."""


def compare_runs(a: Run, b: Run, watch: Watch = lambda what, done, most: None) -> Against:
    """Simulate two runs of the same work until their difference is known, and compare them.

    Both use the same prompts and lengths step by step. The same number of steps counts in both. The
    ratio of their step times must reach the narrower `simulate.interval` of the two. The larger
    `simulate.max_steps` applies.

    Args:
        a: the run to assess.
        b: the run to compare it with.
        watch: receives progress.

    Raises:
        IncomparableError: they do not do the same work, or one has no price.
        ValueError: one does not fit its profiles or the GPU memory.
        RuntimeError: a run is stuck, or one stops before its last step.
    """
    check_same_work(a, b)
    for run in (a, b):
        if not PaidGpus.of(run).dollars_per_second:
            raise _without_price(run.rollout.pool)
    a, b = _alike(a, b)
    pair = simulate_pair(a, b, watch)
    counted = (pair.steps.first, pair.steps.last)
    against = compare_traces(pair.traces, counted, pair.note)
    index = find_link(a.cluster.links, a.rollout.pool, a.trainer.pool)
    if index is None or against.outcome == "no difference":
        return against
    found = find_break_even_bandwidth(a, index, against, watch)
    return replace(against, bandwidths=[found])


def _without_price(pool: str) -> IncomparableError:
    """Return the error of a run without costs. A ratio of dollars cannot be computed for it."""
    key = pool_key(pool, "price")
    text = f"{key} is 0, so the ratio of costs is undefined; set a price in dollars per GPU-hour"
    return IncomparableError(key, 0.0, Bounds(0.0, excludes_least=True), text)


def _alike(a: Run, b: Run) -> tuple[Run, Run]:
    """Return both runs with the same `[simulate]` and the same `plan.staleness_cost`.

    The cost of staleness depends on the task, and the task is the same.
    """
    simulate = replace(
        a.simulate,
        interval=min(a.simulate.interval, b.simulate.interval),
        max_steps=max(a.simulate.max_steps, b.simulate.max_steps),
    )
    lag = max(a.plan.staleness_cost, b.plan.staleness_cost)
    alike_a, alike_b = (
        replace(run, simulate=simulate, plan=replace(run.plan, staleness_cost=lag))
        for run in (a, b)
    )
    return alike_a, alike_b


def simulate_pair(a: Run, b: Run, watch: Watch = lambda what, done, most: None) -> Pair:
    """Simulate two runs step by step in turn, until the ratio of their step times is known."""
    runs = (a, b)
    worlds = [open_world(run) for run in runs]
    made = [world.steps for world in worlds]
    drifts = not all(run.has_steady_state for run in runs)

    def is_known(steady: Steady, share: float) -> bool:
        return find_paired_steps(runs, made, 0, drifts=drifts).is_within(share)

    enough = [Enough(world, is_known) for world in worlds]
    walks, most = [world.walk() for world in worlds], a.simulate.max_steps
    with collecting_seldom():
        is_over = False
        while not is_over:
            behind, other = (0, 1) if len(made[0]) <= len(made[1]) else (1, 0)
            stopped_by_itself = next(walks[behind], True)
            if stopped_by_itself:
                _check_finished(worlds[behind], "AB"[behind])
                break
            watch("step", min(map(len, made)), most)
            ahead = len(made[behind]) - len(made[other])
            if not ahead:
                answers = [each.is_there() for each in enough]  # call each once per step
                is_over = all(answers)
            if ahead <= 0 and made[behind].num_made > most:
                is_over = True  # even if a loss of the trainer has removed steps
    if not min(map(len, made)):
        raise RuntimeError(
            "a run ended before both had a finished step, so there is nothing to compare"
        )
    steps = find_paired_steps(runs, made, 1, drifts=drifts)
    return Pair((worlds[0].trace, worlds[1].trace), steps, _doubts(a.simulate, steps, drifts))


def _check_finished(world: SimWorld, letter: str) -> None:
    """Reject a comparison in which a run does not finish."""
    engine, run = world.engine, world.run_file
    unfinished = describe_unfinished(
        run.algorithm.steps, world.steps.version, engine.stop_reason or ""
    )
    if unfinished:
        raise RuntimeError(
            f"{letter} does not finish, so there is nothing to compare: it {unfinished}"
        )


def _doubts(simulate: SimulateConfig, steps: PairedSteps, drifts: bool) -> str:
    """Return the reason why the difference is less exact than requested; empty if there is none."""
    if drifts or steps.is_within(simulate.interval):
        return ""
    if steps.half_width is None:
        num = steps.last - steps.first + 1
        count = "1 step counts" if num == 1 else f"{num} steps count"
        return f"{count} in both, too few for an interval of the difference"
    if not steps.has_settled:
        return f"no steady state of both was found in {steps.last} steps"
    return (
        f"the difference is known to {steps.half_width:.2g}, not to the {simulate.interval:.2g} that is wanted "
        f"(simulate.interval), within simulate.max_steps={simulate.max_steps}"
    )
