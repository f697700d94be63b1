"""The decision of a plan page: what to rent, what it costs, when it is done, what to do next, and what else there is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import NamedTuple

from streamrl.record.uncertainty import MOST_UNMEASURED
from streamrl.record.whole_run import WholeRun
from streamrl.report.next_steps import start_commands, verdict_lines
from streamrl.report.page.answer import Tile
from streamrl.report.page.identity import day_text
from streamrl.report.page.options import LETTERS, Option
from streamrl.report.page.parts import NextStep, PageCell, PageSection, PageTable
from streamrl.report.page.sources import PlanMade
from streamrl.report.pictures.cost_time import PlanPoint, cost_time_picture
from streamrl.report.words import NBSP, SYSTEMS, change, gpu_word, percent
from streamrl.runfile.formatting import listing
from streamrl.runfile.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from streamrl.sim.planner.plan import PLAN_TOML, Choice, Plan

FEW_DAYS = 2
"""Days from which a time is shown in days."""


def money(value: float) -> str:
    """Return dollars of a whole run: "$441", "$9.27"; cents matter only below a hundred dollars."""
    return f"${value:,.0f}" if value >= 100 else f"${value:,.2f}"


def time_in_words(seconds: float) -> str:
    """Return a time of a whole run with three digits: "2.09 days", "31.4 hours", "42 minutes"."""
    for word, size in (("days", SECONDS_PER_DAY), ("hours", SECONDS_PER_HOUR)):
        if seconds >= (FEW_DAYS * size if word == "days" else size):
            return f"{seconds / size:.3g}{NBSP}{word}"
    return f"{seconds / 60:.3g}{NBSP}minutes"


def title_of(made: PlanMade) -> str:
    """Return what to rent, and for how long: "Rent 8 H20 for 2.1 days to post-train Qwen3-8B"."""
    whole, plan = made.plan.whole_run, made.plan
    rented = _gpus_text(gpus_by_pool(plan.allocation), made, is_owned=False)
    owned = _gpus_text(gpus_by_pool(plan.allocation), made, is_owned=True)
    parts = [f"rent {rented}"] if rented else []
    parts += [f"use your own {owned}"] if owned else []
    what = listing(parts)
    time = f" for {time_in_words(whole.seconds)}" if whole is not None else ""
    return f"{what[0].upper()}{what[1:]}{time} to post-train {made.model.name}"


def gpus_by_pool(choice: Choice) -> dict[str, int]:
    """Return the GPUs that a plan uses in each pool. Colocated sides share theirs."""
    sides = [choice.trainer, choice.rollout]
    sides += [side for side in (choice.rollout.beside, choice.verifier) if side is not None]
    found: dict[str, int] = {}
    is_shared = choice.settings["policies.system"] == "colocated"
    for side in sides:
        before, takes_turns = found.get(side.pool, 0), is_shared and side is not choice.verifier
        found[side.pool] = max(before, side.num_gpus) if takes_turns else before + side.num_gpus
    return found


def _gpus_text(gpus: Mapping[str, int], made: PlanMade, *, is_owned: bool) -> str:
    pools = made.run.cluster.pools
    return listing(
        [
            f"{count}{NBSP}{gpu_word(pools[name].gpu)}"
            for name, count in gpus.items()
            if name in pools and pools[name].owned == is_owned
        ]
    )


def lead_of(made: PlanMade, option: Option) -> str:
    """Return who does what, and why this plan: two sentences."""
    plan = made.plan
    system = str(plan.allocation.settings["policies.system"])
    told = f" ({SYSTEMS[system]})" if system in SYSTEMS else ""
    faster, _, _ = plan.why.partition(" as fast as ")
    why = faster if faster == plan.why else f"{faster} as fast"
    chosen = f" This is {why}." if why else ""
    return f"{option.rent[0].upper()}{option.rent[1:]}, {system}{told}.{chosen}"


def tiles_of_plan(made: PlanMade, option: Option, today: date) -> list[Tile]:
    """Return the total, the time, the day of the end and the price of an hour, each with its band."""
    return [*_totals(made, option, today), *_caveats(option)]


def _totals(made: PlanMade, option: Option, today: date) -> Iterator[Tile]:
    whole = made.plan.whole_run
    if whole is None:
        return
    least, most = option.band.factors
    is_wide = option.band.is_wide
    if option.is_paid:
        note = f"likely {money(whole.dollars * least)} to {money(whole.dollars * most)}"
        yield Tile(money(whole.dollars), f"for all {whole.steps:,} steps", note if is_wide else "")
    times = [time_in_words(whole.seconds * factor) for factor in (least, most)]
    told = f"likely {times[0]} to {times[1]}" if is_wide else ""
    yield Tile(time_in_words(whole.seconds), "from start to end", told)
    yield _end_tile(whole, (least, most), today)
    if option.is_paid:
        count = sum(gpus_by_pool(made.plan.allocation).values())
        yield Tile(f"${option.dollars_per_hour:,.2f}", "an hour for all GPUs", f"{count} GPUs")


def _end_tile(whole: WholeRun, factors: tuple[float, float], today: date) -> Tile:
    """Return the day of the end if the run starts at noon on the day of the page."""
    noon = datetime.combine(today, time(12))

    def end(factor: float) -> date:
        return (noon + timedelta(seconds=whole.seconds * factor)).date()

    first, last = end(factors[0]), end(factors[1])
    note = f"if it starts on {day_text(today, has_year=False)} at noon"
    if first != last:
        note += f"; likely {day_text(first, has_year=False)} to {day_text(last, has_year=False)}"
    return Tile(day_text(end(1.0)), "done by", note)


def _caveats(option: Option) -> Iterator[Tile]:
    if option.band.tiers is None:
        return
    share = option.band.unmeasured
    note = "so this is a guess: measure before you rent" if share > MOST_UNMEASURED else ""
    label = "of the seconds rest on datasheets"
    yield Tile(percent(share), label, note, is_warning=share > MOST_UNMEASURED)


def next_steps(made: PlanMade, option: Option) -> Iterator[NextStep]:
    """Yield what to do after reading a plan, with commands."""
    plan_file = f"{made.name}/{PLAN_TOML}"
    if option.run is None:
        text = (
            "See one step of the plan and what its GPUs wait for: simulate it, then report again."
        )
        yield NextStep(text=text, command=f"streamrl simulate {plan_file} -o {made.name}")
    for command in start_commands(made.plan.carried_by, Path(plan_file)):
        yield NextStep(text=_told_of(command), command=command)
    if not any(verdict.can_run for verdict in made.plan.carried_by):
        told = "; ".join(verdict_lines(made.plan.carried_by))
        text = f"No framework here can run this plan as it is: {told}." if told else ""
        yield NextStep(
            text=text or "See what can run the plan.",
            command=shlex.join(["streamrl", "doctor", plan_file]),
        )
    yield from _better_elsewhere(made)


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
            yield NextStep(
                text=f"If you can rent parts of a node: {option.text}. It is {option.relation}.",
                command=plan_command(made, {"plan.unit": "1"}),
            )
    if plan.tighter is not None:
        yield NextStep(
            text=f"{percent(plan.tighter.gain)} cheaper, but the trainer uses {percent(plan.tighter.memory)} of GPU memory: {plan.tighter.choice}."
        )


SOURCE = re.compile(r"^# Chosen by `streamrl plan (?P<words>[^`\n]*)`", re.MULTILINE)
"""The comment of a plan file with the command that made it."""


def plan_command(made: PlanMade, changes: Mapping[str, str]) -> str:
    """Return the command that plans again with other settings, as the plan file names it."""
    found = SOURCE.search((made.path.parent / PLAN_TOML).read_text(encoding="utf-8"))
    try:
        words = shlex.split(found["words"]) if found is not None else []
    except ValueError:  # a quote without its end
        words = []
    settings = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    return shlex.join(["streamrl", "plan", *(words or ["RUN.toml"]), *settings])


class PlanRow(NamedTuple):
    """One option of a plan page, with the totals of its whole run."""

    letter: str
    label: str
    """Such as "cheapest"."""
    choice: Choice
    hours: float
    dollars: float
    is_chosen: bool


def plan_rows(made: PlanMade) -> list[PlanRow]:
    """Return the options of a plan, the recommended one first."""
    return [
        PlanRow(
            LETTERS[option.number - 1],
            ", ".join(option.labels),
            option.choice,
            option.whole_run.seconds / SECONDS_PER_HOUR,
            option.whole_run.dollars,
            option.number == 1,
        )
        for option in made.plan.options
    ]


def totals_of(plan: Plan, choice: Choice) -> tuple[float, float]:
    """Return the seconds and dollars of a plan's whole run, scaled from the chosen plan's by their mean steps."""
    chosen, whole = plan.allocation, plan.whole_run
    assert whole is not None, "sections on whole runs need one"
    seconds = whole.seconds * choice.step_time / chosen.step_time
    per_step = chosen.cost_per_step
    return seconds, whole.dollars * choice.cost_per_step / per_step if per_step else 0.0


def options_section(made: PlanMade) -> Iterator[PageSection]:
    """Yield the options that differ, as a table and a chart."""
    if made.plan.whole_run is None or not made.plan.options:
        return
    rows = plan_rows(made)
    section = PageSection("options", "Options that differ" if len(rows) > 1 else "The option")
    section.pictures.append(cost_time_picture("cost-time", list(_points(made, rows))))
    head = ("", "option", "total cost", "takes", "cost vs A", "speed vs A", "staleness")
    table = [_cells(row, rows[0]) for row in rows]
    section.tables.append(
        PageTable("", head, table, numbers=(2, 3, 4, 5, 6), strong_row=0, is_cards=True)
    )
    section.notes.append(STALE)
    yield section


STALE = (
    "Cost and speed are relative to the recommended option. Staleness counts the updates that a rollout lags behind the weights "
    "it trains. At 0, training is synchronous. What staleness does to your score is not part of these dollars."
)


def _cells(row: PlanRow, chosen: PlanRow) -> list[PageCell]:
    system = str(row.choice.settings["policies.system"])
    lag = row.choice.mean_staleness
    against, times = "", ""
    if not row.is_chosen:
        against = change(row.dollars / chosen.dollars - 1) if chosen.dollars else ""
        times = f"{chosen.hours / row.hours:.2g}{NBSP}times"
    return [
        PageCell(row.letter),
        PageCell(f"{row.label[0].upper()}{row.label[1:]}", row.choice.text),
        PageCell(money(row.dollars)),
        PageCell(time_in_words(row.hours * SECONDS_PER_HOUR)),
        PageCell(against),
        PageCell(times),
        PageCell(f"{lag:.2g}" if lag else "0", "" if lag else system and "synchronous"),
    ]


def _points(made: PlanMade, rows: list[PlanRow]) -> Iterator[PlanPoint]:
    """Yield the options with their names, and other simulated plans as small dots."""
    for row in rows:
        told = f"{row.letter} {row.label}: {money(row.dollars)}, {time_in_words(row.hours * SECONDS_PER_HOUR)}"
        name = f"{row.letter} {row.label.partition(',')[0]}"
        yield PlanPoint(name, told, row.hours, row.dollars, row.is_chosen)
    plan, shown = made.plan, {row.choice.text for row in rows}
    others = [runner.choice for runner in plan.runners_up] + plan.pareto
    for choice in others:
        if choice.text not in shown:
            shown.add(choice.text)
            seconds, dollars = totals_of(plan, choice)
            yield PlanPoint("", choice.text, seconds / SECONDS_PER_HOUR, dollars)
