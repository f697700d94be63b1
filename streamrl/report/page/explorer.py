"""The part of a plan page to play with: the grid of a plan as data for the page's script.

The script chooses by the same rule as `streamrl.sim.planner.what_if.recommend`. A test compares both.
"""

from __future__ import annotations

import msgspec
from markupsafe import Markup

from streamrl.report.page.decision import plan_command
from streamrl.report.page.sources import PlanMade
from streamrl.report.words import SYSTEMS, gpu_word
from streamrl.sim.planner.plan import Plan, PlanOption, WhatIfPlan


def explorer_data(made: PlanMade) -> Markup | None:
    """Return the grid of a plan as JSON that is safe inside an HTML element; None if the plan has no grid."""
    grid = made.plan.what_if
    if grid is None or not grid.plans or made.plan.whole_run is None:
        return None
    table: dict[str, object] = {
        **msgspec.to_builtins(grid),
        "plans": [_plan(made, plan, _option_of(made.plan, plan)) for plan in grid.plans],
        "gpus": {name: gpu_word(gpu) for name, gpu in grid.gpus.items()},
        "steps": made.plan.whole_run.steps,
    }
    text = msgspec.json.encode(table).decode()
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _option_of(plan: Plan, found: WhatIfPlan) -> PlanOption | None:
    """Return the option that a plan of the grid is, or None."""
    those = (option for option in plan.options if option.choice.settings == found.settings)
    return next(those, None)


def _plan(made: PlanMade, plan: WhatIfPlan, option: PlanOption | None) -> dict[str, object]:
    system = str(plan.settings["policies.system"])
    keys = (
        "choice",
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
        "number": None if option is None else option.number,
        "name": "another plan" if option is None else option.labels[0],
        "staleness": round(plan.mean_staleness, 2),
        "system": SYSTEMS.get(system, system),
        "command": _command(made, plan),
    }


def _command(made: PlanMade, plan: WhatIfPlan) -> str:
    """Return the command that plans within the sizes and the system of one plan."""
    settings = plan.settings
    pools = [str(value) for key, value in settings.items() if _is_pool(key)]
    changes = {
        "plan.systems": _list([str(settings["policies.system"])]),
        "plan.rollout_pools": _list(list(dict.fromkeys(pools))),
        "plan.trainer_pools": _list([str(settings["trainer.pool"])]),
        "plan.trainer_gpus": f"[{plan.trainer_gpus}]",
    }
    if len(pools) == 1:
        changes["plan.rollout_gpus"] = f"[{plan.rollout_gpus}]"
    return plan_command(made, changes)


def _is_pool(key: str) -> bool:
    return key.startswith("rollout.") and key.endswith(".pool")


def _list(names: list[str]) -> str:
    return msgspec.json.encode(names).decode()
