"""List the modes of a plan: system, staleness, dispatch, sync mode, rewards. A named framework limits them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple, TypeVar, get_args

from msgspec.structs import replace

from streamrl.engine.presets import SYSTEMS
from streamrl.hardware.profiles import known_engines
from streamrl.hardware.resolved import resolve
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.dispatch_choice import DEFAULT_DISPATCH, DISPATCH, DispatchName
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import OneOf, RunError, shown
from streamrl.runfile.frameworks import Framework, framework_of, keep_filled_in
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.policies_config import (
    OrderName,
    PoliciesConfig,
    SyncConfig,
    SyncMode,
    SystemName,
)
from streamrl.runfile.roles_config import NARROW, RolloutConfig
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.sim.planner.reward_replicas import RewardReplicas, find_reward_replicas
from streamrl.targets.back_ends import for_target
from streamrl.workload.replica_batch import rollouts_under_way

USUAL_SYSTEMS: tuple[SystemName, ...] = (
    *("colocated", "stream-sync", "one-step-async", "stream-async"),
)
OWN_LAG = {
    key: getattr(PoliciesConfig(), key)
    for key in ("sync_every", "over_staleness", "oversampling", "left_over")
}
"""Defaults of keys for late groups. A run file sets these keys for its own system; other systems
are planned with the defaults.
"""
USUAL_DISPATCH: tuple[DispatchName, ...] = (DEFAULT_DISPATCH, "skewness-aware")


SANDBOX_SHARES = (0.25, 0.375, 0.5, 0.75, 1.0)
"""Shares of the offered sandboxes that are tried as the number of episodes in flight."""
SPARE_SANDBOXES = 0.25
"""Sandboxes for each episode in flight that are tried beside it, where sandboxes stay open for the reward."""


class EpisodeLimits(NamedTuple):
    """How many episodes a plan lets run at once; None where it sets no limit."""

    sandboxes: int | None
    max_episodes: int | None

    def change(self, config: EnvironmentConfig) -> EnvironmentConfig:
        """Return an environment with these limits."""
        changed: EnvironmentConfig = replace(config, **self._asdict())
        return changed

    @property
    def most(self) -> float:
        """Episodes that may run at once."""
        return min((each for each in self if each is not None), default=inf)


class Mode(NamedTuple):
    """Choices of a plan beside its replicas and its trainer."""

    system: SystemName
    max_staleness: float | int | None
    dispatch: DispatchName | None
    order: OrderName | None
    sync_mode: SyncMode
    rewards: RewardReplicas | None = None
    """The GPUs that compute rewards; None if no GPU does."""
    episodes: EpisodeLimits | None = None
    """Limits of episodes; None without an environment."""

    def apply(self, run: Run) -> Run:
        """Return the run in this mode.

        Policies that the run sets for its own system do not apply to another system.
        """
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
        sync, verifier = replace(run.sync, mode=self.sync_mode), run.verifier
        if self.rewards is not None:
            verifier = self.rewards.change(verifier)
        changed = replace(run, policies=policies, sync=sync, verifier=verifier)
        if self.episodes is not None and run.environment is not None:
            changed = replace(changed, environment=self.episodes.change(run.environment))
        return keep_filled_in(run, changed)


class Choices(NamedTuple):
    """Values that modes combine. None means the default of a system."""

    systems: Sequence[SystemName]
    dispatch: Sequence[DispatchName | None]
    order: Sequence[OrderName | None]
    sync_modes: Sequence[SyncMode]


def find_choices(run: Run) -> Choices:
    """Return the values in `[plan]`, and useful defaults for the keys that it leaves out."""
    plan, own, lengths = run.plan, run.policies, run.workload.lengths
    return Choices(
        systems=plan.systems or list(dict.fromkeys((own.system, *USUAL_SYSTEMS))),
        dispatch=plan.dispatch or _usual_dispatch(lengths, own.dispatch),
        order=plan.order or _usual_order(lengths, own.order),
        sync_modes=plan.sync_modes or _usual_sync(run.sync, run.model, run.rollout),
    )


def find_modes(run: Run) -> list[Mode]:
    """Return every mode, ordered by system.

    Raises:
        ValueError: no GPUs can have the reward model.
    """
    choices = find_choices(run)
    all_rewards: list[RewardReplicas | None] = [
        *find_reward_replicas(
            resolve(run).reward,
            run.verifier,
            run.cluster.pools,
            run.plan,
            run.algorithm.rollouts_per_step,
        )
    ]
    modes = (
        Mode(system, staleness, dispatch, order, sync, rewards, episodes)
        for system in choices.systems
        for staleness in _bounds(run.plan, run.policies, system)
        for dispatch in choices.dispatch
        for order in choices.order
        for sync in choices.sync_modes
        for rewards in all_rewards or [None]
        for episodes in _episode_limits(
            run.environment,
            run.plan,
            rollouts_under_way(
                replace(run.policies, system=system, max_staleness=staleness), run.algorithm
            ),
        )
    )
    return [
        mode
        for mode in modes
        if mode.system != "colocated" or _is_colocatable(mode.apply(run).sync)
    ]


def _episode_limits(
    config: EnvironmentConfig | None, plan: PlanConfig, most: int
) -> list[EpisodeLimits | None]:
    """Return the limits of episodes to try, if at most `most` are in flight.

    More episodes in flight use tools and sandboxes better, but the KV cache may lose their contexts.
    So their number is chosen apart from the sandboxes. More sandboxes than episodes in flight are of
    use only if rewards are computed in them.
    """
    if config is None:
        return [None]
    offered = min(config.sandboxes or most, most)
    numbers = {max(1, round(share * offered)) for share in SANDBOX_SHARES}
    if plan.sandboxes or plan.max_episodes:
        in_flight: Sequence[int | None] = plan.max_episodes or [config.max_episodes]
        return [
            EpisodeLimits(sandboxes, episodes)
            for sandboxes in plan.sandboxes or sorted(numbers)
            for episodes in in_flight
        ]
    if config.max_episodes is not None:
        numbers.add(min(config.max_episodes, offered))
    found: list[EpisodeLimits | None] = [EpisodeLimits(number, None) for number in sorted(numbers)]
    if config.scores_in_sandbox:
        for number in sorted(numbers - {offered}):
            spare = max(1, round(SPARE_SANDBOXES * number))
            found.append(EpisodeLimits(min(number + spare, offered), number))
    return found


def _bounds(
    plan: PlanConfig, policies: PoliciesConfig, system: SystemName
) -> list[float | int | None]:
    """Return the staleness bounds to try with a system; None means the default of the system."""
    generates_ahead = SYSTEMS[system].max_staleness > 0
    is_own = generates_ahead or system == policies.system
    own = policies.max_staleness if is_own else None
    if plan.max_staleness is None or not generates_ahead:
        return [own]
    return [bound for bound in plan.max_staleness if bound > 0] or [own]


def _usual_dispatch(
    lengths: LengthsConfig | None, own: DispatchName | None
) -> list[DispatchName | None]:
    if lengths is None or lengths.ranker == "none":
        return [own]
    named = (own or DEFAULT_DISPATCH, *USUAL_DISPATCH)
    return list(dict.fromkeys(named))


def _usual_order(lengths: LengthsConfig | None, own: OrderName | None) -> list[OrderName | None]:
    if lengths is None or lengths.ranker == "none":
        return [own]
    return list(dict.fromkeys((own or "fifo", "longest-first")))


def _usual_sync(sync: SyncConfig, model: ModelConfig, rollout: RolloutConfig) -> list[SyncMode]:
    has_deltas = (
        model.dtype != "float32" and rollout.dtype not in NARROW and sync.backend != "nccl-reshard"
    )
    return ["full", "delta"] if sync.mode == "full" and has_deltas else [sync.mode]


def _is_colocatable(sync: SyncConfig) -> bool:
    return sync.mode != "delta" and sync.backend == SyncConfig().backend


_Name = TypeVar("_Name")


class Scope(NamedTuple):
    """An offer limited to what a framework supports."""

    run: Run
    left_out: list[str]
    """Choices that the framework does not support, by kind, such as "systems stream-sync,
    stream-async".
    """


def keep_to_framework(run: Run) -> Scope:
    """Return the offer with only the values in `[plan]` that its framework supports.

    Raises:
        RunError: the framework supports none of the values of a key in `[plan]`, or does not
            generate with `costs.engine`.
    """
    framework = framework_of(run.framework.name)
    if framework is None:
        return Scope(run, [])
    plan, engine = run.plan, run.costs.engine
    _check_engine(engine, framework)
    wanted, able = find_choices(run), _able(engine, framework)
    kept = {
        key: _kept(key, getattr(plan, key), getattr(wanted, key), getattr(able, key), framework)
        for key in able._fields
    }
    if plan.target == "execute" and plan.systems is None:  # which has all systems
        kept["systems"] = list(wanted.systems)
    left_out = list(_left_out(plan, framework, wanted, able))
    mixes = plan.mixes_replicas and framework.mixes_replicas
    found = replace(run, plan=replace(plan, mixes_replicas=mixes, **kept))
    engine_name = for_target(run, plan.target).rollout.backend
    rollout = replace(run.rollout, backend=engine_name)
    return Scope(replace(found, rollout=rollout), left_out)


def _check_engine(engine: str, framework: Framework) -> None:
    if not framework.generates_with(engine):
        able = [name for name in known_engines() if framework.generates_with(name)]
        text = (
            f"costs.engine {shown(engine)}: framework {framework.name} generates with "
            f"{framework.engine_names}; choose {', '.join(able)}"
        )
        raise RunError("costs.engine", engine, OneOf(able), text, ("framework.name",))


def _able(engine: str, framework: Framework) -> Choices:
    return Choices(
        systems=[way.name for way in framework.systems],
        dispatch=[*(framework.dispatch or DISPATCH.own)],
        order=[*(framework.order or get_args(OrderName))],
        sync_modes=framework.sync_modes(engine),
    )


def _kept(
    key: str,
    stated: Sequence[_Name] | None,
    wanted: Sequence[_Name | None],
    able: Sequence[_Name],
    framework: Framework,
) -> list[_Name] | None:
    """Return the values to choose from.

    They are the values in `[plan]` that the framework supports, or all that it supports. None keeps
    a system's own value.
    """
    if wanted == [None]:  # the system's default, which every framework supports
        return None
    found = [name for name in able if name in wanted]
    if stated is not None and not found:
        text = (
            f"plan.{key} {shown(stated)}: framework {framework.name} has none of these; choose from "
            f"{', '.join(map(str, able))}"
        )
        raise RunError(f"plan.{key}", stated, OneOf(able), text, ("framework.name",))
    if stated is None and key == "systems":
        return list(able)
    return found or list(able)


def _left_out(
    plan: PlanConfig, framework: Framework, wanted: Choices, able: Choices
) -> Iterator[str]:
    for key in wanted._fields:
        missing = [
            str(name)
            for name in getattr(wanted, key)
            if name is not None and name not in getattr(able, key)
        ]
        if missing:
            yield f"{key.replace('_', ' ')} {', '.join(missing)}"
    if plan.mixes_replicas and not framework.mixes_replicas:
        yield "replicas of two kinds beside each other"
    layouts = ", ".join(
        f"{layout.name} (ZeRO {'/'.join(map(str, layout.zero))}{_splits_text(layout.splits)})"
        for layout in framework.layouts
    )
    yield f"trainers that are none of {layouts}"


def _splits_text(splits: Sequence[str]) -> str:
    return f", {', '.join(split.replace('_', ' ') for split in splits)}" if splits else ""
