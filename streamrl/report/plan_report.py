"""Show a plan on a terminal: what to rent, its total, the options, and why; further tables are details.

Columns of figures come first and do not wrap. The text of a plan is the last column, which wraps between words. So
tables fit a terminal of 80 columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import isclose

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from streamrl.record.band import ends_of, mixed_basis
from streamrl.record.uncertainty import unshared_error
from streamrl.report.next_steps import differing, hindrances_text, just_dearer_text, runners_text
from streamrl.report.run_tables import basis_of, dollars_text, fact_lines, headline, time_text
from streamrl.report.words import EXPLAINED, NBSP, SYSTEMS, gpu_word, rent_text, sides_of_plan
from streamrl.runfile.formatting import (
    OptionalInterval,
    band_text,
    format_dollars,
    format_duration,
    format_share,
    format_step_time,
    listing,
    long_dollars,
    long_time,
)
from streamrl.runfile.keys import pool_key
from streamrl.runfile.plan_config import ObjectiveName, limit_words
from streamrl.sim.planner.plan import (
    RUN_BY_NOTHING,
    Change,
    Choice,
    Crowding,
    PartialNode,
    Plan,
    PlannedDisaggregation,
    PlannedFramework,
    PlannedLending,
    PlanOption,
    RunnerUp,
    SpotSavings,
    Worth,
    side_text,
)

Show = Callable[..., str]
"""A function that writes a figure, and its band if it gets one."""


def _seconds_a_step(value: float, band: OptionalInterval = None) -> str:
    return f"{format_step_time(value, None, band)} a step"


def _dollars_a_million(value: float, band: OptionalInterval = None) -> str:
    return f"{format_dollars(value, band)} per million tokens"


def _dollars_a_step(value: float, band: OptionalInterval = None) -> str:
    return f"{format_dollars(value, band)} a step"


def _product(value: float, band: OptionalInterval = None) -> str:
    return f"{value:.0f} s x $ a step {band_text(band)}".rstrip()


def _without_the_rest(plan: Plan) -> str:
    """Return the objective without bills, waiting and staleness, if it differs; else ""."""
    name, chosen = plan.objective.name, plan.allocation
    own = {
        "cost-per-million-tokens": chosen.cost_per_million_tokens,
        "cost-per-step": chosen.cost_per_step,
    }.get(name)
    if own is None or isclose(own, plan.objective.value, rel_tol=NO_CHANGE):
        return ""
    return (
        f" by plan.objective, of which GPU time and egress of the steps are {format_dollars(own)}"
    )


VALUES: dict[ObjectiveName, Show] = {
    "cost-per-million-tokens": _dollars_a_million,
    "cost-per-step": _dollars_a_step,
    "step-time": _seconds_a_step,
    "pareto": _product,
}
"""How to write the figure that a plan is judged by, with the digits of `simulate`."""
TERMS = {
    r"\d+ x": "N replicas, which are copies of the model that generate",
    **EXPLAINED,
    "skewness-aware": "rollouts that are expected to be long get replicas of their own",
    "delta sync": "only changed weights are sent to the replicas",
}
"""Meanings of the terms that the line of a plan may have, by their pattern."""
NO_CHANGE = 0.0005
"""Smallest relative effect of a what-if that is shown as a number."""


def plan_report(plan: Plan, *, intervals: bool = False, details: bool = False) -> RenderableType:
    """Lay out a plan for a terminal.

    Args:
        plan: the plan.
        intervals: whether to show 95 % intervals (sampling error) as well.
        details: whether to show all facts, the runners-up, the what-ifs and what was left out as well.
    """
    parts: list[RenderableType] = [Text(decision_text(plan), style="bold")]
    parts += [_indented(dearer)] if (dearer := just_dearer_text(plan)) else []
    parts += [_indented(runners_text(plan).replace(NBSP, " "))] if plan.carried_by else []
    parts += [_indented(line) for line in total_lines(plan, intervals=intervals)]
    if not plan.options:
        parts += [_indented(plan.allocation.text)]
    else:
        parts += [Text(), _options(plan, intervals=intervals), *_left_out(plan)]
        parts += [_indented(basis)] if (basis := basis_of_options(plan)) else []
    texts = [plan.allocation.text, *(each.text for each in plan.options)]
    if terms := terms_text(texts, [str(plan.allocation.settings["policies.system"])]):
        parts += [_indented(f"terms: {terms}")]
    parts += [Text(), Text("why", style="bold"), _listed(why_lines(plan))]
    parts += _details(plan, intervals=intervals) if details else []
    return Group(*parts)


def _details(plan: Plan, *, intervals: bool) -> list[RenderableType]:
    """Lay out what a decision does not need."""
    parts: list[RenderableType] = [Text(), Text("details", style="bold")]
    parts += [_listed(detail_lines(plan, intervals=intervals))]
    if plan.runners_up:
        parts += [Text(), _choices(plan), Text(PAIRED)]
    if plan.pareto:
        parts += [Text(), _pareto(plan.pareto)]
    if plan.sensitivity:
        parts += [Text(), _sensitivity(plan)]
    if left_out := not_varied_text(plan.not_varied):
        parts.append(Text(left_out))
    return [*parts, Text(), _infeasible(plan)]


def _indented(line: str) -> Padding:
    return Padding(Text(line), (0, 0, 0, 2), expand=False)


def _listed(lines: Iterable[str]) -> Table:
    """Lay out lines one by one, their further lines indented."""
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row(" -", Text(line))
    return table


def decision_text(plan: Plan) -> str:
    """Return what to rent, which GPUs do what, and how generation and training take turns."""
    return f"{rented_text(plan)}: {duties_text(plan.allocation)}.".replace(NBSP, " ")


def rented_text(plan: Plan) -> str:
    """Return what to rent, and what to use of one's own: "Rent 8 H20 and use your own 4 H100"."""
    used = plan.allocation.gpus_by_pool
    rented = _counts_text(plan, [pool for pool in used if pool not in plan.owned_pools])
    owned = _counts_text(plan, plan.owned_pools)
    if sandboxes := plan.allocation.settings.get("environment.sandboxes"):
        boxes = f"{sandboxes}{NBSP}CPU sandboxes"
        rented = f"{rented} and {boxes}" if rented else boxes
    text = listing(
        [*([f"rent {rented}"] if rented else []), *([f"use your own {owned}"] if owned else [])]
    )
    return f"{text[0].upper()}{text[1:]}"


