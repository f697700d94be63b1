"""The decision of a plan page: what to rent, what it costs, when it is done, what to do next, and what else there is."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from pathlib import Path

from streamrl.record.band import Band
from streamrl.record.uncertainty import MOST_UNMEASURED
from streamrl.record.whole_run import WholeRun
from streamrl.report.next_steps import (
    differing,
    just_dearer_text,
    placeholders_text,
    runners_text,
    start_commands,
)
from streamrl.report.page.answer import Tile
from streamrl.report.page.assumptions import assumptions_of
from streamrl.report.page.comparison import why
from streamrl.report.page.identity import day_text
from streamrl.report.page.options import Option
from streamrl.report.page.parts import NextStep, PageCell, PageSection, PageTable
from streamrl.report.page.plan_command import directory_of, plan_command
from streamrl.report.page.rental import (
    link_lines,
    places_of,
    prices_from,
    rental_table,
    rental_title,
)
from streamrl.report.page.sources import PlanMade
from streamrl.report.pictures.cost_time import PlanPoint, cost_time_picture
from streamrl.report.plan_report import (
    duties_text,
    in_plain_words,
    limits_in_words,
    not_offered_text,
    partial_node_text,
    rented_text,
)
from streamrl.report.words import gpu_word, money, percent, time_in_words
from streamrl.runfile.formatting import listing
from streamrl.runfile.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from streamrl.sim.planner.plan import PLAN_TOML, Choice, Plan, PlanOption
from streamrl.targets.verdicts import Verdict


def title_of(made: PlanMade) -> str:
    """Return what to rent, and for how long: "Rent 8 H20 for 2.1 days to post-train Qwen3-8B"."""
    whole = made.plan.whole_run
    time = f" for {time_in_words(whole.wall_time)}" if whole is not None else ""
    return f"{rented_text(made.plan)}{time} to post-train {made.model.name}"


def lead_of(made: PlanMade) -> str:
    """Return who does what, and why this plan: two sentences."""
    plan = made.plan
    faster, _, _ = plan.why.partition(" as fast as ")
    why = faster if faster == plan.why else f"{faster} as fast"
    chosen = f" This is {why}." if why else ""
    kept = [limit for limit in limits_in_words(plan) if limit not in plan.at_worst]
    chosen += in_plain_words(f" It keeps {listing(kept)}.") if kept else ""
    at_worst = in_plain_words(plan.at_worst)
    chosen += f" {at_worst[0].upper()}{at_worst[1:]}." if at_worst else ""
    dearer = just_dearer_text(plan)
    chosen += f" {dearer[0].upper()}{dearer[1:]}." if dearer else ""
    chosen += f" {runners_text(plan)}" if plan.carried_by else ""
    return f"{duties_text(plan.allocation)}.{chosen}"


SHORT = 3
"""Days up to which the end of a run has a clock time."""


def tiles_of_plan(made: PlanMade, option: Option, today: date) -> list[Tile]:
    """Return the total, the time, the day of the end and the price of an hour, each with its band."""
    return [*_totals(made, option, today), *_caveats(made, option)]


def _totals(made: PlanMade, option: Option, today: date) -> Iterator[Tile]:
    whole = made.plan.whole_run
    if whole is None:
        return
    seconds, dollars = _bands(whole, option)
    if option.is_paid:
        budget = made.plan.limits.get("budget")
        limit = "" if budget is None else f"budget {money(budget)}"
        parts = [_range_text(dollars, money), limit, prices_from(made)]
        note = "; ".join(part for part in parts if part)
        yield Tile(money(whole.dollars), f"total for {whole.steps:,} steps", note)
    deadline = made.plan.limits.get("deadline")
    limit = "" if deadline is None else f"deadline {time_in_words(deadline)}"
    note = "; ".join(part for part in (_range_text(seconds, time_in_words), limit) if part)
    yield Tile(time_in_words(whole.wall_time), "from start to end", note)
    yield _end_tile(whole.wall_time, seconds, today)
    if option.is_paid:
        count = sum(pool.num_gpus for pool in whole.pools.values())
        yield Tile(f"${option.dollars_per_hour:,.2f}", "an hour for all GPUs", f"{count:g} GPUs")


def _bands(whole: WholeRun, option: Option) -> tuple[Band, Band]:
    """Return the bands of the seconds and dollars of a whole run. Plans of earlier versions have only the option's."""
    if whole.wall_time_band is not None and whole.dollars_band is not None:
        return whole.wall_time_band, whole.dollars_band
    low, high = option.band.factors
    return (
        Band(
            low=whole.wall_time_of(whole.seconds * low),
            high=whole.wall_time_of(whole.seconds * high),
        ),
        Band(low=whole.dollars * low, high=whole.dollars * high),
    )


def _range_text(band: Band, show: Callable[[float], str]) -> str:
    """Return the band of a figure: "band $330 to $978"; empty if both ends look the same."""
    low, high = show(band.low), show(band.high)
    return f"band {low} to {high}" if low != high else ""


