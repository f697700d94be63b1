"""The result of the planner: the chosen plan, its cost, alternatives and sensitivities, written as plan.json."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from streamrl import __version__
from streamrl.record.band import Band, ModelError, ends_of
from streamrl.record.uncertainty import Uncertainty
from streamrl.record.whole_run import WholeRun
from streamrl.runfile.formatting import format_step_time, listing, long_dollars, long_time
from streamrl.runfile.notebook import frame_of, html_table
from streamrl.runfile.plan_config import ObjectiveName
from streamrl.runfile.policies_config import SystemName
from streamrl.runfile.reading import decode_json
from streamrl.runfile.recorded_numbers import (
    Count,
    Interval,
    NotNegative,
    Number,
    Ordinal,
    Positive,
    Setting,
)
from streamrl.runfile.result_files import check_results, write_results
from streamrl.runfile.simulation_config import FrameworkName
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.targets.verdicts import Verdict

if TYPE_CHECKING:
    from pandas import DataFrame

PLAN_JSON = "plan.json"
PLAN_TOML = "plan.toml"
SHORT = {
    "data_parallel": "DP",
    "tensor_parallel": "TP",
    "pipeline_parallel": "PP",
    "expert_parallel": "EP",
    "expert_tensor_parallel": "ETP",
    "context_parallel": "CP",
}
"""Usual abbreviations of the degrees."""
OptionLabel: TypeAlias = Literal[
    "recommended",
    "cheapest",
    "faster",
    "fastest",
    "best synchronous",
    "best colocated",
    "another layout",
    "your own file",
    "on parts of a node",
    "nothing runs this today",
]
"""Why a plan is a row of the answer. "faster" is between the recommended and the fastest plan, or costs
just too much for `plan.tolerance`. "another layout" fills a table that would have fewer than three rows.
"nothing runs this today" is a better plan that no target can run.
"""
RUN_BY_NOTHING: OptionLabel = "nothing runs this today"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """The objective of the chosen plan."""

    name: ObjectiveName
    value: Number
    """Simulated with the run's own seed. What-if results are relative to it."""
    median: Number
    """Median over all simulated seeds. Plans are compared by it."""
    band: Band | None = None
    """Range in which `value` may truly be, with sampling error and model error."""
    unit: str


