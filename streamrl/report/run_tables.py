"""Write the figures of a run, and of a prediction next to a measurement, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean
from typing import TypeAlias

from rich.table import Table
from rich.text import Text

from streamrl.hardware.tiers import datasheet_share
from streamrl.record.assumed import Assumed
from streamrl.record.attribution import UNDERFILLED
from streamrl.record.band import ModelError, ends_of
from streamrl.record.billing import BILLING_KEYS, SANDBOXES
from streamrl.record.episode_figures import EpisodeMetrics
from streamrl.record.metrics import RATIOS, Metrics
from streamrl.record.selection import SelectionMetrics
from streamrl.record.uncertainty import MOST_UNMEASURED
from streamrl.record.whole_run import PoolTotal, WholeRun
from streamrl.runfile.formatting import (
    OptionalInterval,
    format_count,
    format_dollars,
    format_duration,
    format_share,
    format_step_time,
    listing,
    long_dollars,
    long_time,
)


def headline(whole: WholeRun, error: ModelError | None, *, intervals: bool = False) -> str:
    """Return a line on the whole run: "200 steps take 15.7 h (12.6 to 21.4) and cost $893 (717 to 1,214); band: …".

    Args:
        whole: the totals.
        error: the model error of its seconds.
        intervals: whether to show 95 % intervals (sampling error) as well.
    """
    noun, verbs = ("step", ("takes", "costs")) if whole.steps == 1 else ("steps", ("take", "cost"))
    cost = f" and {verbs[1]} {dollars_text(whole, intervals=intervals)}" if whole.dollars else ""
    time = time_text(whole, intervals=intervals)
    return f"{whole.steps:,} {noun} {verbs[0]} {time}{cost}{_sure(whole, error, intervals)}"


def price_note(whole: WholeRun, error: ModelError | None, *, intervals: bool = False) -> str:
    """Return its cost and number of steps: "$893 (717 to 1,214) for 200 steps; band: …"."""
    noun = "step" if whole.steps == 1 else "steps"
    cost = f"{dollars_text(whole, intervals=intervals)} " if whole.dollars else ""
    return f"{cost}for {whole.steps:,} {noun}{_sure(whole, error, intervals)}"


def _sure(whole: WholeRun, error: ModelError | None, intervals: bool) -> str:
    """Return what the band, and the interval if it is shown, mean."""
    sure = "; ± is a 95 % interval" if intervals and whole.seconds_interval is not None else ""
    return f"{sure}; {error.note}" if error is not None else sure


def time_text(whole: WholeRun, *, intervals: bool = False) -> str:
    """Return its duration: "15.7 h (12.6 to 21.4)"."""
    interval = whole.wall_time_interval if intervals else None
    return long_time(whole.wall_time, interval, ends_of(whole.wall_time_band))


def dollars_text(whole: WholeRun, *, intervals: bool = False) -> str:
    """Return its cost: "$893 (717 to 1,214)"."""
    interval = whole.dollars_interval if intervals else None
    return long_dollars(whole.dollars, interval, ends_of(whole.dollars_band))


def facts(whole: WholeRun) -> Iterator[tuple[str, str, str]]:
    """Yield further facts: a name, a figure and a note."""
    for name, pool in whole.pools.items():
        yield f"  {name}", f"${pool.dollars:,.2f}" if pool.dollars else "free", _pool_text(pool)
    if (rented := whole.sandboxes) is not None:
        price = "environment.sandbox_price is 0, so they are not counted"
        figure = f"${rented.dollars:,.2f}" if rented.dollars else "free"
        note = f"{rented.sandboxes:,} for {rented.hours:,.4g} sandbox-hours"
        yield f"  {SANDBOXES}", figure, note if rented.dollars else f"{note}; {price}"
    if whole.egress:
        yield "  links", f"${whole.egress:,.2f}", "for weights that cross them"
    if whole.storage:
        yield "  storage", f"${whole.storage:,.2f}", "while GPUs are rented"
    yield from ((f"  {name}", "", text) for name, text in basis_of(whole))
    yield "  GPU-hours", f"{whole.gpu_hours:,.4g}", _parts_text(whole)
    yield "  trained on", f"{_count(whole.tokens)} tokens", f"{whole.rollouts:,} rollouts"
    if whole.kwh is not None:
        yield "  energy", f"{whole.kwh:,.4g} kWh", "of the GPUs alone"
    elif whole.unknown_power:
        gpus = ", ".join(whole.unknown_power)
        known = sum(pool.kwh for pool in whole.pools.values() if pool.kwh is not None)
        rest = f"; the others take {known:,.4g} kWh" if known else ""
        yield "  energy", "not known", f"no measured watts of {gpus}{rest}"


def basis_of(whole: WholeRun) -> Iterator[tuple[str, str]]:
    """Yield what a total leaves out and what it assumes, each with a name."""
    if whole.dollars and whole.uncounted:
        yield "not counted", f"{listing(whole.uncounted)} ({BILLING_KEYS})"
    if whole.assumed:
        yield "assumed", assumed_text(whole.assumed)


def assumed_text(assumed: Sequence[Assumed]) -> str:
    """Return what a total rests on that the run file does not set, with the keys that set it."""
    keys = dict.fromkeys(each.key for each in assumed)
    return f"{listing([each.text for each in assumed])}: {', '.join(keys)}"


def fact_lines(whole: WholeRun) -> Iterator[str]:
    """Yield the same facts as lines of text."""
    for name, figure, note in facts(whole):
        yield f"{name}: {'; '.join(text for text in (figure, note) if text)}"


def _pool_text(pool: PoolTotal) -> str:
    owned = ", all of an owned pool" if pool.is_owned else ""
    return f"{pool.num_gpus:.4g} {pool.gpu} for {pool.gpu_hours:,.4g} GPU-hours{owned}"


def _parts_text(whole: WholeRun) -> str:
    parts = {
        "the start": whole.start_time,
        "checkpoints": whole.checkpoint_time,
        _evaluations_text(whole): whole.evaluation_time,
        "set-up": whole.setup_time,
        "failed attempts": whole.failed_time,
    }
    told = [f"{long_time(seconds)} for {what}" for what, seconds in parts.items() if seconds > 0]
    return ", ".join(["of them all", *told]) if told else ""


def _evaluations_text(whole: WholeRun) -> str:
    cost = f" ({format_dollars(whole.evaluation_dollars)})" if whole.evaluation_dollars else ""
    noun = "evaluation" if whole.num_evaluations == 1 else "evaluations"
    return f"{whole.num_evaluations:,} {noun}{cost}"


def _count(value: float) -> str:
    for scale, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= scale:
            return f"{value / scale:.4g}{prefix}"
    return f"{value:.4g}"


Deviation: TypeAlias = dict[str, float | None]
"""predicted, measured and error of one figure; the error is None if it is undefined."""

COSTS = ("cost_per_step", "cost_per_million_tokens")
CAUSES_IN_SHORT = {
    "start-up": "replicas or trainers start",
    "failure": "a lost worker is replaced",
    "sync": "waiting for weights",
    "switch": "trainer GPUs change sides",
    "kv-transfer": "waiting for KV caches",
    "skew": "waiting for the longest rollouts of a step",
    "pipeline": "waiting for the other side",
    "staleness": "as far ahead of training as allowed",
    "verifier": "waiting for rewards",
    "checkpoint": "a trainer writes a checkpoint",
    "resize": "ranks of the trainer are added or removed",
    "backpressure": "no room for finished rollouts",
    "wind-down": "end of the run",
}
"""What an idle GPU waits for, in a table on a terminal."""
BAR_WIDTH = 24  # characters for a share of 100 %
TWO_SIDES = ("rollout", "trainer")
"""Sides that the shares of all GPU-seconds describe well enough."""
WORTH_A_WORD = 0.005  # share of a side's GPU-seconds above which an activity is shown
UNKNOWN_YIELD = (
    "no replica was seen with max_running rollouts, and costs.profile names none of this run"
)
NUM_REWARDS = 5  # shown from the start and from the end of a run


def metrics_table(metrics: Metrics, *, intervals: bool = False) -> Table:
    """Lay out the figures of one run: speed, cost, and the use of its GPU-seconds.

    Args:
        metrics: the figures.
        intervals: whether to show 95 % intervals (sampling error) as well.
    """
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value, note in _summary(metrics, intervals):
        table.add_row(name, value, note)
    if len(metrics.trainers) > 1:
        table.add_row()
        for row in _trainer_rows(metrics):
            table.add_row(*row)
    table.add_row()
    for title, shares, colour in (
        ("busy", metrics.busy, "green"),
        ("idle", metrics.idle, "yellow"),
    ):
        table.add_row(title, format_share(sum(shares.values())), "of all GPU-seconds")
        for name, share in shares.items():
            if share > 0:
                waits = CAUSES_IN_SHORT.get(name, "") if title == "idle" else ""
                bar = Text.assemble((_bar(share), colour), f" {waits}" if waits else "")
                table.add_row(f"  {name}", format_share(share), bar)
        if title == "busy" and metrics.underfilled_from == "unknown" and metrics.busy.get("decode"):
            table.add_row(f"  {UNDERFILLED}", "?", UNKNOWN_YIELD)
    if len(metrics.sides) > len(TWO_SIDES):
        table.add_row()
        for row in _side_rows(metrics):
            table.add_row(*row)
    return table


def comparison_table(predicted: Metrics, measured: Metrics, *, intervals: bool = False) -> Table:
    """Lay out a prediction next to its measurement, with the error.

    Args:
        predicted: the figures of the simulation.
        measured: the figures of the executed run.
        intervals: whether to show 95 % intervals (sampling error) as well.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    for title in ("predicted", "measured", "error"):
        table.add_column(title, justify="right", no_wrap=True)
    for name in RATIOS:
        ours, theirs = getattr(predicted, name), getattr(measured, name)
        if name in COSTS and not (ours or theirs):
            continue  # no GPU was rented
        shown = [figure_text(each, name, intervals=intervals) for each in (predicted, measured)]
        table.add_row(LABELS[name], *shown, _relative(_relative_error(ours, theirs)))
    is_within = is_within_band(predicted, measured)
    if intervals or is_within is None:
        table.add_row("", "", "", _beyond_text(are_apart(predicted, measured)))
    else:
        table.add_row("", "", "", f"{'within' if is_within else 'outside'} the band")
    table.add_row("seconds from", format_tiers(predicted.tiers), format_tiers(measured.tiers))
    kinds = (_comparable(predicted, measured), (predicted.idle, measured.idle))
    for title, (ours, theirs) in zip(("busy", "idle"), kinds, strict=True):
        table.add_row()
        _add_shares(table, title, sum(ours.values()), sum(theirs.values()))
        for name in _names(ours, theirs):
            if ours.get(name, 0.0) > 0 or theirs.get(name, 0.0) > 0:
                _add_shares(table, f"  {name}", ours.get(name, 0.0), theirs.get(name, 0.0))
    return table


