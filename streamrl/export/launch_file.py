"""Write a shell script that starts a framework with a plan: one option in each line, with its key and source.

Settings without an option are in comments at the end. A script is not written if its options
contradict each other by the framework's own rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import NamedTuple

from streamrl.export.layout_rules import check_replica_degrees, check_stages, layout_of
from streamrl.export.option_table import (
    ExportName,
    LaunchOption,
    OptionTable,
    Relation,
    load_options,
)
from streamrl.export.planned_values import (
    ALWAYS,
    PlannedValue,
    other_settings,
    planned_facts,
    planned_machines,
    planned_values,
)
from streamrl.hardware.profiles import load_model
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.escaping import visible
from streamrl.runfile.frameworks import Framework, Value, load_framework
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig

SHELL = re.compile(r'[\\"$`]')
"""Characters that act between the double quotes of a shell."""


class Argument(NamedTuple):
    """An option with its value."""

    option: LaunchOption
    value: Value
    key: str
    """Key of the run file; empty if the value never changes."""


class Launchable(NamedTuple):
    """The arguments of a framework, and the settings of the plan that it has no option for."""

    framework: Framework
    table: OptionTable
    command: str
    arguments: list[Argument]
    find_untold: Callable[[], list[PlannedValue]]
    """Finds those settings. It takes a third of the time, and checks of a plan do without."""
    notes: list[str]


def launch_script(found: Launchable) -> str:
    """Return the script that starts a framework with a plan.

    Raises:
        RunError: the framework's own rules forbid the plan.
    """
    check_options(found)
    return "\n".join(_lines(found)) + "\n"


def check_options(found: Launchable) -> None:
    """Raise `RunError` if the options of a plan contradict each other by the framework's own rules."""
    check_relations(found.table.relations, {arg.option.name: arg.value for arg in found.arguments})


def check_one_turn(environment: EnvironmentConfig | None, framework: str) -> None:
    """Raise `RunError` if a run has episodes of several turns: the frameworks' settings of environments are not known."""
    if environment is not None:
        text = f"the settings of environments in {framework} are not known, so [environment] cannot be exported"
        raise RunError("environment", None, text=text)


def find_arguments(run: Run, name: ExportName) -> Launchable:
    """Return the options that a plan sets, in the order of the framework's table.

    Raises:
        RunError: the framework cannot split the trainer as the plan does, or the plan has no whole
            number for an option.
    """
    framework, table = load_framework(name), load_options(name)
    check_one_turn(run.environment, framework.name)
    layout = layout_of(framework, run.trainer)
    check_stages(load_model(run.model), run.trainer)
    values, facts = planned_values(run), planned_facts(run, layout)
    arguments = list(_arguments(table, values, facts))
    known = {arg.option.of for arg in arguments}
    known |= {name for arg in arguments for name in arg.option.covers}
    check_replica_degrees(run.rollout, known, framework.name)

    def find_untold() -> list[PlannedValue]:
        untold = [each for each in values.values() if _has_to_be_told(each)]
        told = [each for each in values.values() if each.plain is not None or each.name in known]
        seed = [PlannedValue("seed", "seed", run.seed, ALWAYS)] if run.seed else []
        unknown = [each for each in untold if each.name not in known]
        return [*unknown, *seed, *other_settings(run, told)]

    notes = [note.text for note in table.notes if _holds(note.when, facts)]
    return Launchable(
        framework,
        table,
        next(launch.command for launch in table.launch if _holds(launch.when, facts)),
        arguments,
        find_untold,
        notes,
    )


def why_not_placed(
    name: ExportName,
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    pools: dict[str, PoolConfig],
    *,
    shares_gpus: bool,
) -> str:
    """Return why a framework has no placement for the GPUs of both sides; "" if it has one."""
    needed = {option.of for option in load_options(name).options}
    machines = planned_machines(rollout, trainer, pools, shares_gpus=shares_gpus)
    return next((each.refusal for each in machines if each.name in needed and each.refusal), "")