def _counts_text(plan: Plan, pools: Iterable[str]) -> str:
    chosen = plan.allocation
    return listing(
        [f"{chosen.gpus_by_pool[pool]}{NBSP}{gpu_word(chosen.gpus[pool])}" for pool in pools]
    )


def duties_text(choice: Choice) -> str:
    """Return which GPUs of a plan do what, and how generation and training take turns."""
    system = str(choice.settings["policies.system"])
    turns = "" if system == "colocated" else f" ({SYSTEMS.get(system, 'a system of your own')})"
    return f"{rent_text(sides_of_plan(choice), system)}, {system}{turns}"


def terms_text(texts: Iterable[str], known: Collection[str] = ()) -> str:
    """Return the meaning of the terms that some plans are written with.

    Args:
        texts: the plans, in one line each.
        known: terms that the output explains elsewhere.
    """
    text = " ".join(texts)
    found = ((re.search(rf"\b{pattern}", text), meaning) for pattern, meaning in TERMS.items())
    meanings = {
        re.sub(r"^\d+(?= )", "N", match[0]).rstrip(" 0123456789"): meaning
        for match, meaning in found
        if match is not None and match[0] not in known
    }
    return "; ".join(f"{name} = {meaning}" for name, meaning in meanings.items())


def head_lines(plan: Plan, *, intervals: bool = False) -> Iterator[str]:
    """Yield all lines on the choice: its figures, its reasons and its facts."""
    yield from filter(None, [just_dearer_text(plan)])
    yield from total_lines(plan, intervals=intervals)
    yield plan.allocation.text
    yield from (f"  {line}" for line in why_lines(plan))
    yield from (f"  {line}" for line in detail_lines(plan, intervals=intervals))