def compare(predicted: Metrics, measured: Metrics) -> dict[str, object]:
    """Return the same comparison as data.

    `error` is (predicted - measured) / measured for times, rates and dollars. For shares it is
    predicted - measured, in percentage points.
    """
    figures: dict[str, object] = {}
    for name in RATIOS:
        ours, theirs = getattr(predicted, name), getattr(measured, name)
        figures[name] = _deviation(ours, theirs, _relative_error(ours, theirs))
    figures["bands"] = {f"{name}_band": getattr(predicted, f"{name}_band") for name in BANDED}
    figures["model_error"] = predicted.model_error
    figures["step_time_interval"] = {
        "predicted": predicted.step_time_interval,
        "measured": measured.step_time_interval,
    }
    figures["is_beyond_intervals"] = are_apart(predicted, measured)
    figures["is_within_band"] = is_within_band(predicted, measured)
    figures["notes"] = {"predicted": predicted.note, "measured": measured.note}
    figures["busy"] = _share_deviations(*_comparable(predicted, measured))
    figures["idle"] = _share_deviations(predicted.idle, measured.idle)
    figures["stages"] = {"predicted": predicted.stages, "measured": measured.stages}
    figures["staleness"] = {"predicted": predicted.staleness, "measured": measured.staleness}
    figures["wasted"] = {"predicted": predicted.wasted, "measured": measured.wasted}
    figures["tiers"] = {"predicted": predicted.tiers, "measured": measured.tiers}
    return figures


