"""The whole run in words, the first thing that a plan, a simulation and a report say: all three in the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, log10
from typing import TypeAlias

from streamrl.record.whole_run import PoolTotal, WholeRun
from streamrl.runfile.units import SECONDS_PER_DAY, SECONDS_PER_HOUR

Interval: TypeAlias = tuple[float, float] | None
IN_DAYS = 2 * SECONDS_PER_DAY
"""Seconds from which a run is told in days."""
DIGITS = 2
"""Of the half of an interval; the value has as many behind the point."""
UNSURE = 3
"""Digits of a value without an interval."""


def headline(whole: WholeRun) -> str:
    """Say in a line what the whole run takes: "200 steps take 15.68 h ± 0.14 and cost $892.7 ± 7.9 (95 % intervals)"."""
    sure = " (95 % intervals)" if whole.seconds_interval is not None else ""
    noun, verbs = ("step", ("takes", "costs")) if whole.steps == 1 else ("steps", ("take", "cost"))
    cost = f" and {verbs[1]} {dollars_text(whole)}" if whole.dollars else ""
    return f"{whole.steps:,} {noun} {verbs[0]} {time_text(whole)}{cost}{sure}"


def price_note(whole: WholeRun) -> str:
    """Say what it costs and how many steps it is, beside its time: "$892.7 ± 7.9 for 200 steps; 95 % intervals"."""
    noun = "step" if whole.steps == 1 else "steps"
    sure = "; 95 % intervals" if whole.seconds_interval is not None else ""
    cost = f"{dollars_text(whole)} " if whole.dollars else ""
    return f"{cost}for {whole.steps:,} {noun}{sure}"


def time_text(whole: WholeRun) -> str:
    """Write how long it takes: "15.68 h ± 0.14", "3.27 d ± 0.05 (78.5 h)"."""
    return long_time(whole.seconds, whole.seconds_interval)


def dollars_text(whole: WholeRun) -> str:
    """Write what it costs: "$892.7 ± 7.9"."""
    return long_dollars(whole.dollars, whole.dollars_interval)


def long_time(seconds: float, interval: Interval = None) -> str:
    """Write the seconds of a whole run in the unit that people count it in."""
    for unit, size in (("d", SECONDS_PER_DAY), ("h", SECONDS_PER_HOUR), ("min", 60.0)):
        if seconds >= (IN_DAYS if unit == "d" else size):
            break
    else:
        unit, size = "s", 1.0
    text = _with_half(seconds, interval, size)
    value, *half = text.split(" ")
    text = " ".join([f"{value} {unit}", *half])
    return f"{text} ({seconds / SECONDS_PER_HOUR:,.1f} h)" if unit == "d" else text


def long_dollars(dollars: float, interval: Interval = None) -> str:
    """Write the dollars of a whole run."""
    return f"${_with_half(dollars, interval, 1.0)}"


def facts(whole: WholeRun) -> Iterator[tuple[str, str, str]]:
    """Yield what else is to be said of it: a name, a figure and a note."""
    for name, pool in whole.pools.items():
        yield f"  {name}", f"${pool.dollars:,.2f}" if pool.dollars else "free", _pool_text(pool)
    if whole.egress:
        yield "  links", f"${whole.egress:,.2f}", "for weights that cross them"
    yield "  GPU-hours", f"{whole.gpu_hours:,.4g}", _parts_text(whole)
    yield "  trained on", f"{_count(whole.tokens)} tokens", f"{whole.rollouts:,} rollouts"
    if whole.kwh is not None:
        yield "  energy", f"{whole.kwh:,.4g} kWh", "of the GPUs alone"
    elif whole.unknown_power:
        gpus = ", ".join(whole.unknown_power)
        known = sum(pool.kwh for pool in whole.pools.values() if pool.kwh is not None)
        rest = f"; the others take {known:,.4g} kWh" if known else ""
        yield "  energy", "not known", f"no measured watts of {gpus}{rest}"


def fact_lines(whole: WholeRun) -> Iterator[str]:
    """Yield the same as lines of text."""
    for name, figure, note in facts(whole):
        yield f"{name}: {figure}; {note}"


def _pool_text(pool: PoolTotal) -> str:
    owned = ", all of an owned pool" if pool.is_owned else ""
    return f"{pool.num_gpus:.4g} {pool.gpu} for {pool.gpu_hours:,.4g} GPU-hours{owned}"


def _parts_text(whole: WholeRun) -> str:
    parts = {"the start": whole.start_time, "checkpoints": whole.checkpoint_time}
    told = [f"{long_time(seconds)} for {what}" for what, seconds in parts.items() if seconds > 0]
    return ", ".join(["of them all", *told]) if told else ""


def _with_half(value: float, interval: Interval, size: float) -> str:
    """Write a value in units of `size`, with half its interval and as many digits as that leaves sure."""
    value /= size
    half = 0.0 if interval is None else (interval[1] - interval[0]) / 2 / size
    if half <= 0:
        return f"{value:,.{_decimals(value, UNSURE)}f}"
    decimals = _decimals(half, DIGITS)
    return f"{value:,.{decimals}f} ± {half:,.{decimals}f}"


def _decimals(value: float, digits: int) -> int:
    """Return the digits behind the point with which a number has so many in all."""
    if value <= 0:
        return 0
    return max(0, digits - 1 - floor(log10(value)))


def _count(value: float) -> str:
    for scale, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= scale:
            return f"{value / scale:.4g}{prefix}"
    return f"{value:.4g}"