def total_lines(plan: Plan, *, intervals: bool = False) -> Iterator[str]:
    """Yield the total of the chosen plan, and its rates."""
    chosen, show = plan.allocation, VALUES[plan.objective.name]
    if plan.whole_run is not None:
        yield f"whole run: {headline(plan.whole_run, chosen.model_error, intervals=intervals)}"
    if plan.limits:
        yield f"within {listing(limits_in_words(plan))}"
    if plan.at_worst:
        yield plan.at_worst
    yield (
        f"{show(plan.objective.value, ends_of(plan.objective.band))}{_without_the_rest(plan)}; a step {_step_text(chosen, intervals=intervals)}"
        f"{_rates(chosen)}"
    )
    yield from map(partial_node_text, plan.partial_nodes)
    if plan.lending is not None:
        yield lending_text(plan.lending, "[lending]")
    if plan.borrowing is not None:
        yield lending_text(plan.borrowing, "trainer.borrows")
    if plan.disaggregation is not None:
        yield disaggregation_text(plan.disaggregation)
    if plan.spot is not None:
        yield spot_text(plan.spot)
    if plan.whole_run is not None:
        if (rented := plan.whole_run.sandboxes) is not None and rented.dollars:
            yield (
                f"of it sandboxes: {format_dollars(rented.dollars)} for {rented.sandboxes:,} sandboxes and "
                f"{rented.hours:,.4g} sandbox-hours"
            )
        yield from (f"{name}: {text}" for name, text in basis_of(plan.whole_run))


def _rates(chosen: Choice) -> str:
    """Return the dollars of a step and of an hour; empty if a plan costs nothing."""
    if not (chosen.dollars_per_hour or chosen.cost_per_step):
        return ""
    step = format_dollars(chosen.cost_per_step, ends_of(chosen.cost_per_step_band))
    return f" and {step}, ${chosen.dollars_per_hour:.2f} an hour{_reward_price(chosen)}"


def in_plain_words(text: str) -> str:
    """Return words on limits without their keys and with units in full: "the deadline of 12 hours"."""
    return SHORT_UNIT.sub(lambda unit: UNITS[unit[0]], KEY_OF_LIMIT.sub("", text))


KEY_OF_LIMIT = re.compile(r" \(plan\.\w+\)")
SHORT_UNIT = re.compile(r"(?<=\d )(?:h|min|s)\b")
UNITS = {"h": "hours", "min": "minutes", "s": "seconds"}


def limits_in_words(plan: Plan, keys: Iterable[str] | None = None) -> list[str]:
    """Return limits of a plan in words: all, or those whose keys are given as "plan.deadline"."""
    names = [f"plan.{key}" for key in plan.limits] if keys is None else keys
    limits = {f"plan.{key}": limit_words(key, most) for key, most in plan.limits.items()}
    return [limits.get(name, name) for name in names]


def partial_node_text(part: PartialNode) -> str:
    """Return that a plan rents a part of a node, and what to do if nobody rents that out."""
    return (
        f"part of a node: {part.num_gpus} of the {part.gpus_per_node} GPUs of a node of {part.pool}; if only whole nodes are "
        f"for rent, plan again with --set {pool_key(part.pool, 'unit')}={part.gpus_per_node}"
    )


def lending_text(lending: PlannedLending, setting: str) -> str:
    """Return what GPUs that change sides by a setting change, and whether the plan's file has it."""
    if lending.reason:
        return f"without {setting}: {lending.reason}"
    change = lending.step_time_lent / lending.step_time - 1
    seconds = f"a step takes {format_step_time(lending.step_time_lent, None)} with {setting}, {change:+.1%}"
    if lending.is_taken:
        return f"{seconds}; the plan's file has it, other figures here are without it"
    return f"{seconds}; that is no gain, so the plan's file leaves it out"


