"""The section `[plan]` of a run file: what `streamrl plan` chooses among, and by what.

The offer is `[cluster]`: each pool with its price, and as many nodes as may be rented of it. A key of this
section that is absent leaves open whatever is sensible for the model and the offer.
"""

from __future__ import annotations

from typing import Literal

from streamrl.runfile.dispatch_choice import DispatchName
from streamrl.runfile.policies_config import OrderName, SyncMode, SystemName
from streamrl.runfile.roles_config import Recompute
from streamrl.runfile.section import Section
from streamrl.runfile.simulation_config import FrameworkName
from streamrl.runfile.units import Duration, quantity_text

ObjectiveName = Literal["cost-per-million-tokens", "cost-per-step", "step-time", "pareto"]


TargetName = Literal["execute", "verl", "nemo-rl", "slime", "openrlhf", "trl"]
"""What can run a plan: `streamrl execute`, or a framework."""

COSTS: tuple[ObjectiveName, ...] = ("cost-per-million-tokens", "cost-per-step")
"""Objectives in dollars."""


class PlanConfig(Section, frozen=True, kw_only=True):
    """The search space and objective of `streamrl plan`."""

    objective: ObjectiveName = "cost-per-million-tokens"
    """What to minimise, on average over the steady state: dollars per million trained tokens,
    dollars per step, or seconds per step. pareto: report all plans that no other beats in both
    seconds and dollars of a step, and choose the smallest product.
    """
    tolerance: float = 0.1
    """Share by which the chosen plan may cost more than the cheapest where it is faster: the fastest
    of those plans is chosen. With a deadline or a budget, both are plans that keep it. 0 chooses the
    cheapest. Unused with `value_of_hour`, and where `objective` is not a cost.
    """
    value_of_hour: float = 0.0
    """Dollars that an hour of waiting for the run is worth to you. They are added to the cost of
    each plan when plans are compared.
    """
    budget_per_hour: float | None = None
    """Maximum dollars per hour of all GPUs of a plan."""
    budget_per_step: float | None = None
    """Maximum mean dollars of a step."""
    budget_per_day: float | None = None
    """Maximum dollars per day, for all GPUs and link traffic."""
    budget: float | None = None
    """Maximum dollars of the whole run (all `algorithm.steps`)."""
    deadline: Duration | None = None
    """Maximum time of the whole run, such as "3 d"."""
    target: TargetName | None = None
    """What is to run the plan: `streamrl execute`, or a framework. Only plans that it can run are
    searched. It also sets `framework.name` where that is absent: its own name, or streamrl for
    execute. Where this key is absent, plans that `framework.name` can run are searched; without
    both keys, plans that any target can run.
    """
    rollout_pools: list[str] | None = None
    """Pools that may generate; all where absent."""
    trainer_pools: list[str] | None = None
    """Pools that may train; all where absent."""
    rollout_gpus: list[int] | None = None
    """Numbers of GPUs that may generate; every multiple of `unit` where absent."""
    trainer_gpus: list[int] | None = None
    """Numbers of GPUs that may train; every multiple of `unit` where absent."""
    reward_pools: list[str] | None = None
    """Pools that may run the reward model; `verifier.pool` where absent. Unused without a pool."""
    reward_gpus: list[int] | None = None
    """Numbers of GPUs that may run the reward model; a few multiples of `unit` where absent, each at
    least twice the one before.
    """
    unit: int | None = None
    """GPUs by which the size of a side changes. Where absent, a node; in a pool of one node, one
    GPU.
    """
    rollout_tensor_parallel: list[int] | None = None
    """Powers of two that divide a node where absent."""
    rollout_pipeline_parallel: list[int] | None = None
    """1 and the run's own where absent, and powers of two where no replica fits an NVLink domain."""
    rollout_data_parallel: list[int] | None = None
    """Attention ranks of a mixture's replica, tried in addition to replicas without; the run's own
    where absent.
    """
    speculative: list[int] | None = None
    """Tokens that replicas draft per decode step; 0: none. Every drafted token has the acceptance
    of `rollout.speculative.acceptance`. The run's own where absent.
    """
    trainer_tensor_parallel: list[int] | None = None
    """Powers of two that divide a node where absent."""
    mixes_replicas: bool = True
    """Whether some replicas may use GPUs of a second pool, or other degrees of parallelism, where
    that is better.
    """
    pipeline_parallel: list[int] | None = None
    """Powers of two where absent."""
    expert_parallel: list[int] | None = None
    """Of the trainer; 1 and its own where absent, for a mixture of experts powers of two."""
    expert_tensor_parallel: list[int] | None = None
    """Of the trainer of a mixture: ranks that share each expert; the run's own where absent."""
    context_parallel: list[int] | None = None
    """Of the trainer; 1 and its own where absent, and powers of two where rollouts are of 32K tokens and more."""
    micro_batch: list[int] | None = None
    """1, 2, 4 and 8 where absent."""
    zero: list[Literal[0, 1, 2, 3]] | None = None
    """Where absent, all stages of what may run the plan; 3 only without pipeline stages."""
    recompute: list[Recompute] | None = None
    """What a backward pass may make again: none, selective and full where absent. The least that fits is taken."""
    max_running: list[int] | None = None
    """The run's own where absent, and up to 1,024 where more wait for a replica and its memory holds them."""
    systems: list[SystemName] | None = None
    """The run's own, colocated, stream-sync, one-step-async and stream-async where absent."""
    max_staleness: list[int] | None = None
    """Bounds for systems that generate ahead; that of the run for all of them, or each one's own, where absent."""
    dispatch: list[DispatchName] | None = None
    """The run's own where absent; where a ranker is named least-loaded and skewness-aware too."""
    order: list[OrderName] | None = None
    """The run's own where absent; where a ranker is named longest-first too."""
    sandboxes: list[int] | None = None
    """Numbers of sandboxes of episodes with an environment. Where absent, a quarter of
    `environment.sandboxes` and up to all of them; without that key, up to one for each episode that
    may be in flight.
    """
    max_episodes: list[int] | None = None
    """Limits on the episodes in flight; the run's own where absent."""
    sync_modes: list[SyncMode] | None = None
    """The run's own where absent, and delta beside full: both bring replicas the same weights."""
    cut_off_share: float = 0.1
    """Maximum share of the tokens of episodes that a plan may lose, because they reach
    `environment.episode_time_limit`. A plan that loses more is not chosen.
    """
    staleness_cost: float = 0.0
    """Per cent more steps that a training needs for each version of mean staleness. It depends on
    your task. 0 assumes that a stale rollout teaches as much as a fresh one.
    """
    staleness_study: str | None = None
    """Your own study of staleness, which replaces `staleness_cost`: a JSON file as
    `examples/staleness.py` writes it. The planner fits a line through its runs with
    `algorithm.correction`.
    """
    time_limit: Duration = Duration(300.0)
    """Time after which no further plan is simulated. The plan then says how much better another one
    might be. The chosen plan is simulated for at most half as long, but for at least 20 steps.
    If its interval is still too wide, the plan says so.
    """
    finalists: int = 6
    """Plans that are simulated for longer. The best of them is chosen, and simulated until it
    reaches the interval of `[simulate]`.
    """
    seeds: int = 1
    """Seeds of a finalist's simulations, from the run's own on; the objective is their median."""

    @property
    def takes_faster(self) -> bool:
        """Whether a plan that is faster is chosen for a little more than the cheapest costs."""
        return self.objective in COSTS and self.tolerance > 0 and not self.value_of_hour


LIMITS = {
    "deadline": "the deadline of {}",
    "budget": "the budget of {} for the whole run",
    "budget_per_day": "the budget of {} a day",
    "budget_per_hour": "the budget of {} an hour",
    "budget_per_step": "the budget of {} a step",
}
"""The keys of limits, and how a reader who does not know the keys calls them."""


def limits_by_key(plan: PlanConfig) -> dict[str, float]:
    """Return the limits that are set: dollars, and the seconds of the deadline."""
    return {key: float(most) for key in LIMITS if (most := getattr(plan, key)) is not None}


def limit_words(key: str, most: float) -> str:
    """Return a limit in words, with its key: "the deadline of 3 days (plan.deadline)"."""
    shown = quantity_text(Duration(most)) if key == "deadline" else f"${most:,.10g}"
    return f"{LIMITS[key].format(shown)} (plan.{key})"


def framework_of_target(target: TargetName) -> FrameworkName:
    """Return the framework whose costs, systems and layouts are those of what is to run a plan."""
    return "streamrl" if target == "execute" else target
