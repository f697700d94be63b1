"""The answer of the report: one or two sentences, and the key figures next to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streamrl.record.metrics import Metrics
from streamrl.record.whole_run import WholeRun
from streamrl.report.against_report import verdict
from streamrl.report.page.options import Option
from streamrl.report.page.sources import Sources
from streamrl.report.run_tables import dollars_text, headline, time_text
from streamrl.report.words import CAUSES, change, dollars, percent, rounded, step_seconds
from streamrl.runfile.formatting import format_dollars

SAME = 0.02  # relative difference of two costs that counts as equal: the effect of seeds on a run


class Tile(NamedTuple):
    """One figure in large type."""

    value: str
    label: str
    note: str
    is_warning: bool = False


def chosen_of(options: list[Option]) -> Option | None:
    """Return the option that a report is about.

    This is an executed run, because measured figures replace predicted ones. Without executed runs
    it is the first plan. Otherwise it is the finished run with the cheapest tokens, or the fastest
    one if a run is not paid for.
    """
    executed = [option for option in options if option.is_executed]
    plans = [option for option in options if option.kind == "plan"]
    if plans and not executed:
        return plans[0]
    runs = executed or options
    finished = [option for option in runs if not option.unfinished] or runs
    if not all(option.is_paid for option in finished):
        return max(finished, key=lambda option: option.goodput)
    return min(finished, key=lambda option: option.cost_per_million_tokens, default=None)


def answer_of(sources: Sources, options: list[Option]) -> str:
    """Return the answer: the whole run, then the recommendation and its cost."""
    chosen = chosen_of(options)
    if chosen is None:
        return _without_runs(sources)
    if chosen.kind == "plan":
        model = sources.plans[0].model.name
        return (
            f"{_whole(chosen)}To post-train {model}, rent {chosen.rent}: a million tokens trained on then cost {_cost(chosen)}, and an "
            f"optimizer step takes {_step(chosen)} at {dollars(chosen.dollars_per_hour)} an hour."
        )
    rivals = [
        option
        for option in options
        if option is not chosen and not option.unfinished and option.world == chosen.world
    ]
    if not rivals:
        return _of_one(chosen)
    return _of_runs(chosen, rivals)


def _of_one(option: Option) -> str:
    assert option.run is not None
    model = option.run.model.name
    idle = option.run.metrics.idle
    cause = max(idle, key=lambda name: idle[name], default="")
    waits = ""
    if cause and idle[cause] > 0:
        stand = "stood" if option.is_executed else "stand"
        waits = f"; GPUs {stand} idle for {percent(sum(idle.values()))} of their time, mostly by {cause}: {CAUSES[cause]}"
    cost = f", a million tokens trained on cost {_cost(option)}" if option.is_paid else ""
    takes = "took" if option.is_executed else "takes"
    return f"{_whole(option)}With {option.rent}, an optimizer step of {model} {takes} {_step(option)}{cost}{waits}."


def _of_runs(chosen: Option, rivals: list[Option]) -> str:
    model = chosen.run.model.name if chosen.run else "the model"
    if not all(option.is_paid for option in (chosen, *rivals)):
        return (
            f"{_whole(chosen)}Of the {len(rivals) + 1} ways compared, {chosen.name} is the fastest: with {chosen.rent}, {model} is trained on "
            f"{rounded(chosen.goodput)} tokens a second."
        )
    second = min(rivals, key=lambda option: option.cost_per_million_tokens)
    behind = second.cost_per_million_tokens / (chosen.cost_per_million_tokens or 1.0) - 1
    if behind < SAME:
        versus = f"{second.name} costs the same within {percent(SAME)}"
    else:
        versus = f"{second.name}, the next, costs {change(behind).lstrip('+')} more"
    return (
        f"{_whole(chosen)}Of the {len(rivals) + 1} ways compared, {chosen.name} trains {model} at the least cost: with {chosen.rent}, a million "
        f"tokens trained on cost {_cost(chosen)}; {versus}."
    )


def _without_runs(sources: Sources) -> str:
    if sources.comparisons:
        return verdict(sources.comparisons[0].found.against)
    study = sources.studies[0].found
    return study.findings[next(iter(study.findings))] if study.findings else study.title


def _whole(option: Option) -> str:
    """Return the duration of the whole run, or that it is unfinished."""
    if option.unfinished:
        return f"Not finished: the run {option.unfinished}. "
    if option.whole_run is None:
        return ""
    if option.is_complete and not option.steps_before:
        return f"{_measured_whole(option.whole_run)}. "
    line = headline(option.whole_run, option.model_error)
    if option.run is not None and option.run.is_under_way:
        made, steps = option.run.newest_step, option.run.run.algorithm.steps
        return f"Not at its end: {made:,} of {steps:,} steps are made. At their rate {line}. "
    if option.is_executed and option.steps_before:
        return f"Resumed after step {option.steps_before:,}. At the rate of the steps since then, {line}. "
    return f"{line}. "


def _measured_whole(whole: WholeRun) -> str:
    """Return what an executed run took and cost: "200 steps took 15.68 h and cost $892.7"."""
    noun = "step" if whole.steps == 1 else "steps"
    cost = f" and cost {dollars_text(whole)}" if whole.dollars else ""
    return f"{whole.steps:,} {noun} took {time_text(whole)}{cost}"


def _step(option: Option) -> str:
    return step_seconds(option.step_time, option.step_time_band)


def _cost(option: Option) -> str:
    return format_dollars(option.cost_per_million_tokens, option.cost_range)


def _whole_tiles(option: Option, predicted: Metrics | None) -> Iterator[Tile]:
    """Yield the tiles with the time and the dollars of the whole run."""
    whole = option.whole_run
    if whole is None:
        return
    hours, steps = f"{whole.gpu_hours:,.4g} GPU-hours", f"{whole.steps:,} training steps"
    theirs = None if predicted is None else predicted.whole_run
    # the rest of a resumed run is not predicted
    if theirs is not None and theirs.steps == whole.steps:
        hours += f"; predicted {dollars_text(theirs)}"
        steps += f"; predicted {time_text(theirs)}"
    if option.is_paid:
        yield Tile(dollars_text(whole), "for the whole run", hours)
    yield Tile(time_text(whole), "for the whole run", steps)


def tiles_of(option: Option, predicted: Metrics | None = None) -> list[Tile]:
    """Return the key figures of the option that a report is about.

    Args:
        option: the option.
        predicted: the prediction of an executed run, for the notes under its measured figures.
    """
    slow, fast = map(rounded, option.goodput_range)
    tiles = list(_whole_tiles(option, predicted))
    if option.is_paid:
        tiles.append(
            Tile(
                format_dollars(option.cost_per_million_tokens, option.cost_range),
                "per million tokens trained on",
                "",
            )
        )
    a_step = f"{dollars(option.cost_per_step)} a step" if option.is_paid else ""
    if predicted is not None:
        told = f"predicted {step_seconds(predicted.step_time, None)}"
        a_step = f"{a_step}; {told}" if a_step else told
    tiles.append(Tile(_step(option), "per optimizer step", a_step))
    tiles.append(
        Tile(
            rounded(option.goodput),
            "tokens trained on per second",
            f"{slow} to {fast}" if slow != fast else "",
        )
    )
    if option.is_paid:
        tiles.append(Tile(dollars(option.dollars_per_hour), "per hour for all GPUs", ""))
    if option.run is not None:
        idle = option.run.metrics.idle
        cause = max(idle, key=lambda name: idle[name], default="")
        share = sum(idle.values())
        note = f"most of it by {cause}" if share > 0 else ""
        tiles.append(Tile(percent(share), "of GPU time idle", note))
    if option.world == "simulated" and option.band.tiers is not None:
        share = option.band.unmeasured
        tiles.append(
            Tile(percent(share), "of these seconds are unmeasured", "from datasheets alone")
        )
    return tiles