def disaggregation_text(apart: PlannedDisaggregation) -> str:
    """Return what prefill replicas change, and whether the plan's file has them."""
    if apart.reason:
        return f"without prefill replicas: {apart.reason}"
    change = apart.step_time_apart / apart.step_time - 1
    step = format_step_time(apart.step_time_apart, None)
    text = f"a step takes {step} if {apart.num_prefill} of the replicas only prefill, {change:+.1%}"
    if apart.is_taken:
        return f"{text}; the plan's file has them, other figures here are without them"
    return f"{text}; that is no gain, so the plan's file has none"


def spot_text(spot: SpotSavings) -> str:
    """Return what spot machines save against the same machines on demand."""
    if spot.reason:
        return f"savings of spot machines are not known: {spot.reason}"
    least, most = (format_share(end) for end in spot.interval)
    return (
        f"spot machines save {format_share(spot.share)} ({least} to {most} over {spot.num_seeds} seeds): "
        f"{format_dollars(spot.dollars)} in {format_duration(spot.seconds)} instead of "
        f"{format_dollars(spot.dollars_on_demand)} in {format_duration(spot.seconds_on_demand)} on demand; "
        f"about {spot.num_notices:,.3g} notices to replicas"
    )


def why_lines(plan: Plan) -> Iterator[str]:
    """Yield why this plan was chosen, and what would alter the choice."""
    yield f"chosen as {with_numbers(plan.why, plan.options)}"
    yield from first_plan_lines(plan)
    yield plan.binding.text.partition("; ")[0]
    yield from map(worth_text, plan.worths)
    yield from _alterations(plan)
    if plan.tighter is not None:
        yield (
            f"with less room {plan.tighter.gain:.0%} better: {plan.tighter.choice}, with {listing(differing(plan))}, "
            f"whose trainer takes {plan.tighter.memory:.1%} of a GPU"
        )
    yield search_text(plan)


def worth_text(worth: Worth) -> str:
    """Return the simulated effect of more of one resource: "24 more sandboxes: a step takes 6.1 % less ± 2.0 %, ..."."""
    saved = 1 - worth.step_time_ratio
    effect = f"{abs(saved):.1%} {'less' if saved >= 0 else 'more'}" if saved else "as long"
    chance = f" (± {worth.half_width:.1%} by chance)" if worth.half_width is not None else ""
    text = f"with {worth.what} a step takes {effect}{chance} and costs {worth.cost_ratio - 1:+.1%}"
    if worth.break_even is None:
        return text
    what = "one sandbox" if worth.resource == "sandboxes" else "the replica"
    asked = f"; it costs ${worth.price:.3g}" if worth.price else ""
    if worth.break_even > 0:
        text = f"{text}; {what} pays for itself below ${worth.break_even:.3g} an hour{asked}"
    else:
        text = f"{text}; {what} pays for itself at no price{asked and f'{asked} an hour'}"
    return f"{text}{crowding_text(worth.crowding)}"


def crowding_text(crowding: Crowding | None) -> str:
    """Return what more episodes in flight would do: "; 60 episodes in flight take 35.6 % longer, ..."."""
    if crowding is None:
        return ""
    again, before = crowding.recomputed, crowding.recomputed_before
    if crowding.step_time_ratio is None:
        effect = "lose too many tokens at their time limit"
    else:
        change = crowding.step_time_ratio - 1
        effect = f"take {abs(change):.1%} {'longer' if change >= 0 else 'less'} a step"
    cause = (
        f", because replicas compute lost contexts again for {again:.0%} of their time ({before:.0%} now)"
        if again - before >= 0.01
        else ""
    )
    return f"; {crowding.episodes} episodes in flight would {effect}{cause}"


def with_numbers(text: str, options: Sequence[PlanOption]) -> str:
    """Return a text in which options are called by their number and name, not by their layout."""
    for option in options:
        text = text.replace(option.text, f"option {option.number} ({option.labels[0]})")
    return text


