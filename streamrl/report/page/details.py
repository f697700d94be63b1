"""Write the sections on the whole run, idle time, one step, sensitivity, uncertainty, studies and assumptions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from streamrl.engine.trace import Trace
from streamrl.hardware.profiles import price_of
from streamrl.hardware.tiers import TIERS as COST_TIERS
from streamrl.record.attribution import BUSY, IDLE
from streamrl.record.band import ends_of
from streamrl.record.whole_run import WholeRun
from streamrl.report.page import band
from streamrl.report.page.answer import chosen_of
from streamrl.report.page.assumptions import assumptions_of, sources_of_seconds, tiers_by_operation
from streamrl.report.page.options import Option
from streamrl.report.page.parts import PageCell, PageSection, PageTable, cells
from streamrl.report.page.sources import RecordedRun, Sources
from streamrl.report.pictures.drawing import Picture
from streamrl.report.pictures.range_bars import LEAST, Range, Swing, bands_picture, tornado_picture
from streamrl.report.pictures.stacked_bars import segments, shares_picture
from streamrl.report.pictures.step_timeline import timeline_picture, typical_step
from streamrl.report.pictures.study_chart import study_picture
from streamrl.report.plan_report import (
    in_plain_words,
    limits_in_words,
    not_varied_text,
    total_after,
    wall_time_ratio,
)
from streamrl.report.run_tables import facts, headline
from streamrl.report.study_report import RecordedStudy
from streamrl.report.study_table import MetricTable, Spread, name_of
from streamrl.report.words import (
    ACTIVITIES,
    CAUSES,
    TIERS,
    change,
    dollars,
    money,
    percent,
    tiers_text,
    time_in_words,
)
from streamrl.runfile.formatting import listing
from streamrl.runfile.gpu_pools import sides_of
from streamrl.sim.planner.plan import Change, Plan, Worth


def whole_section(chosen: Option | None) -> Iterator[PageSection]:
    """Yield the section on the whole run of the report's option, if it is known."""
    if chosen is None or chosen.whole_run is None:
        return
    section = PageSection("whole", "The whole run")
    section.text.append(f"{_whole_text(chosen, chosen.whole_run)}: {chosen.rent}.")
    section.notes.append(NOTE)
    rows = [
        [PageCell(name.strip()), PageCell(figure), PageCell(note)]
        for name, figure, note in facts(chosen.whole_run)
    ]
    section.tables.append(PageTable("", ("", "in all", ""), rows, numbers=(1,), is_cards=True))
    yield section


def _whole_text(chosen: Option, whole: WholeRun) -> str:
    """Return the totals of a run; those of a plan as its tiles have them, with the band there."""
    if chosen.kind != "plan":
        return headline(whole, chosen.model_error)
    noun, verbs = ("step", ("takes", "costs")) if whole.steps == 1 else ("steps", ("take", "cost"))
    cost = f" and {verbs[1]} {money(whole.dollars)}" if whole.dollars else ""
    return f"{whole.steps:,} {noun} {verbs[0]} {time_in_words(whole.wall_time)}{cost}"


NOTE = (
    "All training steps with the start: steps before the steady state as they were, all others at its mean. The band combines the "
    "95 % interval of the mean step and the model error."
)


SHIFT = re.compile(r"(?P<what>.+) (?P<sign>[+-])(?P<share>\d+) ?%")
BY = 0.2
"""Share by which prices of a run are shifted, as in a plan."""
WANTED = {
    "prices": "price",
    "lengths": "length",
    "bandwidth": "bandwidth",
    "training speed (MFU)": "training|mfu",
}
"""Questions that a reader will have, and the part of a swing's name that answers each."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Effects of assumptions on one figure."""

    of: str
    """The option and the figure."""
    by: str
    swings: list[Swing]
    changes: list[Change]
    """Further results of a plan's what-ifs: the plan that would be chosen."""
    missing: list[str]
    """Assumptions that were not varied."""
    source: str
    left_out: str = ""
    """What-ifs that cannot change the plan, and why; empty if there are none."""
    plan: Plan | None = None
    """The plan, whose total the changes move."""