class PlannedSide(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs that one side rents, and its parallelism."""

    pool: str
    gpu: str
    num_gpus: Count
    degrees: dict[str, Count]
    """Keys and values of the run file's section, such as tensor_parallel."""
    beside: PlannedSide | None = None
    """Replicas of another kind that also generate."""

    @property
    def kinds(self) -> list[PlannedSide]:
        """Return this side and those beside it, one for each kind of replicas."""
        return [self, *(self.beside.kinds if self.beside is not None else [])]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One plan and its simulated figures."""

    rollout: PlannedSide
    trainer: PlannedSide
    verifier: PlannedSide | None = None
    """The GPUs that compute rewards, if there are any."""
    settings: dict[str, Setting]
    """All keys of the run file that the plan sets, as for `--set`."""
    gpus_by_pool: dict[str, Count] = {}
    """GPUs that the plan uses, by pool: those of all sides. Colocated sides share theirs."""
    dollars_per_hour: NotNegative
    """Of all GPUs."""
    verifier_dollars_per_hour: NotNegative = 0.0
    """Of the GPUs that compute rewards, at the price of their pool."""
    step_time: Positive
    """Mean seconds of a step in the steady state, with the run's own seed. `simulate` reports the
    same value.
    """
    step_time_interval: Interval | None = None
    """95 % interval of `step_time`; None if too few steps were simulated."""
    median_step_time: Positive
    """Median seconds of a step."""
    steps: Count = 0
    """Steps that were simulated."""
    note: str = ""
    """Why its figures are less exact than requested; empty if they are not."""
    cost_per_step: NotNegative
    """Dollars of a mean step."""
    cost_per_million_tokens: NotNegative
    mean_staleness: NotNegative = 0.0
    """Mean number of versions between generating and training on a rollout."""
    complexity: Count = 0
    """Number of features to set up, such as degrees above one, a second pool and each step of
    staleness.
    """
    model_error: ModelError | None = None
    """Range of true to simulated seconds. For a plan that was not measured in full it is an estimate. None if an
    earlier version wrote the plan, as for all bands.
    """
    step_time_band: Band | None = None
    """Range in which `step_time` may truly be: sampling error over all seeds, and model error."""
    cost_per_step_band: Band | None = None
    cost_per_million_tokens_band: Band | None = None
    least: Number
    """Lowest objective within the 95 % interval of the step time, over all seeds."""
    most: Number
    num_seeds: Ordinal
    estimate: NotNegative
    """Seconds of a step from closed forms, before any simulation."""

    def __post_init__(self) -> None:
        if not self.gpus_by_pool:
            totals = {pool: sum(tasks.values()) for pool, tasks in self.tasks_by_pool.items()}
            msgspec.structs.force_setattr(self, "gpus_by_pool", totals)

    @property
    def text(self) -> str:
        """Return the plan in one line."""
        return plan_text(self.rollout, self.trainer, self.settings, self.verifier)

    @property
    def sides(self) -> list[PlannedSide]:
        """Return the sides: each kind of replicas, the trainer, and the GPUs that compute rewards."""
        return [*self.rollout.kinds, self.trainer, *([self.verifier] if self.verifier else [])]

    @property
    def gpus(self) -> dict[str, str]:
        """Return the GPU of each pool that the plan uses."""
        return {side.pool: side.gpu for side in self.sides}

    @property
    def tasks_by_pool(self) -> dict[str, dict[str, int]]:
        """Return the GPUs of each pool by their task."""
        tasks = [("generate", kind) for kind in self.rollout.kinds] + [("train", self.trainer)]
        if self.settings["policies.system"] == "colocated":
            shared = max(self.rollout, self.trainer, key=lambda side: side.num_gpus)
            tasks = [("generate and train in turn", shared)]
        if self.verifier is not None:
            tasks.append(("compute rewards", self.verifier))
        found: dict[str, dict[str, int]] = {}
        for task, side in tasks:
            of_pool = found.setdefault(side.pool, {})
            of_pool[task] = of_pool.get(task, 0) + side.num_gpus
        return found


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """The stage and resource that limit the step time of the chosen plan."""

    stage: str
    """One of generation, training, sync and rewards."""
    resource: str
    seconds: dict[str, NotNegative]
    """Seconds of each stage alone, and of a simulated step."""
    text: str


Resource: TypeAlias = Literal["sandboxes", "replica", "tools", "training"]


class Crowding(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated effect of an episode in flight for each added sandbox, which slows the plan down."""

    episodes: Count
    """Episodes in flight."""
    step_time_ratio: NotNegative | None
    """Seconds of a step, divided by those of the plan; None if too many episodes reach their time limit."""
    recomputed: NotNegative
    """Share of the replicas' seconds in which they compute contexts again that the KV cache has lost."""
    recomputed_before: NotNegative
    """The same share in the plan."""


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated effect of more of one resource on a plan with episodes."""

    resource: Resource
    what: str
    """The change, such as "48 more sandboxes"."""
    units: NotNegative
    """Units that are added; 0 for a speed."""
    step_time_ratio: NotNegative
    """Seconds of a step after the change, divided by those before."""
    half_width: Number | None
    """Half the 95 % interval (sampling error) of the logarithm of the ratio; None if too few steps count."""
    cost_ratio: NotNegative
    """Dollars of a step after the change, divided by those before. It includes the price of the units."""
    gain: Number
    """Share of a step that is saved, divided by the relative change of the resource."""
    break_even: Number | None
    """Dollars an hour at which one unit leaves the cost of a step unchanged; None for a speed."""
    price: NotNegative = 0.0
    """Dollars an hour that one unit costs."""
    crowding: Crowding | None = None
    """What more episodes in flight would do, where the sandboxes are of use without them only."""


class RunnerUp(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was simulated on the same prompts but not chosen.

    Plans for comparison are simulated for as many steps as the chosen one, and have their own
    figures. A finalist was compared with the chosen plan over up to 16 steps. Its figures are those
    of the chosen plan, scaled by the ratio over these steps.
    """

    choice: Choice
    value: Number
    behind: Number
    """Share by which its objective is above the chosen plan's."""
    behind_interval: Interval | None = None
    """95 % interval of `behind`, from the steps that both plans have. None if these are too few, or
    if an earlier version wrote the plan.
    """
    is_beyond_chance: bool | None = None
    """Whether the difference is larger than its 95 % interval, on the same prompts and lengths.
    None if too few steps were simulated.
    """
    variants: list[RunnerUp] = []
    """Further plans on the same GPUs in the same system, the best first. They differ in degrees,
    dispatch, sync mode, or how the trainer fits its memory.
    """
    variant_of: Ordinal | None = None
    """Number of the option on the same GPUs in the same system; None if no option is."""


class PlanOption(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the answer: a plan to decide for, simulated for as many steps as the recommended one."""

    number: Ordinal
    """Its number in the table and in `--take`, from 1. The recommended plan has 1."""
    labels: list[OptionLabel]
    """The reasons why it is in the table."""
    text: str
    """The plan in one line: the GPUs that generate, the GPUs that train, and the mode."""
    choice: Choice
    whole_run: WholeRun
    """Time and cost of all training steps."""
    tiers: dict[str, NotNegative]
    """Share of its seconds by the source of their costs."""
    uncertainty: Uncertainty | None = None
    """Possible error of its simulated seconds."""
    trains_on: str
    """Age of its rollouts, such as "trains on rollouts 1 step old"."""
    cost_ratio: NotNegative | None
    """Dollars of the whole run, divided by those of the recommended plan; None if GPUs are free. Both ratios are over
    the steps that count in both simulations.
    """
    time_ratio: Positive
    """Wall time of the whole run, divided by that of the recommended plan."""
    ratio_half_width: NotNegative | None = None
    """Half the 95 % interval (sampling error) of both ratios, as a share. None if too few steps were
    simulated.
    """
    relation: str
    """Both ratios in words, such as "11.5 % dearer, 1.8 times as fast"; empty for the recommended
    plan.
    """
    is_offered: bool = True
    """Whether the search may choose it. A plan on parts of a node is not offered if pools are rented by
    the node. Neither are the layout of a run file that `[plan]` excludes, and a plan that no target can
    run although targets can run others.
    """
    note: str = ""
    """A limit of `[plan]` that it exceeds; empty if it keeps all."""
    carried_by: list[Verdict] = []
    """What can run it, and the first rule of each other target that it breaks."""


class LeftOutOption(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of plan that has no row, and the reason."""

    label: OptionLabel
    reason: str


class FirstPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan that the first answer recommended, and what became of it."""

    choice: str
    """The plan in one line."""
    estimated_dollars: NotNegative
    """Dollars of the whole run in the first answer."""
    estimated_wall_time: NotNegative
    """Seconds of the whole run in the first answer."""
    option: Ordinal | None = None
    """Number of the option that it is; None if it is none."""
    dollars: NotNegative | None = None
    wall_time: Positive | None = None
    """The same, simulated for as many steps as the recommended plan; None if no time was left."""
    relation: str = ""
    """Its dollars and time against those of the recommended plan, in words."""
    reason: str = ""
    """Why the rule of the plan did not choose it; empty if it did."""


class OverMemoryLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A clearly better plan that was not chosen, because its trainer leaves too little GPU memory free."""

    choice: str
    """The plan in one line."""
    settings: dict[str, Setting]
    """All keys of the run file that the plan sets."""
    gain: Number
    """Share by which its objective is below the chosen plan's, on the same prompts."""
    memory: NotNegative
    """Share of a GPU's memory that its trainer uses."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of one what-if on the choice."""

    what: str
    """Such as "lengths +20 %"."""
    value: Number
    """Objective of the chosen plan after the change, or of the other plan if the chosen one no
    longer fits.
    """
    still_fits: bool
    choice: str
    """The plan that would be chosen, in one line. It may be the chosen plan itself."""
    is_other: bool
    gain: Number
    """Share of the objective that the other plan saves after the change, as simulated; 0 if the
    choice stays. It is negative if the rule of the plan chooses a dearer plan that is faster.
    """
    option: Ordinal | None = None
    """Number of the plan in `options`; None if it is no option, or if an earlier version wrote the file."""
    relation: str = ""
    """If the rule of the plan chooses another option: its dollars and time after the change against
    those of the recommended plan.
    """
    reason: str = ""
    """The reason of the rule."""
    settings: dict[str, Setting] = {}
    """All keys of the run file that the other plan sets; empty if the choice stays."""
    is_used: bool = True
    """Whether the chosen or the other plan uses the changed thing, such as a pool that it rents or
    a link that it crosses.
    """
    is_estimate: bool = False
    """Whether `value` comes from closed forms, because no time was left to simulate it."""
    note: str = ""
    """Mean lengths and the share of outputs that are cut off, before and after a change of lengths."""
    breaks: list[str] = []
    """Keys of `[plan]` whose limits the chosen plan exceeds after the change."""
    time_ratio: Positive | None = None
    cost_ratio: NotNegative | None = None
    """Ratios of the time of a step and of the bill of the whole run after the change to those before,
    of the same plan as `value`; None if an earlier version wrote the file.
    """


class GpuShare(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of a pool that do the same thing."""

    pool: str
    num_gpus: Count
    tensor_parallel: Count = 1


class WhatIfPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One plan of the what-if grid."""

    choice: str
    """The plan in one line."""
    settings: dict[str, Setting]
    """All keys of the run file that the plan sets."""
    generate: list[GpuShare]
    """Replicas of each kind."""
    rewards: GpuShare | None = None
    """Replicas of the reward model, if GPUs run one."""
    rollout_gpus: Count
    trainer_gpus: Count
    paid: dict[str, NotNegative]
    """GPUs that are paid for, by pool."""
    mean_staleness: NotNegative
    other_dollars: NotNegative
    """Dollars of the whole run besides the rent of the GPUs, such as traffic between pools."""
    is_simulated: bool
    """Whether its hours without a change are from a simulation."""
    has_total: bool = False
    """Whether they are the total of a simulation as long as that of the chosen plan, as of each option."""
    hours: list[list[list[NotNegative | None]]]
    """Hours of the whole run by lengths, cap and links; None where the plan does not fit."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates of plans near the front for other lengths, caps and links.

    Prices, the value of an hour and a deadline need no grid: dollars are hours x GPUs x price.
    """

    lengths: list[Positive]
    """Factors on all output lengths, before the cap cuts them off."""
    caps: list[Count]
    """Values of rollout.max_tokens."""
    links: list[Positive]
    """Factors on the bandwidth of all links."""
    unchanged: tuple[Count, Count, Count]
    """Place of the run file's own lengths, cap and links."""
    mean_tokens: list[list[NotNegative]]
    """Mean output tokens of a rollout, by lengths and cap."""
    bandwidth: NotNegative | None
    """Bytes a second of the slowest link of the offer; None without links."""
    gpus: dict[str, str]
    """The GPU of each pool of the offer."""
    prices: dict[str, NotNegative]
    """Dollars an hour of a GPU, by pool."""
    objective: ObjectiveName
    tolerance: NotNegative
    value_of_hour: NotNegative
    deadline: NotNegative | None
    """Hours."""
    plans: list[WhatIfPlan]
    """The chosen plan comes first."""


class PlannedFramework(msgspec.Struct, frozen=True, kw_only=True):
    """The framework that the run file names."""

    name: FrameworkName
    facts: list[str]
    """The version that was read, the keys that it fills in, and the seconds that it adds, with
    sources.
    """
    left_out: list[str]
    """Choices that were not searched, because the framework does not support them."""


class PartialNode(msgspec.Struct, frozen=True, kw_only=True):
    """A rented node of which a plan uses some GPUs, although the run file says no `unit`."""

    pool: str
    num_gpus: Count
    """GPUs that the plan uses of the node, and pays for."""
    gpus_per_node: Count


class PlannedLending(msgspec.Struct, frozen=True, kw_only=True):
    """What the chosen plan gains by `[lending]`, or by `trainer.borrows`."""

    step_time: NotNegative = 0.0
    """Seconds of a step without it."""
    step_time_lent: NotNegative = 0.0
    """Seconds of a step with it."""
    is_taken: bool = False
    """Whether the plan's run file has it."""
    reason: str = ""
    """Why the plan cannot have it; empty if it can."""


class PlannedDisaggregation(msgspec.Struct, frozen=True, kw_only=True):
    """What the chosen plan gains if some of its replicas only prefill."""

    step_time: NotNegative = 0.0
    """Seconds of a step if all replicas prefill and decode."""
    step_time_apart: NotNegative = 0.0
    """Seconds of a step with prefill replicas."""
    num_prefill: Count = 0
    """Prefill replicas."""
    is_taken: bool = False
    """Whether the plan's run file has them."""
    reason: str = ""
    """Why the plan cannot have them; empty if it can."""


class SpotSavings(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run on spot machines, and on the same machines on demand without interruptions; means over seeds."""

    share: Number = 0.0
    """Dollars saved, as a share of those on demand."""
    interval: Interval = (0.0, 0.0)
    """95 % interval of that mean, over the seeds. It has sampling error alone."""
    dollars: NotNegative = 0.0
    dollars_on_demand: NotNegative = 0.0
    seconds: NotNegative = 0.0
    """Wall time."""
    seconds_on_demand: NotNegative = 0.0
    num_notices: NotNegative = 0.0
    """Expected notices to replicas in the whole run."""
    num_seeds: Count = 0
    reason: str = ""
    """Why the run on one of the two did not end; empty if both did."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The complete result of `streamrl plan`."""

    whole_run: WholeRun | None = None
    """Time and cost of all training steps of the chosen plan; None if an earlier version wrote the
    plan.
    """
    allocation: Choice
    objective: Figure
    candidates: Count
    """Plans that fit. All of them were estimated."""
    systems: list[SystemName] = []
    """Systems that were searched."""
    whole_nodes: list[str] = []
    """Pools of which plans could only rent whole nodes."""
    partial_nodes: list[PartialNode] = []
    """Nodes that the chosen plan rents in part."""
    lending: PlannedLending | None = None
    """What lending GPUs of the trainer changes; None if the run file has no `[lending]`."""
    borrowing: PlannedLending | None = None
    """What GPUs of replicas that train change; None if the run file has no `trainer.borrows`."""
    disaggregation: PlannedDisaggregation | None = None
    """What prefill replicas change; None if the run file has none."""
    spot: SpotSavings | None = None
    """What spot machines save; None if no used pool has an `on_demand_price`."""
    limits: dict[str, NotNegative] = {}
    """The limits of `[plan]`, by key: dollars, and the seconds of the deadline."""
    simulated: Count
    """Plans that were simulated."""
    open_gap: Number | None = None
    """Share by which a plan that was not simulated may be better, if `time_limit` ended the search.
    None if the search proved that no plan is better by more than its margin.
    """
    time_limit: NotNegative = 0.0
    """Seconds after which no further simulation starts."""
    steps_in_time: Count | None = None
    """Steps of the chosen plan that `time_limit` allowed, if its interval did not reach the target
    by then.
    """
    why: str = ""
    """Why this plan was chosen, and not another one of about the same cost."""
    at_worst: str = ""
    """The limits of `[plan]` that the chosen plan exceeds at the high end of its band; empty if it keeps all."""
    offer: str = ""
    """Digest of the run file that was planned, with its changes. A later `--take` needs the same one."""
    taken: Ordinal = 1
    """Number of the option whose run file is plan.toml."""
    run_file: str = ""
    """SHA-256 of plan.toml as it was written; empty if it was not written, or an earlier version wrote it."""
    version: str = ""
    """The version of streamrl that wrote the plan."""
    options: list[PlanOption] = []
    """Three to five plans that differ, the recommended one first and the others by rising cost. Your
    own file, a plan on parts of a node and one that nothing runs today are further rows. Empty if an
    earlier version wrote the plan.
    """
    just_dearer: Ordinal | None = None
    """Number of the option that costs just more than `plan.tolerance` allows and is at least 1.5 times
    as fast as the recommended one. None if there is none, or if an earlier version wrote the plan.
    """
    left_out: list[LeftOutOption] = []
    """Kinds of plan without a row of `options`."""
    tighter: OverMemoryLimit | None = None
    """A better plan that leaves less GPU memory free. None if no such plan is clearly better, or if
    no time was left.
    """
    staleness_cost: NotNegative = 0.0
    """Per cent more steps for each version of staleness, as charged by the objective."""
    staleness_model: str = ""
    """The fitted line with that slope, if a study of staleness is given."""
    ruled_out: Count
    """Plans whose lower bound alone is above the simulated objective of the chosen plan."""
    seconds: NotNegative
    """Seconds that planning took."""
    infeasible: dict[str, Count]
    """Number of sides, or pairs of sides, that each reason ruled out."""
    binding: Binding
    worths: list[Worth] = []
    """The effects of more sandboxes, one more replica, faster tools and faster training on the chosen
    plan. Empty without an environment.
    """
    lower_bound: Number
    """Lowest objective that the bound of any plan allows. It is at most the value of the chosen plan. Bounds are of
    the prompts of the search.
    """
    gap: Number
    """Share by which the chosen plan is above `lower_bound`."""
    own_bound: Number
    """Objective that the bound of the chosen plan allows."""
    runners_up: list[RunnerUp]
    """The best plans that are no options, at most five. Variants of a plan are members of one entry.
    """
    pareto: list[Choice]
    """Plans that no other beats in both time and dollars of the whole run; empty for other objectives.
    """
    sensitivity: list[Change]
    not_varied: dict[str, str] = {}
    """Prices and links whose change cannot change the choice or its objective, each with the reason.
    """
    stages: dict[str, NotNegative] = {}
    """Seconds of a mean step of the chosen plan in each stage. `execute` compares them with what it
    measures. Empty if an earlier version wrote the plan.
    """
    tiers: dict[str, NotNegative]
    """Share of the chosen plan's seconds by the source of its costs. It includes time spent waiting
    for weights.
    """
    uncertainty: Uncertainty | None = None
    """Possible error of its simulated seconds."""
    what_if: WhatIf | None = None
    """Estimates for other lengths, caps and links, which the report page explores. None if an earlier
    version wrote the plan.
    """
    framework: PlannedFramework | None = None
    carried_by: list[Verdict] = []
    """What can run the plan, and the first rule of each other target that it breaks. Empty if an earlier
    version wrote the plan.
    """
    first: FirstPlan | None = None
    """The plan of the first answer; None if the command printed none."""
    drafts: str = ""
    """Assumptions about speculative decoding and their source; empty if plans could not choose it.
    """
    steps: Count
    """Most steps by which the search compares plans. A finalist has as many as its interval needs.
    """

    @property
    def owned_pools(self) -> list[str]:
        """Return the pools that the plan uses and whose GPUs are the user's own."""
        paid = {} if self.whole_run is None else self.whole_run.pools
        used = self.allocation.gpus_by_pool
        return [pool for pool in used if pool in paid and paid[pool].is_owned]

    @property
    def rents_none(self) -> bool:
        """Return whether the plan uses only GPUs that the user owns."""
        return len(self.owned_pools) == len(self.allocation.gpus_by_pool)

    def __repr__(self) -> str:
        figures = [*(_whole_texts(self.whole_run)), f"step {_step_text(self.allocation)}"]
        return f"<Plan: {self.allocation.text}; {', '.join(figures)}>"

    def _repr_html_(self) -> str:
        """Return the options as a table for a notebook, with the rule of the recommendation."""
        rows = [
            [
                *(option.number, ", ".join(option.labels), option.text),
                *_whole_texts(option.whole_run),
                *(_step_text(option.choice), option.relation),
            ]
            for option in self.options
        ]
        left_out = [f"no row for {each.label}: {each.reason}" for each in self.left_out]
        error = self.allocation.model_error
        notes = [
            f"recommended as {self.why}",
            self.binding.text,
            *left_out,
            "" if error is None else error.note,
        ]
        head = ("", "option", "plan", "cost", "time", "step", "against 1")
        return html_table("Plan", rows, head, notes)

    def to_frame(self, what: PlanFrame = "options") -> DataFrame:
        """Return a data frame.

        Args:
            what: "options" has the rows of the answer. "runners-up" has further plans that were simulated. Both have
                a column for each key of the run file that a plan sets. "sensitivity" has the what-ifs.

        Raises:
            ValueError: there is no such frame.
        """
        rows = {
            "options": map(_option_row, self.options),
            "runners-up": map(_runner_row, self.runners_up),
            "sensitivity": map(msgspec.structs.asdict, self.sensitivity),
        }
        if what not in rows:
            raise ValueError(f"what must be one of {', '.join(map(repr, rows))}, got {what!r}")
        return frame_of(rows[what])


PlanFrame: TypeAlias = Literal["options", "runners-up", "sensitivity"]
FIGURES = (
    *("step_time", "cost_per_step", "cost_per_million_tokens"),
    *("dollars_per_hour", "mean_staleness"),
)
"""Figures of a plan in its row of a data frame."""


def _option_row(option: PlanOption) -> dict[str, object]:
    whole = option.whole_run
    hours = _band_columns("hours", whole.wall_time, whole.wall_time_band, SECONDS_PER_HOUR)
    return {
        "number": option.number,
        "labels": ", ".join(option.labels),
        "plan": option.text,
        **_band_columns("dollars", whole.dollars, whole.dollars_band),
        **hours,
        **_choice_columns(option.choice),
    }


def _runner_row(runner: RunnerUp) -> dict[str, object]:
    low, high = runner.behind_interval or (None, None)
    behind = {"behind": runner.behind, "behind_low": low, "behind_high": high}
    return {"plan": runner.choice.text, **behind, **_choice_columns(runner.choice)}


def _band_columns(
    name: str, value: float, band: Band | None, unit: float = 1.0
) -> dict[str, float | None]:
    low, high = (None, None) if band is None else (band.low / unit, band.high / unit)
    return {name: value / unit, f"{name}_low": low, f"{name}_high": high}


def _choice_columns(choice: Choice) -> dict[str, object]:
    return {**{name: getattr(choice, name) for name in FIGURES}, **choice.settings}


def _whole_texts(whole: WholeRun | None) -> tuple[str, ...]:
    """Return cost and time of a whole run with their bands."""
    if whole is None:
        return ()
    dollars = long_dollars(whole.dollars, band=ends_of(whole.dollars_band))
    return dollars, long_time(whole.wall_time, band=ends_of(whole.wall_time_band))


def _step_text(choice: Choice) -> str:
    return format_step_time(choice.step_time, None, ends_of(choice.step_time_band))


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_taken(directory: Path) -> PlanOption | None:
    """Return the option in the run file of a plan's directory, with its figures.

    The result is None if the run file was edited, another version planned it, or there is no plan.
    """
    if not (directory / PLAN_JSON).is_file():
        return None
    plan = read_plan(directory / PLAN_JSON)
    is_same = plan.run_file == digest_of_file(directory / PLAN_TOML)
    return plan.options[plan.taken - 1] if is_same and plan.version == __version__ else None


def write_plan(plan: Plan, directory: Path | str) -> None:
    """Write plan.json."""
    write_results(Path(directory), {PLAN_JSON: plan_data(plan)})


def plan_data(plan: Plan) -> bytes:
    """Return the bytes of plan.json."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n"


def read_plan(path: Path | str) -> Plan:
    """Read a plan that `write_plan` wrote.

    Raises:
        ValueError: the file is missing or is not a plan, or its directory mixes the results of two commands.
    """
    check_results(Path(path))
    try:
        plan = decode_json(path, Plan)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{path}: not a plan: {error}") from None
    if [option.number for option in plan.options] != [*range(1, 1 + len(plan.options))]:
        raise ValueError(f"{path}: not a plan: the numbers of its options must count from 1")
    named = [plan.taken, plan.just_dearer or 1, *(each.option or 1 for each in plan.sensitivity)]
    if max(named) > len(plan.options):
        raise ValueError(f"{path}: not a plan: it names option {max(named)} of {len(plan.options)}")
    return plan


def plan_text(
    rollout: PlannedSide,
    trainer: PlannedSide,
    settings: dict[str, Setting],
    verifier: PlannedSide | None = None,
) -> str:
    """Return a plan in one line: the GPUs that generate, train and compute rewards, and the mode."""
    gpus = f"{side_text(rollout)} generate, {side_text(trainer)} train"
    if settings["policies.system"] == "colocated":
        gpus = f"{side_text(rollout)} generate and train{in_brackets(trainer)}"
    if verifier is not None:
        gpus += f", {side_text(verifier)} compute rewards"
    mode = [str(settings["policies.system"])]
    if dispatch := settings.get("policies.dispatch"):
        mode.append(str(dispatch))
    if sandboxes := settings.get("environment.sandboxes"):
        mode.append(f"{sandboxes} sandboxes")
    if in_flight := settings.get("environment.max_episodes"):
        mode.append(f"{in_flight} episodes in flight")
    if drafted := settings.get("rollout.speculative.tokens"):
        mode.append(f"{drafted} drafted")
    if settings["sync.mode"] != "full":
        mode.append(f"{settings['sync.mode']} sync")
    return f"{gpus}; {', '.join(mode)}"


def side_text(side: PlannedSide) -> str:
    """Return the GPUs of a side and its degrees: "8 h800 (DP4 TP2)"."""
    return listing([f"{kind.num_gpus} {kind.pool}{in_brackets(kind)}" for kind in side.kinds])


def in_brackets(side: PlannedSide) -> str:
    """Return the degrees of a side in brackets: " (2 x TP4)"; "" for a trainer on one GPU that has none."""
    degrees = _degrees_text(side)
    return f" ({degrees})" if degrees else ""


def _degrees_text(side: PlannedSide) -> str:
    if "workers" in side.degrees:
        return f"{side.degrees['workers']} x TP{side.degrees['gpus_per_worker']}"
    parts = [f"{side.degrees['replicas']} x"] if "replicas" in side.degrees else []
    for key, name in SHORT.items():
        value = side.degrees.get(key, 1)
        if value > 1 or (key == "tensor_parallel" and parts):
            parts.append(f"{name}{value}")
    zero = side.degrees.get("zero", 1)
    if zero > 1 or (not zero and side.degrees.get("data_parallel", 1) > 1):
        parts.append(f"ZeRO {zero}")
    if side.degrees.get("offload"):
        parts.append("offload")
    if side.degrees.get("offload_to_nvme"):
        parts.append("to NVMe")
    return " ".join(parts)