def first_plan_lines(plan: Plan) -> Iterator[str]:
    """Yield what became of the plan that the first answer recommended, in one line."""
    first = plan.first
    if first is None:
        return
    estimated = _total_text(first.estimated_dollars, first.estimated_wall_time)
    if first.option == 1:
        yield f"the first answer recommended the same plan, estimated at {estimated}"
        return
    name = first.choice if first.option is None else f"option {first.option}"
    told = f"the first answer recommended {name}, estimated at {estimated}"
    if first.dollars is None or first.wall_time is None:
        yield f"{told}; no time was left to simulate it"
        return
    simulated = _total_text(first.dollars, first.wall_time)
    yield f"{told}; simulated, it takes {simulated}: {first.relation}. It lost because {first.reason}"


def _total_text(dollars: float, seconds: float) -> str:
    """Return dollars and time of a whole run: "$430 and 2.04 d"."""
    return f"{long_dollars(dollars)} and {long_time(seconds)}" if dollars else long_time(seconds)


def _alterations(plan: Plan) -> Iterator[str]:
    """Yield the what-ifs after which another plan is better."""
    if not plan.sensitivity:
        yield f"no what-ifs: plan.time_limit of {plan.time_limit:.0f} s came before them"
    for change in plan.sensitivity:
        if change.note:
            yield f"{change.what}: {_given(plan, change)}; {change.note}"
    others = [change for change in plan.sensitivity if change.is_other]
    for change in others:
        yield f"another choice with {change.what}: {changed_choice_text(plan, change)}"
    for change in plan.sensitivity:
        if change.breaks and not change.is_other:
            yield f"with {change.what} it exceeds {listing(limits_in_words(plan, change.breaks))}"
    if plan.sensitivity and not others:
        yield f"the same rule chooses this plan under each of {len(plan.sensitivity)} what-ifs"


def changed_choice_text(plan: Plan, change: Change) -> str:
    """Return the plan that is chosen after a change, and why."""
    if change.reason:
        option = plan.options[(change.option or 1) - 1]
        name = f"option {option.number} ({', '.join(option.labels)})"
        return f"{name}: {change.relation}; {change.reason}"
    effect = f"saves {_gain(change)}" if change.gain >= 0 else _keeping_limits(plan, change)
    return f"{change.choice}, which {effect}"


def detail_lines(plan: Plan, *, intervals: bool = False) -> Iterator[str]:
    """Yield further facts of the chosen plan and of the search."""
    chosen, show = plan.allocation, VALUES[plan.objective.name]
    yield plan.binding.text.partition("; ")[2]
    if chosen.num_seeds > 1 and intervals:
        yield f"over {chosen.num_seeds} seeds {show(chosen.least)} to {show(chosen.most)}"
    if chosen.note:
        yield chosen.note
    if plan.steps_in_time is not None:
        yield (
            f"plan.time_limit of {plan.time_limit:.0f} s left time for {plan.steps_in_time} steps of it, "
            "which is what the plan file has as simulate.max_steps"
        )
    if plan.whole_run is not None:
        basis = {name for name, _ in basis_of(plan.whole_run)}
        facts = (line.strip() for line in fact_lines(plan.whole_run))
        yield from (line for line in facts if line.partition(":")[0] not in basis)
    if plan.systems and "fully-async" not in plan.systems:
        yield (
            f"systems that were searched: {', '.join(plan.systems)}; not fully-async, whose rollouts may be several "
            "steps old: plan.systems names it where it is wanted"
        )
    if plan.whole_nodes:
        yield (
            f"plans rent whole nodes of {' and '.join(plan.whole_nodes)}, except in the row on parts of a node; "
            "unit of a pool sets what can be rented"
        )
    if not plan.staleness_cost:
        yield "staleness is taken to cost no progress: plan.staleness_cost says how much it does"
    else:
        yield (
            f"with {plan.staleness_cost:g} % charged for each version of lag; as simulated "
            f"{_dollars_a_million(chosen.cost_per_million_tokens, ends_of(chosen.cost_per_million_tokens_band))}"
        )
    if plan.staleness_model:
        yield f"as {plan.staleness_model}"
    if plan.drafts:
        yield plan.drafts
    tiers = ", ".join(f"{share:.0%} {tier}" for tier, share in plan.tiers.items() if share > 0)
    yield f"seconds are {tiers}; planned in {plan.seconds:.1f} s"
    if plan.framework is not None:
        yield from _framework_lines(plan.framework)


