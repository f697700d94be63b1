"""The options of a report, each with its figures: the plan, its runners-up, and recorded runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from math import isfinite
from typing import Literal

import msgspec

from streamrl.hardware.profiles import price_of
from streamrl.record.band import Band as FigureBand
from streamrl.record.band import ModelError, hull
from streamrl.record.charges import PaidGpus
from streamrl.record.relations import EQUAL, percent_text
from streamrl.record.uncertainty import GUESS, unmeasured_warning
from streamrl.record.whole_run import WholeRun
from streamrl.report.page.band import Band
from streamrl.report.page.sources import PlanMade, RecordedRun, Sources
from streamrl.report.words import change, planned_sides_of, rent_text, sides_of_plan, sides_text
from streamrl.runfile.checks import KEYS_OF_ONE_SOURCE
from streamrl.runfile.config import Run
from streamrl.runfile.files import values_by_key
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.planner.plan import Choice, Plan, PlanOption

Kind = Literal["plan", "option", "runner-up", "front", "run"]
"""The recommended plan, another option of its table, other simulated plans, or a recorded run."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ASIDE = (".nodes", "policies.latency", "policies.context_time")
"""Ends of keys in which two runs of one plan may differ."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of how to run, with its time and cost."""

    mark: str = ""
    """Its short name in figures: the number of a plan, as `streamrl plan` prints it, or the letter of a run."""
    name: str
    kind: Kind
    what: str
    rent: str
    config: Mapping[str, object]
    """Keys of the run file with their values, such as rollout.replicas."""
    world: str
    step_time: float
    step_time_band: FigureBand | None = None
    """Range in which it may truly be; None if the file does not have it."""
    note: str = ""
    """Reason why its figures are less certain than requested."""
    goodput: float
    cost_per_step: float
    cost_per_million_tokens: float
    cost_band: FigureBand | None = None
    """Range in which `cost_per_million_tokens` may truly be; None if the file does not have it."""
    model_error: ModelError | None = None
    dollars_per_hour: float
    band: Band
    staleness: float
    """Mean staleness of rollouts when they are trained on, in versions."""
    source: str
    behind: float | None = None
    """Share by which a runner-up's objective is above its plan's, over common seeds."""
    against: str = ""
    """What an option of a plan costs more or less than the chosen one, as its relation says: "+8 %"."""
    run: RecordedRun | None = None
    """Its trace, if there is one."""
    whole_run: WholeRun | None = None
    """Total of all its training steps; None for runners-up of a plan."""
    unfinished: str = ""
    """The step after which it stopped early, and why. Such a run cannot be the answer."""

    @property
    def title(self) -> str:
        """Return its mark and its name, by which all parts of the page call it."""
        return f"{self.mark} \N{MIDDLE DOT} {self.name}"

    @property
    def noun(self) -> str:
        """Return what to call it in a sentence: "option 2", "run A"."""
        return f"run {self.mark}" if self.kind == "run" else f"option {self.mark}"

    @property
    def is_executed(self) -> bool:
        """Return whether its figures were measured, not predicted."""
        return self.world == "executed"

    @property
    def is_complete(self) -> bool:
        """Return whether it was executed up to its last step."""
        is_open = self.unfinished or (self.run is not None and self.run.is_under_way)
        return self.is_executed and not is_open

    @property
    def steps_before(self) -> int:
        """Number of steps that earlier starts of the run made; their seconds are not known here."""
        return 0 if self.run is None else self.run.metrics.steps_before

    @property
    def is_paid(self) -> bool:
        """Return whether it costs anything: the user's own CPU is not rented."""
        return self.dollars_per_hour > 0

    @property
    def cost_range(self) -> tuple[float, float]:
        """Return the range of dollars per million tokens."""
        if self.cost_band is not None:
            return self.cost_band.low, self.cost_band.high
        least, most = self.band.factors
        return self.cost_per_million_tokens * least, self.cost_per_million_tokens * most

    @property
    def has_band(self) -> bool:
        """Return whether the model error of its figures is known: seeds alone do not show it."""
        return self.cost_band is not None or self.band.is_known

    @property
    def goodput_range(self) -> tuple[float, float]:
        """Return the range of trained tokens per second: more seconds mean fewer tokens."""
        if self.step_time_band is not None:
            tokens = self.goodput * self.step_time
            return tokens / self.step_time_band.high, tokens / self.step_time_band.low
        least, most = self.band.factors
        return self.goodput / most, self.goodput / least