def _end_tile(seconds: float, band: Band, today: date) -> Tile:
    """Return when the run ends if it starts at the midnight after the page was made: to the minute if that is within days."""
    start = datetime.combine(today + timedelta(days=1), time())
    is_near = band.high < SHORT * SECONDS_PER_DAY

    def end(after: float, *, has_year: bool = False) -> str:
        at = start + timedelta(seconds=after)
        day = day_text(at.date(), has_year=has_year)
        return f"{day}, {at:%H:%M}" if is_near else day

    first, last = end(band.low), end(band.high)
    note = f"assumes a start at the next midnight, {day_text(start.date(), has_year=False)}, 00:00"
    if first != last:
        note += f"; band {first} to {last}"
    is_other_year = (start + timedelta(seconds=seconds)).year != today.year
    return Tile(end(seconds, has_year=is_other_year), "done by", note)


def _caveats(made: PlanMade, option: Option) -> Iterator[Tile]:
    if option.band.tiers is None:
        return
    share = option.band.unmeasured
    begin = "start" if made.plan.rents_none else "rent"
    note = f"so this is a guess: measure before you {begin}" if share > MOST_UNMEASURED else ""
    label = "of the seconds rest on datasheets"
    yield Tile(percent(share), label, note, is_warning=share > MOST_UNMEASURED)


def rental_section(made: PlanMade) -> PageSection:
    """Return where to rent what, at which price, and which own GPUs to use."""
    parts = [
        f"{text[0].upper()}{text[1:]}." for text in map(partial_node_text, made.plan.partial_nodes)
    ]
    notes = [*parts, *link_lines(made), *places_of(made)]
    return PageSection("rent", rental_title(made), tables=[rental_table(made)], notes=notes)


def next_steps(made: PlanMade, option: Option) -> Iterator[NextStep]:
    """Yield what to do after reading a plan, with commands, and the words of each that the reader replaces."""
    for step in _steps(made, option):
        replaced = placeholders_text(step.command)
        yield NextStep(text=f"{step.text} {replaced}".rstrip(), command=step.command)


def _steps(made: PlanMade, option: Option) -> Iterator[NextStep]:
    directory = Path(directory_of(made))
    plan_file = directory / PLAN_TOML
    if made.plan.taken != 1:
        taken = made.plan.options[made.plan.taken - 1]
        yield NextStep(
            text=f"{PLAN_TOML} holds option {taken.number}, {', '.join(taken.labels)}: {taken.relation}."
        )
    if not any(verdict.can_run for verdict in made.plan.carried_by):
        told = "; ".join(_hindrances(made.plan.carried_by))
        why = f" The reasons: {told}." if told else ""
        yield NextStep(
            text=f"Nothing here can run this plan as it is.{why} Plan again for what you use, such as verl: if your file excludes every plan that it can run, the error names the setting.",
            command=plan_command(made, ["--for", "verl"], "verl"),
        )
    yield from _measuring(made, option)
    if option.run is None:
        text = (
            "See one step of the plan and what its GPUs wait for: simulate it, then report again."
        )
        words = ["streamrl", "simulate", str(plan_file), "-o", str(directory)]
        yield NextStep(text=text, command=shlex.join(words))
    for command in start_commands(made.plan, plan_file):
        yield NextStep(text=_told_of(command), command=command)
    yield from _better_elsewhere(made)


HINDRANCES = {
    "policies.system": "not in the mode {}",
    "trainer.offload": "not with the optimizer state in host memory",
}
"""What a target cannot do, by the key of the rule that a plan breaks."""


