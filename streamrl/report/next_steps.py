"""Say what can run a plan, and the commands that start it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from streamrl.export.option_table import ExportName
from streamrl.sim.planner.plan import Plan
from streamrl.targets.verdicts import Verdict

PLACEHOLDERS = {"model.path": "DIR", "workload.prompts": "FILE", "verifier.scorer": "NAME"}
"""What stands for a value that a run file must have to be executed."""


def verdict_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield what can run a plan, and the first setting that keeps each other target from it."""
    able = [_title(each) for each in verdicts if each.can_run]
    if able:
        yield f"can be run by: {', '.join(able)}"
    broken: dict[str, list[str]] = {}
    for each in verdicts:
        if not each.can_run:
            broken.setdefault(each.broken, []).append(each.name)
    if broken:
        reasons = (f"{', '.join(names)} ({setting})" for setting, names in broken.items())
        yield f"not by: {'; '.join(reasons)}"


def option_lines(plan: Plan) -> Iterator[str]:
    """Yield the other options that something can run which cannot run the option of the plan file."""
    able = {each.name for each in plan.carried_by if each.can_run}
    for option in plan.options:
        more = [each for each in option.carried_by if each.can_run and each.name not in able]
        if more:
            yield f"option {option.number} can also be run by: {', '.join(map(_title, more))}"


def next_lines(plan: Plan, plan_file: Path) -> Iterator[str]:
    """Yield the commands that start a plan, one per line, for the targets that can run it."""
    for place, command in enumerate(start_commands(plan, plan_file)):
        yield f"{'or:  ' if place else 'next:'} {command}"
    if own := _without_script(plan):
        yield f"next: set the options of {own} as {plan_file} has them; no launch script is written for {own}"
    if not any(each.can_run for each in plan.carried_by):
        yield "next: plan for what is to run it, such as --for execute or --for verl"


def start_commands(plan: Plan, plan_file: Path) -> Iterator[str]:
    """Yield the commands that execute a plan or write its launch script, for the targets that can run it.

    The script is that of the framework that the plan was made for, if it can run the plan.
    """
    able = {each.name: each for each in plan.carried_by if each.can_run}
    if "execute" in able:
        yield execute_command(able["execute"], plan_file)
    own = None if plan.framework is None else plan.framework.name
    exports = [name for name in get_args(ExportName) if name in able]
    exports.sort(key=lambda name: name != own)
    if exports and not _without_script(plan):
        script = plan_file.with_name(f"{exports[0]}.sh")
        words = ["streamrl", "export", str(plan_file), "--framework", exports[0], "-o", str(script)]
        yield shlex.join(words)


def _without_script(plan: Plan) -> str:
    """Return the framework that the plan was made for if it can run the plan but has no launch script; else ""."""
    own = None if plan.framework is None else plan.framework.name
    is_able = any(each.name == own for each in plan.carried_by if each.can_run)
    return own if own is not None and is_able and own not in get_args(ExportName) else ""


def execute_command(verdict: Verdict, plan_file: Path) -> str:
    """Return the command that executes a plan, with the settings that its file does not have yet."""
    settings = {**verdict.settings, **{key: PLACEHOLDERS[key] for key in verdict.missing}}
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return shlex.join(["streamrl", "execute", str(plan_file), *changes])


def _title(verdict: Verdict) -> str:
    back_ends = ", ".join(verdict.back_ends)
    return f"{verdict.name} ({back_ends})" if back_ends else verdict.name


def differing(plan: Plan) -> list[str]:
    """Return the settings in which the variant with fuller memory differs from the plan."""
    assert plan.tighter is not None, "it has a variant"
    ours, theirs = plan.allocation.settings, plan.tighter.settings
    return [f"{key}={theirs[key]}" for key in theirs if theirs[key] != ours.get(key)]
