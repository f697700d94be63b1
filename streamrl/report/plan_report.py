"""Show a plan on a terminal: the choice, its reasons, the runners-up, and changes that would alter it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.record.band import ends_of
from streamrl.record.uncertainty import unshared_error
from streamrl.report.run_tables import dollars_text, fact_lines, headline, time_text
from streamrl.runfile.formatting import (
    OptionalInterval,
    band_text,
    format_dollars,
    format_step_time,
)
from streamrl.runfile.plan_config import ObjectiveName
from streamrl.sim.planner.plan import (
    Change,
    Choice,
    Plan,
    PlannedFramework,
    PlanOption,
    RunnerUp,
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


VALUES: dict[ObjectiveName, Show] = {
    "cost-per-million-tokens": _dollars_a_million,
    "cost-per-step": _dollars_a_step,
    "step-time": _seconds_a_step,
    "pareto": _product,
}
"""How to write the figure that a plan is judged by, with the digits of `simulate`."""
NO_CHANGE = 0.0005
"""Smallest relative effect of a what-if that is shown as a number."""


def plan_report(plan: Plan, *, intervals: bool = False) -> RenderableType:
    """Lay out a plan for a terminal.

    Args:
        plan: the plan.
        intervals: whether to show 95 % intervals (sampling error) as well.
    """
    parts: list[RenderableType] = [Text(line) for line in head_lines(plan, intervals=intervals)]
    parts += [Text(), _options(plan.options, intervals=intervals), *_left_out(plan)]
    if plan.runners_up:
        parts += [Text(), _choices(plan)]
    parts.append(Text(PAIRED))
    if plan.pareto:
        parts += [Text(), _pareto(plan.pareto)]
    return Group(*parts, Text(), _sensitivity(plan), Text(), _infeasible(plan))


def head_lines(plan: Plan, *, intervals: bool = False) -> Iterator[str]:
    """Yield a few lines with the choice and its reasons."""
    chosen, show = plan.allocation, VALUES[plan.objective.name]
    if plan.whole_run is not None:
        yield f"whole run: {headline(plan.whole_run, chosen.model_error, intervals=intervals)}"
    yield chosen.text
    yield (
        f"  {show(plan.objective.value, ends_of(plan.objective.band))}; a step {_step_text(chosen, intervals=intervals)} "
        f"and {format_dollars(chosen.cost_per_step, ends_of(chosen.cost_per_step_band))}, "
        f"${chosen.dollars_per_hour:.2f} an hour{_reward_price(chosen)}"
    )
    if chosen.num_seeds > 1 and intervals:
        yield f"  over {chosen.num_seeds} seeds {show(chosen.least)} to {show(chosen.most)}"
    if chosen.note:
        yield f"  {chosen.note}"
    if plan.steps_in_time is not None:
        yield (
            f"  plan.time_limit of {plan.time_limit:.0f} s left time for {plan.steps_in_time} steps of it, "
            "which is what the plan file has as simulate.max_steps"
        )
    if plan.whole_run is not None:
        yield from fact_lines(plan.whole_run)
    yield f"  {plan.binding.text}"
    yield f"  chosen as {plan.why}; {search_text(plan)}"
    if plan.systems and "fully-async" not in plan.systems:
        yield (
            f"  systems that were searched: {', '.join(plan.systems)}; not fully-async, whose rollouts may be several "
            "steps old: plan.systems names it where it is wanted"
        )
    if plan.whole_nodes and not any("on parts of a node" in each.labels for each in plan.options):
        yield (
            f"  each side has whole nodes of {' and '.join(plan.whole_nodes)}; no plan on parts of a node that was "
            "tried is better"
        )
    if plan.tighter is not None:
        yield (
            f"  with less room {plan.tighter.gain:.0%} better: {plan.tighter.choice}, whose trainer takes "
            f"{plan.tighter.memory:.1%} of a GPU"
        )
    if not plan.staleness_cost:
        yield "  staleness is taken to cost no progress: plan.staleness_cost says how much it does"
    else:
        yield (
            f"  with {plan.staleness_cost:g} % charged for each version of lag; as simulated "
            f"{_dollars_a_million(chosen.cost_per_million_tokens, ends_of(chosen.cost_per_million_tokens_band))}"
        )
    if plan.staleness_model:
        yield f"  as {plan.staleness_model}"
    if plan.drafts:
        yield f"  {plan.drafts}"
    tiers = ", ".join(f"{share:.0%} {tier}" for tier, share in plan.tiers.items() if share > 0)
    yield f"  seconds are {tiers}; planned in {plan.seconds:.1f} s"
    if plan.framework is not None:
        yield from _framework_lines(plan.framework)


def _reward_price(chosen: Choice) -> str:
    if chosen.verifier is None:
        return ""
    return f", ${chosen.verifier_dollars_per_hour:.2f} of it for rewards"


def _framework_lines(framework: PlannedFramework) -> Iterator[str]:
    """Yield what a framework fills in, which plans it takes, and what they lack because of it."""
    yield from (f"  {fact}" for fact in framework.facts)
    left_out = "; ".join(framework.left_out) or "nothing"
    yield f"  left out, as framework {framework.name} has none: {left_out}"


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
HEAD = ("behind", "step", "staleness", "$ a step", "$ an hour")
SAID = ("policies.dispatch", "sync.mode", "rollout.speculative.tokens")
"""Keys that the line of a plan shows besides its GPUs and degrees."""
OPTIONS_HEAD = ("option", "whole run", "$/M tokens", "step", "against 1")


def _options(options: list[PlanOption], *, intervals: bool = False) -> Table:
    """Lay out the answer: one row for each plan to decide for."""
    table = Table("", *OPTIONS_HEAD, box=None, pad_edge=False)
    for option in options:
        choice, whole = option.choice, option.whole_run
        dollars = f"{dollars_text(whole, intervals=intervals)}\n" if whole.dollars else ""
        table.add_row(
            str(option.number),
            f"{', '.join(option.labels)}\n{option.text}",
            f"{dollars}{time_text(whole, intervals=intervals)}",
            _dollars_a_token(choice),
            _step_text(choice, intervals=intervals),
            "\n".join(each for each in (option.relation, option.trains_on, option.note) if each),
        )
    return table


def _dollars_a_token(choice: Choice) -> str:
    """Return dollars per million tokens, with their band on a line below."""
    band = ends_of(choice.cost_per_million_tokens_band)
    return format_dollars(choice.cost_per_million_tokens, band).replace(" (", "\n(")


def _left_out(plan: Plan) -> Iterator[Text]:
    """Yield a line for each kind of plan without a row."""
    for each in plan.left_out:
        yield Text(f"no row for {each.label}: {each.reason}")


def _choices(plan: Plan) -> Table:
    """Lay out the runners-up, one row for all variants of a plan."""
    table = Table("runner-up", *HEAD, box=None, pad_edge=False)
    for runner in plan.runners_up:
        table.add_row(_runner_text(plan, runner), *_cells(plan, runner))
    return table


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


def _cells(plan: Plan, runner: RunnerUp) -> tuple[str, ...]:
    choice = runner.choice
    return (
        _behind_text(plan, runner),
        _step_text(choice),
        f"{choice.mean_staleness:.2f}",
        format_dollars(choice.cost_per_step, ends_of(choice.cost_per_step_band)),
        f"{choice.dollars_per_hour:.2f}",
    )


def _pareto(choices: list[Choice]) -> Table:
    table = Table("none beats in time and cost", "step", "$ a step", box=None, pad_edge=False)
    for choice in choices:
        dollars = format_dollars(choice.cost_per_step, ends_of(choice.cost_per_step_band))
        table.add_row(choice.text, _step_text(choice), dollars)
    return table


def _step_text(choice: Choice, *, intervals: bool = False) -> str:
    """Return the seconds of a step with their band, and with half their interval if `intervals`."""
    interval = choice.step_time_interval if intervals else None
    return format_step_time(choice.step_time, interval, ends_of(choice.step_time_band))


def _behind_text(plan: Plan, runner: RunnerUp) -> str:
    """Return how far a plan is behind, and whether that may be sampling error or model error.

    Errors of work that both plans do alike on the same GPUs cancel.
    """
    text = f"{runner.behind:+.1%}"
    if runner.behind_interval is not None:
        least, most = runner.behind_interval
        text += f" ± {50 * (most - least):.1f}"
    if runner.is_beyond_chance is False:
        return f"{text}, may be chance"
    if plan.uncertainty is None:
        return text
    shared = set()
    if runner.choice.rollout == plan.allocation.rollout:
        shared.add("decode")
    if runner.choice.trainer == plan.allocation.trainer:
        shared.add("train")
    error = unshared_error(plan.uncertainty.stages, shared)
    if error is None:
        return f"{text}, costs never checked there"
    return f"{text}, within costs' {error:.0%}" if runner.behind < error else text


def _sensitivity(plan: Plan) -> RenderableType:
    if not plan.sensitivity:
        return Text(f"no what-ifs: plan.time_limit of {plan.time_limit:.0f} s came before them")
    table = Table("if", "the plan gives", "better then", "saves", box=None, pad_edge=False)
    for change in plan.sensitivity:
        other = (change.choice, _gain(change)) if change.is_other else ("no other", "")
        table.add_row(change.what, _given(plan, change), *other)
    left_out = not_varied_text(plan.not_varied)
    return Group(table, Text(left_out)) if left_out else table


def _given(plan: Plan, change: Change) -> str:
    """Return the objective of the chosen plan after a change, and the relative effect."""
    if not change.still_fits:
        return "does not fit"
    effect = change.value / plan.objective.value - 1
    shown = f"{effect:+.1%}" if abs(effect) >= NO_CHANGE else "no change"
    if change.is_estimate:
        shown += ", an estimate"
    given = f"{VALUES[plan.objective.name](change.value)} ({shown})"
    return f"{given}, exceeds {' and '.join(change.breaks)}" if change.breaks else given


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
    table = Table("left out, sides or pairs of sides", "count", box=None, pad_edge=False)
    for reason, count in sorted(plan.infeasible.items(), key=lambda item: -item[1]):
        table.add_row(reason, f"{count:,}")
    return table
