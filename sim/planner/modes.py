"""Modes of a plan: system, staleness, dispatch and sync mode, limited to what a named framework supports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar, get_args

from msgspec.structs import replace

from streamrl.engine.presets import SYSTEMS
from streamrl.hardware.profiles import known_engines
from streamrl.runfile.config import Run
from streamrl.runfile.dispatch_choice import DEFAULT_DISPATCH, DISPATCH, DispatchName
from streamrl.runfile.errors import OneOf, RunError, shown
from streamrl.runfile.frameworks import Framework, framework_of, keep_filled_in
from streamrl.runfile.policies_config import (
    OrderName,
    PoliciesConfig,
    SyncConfig,
    SyncMode,
    SystemName,
)
from streamrl.runfile.roles_config import NARROW

USUAL_SYSTEMS: tuple[SystemName, ...] = (
    *("colocated", "stream-sync", "one-step-async", "stream-async"),
)
OWN_LAG = {
    key: getattr(PoliciesConfig(), key)
    for key in ("sync_every", "over_staleness", "oversampling", "left_over")
}
"""What a run file says of late groups for its own system; others, which take them in order, are tried without."""
USUAL_DISPATCH: tuple[DispatchName, ...] = (DEFAULT_DISPATCH, "skewness-aware")


class Mode(NamedTuple):
    """What does not depend on who has which GPUs."""

    system: SystemName
    max_staleness: float | int | None
    dispatch: DispatchName | None
    order: OrderName | None
    sync_mode: SyncMode

    def apply(self, run: Run) -> Run:
        """Return the run in this mode; what it replaces of its own system by name stays with that system."""
        policies = replace(run.policies, system=self.system, latency=None, context_time=None)
        if self.system != run.policies.system:
            policies = replace(
                policies,
                waits_for_whole_batches=None,
                streaming=None,
                consumption=None,
                weight_sync=None,
                **OWN_LAG,
            )
        policies = replace(
            policies, max_staleness=self.max_staleness, dispatch=self.dispatch, order=self.order
        )
        sync = replace(run.sync, mode=self.sync_mode)
        return keep_filled_in(run, replace(run, policies=policies, sync=sync))


class Choices(NamedTuple):
    """What modes are made of; None is a system's own."""

    systems: Sequence[SystemName]
    dispatch: Sequence[DispatchName | None]
    order: Sequence[OrderName | None]
    sync_modes: Sequence[SyncMode]


def find_choices(run: Run) -> Choices:
    """Return what `[plan]` names, and where it names nothing what is sensible."""
    plan, own = run.plan, run.policies
    return Choices(
        systems=plan.systems or list(dict.fromkeys((own.system, *USUAL_SYSTEMS))),
        dispatch=plan.dispatch or _usual_dispatch(run),
        order=plan.order or _usual_order(run),
        sync_modes=plan.sync_modes or _usual_sync(run),
    )


def find_modes(run: Run) -> list[Mode]:
    """Return every mode, those of one system beside each other."""
    choices = find_choices(run)
    modes = (
        Mode(system, staleness, dispatch, order, sync)
        for system in choices.systems
        for staleness in _bounds(run, system)
        for dispatch in choices.dispatch
        for order in choices.order
        for sync in choices.sync_modes
    )
    return [mode for mode in modes if mode.system != "colocated" or _is_colocatable(run, mode)]


def _bounds(run: Run, system: SystemName) -> list[float | int | None]:
    """Return the bounds of staleness that a system may have, the run's where it has one; None is the system's own."""
    generates_ahead = SYSTEMS[system].max_staleness > 0
    is_own = generates_ahead or system == run.policies.system
    own = run.policies.max_staleness if is_own else None
    if run.plan.max_staleness is None or not generates_ahead:
        return [own]
    return [bound for bound in run.plan.max_staleness if bound > 0] or [own]


def _usual_dispatch(run: Run) -> list[DispatchName | None]:
    lengths = run.workload.lengths
    own = run.policies.dispatch
    if lengths is None or lengths.ranker == "none":
        return [own]
    named = (own or DEFAULT_DISPATCH, *USUAL_DISPATCH)
    return list(dict.fromkeys(named))


def _usual_order(run: Run) -> list[OrderName | None]:
    lengths, own = run.workload.lengths, run.policies.order
    if lengths is None or lengths.ranker == "none":
        return [own]
    return list(dict.fromkeys((own or "fifo", "longest-first")))


def _usual_sync(run: Run) -> list[SyncMode]:
    own = run.sync.mode
    is_tight = (
        run.model.dtype != "float32"
        and run.rollout.dtype not in NARROW
        and run.sync.backend != "nccl-reshard"
    )
    return ["full", "delta"] if own == "full" and is_tight else [own]


def _is_colocatable(run: Run, mode: Mode) -> bool:
    sync = mode.apply(run).sync
    return sync.mode == "full" and sync.backend == SyncConfig().backend


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
    framework = framework_of(run.framework.name)
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
        dispatch=[*(framework.dispatch or DISPATCH.own)],
        order=[*(framework.order or get_args(OrderName))],
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
