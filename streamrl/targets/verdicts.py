"""Say for a plan what can run it, or the first rule of each target that it breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import msgspec

from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.plan_config import TargetName
from streamrl.runfile.roles_config import VerifierConfig
from streamrl.runfile.workload_config import WorkloadConfig
from streamrl.targets.back_ends import back_end_settings, for_target
from streamrl.targets.execute_limits import check_back_ends
from streamrl.targets.framework_rules import check_framework

LAUNCHERS = ("local", "in-process")
"""Launchers on one machine, which need nothing installed."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one target can run a plan."""

    name: TargetName
    can_run: bool
    key: str = ""
    """Key of the first rule that the plan breaks."""
    value: str = ""
    """Its value in the plan, as text."""
    reason: str = ""
    """The rule, in one line."""
    back_ends: list[str] = []
    """For execute: the inference engine, the training back end, and Ray if it is needed."""
    settings: dict[str, str] = {}
    """For execute: keys to change in the plan's run file, with their values."""
    missing: list[str] = []
    """For execute: keys that the run file must still get."""

    @property
    def broken(self) -> str:
        """The setting that breaks the first rule, such as "trainer.zero=1"; a whole section is "[environment]"."""
        return f"{self.key}={self.value}" if "." in self.key else f"[{self.key}]"


TARGETS: tuple[TargetName, ...] = get_args(TargetName)


def verdict_of(run: Run, name: TargetName) -> Verdict:
    """Return whether a target can run a plan."""
    adapted = for_target(run, name)
    try:
        check_target(adapted, name)
    except RunError as error:
        return Verdict(
            name=name, can_run=False, key=error.key, value=str(error.value), reason=str(error)
        )
    if name != "execute":
        return Verdict(name=name, can_run=True)
    own = back_end_settings(run.rollout, run.trainer, run.execute)
    settings = back_end_settings(adapted.rollout, adapted.trainer, adapted.execute)
    return Verdict(
        name=name,
        can_run=True,
        back_ends=[value for value in settings.values() if value not in LAUNCHERS],
        settings={key: value for key, value in settings.items() if own[key] != value},
        missing=list(missing_inputs(run.model, run.workload, run.verifier, run.environment)),
    )


def check_target(run: Run, name: TargetName) -> None:
    """Raise `RunError` if a target cannot run a plan as its file says."""
    if name == "execute":
        check_back_ends(run)
    else:
        check_framework(run, name)


def missing_inputs(
    model: ModelConfig,
    workload: WorkloadConfig,
    verifier: VerifierConfig,
    environment: EnvironmentConfig | None,
) -> Iterator[str]:
    """Yield the keys of weights, prompts, environment and rewards that a run file must have to be executed.

    An environment gives the reward itself, if there is no scorer.
    """
    if model.path is None:
        yield "model.path"
    if not workload.sources:
        yield "workload.prompts"
    if environment is not None:
        if environment.implementation is None:
            yield "environment.implementation"
    elif not verifier.rewards:
        yield "verifier.scorer"
