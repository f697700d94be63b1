"""The part of a plan page to play with: the grid of a plan as data for the page's script.

The script chooses by the same rule as `streamrl.sim.planner.what_if.recommend`. A test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log

import msgspec
import numpy as np
from markupsafe import Markup

from streamrl.report.page.details import SHIFT
from streamrl.report.page.sources import PlanMade
from streamrl.report.page.what_if_command import changes_of, command_parts, note_of
from streamrl.report.plan_report import wall_time_ratio
from streamrl.report.words import SYSTEMS, gpu_word, percent, pool_words, with_pool_words
from streamrl.runfile.escaping import visible_json
from streamrl.runfile.formatting import listing
from streamrl.sim.planner.plan import Plan, PlanOption, WhatIf, WhatIfPlan


def explorer_data(made: PlanMade) -> Markup | None:
    """Return the grid of a plan as JSON that is safe inside an HTML element; None if the plan has no grid."""
    grid = made.plan.what_if
    if grid is None or not grid.plans or made.plan.whole_run is None:
        return None
    words = {name: _pool_word(name, gpu) for name, gpu in grid.gpus.items()}
    pools = pool_words(grid.gpus)
    table: dict[str, object] = {
        **msgspec.to_builtins(grid),
        "plans": [_plan(each, _option_of(made.plan, each), words, pools) for each in grid.plans],
        "gpus": {name: gpu_word(gpu) for name, gpu in grid.gpus.items()},
        "steps": made.plan.whole_run.steps,
        "budget": made.plan.limits.get("budget"),
        "command": command_parts(made, grid),
    }
    text = visible_json(msgspec.json.encode(table).decode())
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def estimate_note(plan: Plan) -> str:
    """Return how far the estimate of longer outputs is from their simulation; empty if it is near or unknown."""
    grid = plan.what_if
    for change in plan.sensitivity:
        match = SHIFT.fullmatch(change.what)
        if match is None or match["what"] != "lengths" or match["sign"] == "-" or grid is None:
            continue
        ratio = None if change.is_estimate else wall_time_ratio(plan, change)
        estimate = _estimated_ratio(grid, 1 + int(match["share"]) / 100)
        if ratio is not None and estimate and abs(ratio / estimate - 1) > NEAR:
            return (
                f"With outputs {match['share']} % longer, a simulation of option 1 took {percent(ratio - 1)} more time. "
                f"The sliders estimate {percent(estimate - 1)}." + (LOW if estimate < ratio else "")
            )
    return ""


NEAR = 0.03
"""Relative difference of two times up to which an estimate is near a simulation."""
LOW = " Where GPU memory limits generation, estimates for long outputs are too low."


def _estimated_ratio(grid: WhatIf, factor: float) -> float | None:
    """Return the estimated time of the chosen plan for longer outputs, relative to that without a change."""
    lengths, cap, links = grid.unchanged
    hours = {at: row[cap][links] for at, row in zip(grid.lengths, grid.plans[0].hours, strict=True)}
    known = {log(at): log(each) for at, each in hours.items() if each}
    if len(known) < 2 or not log(min(grid.lengths)) <= log(factor) <= max(known):
        return None
    unchanged = known[log(grid.lengths[lengths])]
    return exp(float(np.interp(log(factor), list(known), list(known.values()))) - unchanged)


def _option_of(plan: Plan, found: WhatIfPlan) -> PlanOption | None:
    """Return the option that a plan of the grid is, or None."""
    those = (option for option in plan.options if option.choice.settings == found.settings)
    return next(those, None)


def _plan(
    plan: WhatIfPlan,
    option: PlanOption | None,
    words: Mapping[str, str],
    pools: Mapping[str, str],
) -> dict[str, object]:
    system = str(plan.settings["policies.system"])
    keys = (
        "rollout_gpus",
        "trainer_gpus",
        "paid",
        "other_dollars",
        "is_simulated",
        "has_total",
        "hours",
    )
    return {
        **{key: getattr(plan, key) for key in keys},
        "choice": with_pool_words(plan.choice, pools),
        "number": None if option is None else option.number,
        "name": _name(plan, words) if option is None else option.labels[0],
        "gpus": _name(plan, words),
        "staleness": round(plan.mean_staleness, 2),
        "system": SYSTEMS.get(system, system),
        "changes": changes_of(plan),
        "unsaid": note_of(plan),
    }


def _name(plan: WhatIfPlan, words: Mapping[str, str]) -> str:
    """Return the GPUs of a plan in a few words: "12 H100 and 2 H20 generate, 4 H100 train"."""
    generate = listing([f"{kind.num_gpus} {words[kind.pool]}" for kind in plan.generate])
    if plan.settings["policies.system"] == "colocated":
        return f"{generate} generate and train in turn"
    trainer = words[str(plan.settings["trainer.pool"])]
    return f"{generate} generate, {plan.trainer_gpus} {trainer} train"


def _pool_word(pool: str, gpu: str) -> str:
    """Return how a sentence calls the GPUs of a pool: "H20", or "H20 in near"."""
    return gpu_word(gpu) if pool == gpu else f"{gpu_word(gpu)} in {pool}"
