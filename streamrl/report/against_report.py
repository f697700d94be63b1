"""Report whether run A is worth it over run B, on a terminal and as against.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import log
from pathlib import Path
from typing import Any, assert_never

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.record.band import ends_of
from streamrl.record.run_comparison import (
    Against,
    BreakEvenBandwidth,
    BreakEvenPrice,
    GpuUse,
    Known,
    PairedRun,
    is_significant,
)
from streamrl.report.run_tables import assumed_text, dollars_text, time_text
from streamrl.runfile.formatting import (
    format_count,
    format_dollars,
    format_duration,
    format_share,
    format_step_time,
)
from streamrl.runfile.reading import read_bytes
from streamrl.runfile.result_files import check_results, write_results
from streamrl.runfile.units import BITS_PER_BYTE, SECONDS_PER_HOUR

Row = tuple[str, str, str, str]
AS_LONG = 0.005
"""Logarithm of the ratio of two times below which they read as equal: "1.00 times as fast"."""


def against_report(
    against: Against, names: tuple[str, str], *, intervals: bool = False
) -> RenderableType:
    """Lay out the comparison of two runs for a terminal.

    Args:
        against: their figures.
        names: a description of A and of B, one line each.
        intervals: whether to show 95 % intervals (sampling error) of A and B as well.
    """
    heads = [Text(f"{letter}  {name}") for letter, name in zip("AB", names, strict=True)]
    table = Table("", "A", "B", "A - B", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for row in figures(against, intervals=intervals):
        table.add_row(*row)
    lines = [Text(line) for line in break_even_lines(against)]
    lines += [Text(line) for line in band_lines(against)]
    doubts = [Text(note, style="yellow") for note in notes(against)]
    told = Text(verdict(against), style="bold")
    return Group(*heads, Text(), table, Text(), *lines, *doubts, told)


# Sentences ----------------------------------------------------------------------------------------


def verdict(against: Against) -> str:
    """Return a sentence on whether A is worth it over B, or why this is unknown."""
    if against.outcome == "no difference":
        return "A costs as much a token as B and takes as long: no difference."
    text = f"A costs {_costs(against.cost_ratio)} a token{_doubt(against)} and {_speed(against)}: {_end(against)}."
    if against.steps_ratio != 1:
        text += f" In both is that A needs {against.steps_ratio:.2f} steps for one of B's (plan.staleness_cost)."
    if against.unshared_error is None:
        text += " Costs of what they do not do alike were never checked."
    return text


def _end(against: Against) -> str:
    match against.outcome:
        case "no difference" | "worth it" | "not worth it":
            return against.outcome
        case "may be chance":
            return f"dollars cannot decide{_at_most(against)}"
        case "within the error of costs":
            return "dollars cannot decide"
        case "faster but dearer":
            return f"worth it where an hour saved is worth more than {_whole_dollars(dollars_per_hour_saved(against))}"
        case "cheaper but slower":
            return f"worth it where an hour lost is worth less than {_whole_dollars(dollars_per_hour_saved(against))}"
        case _:
            assert_never(against.outcome)


def _at_most(against: Against) -> str:
    """Return the cost of an hour saved, for a faster run that may cost more or less, with both uncertainties."""
    dollars, ratio = against.cost_per_step.interval, against.step_time_ratio
    if dollars is None or ratio.value > 1 or not is_significant(ratio, against.unshared_error):
        return ""
    dearer = dollars[1] + (against.unshared_error or 0.0) * against.b.cost_per_step
    most = dearer / -against.step_time.value * SECONDS_PER_HOUR
    return f", and an hour saved costs {_whole_dollars(most)} at most"


def dollars_per_hour_saved(against: Against) -> float:
    """Return the extra dollars of the dearer run for each hour that it finishes earlier."""
    return -against.cost_per_step.value / against.step_time.value * SECONDS_PER_HOUR


def _whole_dollars(value: float) -> str:
    """Return dollars without cents, because cents are unknown here."""
    return f"${value:,.0f}" if value >= 10 else format_dollars(value)


def _costs(ratio: Known) -> str:
    """Return a cost difference: "12.0 % ± 2.0 % less" or more than B."""
    share = abs(ratio.value - 1)
    return f"{format_share(share)}{_plus_minus(ratio, format_share)} {'less' if ratio.value < 1 else 'more'}"


def _doubt(against: Against) -> str:
    if against.outcome == "may be chance":
        if against.cost_ratio.interval is None:
            return ", of which too few steps say how sure that is,"
        return ", which may be chance,"
    if against.outcome == "within the error of costs":
        assert against.unshared_error is not None, "nothing is within what is not known"
        return f", within the {against.unshared_error:.0%} that costs of what they do not do alike may be off,"
    return ""


def _speed(against: Against) -> str:
    ratio, error = against.step_time_ratio, against.unshared_error
    if abs(log(ratio.value)) < AS_LONG:
        return "takes as long"
    text = _times_as_long(ratio)
    if not ratio.differs_from(1.0):
        return f"{text}, which may be chance" if ratio.interval else f"{text} over few steps"
    if is_significant(ratio, error):
        return text
    return f"{text}, within the {error:.0%} that costs may be off"


def _times_as_long(ratio: Known) -> str:
    if ratio.value > 1:
        return f"takes {ratio.value:.2f}{_plus_minus(ratio, '{:.2f}'.format)} times as long"
    interval = None if ratio.interval is None else (1 / ratio.interval[1], 1 / ratio.interval[0])
    faster = Known(value=1 / ratio.value, interval=interval)
    return f"is {faster.value:.2f}{_plus_minus(faster, '{:.2f}'.format)} times as fast"


def break_even_lines(against: Against) -> Iterator[str]:
    """Yield the GPU price and the link bandwidth of A at which a token costs as much as with B."""
    for price in against.prices:
        yield _price_line(price)
    if not against.prices:
        yield "A rents no GPUs beyond those of B, so no price of them makes up for anything."
    for bandwidth in against.bandwidths:
        yield _bandwidth_line(bandwidth, may_be_chance=against.outcome == "may be chance")


def _price_line(price: BreakEvenPrice) -> str:
    gpus = f"the {price.num_gpus:g} {price.pool} that A has more"
    now = f"they cost {format_dollars(price.price)}"
    if price.break_even is None:
        return f"Break-even price: none; even with {gpus} at $0 a token costs more with A ({now} per GPU-hour)."
    value = price.break_even
    return (
        f"Break-even price: {format_dollars(value.value)}{_plus_minus(value, format_dollars)} per GPU-hour of {gpus} "
        f"({now})."
    )


def _bandwidth_line(found: BreakEvenBandwidth, *, may_be_chance: bool) -> str:
    link, now = " - ".join(found.between), f"it has {_gbps(found.bandwidth)}"
    if found.break_even is not None:
        open_end = ", where costs are not told apart either" if may_be_chance else ""
        return f"Break-even bandwidth: about {_gbps(found.break_even)} on the link {link} ({now}{open_end})."
    if found.is_cheaper:
        least = _gbps(found.least)
        return f"Break-even bandwidth: none; A costs less at any of the link {link} down to {least} ({now})."
    return f"Break-even bandwidth: none; A costs more even with a free link {link} ({now})."


def notes(against: Against) -> Iterator[str]:
    """Yield the reasons why the difference, or a figure of a run, is less certain than requested."""
    if against.note:
        yield against.note
    for letter, run in (("A", against.a), ("B", against.b)):
        if run.note:
            yield f"{letter}: {run.note}"


# The table ----------------------------------------------------------------------------------------


def band_lines(against: Against) -> Iterator[str]:
    """Yield what the bands and the totals of A and B rest on."""
    runs = (against.a, against.b)
    yield from _of_both([run.model_error.note if run.model_error else "" for run in runs])
    assumed = [run.whole_run.assumed for run in runs]
    yield from _of_both([f"assumed {assumed_text(each)}" if each else "" for each in assumed])


def _of_both(notes: Sequence[str]) -> Iterator[str]:
    """Yield a note on A and one on B, or one on both if they are the same; empty ones are left out."""
    if len(set(notes)) == 1:
        yield from (f"A and B: {note}." for note in notes[:1] if note)
    else:
        yield from (f"{letter}: {note}." for letter, note in zip("AB", notes, strict=True) if note)


def figures(against: Against, *, intervals: bool = False) -> Iterator[Row]:
    """Yield the figures of both runs with their bands, and their difference: name, A, B, A - B.

    Args:
        against: the figures.
        intervals: whether to show 95 % intervals (sampling error) of A and B as well.
    """
    a, b = against.a, against.b
    seconds = _signed(format_duration)
    dollars = _signed(format_dollars)
    steps = _each(a, b, lambda run: _step_text(run, intervals=intervals))
    yield ("step", *steps, seconds(against.step_time))
    yield ("$ an hour", *_each(a, b, lambda run: format_dollars(run.dollars_per_hour)), "")
    costs = _each(
        a, b, lambda run: format_dollars(run.cost_per_step, ends_of(run.cost_per_step_band))
    )
    yield ("$ a step", *costs, dollars(against.cost_per_step))
    ratio = against.cost_ratio
    share = f"{(ratio.value - 1) * 100:+.1f} %{_plus_minus(ratio, format_share)}"
    tokens = _each(a, b, _dollars_a_million)
    yield ("$ per million tokens", *tokens, share)
    yield ("tokens/s trained on", *_each(a, b, lambda run: format_count(run.goodput)), "")
    yield ("tokens/s generated", *_each(a, b, lambda run: format_count(run.throughput)), "")
    yield ("GPUs that generate", *_each(a, b, lambda run: _gpus(run, run.generation)), "")
    yield ("  idle", *_each(a, b, lambda run: format_share(run.generation.idle)), "")
    yield ("  underfilled", *_each(a, b, lambda run: _underfilled(run.generation)), "")
    yield ("GPUs that train", *_each(a, b, lambda run: _gpus(run, run.training)), "")
    yield ("  idle", *_each(a, b, lambda run: format_share(run.training.idle)), "")
    yield ("  underfilled", *_each(a, b, lambda run: _underfilled(run.training)), "")
    if a.rewards is not None or b.rewards is not None:
        yield ("GPUs that compute rewards", *_each(a, b, _rewards), "")
        yield ("  idle", *_each(a, b, _rewards_idle), "")
    yield ("staleness, mean", *_each(a, b, lambda run: f"{run.staleness:.2f}"), "")
    idle = _each(a, b, lambda run: format_count(run.idle_gpu_seconds))
    yield ("idle GPU-seconds a step", *idle, _signed(format_count)(against.idle_gpu_seconds))
    idle = _each(a, b, lambda run: format_dollars(run.idle_cost))
    yield ("$ a step for idle GPUs", *idle, dollars(against.idle_cost))
    num = against.training_steps
    times = _each(a, b, lambda run: time_text(run.whole_run, intervals=intervals))
    yield (f"whole training, {num:,} steps", *times, seconds(against.training_time))
    costs = _each(a, b, lambda run: dollars_text(run.whole_run, intervals=intervals))
    yield ("  $", *costs, dollars(against.training_cost))


def _step_text(run: PairedRun, *, intervals: bool) -> str:
    interval = run.step_time_interval if intervals else None
    return format_step_time(run.step_time, interval, ends_of(run.step_time_band))


def _dollars_a_million(run: PairedRun) -> str:
    return format_dollars(run.cost_per_million_tokens, ends_of(run.cost_per_million_tokens_band))


def _each(a: PairedRun, b: PairedRun, show: Callable[[PairedRun], str]) -> tuple[str, str]:
    return show(a), show(b)


def _gpus(run: PairedRun, use: GpuUse) -> str:
    return f"{use.num_gpus:g}{' in turn' if run.shares_gpus else ''}"


def _rewards(run: PairedRun) -> str:
    return "" if run.rewards is None else f"{run.rewards.num_gpus:g}"


def _rewards_idle(run: PairedRun) -> str:
    return "" if run.rewards is None else format_share(run.rewards.idle)


def _underfilled(use: GpuUse) -> str:
    return "?" if use.underfilled is None else format_share(use.underfilled)


def _signed(show: Callable[[float], str]) -> Callable[[Known], str]:
    """Return a function that writes a difference with its sign and half its interval."""

    def write(known: Known) -> str:
        sign = "-" if known.value < 0 else "+"
        return f"{sign}{show(abs(known.value))}{_plus_minus(known, show)}"

    return write


def _plus_minus(known: Known, show: Callable[[float], str]) -> str:
    if known.interval is None:
        return ""
    half = (known.interval[1] - known.interval[0]) / 2
    if show is format_dollars and half < 1:
        return f" ± ${half:.2g}"
    return f" ± {show(half)}"


def _gbps(bandwidth: float) -> str:
    return f"{bandwidth * BITS_PER_BYTE / 1e9:.3g} Gbps"


AGAINST_JSON = "against.json"


class AgainstFile(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs and their difference."""

    names: tuple[str, str]
    """A description of A and of B, one line each."""
    against: Against

    def as_json(self) -> dict[str, Any]:
        """Return all figures of the difference, the names and the verdict, as data."""
        told = {"verdict": verdict(self.against), "names": self.names}
        return {**msgspec.to_builtins(self.against), **told}


def write_comparison(comparison: AgainstFile, directory: Path) -> Path:
    """Write against.json to a directory, which is created; return its path.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    data = msgspec.json.format(msgspec.json.encode(comparison.as_json()))
    write_results(directory, {AGAINST_JSON: data})
    return directory / AGAINST_JSON


def read_comparison(path: Path) -> AgainstFile:
    """Read against.json; its verdict is computed again from the figures.

    Raises:
        ValueError: the file is missing, has no comparison, or is not from the command that `results.json` names.
    """
    check_results(path)
    try:
        data = read_bytes(path)
        names = msgspec.json.decode(data, type=_Names).names
        return AgainstFile(names=names, against=msgspec.json.decode(data, type=Against))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a run set against another: {error}") from None


class _Names(msgspec.Struct, frozen=True):
    names: tuple[str, str]
