"""Presets of policies by system name, and how far generation may run ahead of training (the admission window).

The admission window decides which groups may start ahead of training, and under which version. It
bounds staleness.

Groups have places in the order of the run, from 0. With P prompts a step, generation S steps ahead
(A = floor(P S) groups), and a push of every k-th version:

    step of place n               n // P + 1, which trains from version n // P
    oldest version of place n     k max(0, floor((n - A) / (P k)))
    places that may start at v    those before P (v - v mod k + k) + A, whose oldest version is at most v

A group that is trained in its place is less than S + k versions behind, so at most ceil(S) + k - 1.
With k = 1 and a whole S this is S: the bound of AReaL (eta in arXiv 2505.24298), and of (1 +
staleness_threshold) batches per push in verl.

A preset is a named set of policies. It decides how generation, training and weight sync take turns:

| system         | a batch is trained   | prompts of step s may start | weights reach the replicas      |
|----------------|----------------------|-----------------------------|---------------------------------|
| colocated      | when complete        | when s - 1 is loaded        | while all GPUs switch           |
| disaggregated  | when complete        | when s - 1 is loaded        | while both sides wait           |
| stream-sync    | as rollouts arrive   | when s - 1 is loaded        | while generation waits          |
| one-step-async | when complete        | one whole batch ahead       | while both sides wait           |
| stream-async   | as rollouts arrive   | one step ahead              | overlapped; replicas drain      |
| fully-async    | as rollouts arrive   | max_staleness steps ahead   | overlapped, in flight           |

With `sync_every` = k, replicas load only every k-th version.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import assert_never

from streamrl.runfile.config import num_extra, whole_groups
from streamrl.runfile.dispatch_choice import DEFAULT_DISPATCH, DispatchName
from streamrl.runfile.policies_config import (
    ConsumptionName,
    OrderName,
    OverStalenessName,
    PoliciesConfig,
    StreamingName,
    SystemName,
    WeightSyncName,
)


@dataclass(frozen=True, slots=True)
class AdmissionWindow:
    """How far generation may run ahead of training; formulas are in the module docstring."""

    prompts_per_step: int
    num_ahead: int
    """Groups that may start before the version that their step would otherwise need."""
    sync_every: int = 1
    num_extra: int = 0
    """Extra groups drawn for a step (oversampling)."""

    def num_allowed(self, version: int, num_steps: int) -> int:
        """Return the number of places that may be drawn at `version` of a run of `num_steps` steps, without extra groups."""
        pushed = version - version % self.sync_every
        allowed = (pushed + self.sync_every) * self.prompts_per_step + self.num_ahead
        last = num_steps * self.prompts_per_step
        return allowed if allowed < last else last

    def oldest(self, place: int) -> int:
        """Return the oldest version under which the group at a place may start."""
        return self.sync_every * self._cycle(place)

    def step(self, place: int) -> int:
        """Return the step of the group at a place."""
        return place // self.prompts_per_step + 1

    def next_border(self, place: int) -> int:
        """Return the next place with another step or another oldest version."""
        cycle = self.prompts_per_step * self.sync_every
        new_version = self.num_ahead + cycle * (self._cycle(place) + 1)
        return min(self.step(place) * self.prompts_per_step, new_version)

    def _cycle(self, place: int) -> int:
        """Return the number of pushes that the group at a place waits for."""
        return max(0, place - self.num_ahead) // (self.prompts_per_step * self.sync_every)


@dataclass(frozen=True, kw_only=True)
class System:
    """One choice for each policy."""

    max_staleness: float | int = 0
    sync_every: int = 1
    waits_for_whole_batches: bool = False
    dispatch: DispatchName = DEFAULT_DISPATCH
    order: OrderName = "fifo"
    streaming: StreamingName = "stream"
    consumption: ConsumptionName = "strict-fifo"
    over_staleness: OverStalenessName = "wait"
    weight_sync: WeightSyncName = "drain-then-load"

    @property
    def staleness_bound(self) -> int:
        """Maximum versions that a rollout may be behind the version that trains on it."""
        return ceil(self.max_staleness) + self.sync_every - 1

    @property
    def keeps_bound(self) -> bool:
        """Whether no rollout is trained on past the bound: groups are taken in draw order, or dropped in time."""
        return self.consumption == "strict-fifo" or self.over_staleness == "drop"

    @property
    def halts_for_sync(self) -> bool:
        """Whether both sides wait during a weight sync."""
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
    """Return the preset that `policies` names, with the policies that it replaces."""
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


def window_of(policies: PoliciesConfig, prompts_per_step: int) -> AdmissionWindow:
    """Return the admission window of a run."""
    system = choose_system(policies)
    return AdmissionWindow(
        prompts_per_step,
        whole_groups(system.max_staleness, prompts_per_step),
        system.sync_every,
        num_extra(policies.oversampling, prompts_per_step),
    )