def _comparable(predicted: Metrics, measured: Metrics) -> tuple[dict[str, float], dict[str, float]]:
    """Return both busy shares. Decoding is one figure if only one run knows its underfilled part."""
    if UNDERFILLED in predicted.busy and UNDERFILLED in measured.busy:
        return predicted.busy, measured.busy
    return _with_all_decoding(predicted.busy), _with_all_decoding(measured.busy)


def _with_all_decoding(busy: Mapping[str, float]) -> dict[str, float]:
    whole = {name: share for name, share in busy.items() if name != UNDERFILLED}
    if UNDERFILLED in busy:
        whole["decode"] = busy["decode"] + busy[UNDERFILLED]
    return whole


def are_apart(one: Metrics, other: Metrics) -> bool | None:
    """Return whether the 95 % intervals of two step times are disjoint; None if one has none."""
    if one.step_time_interval is None or other.step_time_interval is None:
        return None
    (low, high), (least, most) = one.step_time_interval, other.step_time_interval
    return high < least or most < low


def is_within_band(predicted: Metrics, measured: Metrics) -> bool | None:
    """Return whether the measured step time is in the band of the predicted one; None without a band."""
    band = predicted.step_time_band
    return None if band is None else band.low <= measured.step_time <= band.high


def measure_first_text(predicted: Metrics, directory: str) -> str:
    """Return how to predict a run from measurements of its machine; empty unless the prediction rests on datasheets."""
    if datasheet_share(predicted.tiers) <= MOST_UNMEASURED:
        return ""
    return (
        "The prediction rests on datasheets. `streamrl profile MODELDIR -o profile.toml` measures this machine, and "
        f"`streamrl compare {directory} --set costs.profile=profile.toml` predicts from that."
    )