def of_plan(plan: Plan, name: str, source: str) -> Sensitivity:
    """Read a plan's what-ifs. The figure is that of the chosen plan, or of another if it no longer fits."""
    figure, effect_of = _figure_of(plan)
    found: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
    shares: dict[str, None] = {}
    used: set[str] = set()
    for each in plan.sensitivity:
        match = SHIFT.fullmatch(each.what)
        what = match["what"] if match else each.what
        sign = "+" if match is None or match["sign"] == "+" else "-"
        found.setdefault(what, {})[sign] = effect_of(each)
        if match:
            shares[f"{match['share']} %"] = None
        if each.is_used:
            used.add(what)
        if each.is_other:
            notes[what] = each.choice
    swings = [
        Swing(what, values.get("-"), values.get("+"), notes.get(what, ""), what in used)
        for what, values in found.items()
    ]
    return Sensitivity(
        of=f"{figure} of {name}",
        by=" or ".join(shares) or "as named",
        swings=swings,
        changes=list(plan.sensitivity),
        missing=_missing([*plan.not_varied, *(swing.what for swing in swings)]),
        left_out=not_varied_text(plan.not_varied),
        plan=plan,
        source=source,
    )


def _figure_of(plan: Plan) -> tuple[str, Callable[[Change], float]]:
    """Return the figure whose changes are drawn: the total, as in the head of the page, and its relative change.

    Plans of earlier versions have only the figure that they are judged by.
    """
    base, changes = plan.objective.value, plan.sensitivity
    if any(total_after(plan, each) is None for each in changes):
        return plan.objective.unit, lambda change: change.value / base - 1
    if plan.whole_run is not None and plan.whole_run.dollars:
        return "total cost", lambda change: (change.cost_ratio or 1.0) - 1
    return "total time", lambda change: (wall_time_ratio(plan, change) or 1.0) - 1


def of_run(trace: Trace, name: str, source: str) -> Sensitivity:
    """Shift the price of each pool: the cost of a pool is a fixed share of all dollars."""
    dollars: dict[str, float] = dict(_dollars_by_pool(trace))
    total = sum(dollars.values()) or 1.0
    swings = [
        Swing(f"price of {pool}", -BY * part / total, BY * part / total)
        for pool, part in dollars.items()
    ]
    return Sensitivity(
        of=f"total cost of {name}",
        by=percent(BY),
        swings=swings,
        changes=[],
        missing=_missing([swing.what for swing in swings]),
        source=source,
    )


def _dollars_by_pool(trace: Trace) -> Iterator[tuple[str, float]]:
    """Yield each pool with the dollars per hour of its allocated GPUs."""
    run = trace.run
    found: dict[str, float] = {}
    for side in sides_of(run):
        dollars = side.num_gpus * price_of(run.cluster.pools[side.pool])
        found[side.pool] = found.get(side.pool, 0.0) + dollars
    yield from found.items()


def _missing(things: Sequence[str]) -> list[str]:
    named = " ".join(things).lower()
    return [what for what, pattern in WANTED.items() if not re.search(pattern, named)]


MOST_STEPS = 3  # runs whose step is drawn; the figures are large
MOST_REASONS = 6


def idle_section(options: Sequence[Option]) -> Iterator[PageSection]:
    """Yield the use of GPU-seconds of every option with a trace, if there is one."""
    runs = [(o.title, o.run) for o in options if o.run is not None]
    if not runs:
        return
    section = PageSection("idle", "Idle by cause")
    named = [(label, run.metrics) for label, run in runs]
    found = {(kind, name) for _, m in named for kind, name, _ in segments(m)}
    section.pictures.append(shares_picture("shares", named))
    rows = [
        [PageCell(name if kind == "busy" else f"idle: {name}", MEANINGS[kind][name])]
        + [PageCell(percent(getattr(m, kind).get(name, 0.0))) for _, m in named]
        for kind, names in (("busy", BUSY), ("idle", IDLE))
        for name in names
        if (kind, name) in found
    ]
    head = ("share of GPU-seconds", *(label.split()[0] for label, _ in runs))
    numbers = range(1, len(head))
    section.tables.append(PageTable("", head, rows, numbers, is_cards=len(named) > 2))
    yield section


MEANINGS = {"busy": ACTIVITIES, "idle": CAUSES}
NO_TRACE = (
    "`streamrl simulate DIR/plan.toml -o DIR` simulates a plan into its own directory. The next report then shows what "
    "GPUs wait for."
)


