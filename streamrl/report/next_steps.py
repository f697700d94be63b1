"""Say what can run a plan, and the commands that start it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from streamrl.export.option_table import ExportName
from streamrl.runfile.formatting import listing
from streamrl.sim.planner.plan import Plan
from streamrl.targets.verdicts import Verdict

PLACEHOLDERS = {
    "model.path": "DIR",
    "workload.prompts": "FILE",
    "environment.implementation": "CLASS",
    "verifier.scorer": "NAME",
}
"""What stands for a value that a run file must have to be executed."""
STANDS_FOR = {
    "DIR": "the directory of your model",
    "FILE": "your prompts",
    "CLASS": "your environment, as python:FILE.py:CLASS",
    "NAME": "your scorer",
    "MODELDIR": "the directory of your model",
    "RUN.toml": "your run file",
}
"""Meanings of the words that a reader replaces in a command."""


def placeholders_text(command: str) -> str:
    """Return which words of a command to replace, and by what; empty if there are none."""
    words = dict.fromkeys(word.rpartition("=")[2] for word in shlex.split(command))
    told = [f"{word} by {STANDS_FOR[word]}" for word in words if word in STANDS_FOR]
    return f"Replace {listing(told)}." if told else ""


def runners_text(plan: Plan) -> str:
    """Return what can run a plan; if nothing can, what could run another option."""
    if able := _able(plan.carried_by):
        return f"It can be run by {able}."
    others = [each for each in plan.options if _able(each.carried_by)]
    if plan.taken != 1 and others and others[0].number == 1:
        return f"Nothing here can run option {plan.taken}, which was taken. Option 1 can be run by {_able(others[0].carried_by)}."
    none = "Nothing here can run a plan that your file allows, as it is."
    if not others:
        return none
    return f"{none} Your file excludes option {others[0].number}: {_able(others[0].carried_by)} could run it."


def just_dearer_text(plan: Plan) -> str:
    """Return which option is much faster and costs just too much: "11 % dearer and 1.8 times as fast: option 2"; "" if none is."""
    if plan.just_dearer is None:
        return ""
    option = plan.options[plan.just_dearer - 1]
    return f"{option.relation.replace(', ', ' and ')}: option {option.number}"


def hindrances_text(verdicts: Sequence[Verdict]) -> str:
    """Return the first setting that keeps each target from running a plan: "execute (trainer.zero=1)"; "" if all can run it."""
    broken: dict[str, list[str]] = {}
    for each in verdicts:
        if not each.can_run:
            broken.setdefault(each.broken, []).append(each.name)
    return "; ".join(f"{', '.join(names)} ({setting})" for setting, names in broken.items())


def _able(verdicts: Sequence[Verdict]) -> str:
    """Return what can run a plan, by name; empty if nothing can."""
    names = [each.name for each in verdicts if each.can_run]
    return listing(["`streamrl execute`" if name == "execute" else name for name in names])


def verdict_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield what can run a plan, and the first setting that keeps each other target from it."""
    able = [_title(each) for each in verdicts if each.can_run]
    if able:
        yield f"can be run by: {', '.join(able)}"
    if broken := hindrances_text(verdicts):
        yield f"not by: {broken}"


def option_lines(plan: Plan) -> Iterator[str]:
    """Yield the other options that something can run which cannot run the option of the plan file."""
    able = {each.name for each in plan.carried_by if each.can_run}
    for option in plan.options:
        more = [each for each in option.carried_by if each.can_run and each.name not in able]
        if more:
            also = "also " if able else ""
            excluded = "" if option.is_offered else " (your file excludes this option)"
            yield f"option {option.number} can {also}be run by: {', '.join(map(_title, more))}{excluded}"


def next_lines(plan: Plan, plan_file: Path) -> Iterator[str]:
    """Yield the commands that start a plan, one per line, for the targets that can run it."""
    for place, command in enumerate(start_commands(plan, plan_file)):
        yield f"{'or:  ' if place else 'next:'} {command}"
        if replaced := placeholders_text(command):
            yield f"      {replaced}"
    if own := _without_script(plan):
        yield f"next: set the options of {own} as {plan_file} has them; no launch script is written for {own}"
    if not any(each.can_run for each in plan.carried_by):
        yield f"next: {_way_to_run(plan)}"


def _way_to_run(plan: Plan) -> str:
    """Return how to get a plan that something can run. Targets that run no episodes of several turns are not named."""
    if plan.taken != 1 and _able(plan.options[0].carried_by):
        return f"leave out --take {plan.taken} to write option 1, which something can run"
    without = {each.name for each in plan.carried_by if each.key == "environment"}
    names = (f"--for {name}" for name in ("execute", "verl") if name not in without)
    return f"add {' or '.join(names)}: it names the setting of your file that excludes every plan"


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
