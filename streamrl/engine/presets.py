"""Named sets of policies: how generation, training and weight sync take turns.

system          a batch is trained     prompts of step s may start   weights reach the replicas
colocated       once it is whole       when s - 1 is loaded          while all GPUs turn to generation
disaggregated   once it is whole       when s - 1 is loaded          while both sides wait
stream-sync     as rollouts arrive     when s - 1 is loaded          while generation waits
one-step-async  once it is whole       one batch ahead, whole        while both sides wait
stream-async    as rollouts arrive     one step ahead                overlapped; replicas drain
fully-async     as rollouts arrive     max_staleness steps ahead     overlapped, in flight

Of each, `sync_every` makes the versions that replicas load fewer: see `streamrl.engine.window`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import assert_never

from streamrl.engine.window import AdmissionWindow
from streamrl.runfile.config import Run
from streamrl.runfile.group_counts import num_extra, whole_groups
from streamrl.runfile.policies_config import (
    ConsumptionName,
    DispatchName,
    OrderName,
    OverStalenessName,
    PoliciesConfig,
    StreamingName,
    SystemName,
    WeightSyncName,
)


@dataclass(frozen=True, kw_only=True)
class System:
    """One choice for each policy."""

    max_staleness: float | int = 0
    sync_every: int = 1
    waits_for_whole_batches: bool = False
    dispatch: DispatchName = "least-loaded"
    order: OrderName = "fifo"
    streaming: StreamingName = "stream"
    consumption: ConsumptionName = "strict-fifo"
    over_staleness: OverStalenessName = "wait"
    weight_sync: WeightSyncName = "drain-then-load"

    @property
    def staleness_bound(self) -> int:
        """Most versions that a rollout may be behind the one that it is trained from: see `streamrl.engine.window`."""
        return ceil(self.max_staleness) + self.sync_every - 1

    @property
    def keeps_bound(self) -> bool:
        """Whether nothing is trained on past the bound: groups are taken as they were drawn, or dropped in time."""
        return self.consumption == "strict-fifo" or self.over_staleness == "drop"

    @property
    def halts_for_sync(self) -> bool:
        """Whether both sides wait while weights travel."""
        match self.weight_sync:
            case "barrier":
                return True
            case "drain-then-load" | "load-in-flight" | "abort-and-resume" | "between-batches":
                return False
            case _:
                assert_never(self.weight_sync)


SYSTEMS: dict[SystemName, System] = {
    "colocated": System(streaming="whole-batch", weight_sync="barrier"),
    "disaggregated": System(streaming="whole-batch", weight_sync="barrier"),
    "stream-sync": System(),
    "one-step-async": System(
        max_staleness=1,
        waits_for_whole_batches=True,
        streaming="whole-batch",
        weight_sync="barrier",
    ),
    "stream-async": System(max_staleness=1),
    "fully-async": System(max_staleness=2, weight_sync="load-in-flight"),
}


def choose_system(policies: PoliciesConfig) -> System:
    """Return the preset that `policies` names, with what it replaces by name."""
    changes = {
        key: getattr(policies, key)
        for key in (
            "max_staleness",
            "sync_every",
            "waits_for_whole_batches",
            "dispatch",
            "order",
            "streaming",
            "consumption",
            "over_staleness",
            "weight_sync",
        )
        if getattr(policies, key) is not None
    }
    return replace(SYSTEMS[policies.system], **changes)


def window_of(run: Run) -> AdmissionWindow:
    """Return what the run lets start ahead of training."""
    system, prompts = choose_system(run.policies), run.algorithm.prompts_per_step
    return AdmissionWindow(
        prompts, whole_groups(system.max_staleness, prompts), system.sync_every, num_extra(run)
    )