def step_section(options: Sequence[Option]) -> Iterator[PageSection]:
    """Yield one step of the first few options with a trace, at one scale, if there is one."""
    found = [(o, o.run) for o in options if o.run is not None]
    if not found:
        return
    section = PageSection("step", "One step")
    chosen = chosen_of(list(options))
    found.sort(key=lambda pair: pair[0] is not chosen)
    shown = found[:MOST_STEPS]
    longest = max(_step_time(run) for _, run in shown)
    section.text.append(
        "Each row is a replica, a trainer, the link that carries weights, or verifiers with GPUs; the darker the blue, the more rollouts run "
        "at once. The line at the right is the step's end."
    )
    if len(shown) > 1:
        section.text.append("All are drawn to one scale.")
    for option, run in shown:
        section.pictures.append(_step_picture(option, run, longest))
    if len(found) > len(shown):
        rest = listing([option.mark for option, _ in found[MOST_STEPS:]])
        section.notes.append(f"Steps of {rest} are not drawn.")
    yield section


def _step_time(run: RecordedRun) -> float:
    return run.metrics.step_times[typical_step(run.metrics) - 1]


def _step_picture(option: Option, run: RecordedRun, longest: float) -> Picture:
    step = typical_step(run.metrics)
    name, label = f"step-{option.mark}", option.title
    return timeline_picture(name, label, run.trace, run.metrics, (step, step), longest)


def sensitivity_section(sources: Sources, options: Sequence[Option]) -> PageSection:
    """Draw a tornado for each plan, or for the chosen run."""
    section = PageSection("sensitivity", "What would change the total")
    found = [of_plan(m.plan, m.name, f"{m.name}/{m.path.name}") for m in sources.plans]
    chosen = chosen_of(list(options))
    if not found and chosen is not None and chosen.run is not None:
        found = [of_run(chosen.run.trace, chosen.name, chosen.source)]
        section.text.append(
            "The price of a pool is a fixed share of all dollars, so these changes are exact."
        )
    for index, each in enumerate(found):
        _add_tornado(section, each, f"tornado-{index}")
    return section


def _add_tornado(section: PageSection, found: Sensitivity, name: str) -> None:
    if found.swings:
        section.pictures.append(
            tornado_picture(name, found.of, found.swings, found.by, found.source)
        )
    others = [c for c in found.changes if c.is_other or c.breaks or not c.still_fits]
    if found.changes and not others:
        section.text.append("Under each of these changes, the same rule chooses this plan again.")
    if found.plan is not None and found.changes:
        section.tables.append(_totals_table(found.plan))
    if found.plan is not None and found.plan.worths:
        section.tables.append(_worths_table(found.plan.worths))
    if found.left_out:
        section.notes.append(f"{found.left_out[:1].upper()}{found.left_out[1:]}.")
    if found.missing:
        section.notes.append(
            f"Not varied here: {listing(found.missing)}. `streamrl simulate RUN.toml --sweep KEY=V1,V2 -o DIR` varies any key; "
            "name DIR too and the report shows it."
        )


def _totals_table(plan: Plan) -> PageTable:
    """Return the total after each change, and the plan that would be the best then."""
    is_paid = plan.whole_run is not None and plan.whole_run.dollars > 0
    head = ("if", *(("total cost",) if is_paid else ()), "takes", "best then")
    rows = []
    if plan.whole_run is not None:
        as_planned = [money(plan.whole_run.dollars)] if is_paid else []
        rows = [cells("nothing changes", *as_planned, time_in_words(plan.whole_run.wall_time), "")]
    rows += [_total_row(plan, change, is_paid=is_paid) for change in _by_thing(plan.sensitivity)]
    return PageTable("", head, rows, numbers=range(1, len(head) - 1), is_cards=True)


def _worths_table(worths: Sequence[Worth]) -> PageTable:
    """Return the simulated effects of more of each resource of episodes."""
    rows = [
        cells(
            each.what,
            _effect_text(each.step_time_ratio),
            "" if each.half_width is None else f"± {each.half_width:.1%}",
            _effect_text(each.cost_ratio),
            "" if each.break_even is None else f"${max(0.0, each.break_even):.3g}",
        )
        for each in worths
    ]
    head = (
        "with",
        "a step takes",
        "by chance",
        "a step costs",
        "one pays for itself below, an hour",
    )
    return PageTable("", head, rows, numbers=range(1, len(head)), is_cards=True)


def _by_thing(changes: Sequence[Change]) -> list[Change]:
    """Return the changes with both directions of a thing next to each other."""
    things = [SHIFT.sub(r"\g<what>", each.what) for each in changes]
    order = sorted(range(len(changes)), key=lambda place: (things.index(things[place]), place))
    return [changes[place] for place in order]


