"""At which bandwidth of a link a token costs as much with a run as with another that does the same work."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

from msgspec.structs import replace

from streamrl.record.against import Against, BreakEvenBandwidth
from streamrl.record.metrics import measure_speed
from streamrl.runfile.config import Run
from streamrl.runfile.units import Bandwidth
from streamrl.sim.steady_state import open_world

LEAST_BANDWIDTH = 10e6 / 8
"""Bytes a second below which nobody sends weights: 10 Mbps."""
FREE_BANDWIDTH = 1e15
"""Bytes a second of a link that is as good as free: 65 GB take 65 us."""
NEAR_EVEN = 0.1
"""Share of the wanted interval within which costs are even, when a bandwidth is looked for."""
NEAR_BANDWIDTH = 0.005
"""Ratio, less one, of two bandwidths of which it is not worth asking what lies between."""
MOST_TRIALS = 20

Watch = Callable[[str, int, int], None]
"""Told what is done, how much of it, and how much at most."""


def find_break_even_bandwidth(
    a: Run, link: int, against: Against, watch: Watch = lambda what, done, most: None
) -> BreakEvenBandwidth:
    """Find the bandwidth of one of A's links at which a token costs as much with A as with B.

    A is simulated again for each that is tried, over the steps that count. In logarithms costs fall with bandwidth, and
    never faster than it rises, so that a line through two points, and that bound, lead there.

    Args:
        a: the run.
        link: place of the link in its run file.
        against: A against B, as the files have them.
        watch: told of progress.
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
    """Return where a function that falls at most one for one is zero, from a point above zero and one below.

    False position in the Illinois way: a side that stays twice in a row counts half.
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
    """Return dollars for a million tokens with another bandwidth of one link, over the same steps."""
    links = list(a.cluster.links)
    links[link] = replace(links[link], bandwidth=Bandwidth(bandwidth))
    world = open_world(replace(a, cluster=replace(a.cluster, links=links)))
    last = against.counted_steps[1]
    trace = world.run(is_enough=lambda: len(world.steps) > last)
    if len(world.steps) < last:
        made = f"{len(world.steps)} of {last} steps"
        raise RuntimeError(
            f"with {bandwidth:.3g} B/s on a link the run stopped by itself after {made}"
        )
    return measure_speed(trace, against.counted_steps).cost_per_million_tokens