CORRECTED_BY = {
    "verifier": "verifier.time and verifier.workers",
    "tool": "environment.action_time",
    "sync": "a profile of this machine (streamrl profile), or sync.backend",
    "staleness": "policies.max_staleness",
    "checkpoint": "execute.checkpoint_every",
}
"""Where the prediction of each cause of idle time comes from."""
WORTH_A_LINE = 0.05
"""Difference of a cause's share of GPU time above which it is named."""


def most_different_cause(predicted: Metrics, measured: Metrics) -> str:
    """Return the cause of idle time that was predicted worst, and the keys that correct it; empty if all are close."""
    causes = dict.fromkeys([*measured.idle, *predicted.idle])
    shares = {
        each: (predicted.idle.get(each, 0.0), measured.idle.get(each, 0.0)) for each in causes
    }
    if not shares:
        return ""
    worst = max(shares, key=lambda cause: abs(shares[cause][0] - shares[cause][1]))
    ours, theirs = shares[worst]
    if abs(ours - theirs) <= WORTH_A_LINE:
        return ""
    by = f"; set {CORRECTED_BY[worst]}" if worst in CORRECTED_BY else ""
    return f"Predicted worst: idle for {worst}, {ours:.1%} of GPU time predicted and {theirs:.1%} measured{by}."


def _beyond_text(is_apart: bool | None) -> str:
    match is_apart:
        case None:
            return "too few steps for an interval"
        case True:
            return "beyond the intervals"
        case False:
            return "within the intervals"


LABELS = {
    "step_time": "step time",
    "throughput": "throughput",
    "goodput": "goodput",
    "samples_per_second": "rollouts trained",
    "cost_per_step": "cost per step",
    "cost_per_million_tokens": "cost per million tokens",
}


BANDED = ("step_time", "cost_per_step", "cost_per_million_tokens")
"""Figures of a step that have a band."""


def figure_text(metrics: Metrics, name: str, *, intervals: bool = False) -> str:
    """Return a figure of a run with its band: "164.7 s (132 to 224)".

    Args:
        metrics: the figures of the run.
        name: the name of the figure in `Metrics`.
        intervals: whether to show half its 95 % interval (sampling error) as well.
    """
    band = ends_of(getattr(metrics, f"{name}_band")) if name in BANDED else None
    if name == "step_time":
        interval = metrics.step_time_interval if intervals else None
        return format_step_time(metrics.step_time, interval, band)
    return format_figure(name, getattr(metrics, name), band)