def _total_row(plan: Plan, each: Change, *, is_paid: bool) -> list[PageCell]:
    total = total_after(plan, each)
    figures = [PageCell("")] * (1 + is_paid)
    if total is not None and (each.still_fits or each.is_other):
        seconds, dollars = total
        effect = _effect_text(wall_time_ratio(plan, each))
        figures = [PageCell(time_in_words(seconds), effect)]
        if is_paid:
            figures.insert(0, PageCell(money(dollars), _effect_text(each.cost_ratio)))
    note = "; ".join(
        [*(["estimate, not simulated"] if each.is_estimate else []), *filter(None, [each.note])]
    )
    best = PageCell(_name_in(plan, plan.allocation.text))
    if each.is_other:
        best = PageCell(_name_in(plan, each.choice), _saves(plan, each))
    if each.breaks and not each.is_other:
        best = PageCell(best.text, f"it exceeds {_limits(plan, each)}")
    if not each.still_fits and not each.is_other:
        best = PageCell("no plan that was tried", "the chosen one does not fit")
    return [PageCell(each.what, note), *figures, best]


def _name_in(plan: Plan, choice: str) -> str:
    """Return a plan by its number and its name if it is an option, else by its layout."""
    names = (f"{o.number} \N{MIDDLE DOT} {o.labels[0]}" for o in plan.options if o.text == choice)
    return next(names, choice)


def _effect_text(ratio: float | None) -> str:
    """Return a relative change for a note: "+12 %"; empty without a visible one."""
    effect = (ratio or 1.0) - 1
    return change(effect) if abs(effect) >= LEAST else ""


def _saves(plan: Plan, each: Change) -> str:
    """Return what another plan saves after a change, or why the chosen one cannot be kept."""
    if not each.still_fits:
        return "the chosen one does not fit; the figures are of this one"
    if each.reason:
        return f"{each.relation}; {each.reason}"
    saved = f"saves {percent(each.gain)} then"
    if each.gain < 0:
        saved = f"{percent(-each.gain)} worse by plan.objective then"
    broken = _limits(plan, each)
    return f"{saved}; the chosen one exceeds {broken}" if broken else saved


def _limits(plan: Plan, each: Change) -> str:
    """Return the limits that the chosen plan exceeds after a change, in words."""
    return in_plain_words(listing(limits_in_words(plan, each.breaks)))


def uncertainty_section(options: Sequence[Option]) -> PageSection:
    """Show the uncertainty of the figures and its method."""
    section = PageSection("uncertainty", "How sure this is")
    chosen = chosen_of(list(options))
    if chosen is None:
        return section
    if chosen.world == "simulated":
        section.text.append(f"{_unmeasured(chosen)} {band.METHOD}")
        section.text.append(band.SHARED)
    else:
        section.text.append(
            f"The seconds of {chosen.name} were taken from a clock; one run says nothing of how the next would differ."
        )
    if chosen.band.is_wide:
        section.pictures.append(_bands(chosen))
    rows = [
        [
            PageCell(name),
            PageCell("" if share is None else percent(share)),
            PageCell(f"{low:.2f} to {high:.2f} times"),
        ]
        for name, share, low, high in chosen.band.rows()
    ]
    if rows:
        head = ("stage", "share of the step", "true seconds of eight in ten are")
        section.tables.append(PageTable("", head, rows, numbers=(1,), is_cards=True))
    tiers = [
        [PageCell(tier, TIERS[tier]), PageCell(percent((chosen.band.tiers or {}).get(tier, 0.0)))]
        for tier in COST_TIERS
    ]
    section.tables.append(
        PageTable("", ("seconds are", "share of seconds"), tiers, numbers=(1,), is_cards=True)
    )
    if chosen.band.num_seeds == 1 and chosen.world == "simulated":
        section.notes.append(
            "One seed was simulated: the 95 % interval of its mean step stands for what others would give."
        )
    return section