def make_options(sources: Sources) -> list[Option]:
    """Return all options: each plan with its options and runners-up, then the recorded runs.

    A run with a plan's exact allocation is merged into that plan and adds its trace. Runs that
    differ only in the seed are one option.
    """
    options: list[Option] = []
    for made in sources.plans:
        options += _of_plan(made, is_only=len(sources.plans) == 1)
    for run in sources.runs:
        place = _place_of(options, run)
        if place is None:
            options.append(_of_run(run))
        else:
            options[place] = _merged(options[place], run)
    return _marked(options)


def _marked(options: list[Option]) -> list[Option]:
    """Return the options with their marks: plans are numbered in their order, and runs have letters."""
    numbers, letters = count(1), map(_letter, count())
    return [
        replace(option, mark=next(letters) if option.kind == "run" else str(next(numbers)))
        for option in options
    ]


def flatten(run: Run, inputs: Mapping[str, str]) -> dict[str, object]:
    """Return every key of a run file with its value. Files have their names in `inputs` if they were kept.

    If the run file has no price for a pool, its value is the GPU's own price.
    """
    found = {**values_by_key(run), **inputs}
    for name, pool in run.cluster.pools.items():
        found[f"cluster.pools.{name}.price"] = price_of(pool)
    return found


def _letter(index: int) -> str:
    """Return A to Z, then AA, AB and so on."""
    first, second = divmod(index, len(LETTERS))
    return (LETTERS[first - 1] if first else "") + LETTERS[second]


def _of_plan(made: PlanMade, is_only: bool) -> Iterator[Option]:
    """Yield the options of a plan in the order of its table, then its runners-up and its front."""
    plan, before = made.plan, "" if is_only else f"{made.name}, "
    first = plan.options[0].labels[0] if plan.options else "recommended"
    chosen = _of_choice(made, plan.allocation, f"{before}{first}", "plan", plan.objective.value)
    yield _as_simulated(chosen, plan)
    shown = [plan.allocation.settings]
    for other in plan.options[1:]:
        shown.append(other.choice.settings)
        option = _of_choice(made, other.choice, f"{before}{other.labels[0]}", "option", None)
        yield replace(_as_simulated(option, other), against=_against(other))
    for runner in plan.runners_up:
        shown.append(runner.choice.settings)
        base = runner.variant_of
        name = "another plan" if base is None else f"variant of {base}"
        option = _of_choice(made, runner.choice, before + name, "runner-up", runner.value)
        yield replace(option, behind=runner.behind)
    for choice in plan.pareto:
        if choice.settings not in shown:
            yield _of_choice(made, choice, f"{before}on the front", "front", None)


def _as_simulated(option: Option, simulated: Plan | PlanOption) -> Option:
    """Return an option with the total of its simulation, and the sources of its seconds."""
    tiers = simulated.tiers
    band = replace(option.band, tiers=tiers)
    notes = [note for note in option.note.split("; ") if not note.endswith(GUESS)]
    note = "; ".join(each for each in (*notes, unmeasured_warning(tiers)) if each)
    return replace(option, band=band, note=note, whole_run=simulated.whole_run)


def _against(option: PlanOption) -> str:
    """Return the difference in dollars with the digits of the option's relation; empty if it is unknown."""
    ratio, width = option.cost_ratio, option.ratio_half_width
    if ratio is None or width is None or not isfinite(ratio):
        return ""
    if abs(ratio - 1) < EQUAL:
        return change(0.0)
    return f"{'+' if ratio > 1 else '-'}{percent_text(ratio - 1, width)}"


def _of_choice(
    made: PlanMade,
    choice: Choice,
    name: str,
    kind: Kind,
    value: float | None,
) -> Option:
    """Return the option of a choice whose objective is `value`, by which its seeds are known; None if unknown."""
    cost = choice.cost_per_million_tokens
    power = 0.5 if made.plan.objective.name == "pareto" else 1.0  # both factors grow with seconds
    seeds = (1.0, 1.0)
    if value is not None:
        seeds = (choice.least / value) ** power, (choice.most / value) ** power
    return Option(
        name=name,
        kind=kind,
        what=choice.text,
        rent=rent_text(sides_of_plan(choice), str(choice.settings["policies.system"])),
        config={**flatten(made.run, made.inputs), **choice.settings},
        world="simulated",
        step_time=choice.step_time,
        step_time_band=choice.step_time_band,
        cost_band=choice.cost_per_million_tokens_band,
        model_error=choice.model_error,
        note=choice.note,
        goodput=_goodput(made.plan, choice),
        cost_per_step=choice.cost_per_step,
        cost_per_million_tokens=cost,
        dollars_per_hour=choice.dollars_per_hour,
        band=Band(
            seeds=seeds,
            num_seeds=choice.num_seeds,
            error=choice.model_error,
        ),
        staleness=choice.mean_staleness,
        source=f"{made.name}/{made.path.name}",
    )