def _reward_price(chosen: Choice) -> str:
    if chosen.verifier is None:
        return ""
    return f", ${chosen.verifier_dollars_per_hour:.2f} of it for rewards"


def _framework_lines(framework: PlannedFramework) -> Iterator[str]:
    """Yield what a framework fills in, which plans it takes, and what they lack because of it."""
    yield from framework.facts
    left_out = "; ".join(framework.left_out) or "nothing"
    yield f"left out, as framework {framework.name} has none: {left_out}"


def search_text(plan: Plan) -> str:
    """Return how much was searched, and whether a better plan may have been missed."""
    looked = (
        f"{plan.simulated} of {plan.candidates:,} plans were simulated, {plan.steps} steps each"
    )
    if plan.open_gap is None:
        return f"{looked}; by their estimates none of the others is better by more than 1 %"
    return (
        f"{looked}, until plan.time_limit of {plan.time_limit:.0f} s came: "
        f"one of the others may be up to {plan.open_gap:.0%} better"
    )


PAIRED = (
    "All plans have the same prompts. Options were simulated for as long as the recommended plan, runners-up for sixteen "
    "steps. ± is half a 95 % interval (sampling error)."
)
HEAD = ("behind", "step", "$ a step")
SAID = ("policies.dispatch", "sync.mode", "rollout.speculative.tokens")
"""Keys that the line of a plan shows besides its GPUs and degrees."""


def _options(plan: Plan, *, intervals: bool = False) -> Table:
    """Lay out the answer: one row for each plan to decide for."""
    table = Table("", "whole run", "step", "option", box=None, pad_edge=False)
    for option in plan.options:
        choice, whole = option.choice, option.whole_run
        figures = [dollars_text(whole, intervals=intervals)] if whole.dollars else []
        figures.append(time_text(whole, intervals=intervals))
        table.add_row(
            str(option.number),
            "\n".join(figures),
            _step_text(choice, intervals=intervals).replace(" (", "\n("),
            Text("\n").join(_option_lines(plan, option)),
        )
    return _with_whole_figures(table)


def basis_of_options(plan: Plan) -> str:
    """Return which options rest on datasheets, if others rest on measured tables; empty if all are alike."""
    errors = {f"option {each.number}": each.choice.model_error for each in plan.options}
    return mixed_basis(
        {name: error.datasheet_share for name, error in errors.items() if error is not None}
    )


def _option_lines(plan: Plan, option: PlanOption) -> Iterator[Text]:
    """Yield why a plan is an option and how it compares, its layout, and the age of its rollouts."""
    labels = Text(", ".join(option.labels), style="bold")
    yield labels.append(f": {option.relation}" if option.relation else "", style="not bold")
    yield Text(option.text)
    aside = not_offered_text(plan, option)
    yield Text("; ".join(each for each in (option.trains_on, aside, option.note) if each))


def not_offered_text(plan: Plan, option: PlanOption) -> str:
    """Return why an option is not offered, such as pools that are rented by the node; empty if it is offered."""
    if option.is_offered:
        return ""
    if _is_run_by_nothing(option) and any(each.can_run for each in plan.options[0].carried_by):
        begin = "not run by" if RUN_BY_NOTHING in option.labels else f"{RUN_BY_NOTHING}:"
        return f"{begin} {hindrances_text(option.carried_by)}"
    choice = option.choice
    sides = (choice.rollout, choice.rollout.beside, choice.trainer, choice.verifier)
    used = {side.pool for side in sides if side is not None}
    whole = [pool for pool in plan.whole_nodes if pool in used]
    if "on parts of a node" in option.labels and whole:
        return f"not offered: {listing(whole)} are rented by the node here"
    return "not offered: see the keys of [plan] and its pools"