def _bands(option: Option) -> Picture:
    """Draw the range of the total cost, or of a million tokens, from seeds alone, the model alone, and both."""
    found, whole = option.band, option.whole_run
    cost, figure, show = option.cost_per_million_tokens, "Dollars per million tokens", dollars
    together = option.cost_range
    if whole is not None and whole.dollars and whole.dollars_band is not None:
        cost, figure, show = whole.dollars, "Total cost", money
        together = whole.dollars_band.low, whole.dollars_band.high
    seeds = "interval of the mean step" if found.num_seeds == 1 else f"{found.num_seeds} seeds"
    ranges = [
        Range(label, cost * least, cost * most)
        for label, (least, most) in ((seeds, found.seeds), ("error of the step", found.of_model))
    ]
    ranges.append(Range("together", *together, is_total=True))
    return bands_picture("bands", f"{figure} of {option.title}", cost, ranges, show)


def _unmeasured(option: Option) -> str:
    if option.band.tiers is None:
        return f"Where the seconds of {option.noun} come from is not recorded."
    share = option.band.unmeasured
    told = percent(share) if share > 0 else "None"
    return f"{told} of the busy seconds of {option.noun} are unmeasured: they come from datasheets alone."


def study_sections(studies: Sequence[RecordedStudy]) -> Iterator[PageSection]:
    """Show each what-if study: its question, its findings and its metrics."""
    for index, study in enumerate(studies):
        found = study.found
        is_named = "what if" in found.title.lower()
        section = PageSection(
            f"study-{index}", found.title if is_named else f"What if: {found.title}"
        )
        section.text += [text for text in (found.question,) if text]
        section.text += [text for text in dict.fromkeys(found.findings.values()) if text]
        tables = {metric: study.table(metric) for metric in study.metrics}
        for metric, table in tables.items():
            name, title = f"study-{index}-{metric}", f"{table.name[:1].upper()}{table.name[1:]}"
            section.pictures.append(study_picture(name, table, title, _study_caption(study)))
        rows = [
            [PageCell(row.label), *(_spread_cell(t, row.metrics[m]) for m, t in tables.items())]
            for row in found.rows
        ]
        head = ("combination", *map(name_of, study.metrics))
        section.tables.append(PageTable("", head, rows, numbers=range(1, len(head))))
        section.text += [
            f"Left out, as it does not finish: {listing(list(each.values.values()))}: {each.reason}."
            for each in found.unfinished
        ]
        if found.refused:
            reasons = list(dict.fromkeys(refused.reason for refused in found.refused))[
                :MOST_REASONS
            ]
            section.notes.append(
                f"{len(found.refused)} combinations cannot run: {'; '.join(reasons)}."
            )
        section.notes += [f"{note}." for note in found.notes]
        if study.tiers:
            section.notes.append(
                f"Of the busy seconds of all combinations {tiers_text(study.tiers)}."
            )
        yield section


def _study_caption(study: RecordedStudy) -> str:
    seeds = study.found.seeds
    spread = "one seed" if seeds == 1 else f"median of {seeds} seeds"
    return f"Simulated, {spread}, bars are 95 % intervals; from {study.name}/{study.path.name}."


def _spread_cell(table: MetricTable, spread: Spread) -> PageCell:
    """Return a value with its band; studies of earlier versions have only the 95 % interval."""
    low, high = ends_of(spread.band) or (spread.least, spread.most)
    least, most = table.format(low), table.format(high)
    return PageCell(table.format(spread.median), f"{least} to {most}" if least != most else "")


def assumption_sections(sources: Sources, options: Sequence[Option]) -> Iterator[PageSection]:
    """List the assumptions, and every source of seconds."""
    chosen = chosen_of(list(options))
    if chosen is None:
        return
    trace = chosen.run.trace if chosen.run is not None else None
    made = next((m for m in sources.plans if chosen.kind == "plan"), None)
    told = made or chosen.run
    if told is None:
        return
    section = PageSection("assumptions", f"Assumptions and sources ({chosen.title})")
    found = assumptions_of(told.run, told.model, trace, made.plan if made is not None else None)
    rows = [cells(each.what, each.value, each.source) for each in found]
    section.tables.append(PageTable("", ("what", "value", "source"), rows, is_cards=True))
    if trace is None:
        section.notes.append("The sources of seconds are in a trace. " + NO_TRACE)
    elif trace.world == "simulated":
        tiers = [cells(name, text) for name, text in tiers_by_operation(trace)]
        section.tables.append(
            PageTable("Simulated seconds by operation.", ("operation", "seconds are"), tiers)
        )
        named = [cells(source) for source in sources_of_seconds(trace)]
        section.tables.append(
            PageTable("Measured, fitted or assumed by:", ("source of seconds",), named)
        )
    yield section
