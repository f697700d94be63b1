"""The result of the planner: the chosen plan, its cost, alternatives and sensitivities, written as plan.json."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.record.uncertainty import Uncertainty
from streamrl.record.whole_run import WholeRun
from streamrl.runfile.plan_config import ObjectiveName
from streamrl.runfile.policies_config import SystemName
from streamrl.runfile.simulation_config import FrameworkName

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
"""What the field calls the degrees."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan was judged by."""

    name: ObjectiveName
    value: float
    """As simulated on the run's own seed; what-ifs start from it."""
    median: float
    """Of all seeds that were simulated, by which plans are compared."""
    unit: str


class PlannedSide(msgspec.Struct, frozen=True, kw_only=True):
    """What one side rents and how it splits a model."""

    pool: str
    gpu: str
    num_gpus: int
    degrees: dict[str, int]
    """Keys of the run file's section, such as tensor_parallel."""
    beside: PlannedSide | None = None
    """Replicas of another kind that generate too."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run, and what simulations say of it."""

    rollout: PlannedSide
    trainer: PlannedSide
    settings: dict[str, str | int | float | bool]
    """Every key of the run file that is chosen: what `--set` would be given."""
    dollars_per_hour: float
    step_time: float
    """Mean seconds of a step in the steady state, on the run's own seed: what `simulate` gives."""
    step_time_interval: tuple[float, float] | None = None
    """Its 95 % interval; None where too few steps were simulated."""
    median_step_time: float
    """Median seconds of a step."""
    steps: int = 0
    """Steps that were simulated."""
    note: str = ""
    """What keeps its figures from being as exactly known as was asked for."""
    cost_per_step: float
    """Dollars of a mean step."""
    cost_per_million_tokens: float
    mean_staleness: float = 0.0
    """Versions that a rollout is behind when it is trained on, on average."""
    complexity: int = 0
    """What there is to set up: degrees above one, a second pool, steps that generation is ahead, and the like."""
    least: float
    """Of the objective: the least that the 95 % interval of the step time leaves open, over all seeds."""
    most: float
    num_seeds: int
    estimate: float
    """Seconds of a step by closed forms, before any simulation."""

    @property
    def text(self) -> str:
        """Return it in a line."""
        return plan_text(self.rollout, self.trainer, self.settings)


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of the chosen plan waits for."""

    stage: str
    """generation, training or sync."""
    resource: str
    seconds: dict[str, float]
    """Of each stage alone, and of a simulated step."""
    text: str


class RunnerUp(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was simulated and not chosen, on the same prompts.

    Plans for comparison are simulated for as many steps as the chosen one, and have their own
    figures. The figures of a finalist are those of the chosen plan, scaled by their ratio over two
    dozen steps.
    """

    choice: Choice
    value: float
    behind: float
    """Share by which its objective is above the chosen plan's."""
    behind_interval: tuple[float, float] | None = None
    """Its 95 % interval, by the steps that both have; None where too few tell, or in a plan of an earlier version."""
    is_beyond_chance: bool | None = None
    """Whether that is more than its 95 % interval, on the same prompts and lengths; None where too few steps tell."""


class ComparedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that a choice is always seen beside."""

    what: str
    """cheapest, best synchronous, best colocated, fastest, or faster for plans between the chosen and the fastest."""
    runner: RunnerUp | None
    """That plan, which may be the chosen one; None where the offer or `[plan]` has none, or no time was left for it."""
    not_simulated: str = ""
    """What that plan is, where no time was left to simulate it for as long as the chosen one."""


class PartialNodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that is notably better, and not looked for among the others as it takes parts of a node."""

    choice: str
    """What is run, in a line."""
    settings: dict[str, str | int | float | bool]
    """Every key of the run file that it sets."""
    gain: float
    """Share by which its objective is below the chosen plan's, on the same prompts."""


class OverMemoryLimit(PartialNodePlan, frozen=True, kw_only=True):
    """A plan that is notably better, and not chosen as its trainer leaves too little of a GPU's memory free."""

    memory: float
    """Share of a GPU that its trainer takes."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What would be chosen if the world were another."""

    what: str
    """Such as "lengths +20 %"."""
    value: float
    """The objective of the chosen plan then; of the other where the chosen one does not fit any more."""
    still_fits: bool
    choice: str
    """What would be chosen; the same text where that stays."""
    is_other: bool
    gain: float
    """Share of the objective that the other choice saves then, as simulated; 0 where nothing changes."""
    is_used: bool = True
    """Whether the chosen plan, or the other, uses what changes: a pool that it rents, a link that it crosses."""


