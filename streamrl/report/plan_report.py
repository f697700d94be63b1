"""Show a plan on a terminal: the choice, its reasons, the runners-up, and changes that would alter it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.record.band import ends_of
from streamrl.record.uncertainty import unshared_error
from streamrl.report.run_tables import fact_lines, headline
from streamrl.runfile.formatting import (
    OptionalInterval,
    band_text,
    format_dollars,
    format_step_time,
)
from streamrl.runfile.plan_config import ObjectiveName
from streamrl.sim.planner.plan import Choice, Plan, PlannedFramework, RunnerUp

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


def plan_report(plan: Plan, *, intervals: bool = False) -> RenderableType:
    """Lay out a plan for a terminal.

    Args:
        plan: the plan.
        intervals: whether to show 95 % intervals (sampling error) as well.
    """
    parts: list[RenderableType] = [Text(line) for line in head_lines(plan, intervals=intervals)]
    parts += [Text(), _beside(plan), Text(), _choices(plan), Text(PAIRED)]
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
    if plan.parts is not None:
        yield (
            f"  on parts of a node {plan.parts.gain:.0%} better than the cheapest: {plan.parts.choice}; "
            "--set plan.unit=1 looks at all of those"
        )
    elif plan.whole_nodes:
        yield (
            f"  each side has whole nodes of {' and '.join(plan.whole_nodes)}: --set plan.unit=1 looks at parts of a node "
            "too, which may be cheaper where little is enough"
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
            f"{format_dollars(chosen.cost_per_million_tokens)} per million tokens"
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
    "all on the chosen plan's prompts, ± is a 95 % interval; what stands beside it was simulated for as long as the chosen "
    "plan, of runners-up sixteen steps"
)
UNSAID = (".max_running", ".micro_batch", ".zero", ".recompute", ".logits", ".order", "_staleness")
"""Ends of keys that the line of a plan does not show."""
HEAD = ("behind", "step", "staleness", "$ a step", "$ an hour")


def _beside(plan: Plan) -> Table:
    table = Table("beside it", *HEAD, box=None, pad_edge=False)
    for beside in plan.beside:
        if beside.not_simulated:
            table.add_row(f"{beside.what}: {beside.not_simulated}", "no time left")
        elif beside.runner is None:
            table.add_row(f"{beside.what}: none is open")
        elif beside.runner.choice == plan.allocation:
            table.add_row(f"{beside.what}: the chosen plan")
        else:
            table.add_row(
                f"{beside.what}: {beside.runner.choice.text}", *_cells(plan, beside.runner)
            )
    return table


def _choices(plan: Plan) -> Table:
    """Lay out the runners-up. Plans with equal lines also show which other keys they set."""
    table = Table("runner-up", *HEAD, box=None, pad_edge=False)
    seen = {plan.allocation.text}
    for runner in plan.runners_up:
        text, is_known = runner.choice.text, runner.choice.text in seen
        seen.add(text)
        text += f", {_unsaid(plan.allocation, runner.choice)}" if is_known else ""
        table.add_row(text, *_cells(plan, runner))
    return table


def _unsaid(chosen: Choice, other: Choice) -> str:
    """Return the keys that differ from the chosen plan, if both plans have the same line."""
    ours, theirs = chosen.settings, other.settings
    found = [
        f"{key.partition('.')[2]} {theirs.get(key, 'default')}"
        for key in dict.fromkeys([*ours, *theirs])
        if key.endswith(UNSAID) and ours.get(key) != theirs.get(key)
    ]
    return ", ".join(found) or "otherwise the same"


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
        show = VALUES[plan.objective.name]
        gives = show(change.value) if change.still_fits else "does not fit"
        other = (change.choice, f"{change.gain:.1%}") if change.is_other else ("no other", "")
        if not change.is_used:
            other = ("no other, and this one uses none of it", "")
        table.add_row(change.what, gives, *other)
    return table


def _infeasible(plan: Plan) -> Table:
    table = Table("left out, sides or pairs of sides", "count", box=None, pad_edge=False)
    for reason, count in sorted(plan.infeasible.items(), key=lambda item: -item[1]):
        table.add_row(reason, f"{count:,}")
    return table