def format_figure(name: str, value: float, band: OptionalInterval = None) -> str:
    """Return the figure that `Metrics` calls `name`, for people."""
    if name.startswith("cost"):
        return format_dollars(value, band)
    if name == "step_time":
        return format_duration(value)
    return f"{format_count(value)}{'/s' if name == 'samples_per_second' else ' tokens/s'}"


def format_tiers(tiers: Mapping[str, float]) -> str:
    """Return the sources of the seconds; shares that rest on a datasheet are called unmeasured."""
    marks = {"scaled": " from other GPUs (unmeasured)", "roofline": " (unmeasured)"}
    return ", ".join(
        f"{format_share(share, 0)} {tier}{marks.get(tier, '')}"
        for tier, share in tiers.items()
        if share > 0
    )


def _whole(metrics: Metrics, intervals: bool) -> Iterable[tuple[str, str, str | Text]]:
    """Yield duration and cost of the whole run, or that it is unfinished; this comes first."""
    whole = metrics.whole_run
    if whole is None:
        yield "NOT FINISHED", "", Text(str(metrics.unfinished), "red")
    else:
        note = price_note(whole, metrics.model_error, intervals=intervals)
        yield "whole run", time_text(whole, intervals=intervals), note
        yield from facts(whole)
    yield "", "", ""


def _summary(metrics: Metrics, intervals: bool) -> Iterable[tuple[str, str, str | Text]]:
    yield from _whole(metrics, intervals)
    first, last = (metrics.steps_before + step for step in metrics.counted_steps)
    steps = f"mean of steps {first} to {last}" if last > first else f"step {first} alone"
    total = format_duration(metrics.total_time)
    median = f"median {format_duration(metrics.median_step_time)}"
    took = f"{median} over the same steps, {metrics.world}, {total} in all"
    step_time = figure_text(metrics, "step_time", intervals=intervals)
    yield LABELS["step_time"], step_time, f"{steps}, {took}"
    if metrics.note:
        yield "", "", Text(metrics.note, "yellow")
    for name in RATIOS[1:]:
        if name not in COSTS or metrics.cost_per_step:
            yield LABELS[name], figure_text(metrics, name), ""
    sides = ", ".join(f"{count} {side}" for side, count in metrics.num_gpus.items())
    yield "GPUs", str(sum(metrics.num_gpus.values())), sides
    if metrics.episodes is not None:
        yield from _episodes(metrics.episodes)
    yield "staleness", _mean_staleness(metrics.staleness), _histogram(metrics.staleness)
    yield "seconds from", "", format_tiers(metrics.tiers)
    if metrics.model_error is not None:
        yield "error of the step", metrics.model_error.of_step, metrics.model_error.of_stages
    if (
        any(metrics.rewards) and metrics.world == "real"
    ):  # simulated rewards only say which groups differ
        yield "mean reward", f"{metrics.rewards[-1]:.3f}", _ends(metrics.rewards)
    if metrics.selection is not None:
        yield from _selected(metrics.selection)
    for reason, count in metrics.dropped.items():
        yield "dropped rollouts", f"{count:,}", reason
    if metrics.wasted:
        yield "wasted tokens", format_share(sum(metrics.wasted.values())), _wasted(metrics.wasted)


def _episodes(found: EpisodeMetrics) -> Iterable[tuple[str, str, str]]:
    """Yield the turns and seconds of an episode, how many are in flight, and the share of contexts in the cache."""
    action = f"{format_duration(found.action_time)} an action"
    started = f"its environment starts in {format_duration(found.start_time)}"
    yield "turns", f"{found.turns:.1f}", f"mean of {found.episodes:,} episodes"
    yield "tools", format_duration(found.tool_time), f"an episode, {action}; {started}"
    yield "episodes in flight", f"{found.in_flight:.1f}", "mean number over the counted steps"
    if found.cached_share is not None:
        share = format_share(found.cached_share)
        yield "cached prefix", share, "of the contexts of later turns"


def _wasted(shares: Mapping[str, float]) -> str:
    """Return the reasons why generated tokens were not trained on, with their shares."""
    parts = [f"{reason} {format_share(share)}" for reason, share in shares.items()]
    return f"of those generated in the steps that count: {', '.join(parts)}"