class PlannedFramework(msgspec.Struct, frozen=True, kw_only=True):
    """Whose training was planned, where the run file names a framework."""

    name: FrameworkName
    facts: list[str]
    """The version that was read, the keys that it fills in, and the seconds that it takes of its own, with sources."""
    left_out: list[str]
    """What was not looked at, as it has none of it."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `streamrl plan` found out."""

    whole_run: WholeRun | None = None
    """What all training steps of the chosen plan take; None in a plan of an earlier version."""
    allocation: Choice
    objective: Figure
    candidates: int
    """Plans that fit: all were estimated."""
    systems: list[SystemName] = []
    """Systems that were searched."""
    whole_nodes: list[str] = []
    """Pools of which each side was given whole nodes alone."""
    simulated: int
    """Plans that were simulated."""
    open_gap: float | None = None
    """Share by which a plan may be better that was not simulated, as `time_limit` came first; None where the search found
    that none is by more than its margin."""
    time_limit: float = 0.0
    """Seconds after which nothing more is simulated."""
    steps_in_time: int | None = None
    """Steps of the chosen plan that `time_limit` left time for, where its interval had not come by then."""
    why: str = ""
    """Why this plan and no other that costs about as much."""
    beside: list[ComparedPlan] = []
    """The cheapest plan where another is chosen, the best synchronous, the best colocated and the fastest plan."""
    parts: PartialNodePlan | None = None
    """A better plan on parts of a node; None where there is none that is notably better, no time was left to look, or `whole_nodes` is
    empty."""
    tighter: OverMemoryLimit | None = None
    """A better plan with less room; None where there is none that is notably better, or no time was left to look."""
    staleness_cost: float = 0.0
    staleness_model: str = ""
    """The line that it is the slope of, where a study says it."""
    """Per cent more steps that were charged for each version of lag."""
    ruled_out: int
    """Plans whose bound alone is above what the chosen one was simulated to take."""
    seconds: float
    """Of planning."""
    infeasible: dict[str, int]
    """Sides, or pairs of sides, that were cut, by reason."""
    binding: Binding
    lower_bound: float
    """The least objective that the bound of any plan allows."""
    gap: float
    """Share by which the chosen plan is above it."""
    own_bound: float
    """The objective that the chosen plan's own bound allows."""
    runners_up: list[RunnerUp]
    pareto: list[Choice]
    """Plans that none beats in both seconds and dollars of a step; empty for other objectives."""
    sensitivity: list[Change]
    tiers: dict[str, float]
    """Share of the seconds of the chosen plan, those that wait for weights counted, by where they come from."""
    uncertainty: Uncertainty | None = None
    """How far its simulated seconds may be off."""
    framework: PlannedFramework | None = None
    drafts: str = ""
    """What was taken of drafted tokens, and from where; nothing where none were chosen among."""
    steps: int
    """Steps by which a search compares plans; a finalist has as many as its interval needs."""


def write_plan(plan: Plan, directory: Path) -> None:
    """Write plan.json."""
    data = msgspec.json.format(msgspec.json.encode(plan), indent=2)
    (directory / PLAN_JSON).write_bytes(data + b"\n")


def read_plan(path: Path) -> Plan:
    """Read what `write_plan` wrote.

    Raises:
        ValueError: the file is missing or no plan.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: not a plan: {error}") from None


def plan_text(
    rollout: PlannedSide, trainer: PlannedSide, settings: dict[str, str | int | float | bool]
) -> str:
    """Return a plan in a line: who generates, who trains, in which mode."""
    gpus = f"{_side_text(rollout)} generate, {_side_text(trainer)} train"
    if settings["policies.system"] == "colocated":
        gpus = f"{_side_text(rollout)} generate and train ({_degrees_text(trainer)})"
    mode = [str(settings["policies.system"])]
    if dispatch := settings.get("policies.dispatch"):
        mode.append(str(dispatch))
    if drafted := settings.get("rollout.speculative.tokens"):
        mode.append(f"{drafted} drafted")
    if settings["sync.mode"] != "full":
        mode.append(f"{settings['sync.mode']} sync")
    return f"{gpus}; {', '.join(mode)}"


def _side_text(side: PlannedSide) -> str:
    others = "" if side.beside is None else f" and {_side_text(side.beside)}"
    return f"{side.num_gpus} {side.pool} ({_degrees_text(side)}){others}"


def _degrees_text(side: PlannedSide) -> str:
    parts = [f"{side.degrees['replicas']} x"] if "replicas" in side.degrees else []
    for key, name in SHORT.items():
        value = side.degrees.get(key, 1)
        if value > 1 or (key == "tensor_parallel" and parts):
            parts.append(f"{name}{value}")
    if side.degrees.get("zero") == 3:
        parts.append("ZeRO 3")
    if side.degrees.get("offload"):
        parts.append("offload")
    return " ".join(parts) or "one GPU"
