"""Refuse plans that a framework cannot run as planned: by its systems and layouts, and by the rules of its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from streamrl.engine.presets import choose_system
from streamrl.export.launch_file import check_one_turn, check_options, find_arguments
from streamrl.export.layout_rules import check_replica_degrees, layout_of
from streamrl.export.option_table import ExportName
from streamrl.runfile.config import Run
from streamrl.runfile.errors import OneOf, RunError
from streamrl.runfile.frameworks import Framework, load_framework
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.simulation_config import FrameworkName


def check_framework(run: Run, name: FrameworkName) -> None:
    """Raise `RunError` if a framework cannot run a plan as it is.

    The error names the first key whose value the framework does not have.
    """
    framework = load_framework(name)
    check_one_turn(run.environment, framework.name)
    _check_policies(run.policies, framework)
    _check("sync.mode", run.sync.mode, framework.sync_modes(run.costs.engine), name)
    if run.rollout.others and not framework.mixes_replicas:
        text = f"{framework.name} has replicas of one kind only, and rollout.others has another"
        raise RunError("rollout.others", len(run.rollout.others), text=text)
    exported: ExportName
    for exported in get_args(ExportName):
        if exported == framework.name:
            check_options(find_arguments(run, exported))
            return
    layout_of(framework, run.trainer)
    check_replica_degrees(run.rollout, (), framework.name)


def _check_policies(policies: PoliciesConfig, framework: Framework) -> None:
    """Raise `RunError` if a framework lacks the system, dispatch or order of a run."""
    system, name = choose_system(policies), framework.name
    _check("policies.system", policies.system, [each.name for each in framework.systems], name)
    if framework.dispatch is not None:
        _check("policies.dispatch", system.dispatch, framework.dispatch, name)
    if framework.order is not None:
        _check("policies.order", system.order, framework.order, name)


def _check(key: str, value: object, able: Sequence[object], name: str) -> None:
    if value not in able:
        text = f"{key} {value!r}: {name} has {', '.join(map(str, able)) or 'none'}"
        raise RunError(key, value, OneOf(able), text)