def check_relations(relations: Iterable[Relation], values: dict[str, Value]) -> None:
    """Raise `RunError` if options contradict each other by the framework's own rules."""
    for relation in relations:
        right = relation.equals or relation.divides
        names = [*relation.product, *right, *([relation.beside] if relation.beside else [])]
        if not all(name in values for name in names):
            continue
        left = prod(int(values[name]) for name in relation.product)
        whole = prod(int(values[name]) for name in right)
        if left != whole if relation.equals else whole % left:
            verb = "be" if relation.equals else "divide"
            text = (
                f"{' x '.join(relation.product)} = {left} must {verb} {' x '.join(right)} = {whole} "
                f"({relation.source})"
            )
            raise RunError(relation.product[0], left, text=text)


def _arguments(
    table: OptionTable, values: dict[str, PlannedValue], facts: set[str]
) -> Iterator[Argument]:
    for option in table.options:
        if not _holds(option.when, facts):
            continue
        if not option.of:
            yield Argument(option, option.value, "")
            continue
        planned = values[option.of]
        if option.map:
            named = option.map.get(str(planned.value))
            if named is not None:
                yield Argument(option, named, planned.key)
            continue
        if planned.value is None and planned.refusal:
            replicas, name = values["replicas"], table.framework
            text = f"{name} cannot place the plan: {planned.refusal}. Plan again with --for {name}"
            raise RunError(replicas.key, replicas.value, text=text)
        if planned.value is None:
            text = f"{option.name} of {table.framework} has no value for the plan: {planned.key} {planned.gap}"
            raise RunError(planned.key, None, text=text)
        yield Argument(option, planned.value, planned.key)


def _holds(when: Iterable[str], facts: set[str]) -> bool:
    return all((fact.removeprefix("!") in facts) != fact.startswith("!") for fact in when)


def _has_to_be_told(planned: PlannedValue) -> bool:
    return planned.plain is not None and planned.value not in planned.plain


# Text ---------------------------------------------------------------------------------------------


def _lines(found: Launchable) -> Iterator[str]:
    framework, table = found.framework, found.table
    yield "#!/usr/bin/env bash"
    yield f"# What was planned, as {framework.name} {framework.version} is started with it. Its options were read at"
    yield f"# github.com/{framework.source} {framework.commit} ({framework.date}), or at the commit"
    yield "# in parentheses after a file. After each option: the key of the run file it comes from; the file that has it."
    yield "set -euo pipefail"
    for name, what in table.variables.items():
        if any(f"${{{name}}}" in str(arg.value) for arg in found.arguments):
            yield f': "${{{name}:?{what}}}"'
    yield ""
    yield "args=("
    for argument in found.arguments:
        for text in _words(argument, table):
            yield f"  {text}  # {_one_line(_origin(argument))}"
    yield ")"
    yield f'{found.command} "${{args[@]}}" "$@"'
    yield from _gaps(found)


def _words(argument: Argument, table: OptionTable) -> Iterator[str]:
    """Yield an option as shell words; a flag that is off is left out."""
    name, value = argument.option.name, argument.value
    if table.style == "assign":
        prefix = "++" if argument.option.adds else ""
        yield f'"{prefix}{name}={_in_quotes(value, table)}"'
    elif value is True:
        yield name
    elif value is not False:
        yield f'{name} "{_in_quotes(value, table)}"'


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _in_quotes(value: Value, table: OptionTable) -> str:
    """Return a value between double quotes of a shell, which expands only the variables of the table."""
    text = SHELL.sub(r"\\\g<0>", _text(value))
    for name in table.variables:
        text = text.replace(f"\\${{{name}}}", f"${{{name}}}")
    return text


def _told(value: Value | None) -> str:
    return "absent" if value is None else _one_line(_text(value))


def _one_line(text: str) -> str:
    """Return a text for a comment, with its line breaks escaped."""
    return visible(text).replace("\n", "\\n")


def _origin(argument: Argument) -> str:
    return "; ".join(part for part in (argument.key, argument.option.source) if part)


def _gaps(found: Launchable) -> Iterator[str]:
    name = found.framework.name
    yield ""
    yield f"# What the plan has and no option of {name} says here:"
    untold = found.find_untold()
    for planned in untold:
        yield f"#   {planned.key} = {_told(planned.value)}"
    if not untold:
        yield "#   nothing"
    if found.notes:
        yield f"# What {name} does otherwise, or wants besides:"
        yield from (f"#   {_one_line(note)}" for note in found.notes)