def _is_run_by_nothing(option: PlanOption) -> bool:
    return bool(option.carried_by) and not any(each.can_run for each in option.carried_by)


def _with_whole_figures(table: Table) -> Table:
    """Return a table of which only the last column wraps."""
    for column in table.columns[:-1]:
        column.no_wrap = True
    return table


def _left_out(plan: Plan) -> Iterator[Text]:
    """Yield a line for each kind of plan without a row."""
    for each in plan.left_out:
        yield Text(f"no row for {each.label}: {each.reason}")


def _choices(plan: Plan) -> Table:
    """Lay out the runners-up, one row for all variants of a plan."""
    table = Table(*HEAD, "runner-up", box=None, pad_edge=False)
    for runner in plan.runners_up:
        doubt = _doubt(plan, runner)
        text = _runner_text(plan, runner) + (f" ({doubt})" if doubt else "")
        table.add_row(*_cells(runner), text)
    return _with_whole_figures(table)


def _runner_text(plan: Plan, runner: RunnerUp) -> str:
    """Return a runner-up, and how its variants and the option on the same GPUs differ from it."""
    text = runner.choice.text
    if runner.variant_of is not None:
        option = plan.options[runner.variant_of - 1]
        text = f"variant of {option.number}: {difference_text(option.choice, runner.choice)}"
    if runner.variants:
        base = runner.choice
        others = [difference_text(base, each.choice) for each in runner.variants]
        text += f"\n{len(others)} more to {runner.variants[-1].behind:+.1%}: {'; '.join(others)}"
    return text


def difference_text(base: Choice, other: Choice) -> str:
    """Return in what a variant differs from another plan on the same GPUs.

    The keys that the line of a plan does not show are named only if nothing else differs.
    """
    sides = [(base.rollout, other.rollout), (base.trainer, other.trainer)]
    found = [side_text(theirs) for ours, theirs in sides if side_text(ours) != side_text(theirs)]
    ours, theirs = base.settings, other.settings
    differing = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
    found += [_setting_text(key, theirs.get(key)) for key in differing if key in SAID]
    found = found or [_setting_text(key, theirs.get(key)) for key in differing]
    return ", ".join(found) or "otherwise the same"


def _setting_text(key: str, value: str | float | bool | None) -> str:
    """Return a setting in a few words: "full sync", "max_running 128"."""
    if key == "policies.dispatch":
        return f"{value or 'usual'} dispatch"
    return f"{value} sync" if key == "sync.mode" else f"{key.rpartition('.')[2]} {value}"


def _cells(runner: RunnerUp) -> tuple[str, ...]:
    """Return how far a plan is behind, and its seconds and dollars of a step."""
    behind = f"{runner.behind:+.1%}"
    if runner.behind_interval is not None:
        least, most = runner.behind_interval
        behind += f" ± {50 * (most - least):.1f}"
    step = format_step_time(runner.choice.step_time, None)
    return behind, step, format_dollars(runner.choice.cost_per_step)


def _pareto(choices: list[Choice]) -> Table:
    table = Table("step", "$ a step", "none beats in time and cost", box=None, pad_edge=False)
    for choice in choices:
        dollars = format_dollars(choice.cost_per_step, ends_of(choice.cost_per_step_band))
        table.add_row(_step_text(choice), dollars, choice.text)
    return _with_whole_figures(table)


def _step_text(choice: Choice, *, intervals: bool = False) -> str:
    """Return the seconds of a step with their band, and with half their interval if `intervals`."""
    interval = choice.step_time_interval if intervals else None
    return format_step_time(choice.step_time, interval, ends_of(choice.step_time_band))


