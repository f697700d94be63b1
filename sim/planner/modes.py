"""How a plan may run, whoever has which GPUs: system, staleness, dispatch, what a weight sync sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.engine.presets import SYSTEMS
from streamrl.runfile.config import Run
from streamrl.runfile.dtypes import NARROW
from streamrl.runfile.frameworks import keep_filled_in
from streamrl.runfile.policies_config import (
    DispatchName,
    OrderName,
    PoliciesConfig,
    SyncMode,
    SystemName,
)
from streamrl.runfile.sync_config import SyncConfig

USUAL_SYSTEMS: tuple[SystemName, ...] = (
    *("colocated", "stream-sync", "one-step-async", "stream-async"),
)
OWN_LAG = {
    key: getattr(PoliciesConfig(), key)
    for key in ("sync_every", "over_staleness", "oversampling", "left_over")
}
"""What a run file says of late groups for its own system; others, which take them in order, are tried without."""
USUAL_DISPATCH: tuple[DispatchName, ...] = ("least-loaded", "skewness-aware")


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
    named = (own or "least-loaded", *USUAL_DISPATCH)
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