def _goodput(plan: Plan, choice: Choice) -> float:
    """Return the tokens a second that a choice trains on; those of a step without a price are the chosen plan's."""
    if cost := choice.cost_per_million_tokens:
        return choice.cost_per_step / choice.step_time / cost * 1e6
    whole = plan.whole_run
    return 0.0 if whole is None else whole.tokens / whole.steps / choice.step_time


def _of_run(run: RecordedRun) -> Option:
    metrics, config = run.metrics, run.trace.run
    system, pools = config.policies.system, config.cluster.pools
    team = planned_sides_of(
        pools, config.rollout, config.trainer, config.followers, config.verifier
    )
    return Option(
        name=run.name,
        kind="run",
        what=sides_text(team, system),
        rent=rent_text(team, system),
        config=flatten(config, run.inputs),
        world="executed" if metrics.world == "real" else "simulated",
        step_time=metrics.step_time,
        step_time_band=metrics.step_time_band,
        cost_band=metrics.cost_per_million_tokens_band,
        model_error=metrics.model_error,
        note=metrics.note,
        goodput=metrics.goodput,
        cost_per_step=metrics.cost_per_step,
        cost_per_million_tokens=metrics.cost_per_million_tokens,
        dollars_per_hour=PaidGpus.of(config).dollars_per_second * SECONDS_PER_HOUR,
        band=Band(
            seeds=(1.0, 1.0) if metrics.world == "real" else metrics.spread,
            tiers=metrics.tiers,
            is_timed=metrics.world == "real",
            error=metrics.model_error,
        ),
        staleness=metrics.mean_staleness,
        source=f"{run.name}/{run.path.name}",
        run=run,
        whole_run=metrics.whole_run,
        unfinished=metrics.unfinished,
    )


def _place_of(options: list[Option], run: RecordedRun) -> int | None:
    """Return the index of the option that a run belongs to."""
    if run.trace.world == "real":
        return None
    found = flatten(run.run, run.inputs)
    for place, option in enumerate(options):
        if option.world == "simulated" and _is_same(option, found):
            return place
    return None


def is_same_run(option: Option, run: RecordedRun) -> bool:
    """Return whether a recorded run has an option's run file, apart from the seed, prompts and faults."""
    return _is_same(option, flatten(run.run, run.inputs))


def _is_same(option: Option, found: Mapping[str, object]) -> bool:
    """Return whether a simulation equals an option, apart from the seed and the prompts."""
    keys = {key: None for key in (*option.config, *found) if not is_aside(key)}
    return all(option.config.get(key) == found.get(key) for key in keys if not _is_data(key))


def _is_data(key: str) -> bool:
    """Return whether a key names the prompts, which a simulation does not read."""
    return key.startswith(tuple(f"workload.{name}" for name in (*KEYS_OF_ONE_SOURCE, "source")))


def is_aside(key: str) -> bool:
    """Return whether a key does not affect time: the seed, the offer, or a value that was filled in."""
    return key.partition(".")[0] in ("seed", "simulate", "plan", "execute") or key.endswith(ASIDE)


def _merged(option: Option, run: RecordedRun) -> Option:
    """Return the option with a run merged into it: its trace, and its seed's part of the spread."""
    band = option.band
    if option.kind == "run":
        ratio = run.metrics.cost_per_million_tokens / option.cost_per_million_tokens
        seeds = (min(band.seeds[0], ratio), max(band.seeds[1], ratio))
        band = replace(band, seeds=seeds, num_seeds=band.num_seeds + 1)
        option = _with_seed(option, run)
    if band.tiers is None:
        error = band.error or run.metrics.model_error
        band = replace(band, tiers=run.metrics.tiers, error=error)
    whole = option.whole_run or run.metrics.whole_run
    return replace(option, band=band, run=option.run or run, whole_run=whole)


def _with_seed(option: Option, run: RecordedRun) -> Option:
    """Return the option with bands that also hold those of another seed."""
    metrics, whole = run.metrics, option.whole_run
    if whole is not None and (other := metrics.whole_run) is not None:
        whole = msgspec.structs.replace(
            whole,
            seconds_band=_joined(whole.seconds_band, other.seconds_band),
            dollars_band=_joined(whole.dollars_band, other.dollars_band),
        )
    return replace(
        option,
        step_time_band=_joined(option.step_time_band, metrics.step_time_band),
        cost_band=_joined(option.cost_band, metrics.cost_per_million_tokens_band),
        whole_run=whole,
    )


def _joined(*bands: FigureBand | None) -> FigureBand | None:
    known = [band for band in bands if band is not None]
    return hull(known) if known else None