def _doubt(plan: Plan, runner: RunnerUp) -> str:
    """Return whether the distance of a plan may be sampling error or model error; "" if neither.

    Errors of work that both plans do alike on the same GPUs cancel.
    """
    if runner.is_beyond_chance is False:
        return "may be chance"
    if plan.uncertainty is None:
        return ""
    shared = set()
    if runner.choice.rollout == plan.allocation.rollout:
        shared.add("decode")
    if runner.choice.trainer == plan.allocation.trainer:
        shared.add("train")
    error = unshared_error(plan.uncertainty.stages, shared)
    if error is None:
        return "costs never checked there"
    return f"within costs' {error:.0%}" if runner.behind < error else ""


def _sensitivity(plan: Plan) -> Table:
    table = Table("if", "the whole run", "saves", "better then", box=None, pad_edge=False)
    for change in plan.sensitivity:
        other = ("", "no other")
        if change.is_other:
            other = (
                ("", changed_choice_text(plan, change))
                if change.reason
                else (_gain(change), change.choice)
            )
        table.add_row(change.what, _given(plan, change), *other)
    return table


def total_after(plan: Plan, change: Change) -> tuple[float, float] | None:
    """Return the seconds and dollars of the whole run after a change; None if the plan's file lacks them."""
    whole = plan.whole_run
    if whole is None or change.time_ratio is None or change.cost_ratio is None:
        return None
    seconds = whole.wall_time_of(whole.seconds * change.time_ratio)
    return seconds, whole.dollars * change.cost_ratio


def wall_time_ratio(plan: Plan, change: Change) -> float | None:
    """Return the wall time of the whole run after a change relative to that before; None as for `total_after`."""
    total, whole = total_after(plan, change), plan.whole_run
    return None if total is None or whole is None else total[0] / whole.wall_time


def _given(plan: Plan, change: Change) -> str:
    """Return the total of the chosen plan after a change, and the relative effect."""
    if not change.still_fits:
        return "does not fit"
    total = total_after(plan, change)
    if total is None:
        ratio = change.value / plan.objective.value
        figures = [f"{VALUES[plan.objective.name](change.value)} ({_effect(ratio)})"]
    else:
        seconds, dollars = total
        figures = [f"{long_dollars(dollars)} ({_effect(change.cost_ratio)})"] if dollars else []
        figures.append(f"{long_time(seconds)} ({_effect(wall_time_ratio(plan, change))})")
    figures += ["an estimate"] if change.is_estimate else []
    broken = listing(limits_in_words(plan, change.breaks))
    figures += [f"exceeds {broken}"] if broken else []
    return ", ".join(figures)


def _effect(ratio: float | None) -> str:
    """Return a ratio as a relative change: "+12.0%"."""
    effect = (ratio or 1.0) - 1
    return f"{effect:+.1%}" if abs(effect) >= NO_CHANGE else "no change"


def _keeping_limits(plan: Plan, change: Change) -> str:
    """Return how much more another plan costs, which keeps limits that the chosen one exceeds after a change."""
    kept = listing(limits_in_words(plan, change.breaks))
    return f"is {-change.gain:.1%} worse by plan.objective, but keeps {kept}"


def _gain(change: Change) -> str:
    """Return the share that another plan saves after a change, or that it keeps the limits."""
    return f"{change.gain:.1%}" if not change.breaks else f"{change.gain:.1%}, and keeps the limits"


def not_varied_text(left_out: Mapping[str, str]) -> str:
    """Return which what-ifs were left out and why, in one line; empty if none was."""
    by_reason: dict[str, list[str]] = {}
    for thing, reason in left_out.items():
        by_reason.setdefault(reason, []).append(thing)
    told = "; ".join(f"{', '.join(things)} ({reason})" for reason, things in by_reason.items())
    return f"not varied: {told}" if told else ""


def _infeasible(plan: Plan) -> Table:
    table = Table("count", "left out, sides or pairs of sides", box=None, pad_edge=False)
    for reason, count in sorted(plan.infeasible.items(), key=lambda item: -item[1]):
        table.add_row(f"{count:,}", reason)
    return table
