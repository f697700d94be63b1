"""What a plan may choose among where the run names a framework: what that framework has, and what is left out for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from streamrl.hardware.profiles import known_engines
from streamrl.runfile.config import Run
from streamrl.runfile.errors import OneOf, RunError, shown
from streamrl.runfile.frameworks import Framework, framework_of
from streamrl.sim.planner.modes import Choices, find_choices

_Name = TypeVar("_Name")


class Scope(NamedTuple):
    """An offer that keeps to a framework."""

    run: Run
    left_out: list[str]
    """What the framework has not, by what it is: "systems stream-sync, stream-async"."""


def keep_to_framework(run: Run) -> Scope:
    """Return an offer with a section `[plan]` that holds only what its framework can do.

    Raises:
        RunError: of what `[plan]` names for a key the framework has nothing, or it does not generate with
            `costs.engine`.
    """
    framework = framework_of(run)
    if framework is None:
        return Scope(run, [])
    _check_engine(run, framework)
    wanted, able = find_choices(run), _able(run, framework)
    kept = {key: _kept(run, key, getattr(wanted, key), getattr(able, key)) for key in able._fields}
    mixes = run.plan.mixes_replicas and framework.mixes_replicas
    plan = replace(run.plan, mixes_replicas=mixes, **kept)
    return Scope(replace(run, plan=plan), list(_left_out(run, framework, wanted, able)))


def _check_engine(run: Run, framework: Framework) -> None:
    engine = run.costs.engine
    if not framework.generates_with(engine):
        able = [name for name in known_engines() if framework.generates_with(name)]
        text = (
            f"costs.engine {shown(engine)}: framework {framework.name} generates with "
            f"{framework.engine_names}, so there is {', '.join(able)}"
        )
        raise RunError("costs.engine", engine, OneOf(able), text, ("framework.name",))


def _able(run: Run, framework: Framework) -> Choices:
    return Choices(
        systems=[way.name for way in framework.systems],
        dispatch=list(framework.dispatch),
        order=list(framework.order),
        sync_modes=framework.sync_modes(run.costs.engine),
    )


def _kept(
    run: Run, key: str, wanted: Sequence[_Name | None], able: Sequence[_Name]
) -> list[_Name] | None:
    """Return what is chosen among: of what `[plan]` names what is there, else all that is."""
    if wanted == [None]:  # a system's own, which every framework has
        return None
    found = [name for name in able if name in wanted]
    stated = getattr(run.plan, key)
    if stated is not None and not found:
        name = run.framework.name
        text = (
            f"plan.{key} {shown(stated)}: framework {name} has none of these, but "
            f"{', '.join(map(str, able))}"
        )
        raise RunError(f"plan.{key}", stated, OneOf(able), text, ("framework.name",))
    if stated is None and key == "systems":
        return list(able)
    return found or list(able)


def _left_out(run: Run, framework: Framework, wanted: Choices, able: Choices) -> Iterator[str]:
    for key in wanted._fields:
        missing = [
            str(name)
            for name in getattr(wanted, key)
            if name is not None and name not in getattr(able, key)
        ]
        if missing:
            yield f"{key.replace('_', ' ')} {', '.join(missing)}"
    if run.plan.mixes_replicas and not framework.mixes_replicas:
        yield "replicas of two kinds beside each other"
    layouts = ", ".join(
        f"{layout.name} (ZeRO {'/'.join(map(str, layout.zero))}{_splits_text(layout.splits)})"
        for layout in framework.layouts
    )
    yield f"trainers that are none of {layouts}"


def _splits_text(splits: Sequence[str]) -> str:
    return f", {', '.join(split.replace('_', ' ') for split in splits)}" if splits else ""