def _selected(found: SelectionMetrics) -> Iterable[tuple[str, str, str]]:
    """Yield the length of trained rollouts relative to generated ones, if they differ by a percent in any step."""
    known = [ratio for ratio in found.length_ratio if ratio is not None]
    if any(abs(ratio - 1) > 0.01 for ratio in known):
        first = f"{known[0]:.2f} in the first step, {mean(known):.2f} in the mean step"
        yield "trained lengths", f"{known[0]:.2f}", f"of those generated for the step; {first}"


def _trainer_rows(metrics: Metrics) -> Iterable[tuple[str, str, str]]:
    """Yield a row for each trainer: its seconds per step, and its use of the rollouts."""
    yield (
        "trainers",
        str(len(metrics.trainers)),
        "the first leads: steps and tokens above are its own, dollars those of all GPUs",
    )
    for trainer in metrics.trainers:
        seconds = trainer.mean_step_time
        step_time = "-" if seconds is None else format_duration(seconds)
        parts = [f"{trainer.num_steps:,} steps", f"{trainer.trained:,} rollouts trained"]
        parts += [f"{format_count(trainer.goodput)} tokens/s"]
        parts += [f"staleness {_mean_staleness(trainer.staleness)}"]
        parts += [f"{count:,} lost: {reason}" for reason, count in trainer.lost.items()]
        yield f"  {trainer.name}", step_time, ", ".join(parts)


def _side_rows(metrics: Metrics) -> Iterable[tuple[str, str, str]]:
    """Yield a row for each side: its busy share, its activities and its waits."""
    yield "sides", "busy", "of the side's own GPU-seconds"
    for name, side in metrics.sides.items():
        idle = {f"idle: {cause}": share for cause, share in side.idle.items()}
        shares = {**side.busy, **idle}.items()
        parts = [
            f"{what} {format_share(share, 0)}" for what, share in shares if share > WORTH_A_WORD
        ]
        yield f"  {name}", format_share(sum(side.busy.values())), ", ".join(parts)


def _mean_staleness(staleness: Mapping[int, int]) -> str:
    total = sum(staleness.values())
    return f"{sum(v * n for v, n in staleness.items()) / total:.2f}" if total else "-"


def _histogram(staleness: Mapping[int, int]) -> str:
    total = sum(staleness.values()) or 1
    return "mean; " + ", ".join(
        f"{versions}: {count:,} ({format_share(count / total, 0)})"
        for versions, count in staleness.items()
    )


def _ends(rewards: list[float]) -> str:
    """Return the means of the first and the last steps, or of every step if there are few."""
    if len(rewards) <= 2 * NUM_REWARDS:
        return "last; " + " ".join(f"{reward:.3f}" for reward in rewards)
    first, last = mean(rewards[:NUM_REWARDS]), mean(rewards[-NUM_REWARDS:])
    return (
        f"last; {first:.3f} over the first {NUM_REWARDS} steps, {last:.3f} over the last "
        f"{NUM_REWARDS} ({last - first:+.3f})"
    )


def _bar(share: float) -> str:
    return "█" * max(1, round(share * BAR_WIDTH))


def _names(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[str]:
    return list(dict.fromkeys([*ours, *theirs]))


def _add_shares(table: Table, title: str, ours: float, theirs: float) -> None:
    points = (ours - theirs) * 100
    table.add_row(title, format_share(ours), format_share(theirs), f"{points:+.1f} pp")


def _deviation(ours: float, theirs: float, error: float | None) -> Deviation:
    return {"predicted": ours, "measured": theirs, "error": error}


def _share_deviations(
    ours: Mapping[str, float], theirs: Mapping[str, float]
) -> dict[str, Deviation]:
    deviations = {}
    for name in _names(ours, theirs):
        a, b = ours.get(name, 0.0), theirs.get(name, 0.0)
        deviations[name] = _deviation(a, b, (a - b) * 100)
    return deviations


def _relative_error(ours: float, theirs: float) -> float | None:
    return (ours - theirs) / theirs if theirs else None


def _relative(error: float | None) -> str:
    return "-" if error is None else f"{error * 100:+.1f} %"