def _hindrances(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield what keeps each target from running a plan, in words."""
    names: dict[str, list[str]] = {}
    for each in verdicts:
        if not each.can_run:
            reason = HINDRANCES.get(each.key, f"not with {each.key} = {{}}").format(each.value)
            names.setdefault(reason, []).append(each.name)
    yield from (f"{listing(found)} {reason}" for reason, found in names.items())


def _measuring(made: PlanMade, option: Option) -> Iterator[NextStep]:
    """Yield the command that measures each GPU of a plan whose seconds are mostly from datasheets."""
    if option.band.tiers is None or option.band.unmeasured <= MOST_UNMEASURED:
        return
    for gpu in dict.fromkeys(made.plan.allocation.gpus.values()):
        words = "" if gpu == "cpu" else f" --gpu {gpu} --backend vllm"
        where = "this machine" if gpu == "cpu" else f"one node of {gpu_word(gpu)}"
        yield NextStep(
            text=f"Measure first, on {where}. Then `streamrl simulate {directory_of(made)}/{PLAN_TOML} --set costs.profile={gpu}.toml` "
            "replaces the seconds from datasheets.",
            command=f"streamrl profile MODELDIR{words} -o {gpu}.toml",
        )


def _told_of(command: str) -> str:
    """Return what a command does with the plan."""
    if command.startswith("streamrl execute"):
        return "Carry it out."
    return "Write the launch script of a framework that can run it."


def _better_elsewhere(made: PlanMade) -> Iterator[NextStep]:
    """Yield better plans that the search left out."""
    plan = made.plan
    for option in plan.options:
        if "on parts of a node" in option.labels:
            is_cheaper = option.cost_ratio is not None and option.cost_ratio < 1
            advice = "take" if is_cheaper else "the work would end sooner with"
            yield NextStep(
                text=f"If you can rent parts of a node, {advice} option {option.number}: {option.text}. It is {option.relation}.",
                command=plan_command(made, ["--set", "plan.unit=1"], "parts"),
            )
    if plan.tighter is not None:
        yield NextStep(
            text=f"A variant that is {percent(plan.tighter.gain)} cheaper fills {percent(plan.tighter.memory)} of the trainer's GPU memory, which is more than plans may here: {plan.tighter.choice}. Its settings differ in {listing(differing(plan))}."
        )


def totals_of(plan: Plan, choice: Choice) -> tuple[float, float]:
    """Return the seconds and dollars of a plan's whole run, scaled from the chosen plan's by their mean steps."""
    chosen, whole = plan.allocation, plan.whole_run
    assert whole is not None, "sections on whole runs need one"
    seconds = whole.wall_time_of(whole.seconds * choice.step_time / chosen.step_time)
    per_step = chosen.cost_per_step
    return seconds, whole.dollars * choice.cost_per_step / per_step if per_step else 0.0


def options_section(made: PlanMade) -> Iterator[PageSection]:
    """Yield the options that differ, as a table and a chart."""
    options = made.plan.options
    if made.plan.whole_run is None or not options:
        return
    section = PageSection("options", "Options that differ" if len(options) > 1 else "The option")
    limits = made.plan.limits
    deadline = limits["deadline"] / SECONDS_PER_HOUR if "deadline" in limits else None
    section.pictures.append(
        cost_time_picture("cost-time", list(_points(made)), deadline, limits.get("budget"))
    )
    head = ("", "option", "total cost", "takes", "against 1", "rollouts")
    table = [_cells(made.plan, option) for option in options]
    section.tables.append(PageTable("", head, table, numbers=(2, 3), strong_row=0, is_cards=True))
    section.notes.append(STALE)
    yield section


STALE = (
    "The numbers are those that `streamrl plan` prints: `--take 2` writes the run file of option 2. Stale rollouts may cost score. Dollars here do not "
    "include that. Percentages are of steps on the same prompts, so they may differ a little from the ratio of two totals."
)


def _cells(plan: Plan, option: PlanOption) -> list[PageCell]:
    whole, label = option.whole_run, ", ".join(option.labels)
    exceeded = in_plain_words(option.note)
    limits = "; ".join(part for part in (not_offered_text(plan, option), exceeded) if part)
    seconds, dollars = whole.wall_time_band, whole.dollars_band
    return [
        PageCell(str(option.number)),
        PageCell(f"{label[0].upper()}{label[1:]}", option.text),
        PageCell(money(whole.dollars), _range_text(dollars, money) if dollars else ""),
        PageCell(
            time_in_words(whole.wall_time), _range_text(seconds, time_in_words) if seconds else ""
        ),
        PageCell(option.relation, limits),
        PageCell(option.trains_on.removeprefix("trains on ")),
    ]


def _points(made: PlanMade) -> Iterator[PlanPoint]:
    """Yield the options with their names, and other simulated plans as small dots."""
    for option in made.plan.options:
        whole, name = option.whole_run, f"{option.number} \N{MIDDLE DOT} {option.labels[0]}"
        told = f"{name}: {money(whole.dollars)}, {time_in_words(whole.wall_time)}"
        hours = whole.wall_time / SECONDS_PER_HOUR
        yield PlanPoint(name, told, hours, whole.dollars, option.number == 1)
    plan, shown = made.plan, {option.text for option in made.plan.options}
    for choice in [runner.choice for runner in plan.runners_up] + plan.pareto:
        if choice.text not in shown:
            shown.add(choice.text)
            seconds, dollars = totals_of(plan, choice)
            yield PlanPoint("", choice.text, seconds / SECONDS_PER_HOUR, dollars)


RESTS_ON = ("price", "network between", "output lengths", "spot pool", "calibration")
"""Beginnings of the assumptions that a plan's dollars and hours rest on most."""


def why_section(made: PlanMade) -> PageSection:
    """Return why the plan was chosen, what it waits for, and the prices, links and lengths that it rests on."""
    section = PageSection("why", "Why this plan", text=list(why(made)))
    found = assumptions_of(made.run, made.model, None, made.plan)
    rows = [
        [PageCell(each.what), PageCell(each.value), PageCell(each.source)]
        for each in found
        if each.what.startswith(RESTS_ON)
    ]
    head = ("it rests on", "value", "source")
    section.tables.append(PageTable("", head, rows, is_cards=True))
    return section
