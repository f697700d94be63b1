"""Write the sections that compare options: table, bars, speed against cost, differing keys, and pairs of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streamrl.record.band import ends_of
from streamrl.report.against_report import break_even_lines, figures, notes, verdict
from streamrl.report.page.answer import chosen_of
from streamrl.report.page.options import Option, is_aside
from streamrl.report.page.parts import PageCell, PageSection, PageTable, cells
from streamrl.report.page.sources import PlanMade, RecordedComparison, Sources
from streamrl.report.pictures.drawing import Picture
from streamrl.report.pictures.range_bars import Bar, bars_picture
from streamrl.report.pictures.scatter import Point, front_of, scatter_picture
from streamrl.report.plan_report import first_plan_lines, with_numbers
from streamrl.report.words import (
    change,
    dollars,
    percent,
    rounded,
    seconds,
    step_seconds,
    tiers_text,
    tokens_per_second,
)
from streamrl.runfile.formatting import band_ends, listing
from streamrl.sim.planner.plan import Plan

MOST_ROWS = 30  # options of a table that people still read
MOST_KEYS = 24  # differing keys of run files; more are shown as a number
STAGES = {
    "generation": "generation",
    "training": "training",
    "sync": "weight sync",
    "rewards": "rewards",
}
WORK = (
    *("model.name", "model.path", "algorithm.name", "algorithm.prompts_per_step"),
    *("algorithm.group_size", "rollout.max_tokens", "workload.informative_share"),
    *("workload.lengths.kind", "workload.lengths.source", "workload.lengths.prompt_tokens"),
    *("workload.lengths.scale", "workload.lengths.scale_to"),
)
"""Keys that describe the work, not how it is done."""


def compare_options(sources: Sources, options: list[Option]) -> Iterator[PageSection]:
    """Yield the sections that compare options, if there are several."""
    if not options:
        return
    yield _alternatives(sources, options)
    if len(options) > 1 and any(option.is_paid for option in options):
        yield _front(options)


def _alternatives(sources: Sources, options: list[Option]) -> PageSection:
    chosen = chosen_of(options)
    assert chosen is not None
    title = "Plan against alternatives" if sources.plans else "Ways to run, compared"
    section = PageSection("alternatives", title if len(options) > 1 else "What it takes and costs")
    if len(sources.plans) > 1 or chosen.kind != "plan":
        section.text += [text for made in sources.plans for text in why(made)]
    section.text += _work_note(options)
    shown = [option for option in options if option.kind != "front"][:MOST_ROWS]
    drawn = _apart(shown)
    section.is_pair, section.pictures = True, _bars(drawn, chosen)
    section.notes += _left_out(shown, drawn)
    section.notes += [f"{option.title}: {option.note}." for option in shown if option.note]
    section.notes += _chance(sources, options)
    rows = [_row(option, chosen) for option in shown]
    section.tables.append(
        PageTable(
            "Dollars are per million output tokens trained on, with the band in which they may truly lie below.",
            (
                "",
                "option",
                "$ per million tokens",
                f"against {chosen.mark}",
                "step",
                "tokens trained on per second",
                "staleness",
                "$ an hour",
                "seconds are",
            ),
            rows,
            numbers=(2, 3, 4, 5, 6, 7),
            strong_row=shown.index(chosen) if chosen in shown else None,
            is_cards=True,
        )
    )
    section.notes += [SCALED for made in sources.plans[:1] if made.plan.runners_up]
    return section


SCALED = (
    "All plans were simulated on the same prompts. Options of the plan were simulated for as long as the chosen plan. "
    "Seconds and dollars of other runners-up are the chosen plan's, times the ratio of both over sixteen steps."
)


NOT_RENTED = "not rented"


def _row(option: Option, chosen: Option) -> list[PageCell]:
    if chosen.is_paid:
        against = option.cost_per_million_tokens / chosen.cost_per_million_tokens - 1
    else:
        against = chosen.goodput / option.goodput - 1
    if option.behind is not None and chosen.kind == "plan":
        against = option.behind
    against_text = "" if option is chosen else change(against)
    if option.against and chosen.kind == "plan":
        against_text = option.against
    seeds = "executed" if option.band.is_timed else _seeds(option.band.num_seeds)
    ends = band_ends(option.cost_range)
    band = ends if option.has_band else "band not known"
    cost, an_hour = PageCell(NOT_RENTED), NOT_RENTED
    a_step = [band_ends(ends_of(option.step_time_band))]
    if option.is_paid:
        cost = PageCell(dollars(option.cost_per_million_tokens), band)
        a_step.append(f"{dollars(option.cost_per_step)} each")
        an_hour = dollars(option.dollars_per_hour)
    return [
        PageCell(option.mark),
        PageCell(option.name, option.what),
        cost,
        PageCell("not finished" if option.unfinished else against_text),
        PageCell(step_seconds(option.step_time, None), "; ".join(filter(None, a_step))),
        PageCell(rounded(option.goodput)),
        PageCell(f"{option.staleness:.2f}"),
        PageCell(an_hour),
        PageCell(f"{option.world}, {tiers_text(option.band.tiers)}", f"{seeds}; {option.source}"),
    ]


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def why(made: PlanMade) -> Iterator[str]:
    """Yield why a plan was chosen, what it waits for, and how much was searched."""
    plan = made.plan
    if plan.why:
        yield f"It was chosen as {with_numbers(plan.why, plan.options)}."
    for line in first_plan_lines(plan):
        yield f"{line[0].upper()}{line[1:]}."
    alone = plan.binding.seconds
    stages = [f"{STAGES[name]} {seconds(alone[name])}" for name in STAGES if name in alone]
    stage = STAGES.get(plan.binding.stage, plan.binding.stage)
    step = step_seconds(plan.allocation.step_time, plan.allocation.step_time_band)
    yield (
        f"A step of the plan waits for {stage}, limited by {plan.binding.resource}. A simulated step takes {step}. "
        f"Each stage alone would take: {listing(stages)}."
    )
    yield (
        f"{plan.candidates:,} plans fit. {plan.ruled_out:,} of them cannot be better than the chosen one, even without any "
        f"waiting. {plan.simulated} were simulated. The chosen plan is {percent(plan.gap)} above the bound of a "
        "plan without any waiting. No real plan may reach this bound."
    )
    yield _openness(plan)
    yield _staleness(plan)


def _openness(plan: Plan) -> str:
    """Return whether a better plan may have been missed."""
    if plan.open_gap is None:
        return "By their estimates none of the plans that were not simulated is better by more than 1 %."
    return (
        f"The search stopped at `plan.time_limit`, {plan.time_limit:.0f} s: a plan that was not simulated may be up to "
        f"{percent(plan.open_gap)} better. A longer limit tells."
    )


def _of_study(plan: Plan) -> str:
    return f", from {plan.staleness_model}" if plan.staleness_model else ""


def _staleness(plan: Plan) -> str:
    lag = plan.allocation.mean_staleness
    if not plan.staleness_cost:
        return (
            f"Rollouts of the chosen plan are {lag:.3g} {_updates(lag)} behind on average, and staleness is taken to cost no "
            "progress: `plan.staleness_cost` says how much it does."
        )
    return (
        f"Plans are compared as if each update that rollouts are behind took {plan.staleness_cost:g} % more steps "
        f"(`plan.staleness_cost`{_of_study(plan)}), for the chosen plan's {lag:.3g} {_updates(lag)} {percent(plan.staleness_cost / 100 * lag, 1)} more. "
        "Dollars and seconds shown are as simulated, without it; what is behind is with it."
    )


def _updates(lag: float) -> str:
    return "update" if lag == 1 else "updates"


def _chance(sources: Sources, options: Sequence[Option]) -> Iterator[str]:
    """Yield the runners-up whose difference from their plan, in either direction, is within its interval."""
    runners = [runner for made in sources.plans for runner in made.plan.runners_up]
    those = [option for option in options if option.kind == "runner-up"]
    alike = [
        option.mark
        for option, runner in zip(those, runners, strict=True)
        if runner.is_beyond_chance is False
    ]
    if alike:
        verb, noun = ("differs", "Option") if len(alike) == 1 else ("differ", "Options")
        yield f"{noun} {listing(alike)} {verb} from the plan by no more than the 95 % interval of the difference: that may be chance."


def _work_note(options: list[Option]) -> Iterator[str]:
    keys = [key for key in _differing(options) if key in WORK]
    if keys:
        yield (
            f"Not all options do the same work: they differ in {listing(keys)}. Compare dollars per token, not seconds per step."
        )


def _apart(options: Sequence[Option]) -> list[Option]:
    """Return options without runners-up on the same GPUs and mode as an earlier option."""
    kept: list[Option] = []
    for option in options:
        alike = [other for other in kept if _same_gpus(option, other)]
        if option.kind != "runner-up" or not alike:
            kept.append(option)
    return kept


def _same_gpus(one: Option, other: Option) -> bool:
    system = "policies.system"
    return one.rent == other.rent and one.config[system] == other.config[system]


def _left_out(shown: Sequence[Option], drawn: Sequence[Option]) -> Iterator[str]:
    rest = [option.mark for option in shown if option not in drawn]
    if rest:
        yield (
            f"The bars leave out {listing(rest)}: they rent the GPUs of an option that is drawn, and differ in how they split "
            "the model or send rollouts to replicas."
        )


def _bars(options: Sequence[Option], chosen: Option) -> list[Picture]:
    costs, speeds = [], []
    for option in options:
        cost, rate = option.cost_per_million_tokens, option.goodput
        costs.append(Bar(option.title, option.rent, cost, *option.cost_range, option is chosen))
        speeds.append(Bar(option.title, option.rent, rate, *option.goodput_range, option is chosen))
    speed = bars_picture("speed", "Output tokens trained on per second", speeds, _rate, "More")
    if not any(option.is_paid for option in options):
        return [speed]
    paid = bars_picture("cost", "Dollars per million tokens trained on", costs, dollars, "Less")
    return [paid, speed]


def _rate(value: float) -> str:
    return tokens_per_second(value).replace("tokens", "tok")


def _front(options: list[Option]) -> PageSection:
    chosen = chosen_of(options)
    points = [
        Point(o.mark, o.name, o.goodput, o.cost_per_million_tokens, o is chosen) for o in options
    ]
    front = front_of(points)
    marks = listing([point.mark for point in front])
    verb = "is" if len(front) == 1 else "are"
    section = PageSection("front", "Speed against cost")
    section.text.append(
        f"{marks} {verb} on the Pareto front: no other option shown is both faster and cheaper."
    )
    section.pictures.append(scatter_picture("pareto", points))
    return section


def differences(options: list[Option]) -> Iterator[PageSection]:
    """Yield the table of run-file keys that differ."""
    keys = _differing(options)
    if not keys or len(options) < 2:
        return
    section = PageSection("differences", "How the options differ")
    rows = [
        [PageCell(f"`{key}`"), *(PageCell(_value(option.config.get(key))) for option in options)]
        for key in keys[:MOST_KEYS]
    ]
    section.tables.append(
        PageTable(
            "Keys of the run file that differ; default is what the system named by `policies.system` has.",
            ("key", *(o.mark for o in options)),
            rows,
            is_cards=True,
            is_grid=True,
        )
    )
    if len(keys) > MOST_KEYS:
        section.notes.append(f"{len(keys) - MOST_KEYS} more keys differ.")
    yield section


def _differing(options: Sequence[Option]) -> list[str]:
    keys = dict.fromkeys(key for option in options for key in option.config if not is_aside(key))
    return [key for key in keys if len({repr(option.config.get(key)) for option in options}) > 1]


def _value(value: object) -> str:
    match value:
        case None:
            return "default"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case str():
            return f"`{value}`"
        case _:
            return str(value)


def against_sections(comparisons: Sequence[RecordedComparison]) -> Iterator[PageSection]:
    """Yield a section for each pair of compared runs."""
    for index, recorded in enumerate(comparisons):
        names, against = recorded.found.names, recorded.found.against
        section = PageSection(f"against-{index}", f"Is it worth it? {recorded.name}")
        section.text.append(verdict(against))
        section.text += [f"{letter} is {name}." for letter, name in zip("AB", names, strict=True)]
        section.text += break_even_lines(against)
        rows = [cells(*row) for row in figures(against)]
        section.tables.append(PageTable("", ("", "A", "B", "A - B"), rows, numbers=(1, 2, 3)))
        first, last = against.counted_steps
        section.notes.append(
            f"Both simulated on the same prompts and lengths; steps {first} to {last} of both count. ± is half a 95 % interval."
        )
        section.notes += notes(against)
        yield section
