"""Convert a plan to the keys of a run file that it sets, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.policies_config import PoliciesConfig, SyncConfig
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig, VerifierConfig
from streamrl.runfile.section import Section
from streamrl.sim.planner.layouts import Degrees, Replicas
from streamrl.sim.planner.modes import EpisodeLimits, Mode
from streamrl.sim.planner.plan import SHORT, PlannedSide, plan_text
from streamrl.sim.planner.reward_replicas import RewardReplicas
from streamrl.sim.planner.space import Candidate

DEGREES = ("replicas", *SHORT, "micro_batch", "zero", "offload")


def side_of(pools: Mapping[str, PoolConfig], candidate: Candidate, section: str) -> PlannedSide:
    """Describe one side of a plan: "rollout" or "trainer"."""
    kinds: Sequence[Replicas | Degrees] = (candidate.trainer,)
    if section == "rollout":
        kinds = candidate.replicas.kinds
    found: PlannedSide | None = None
    for side in reversed(kinds):
        found = PlannedSide(
            pool=side.pool,
            gpu=pools[side.pool].gpu,
            num_gpus=side.num_gpus,
            degrees=_degrees(side),
            beside=found,
        )
    assert found is not None
    return found


def reward_side_of(
    pools: Mapping[str, PoolConfig], rewards: RewardReplicas | None
) -> PlannedSide | None:
    """Describe the GPUs of a plan that compute rewards; None if none does."""
    if rewards is None:
        return None
    return PlannedSide(
        pool=rewards.pool,
        gpu=pools[rewards.pool].gpu,
        num_gpus=rewards.num_gpus,
        degrees={"workers": rewards.workers, "gpus_per_worker": rewards.gpus_per_worker},
    )


def _degrees(side: Replicas | Degrees) -> dict[str, int]:
    own = side._asdict().items()
    return {key: int(value) for key, value in own if key in DEGREES and value is not None}


def settings_of(candidate: Candidate) -> dict[str, str | int | float | bool]:
    """Return the keys of the run file that a plan sets."""
    mode = candidate.mode
    found: dict[str, str | int | float | bool | None] = {
        **{f"rollout.{key}": value for key, value in candidate.replicas.own.items()},
        **{
            f"rollout.others.{place}.{key}": value
            for place, kind in enumerate(candidate.replicas.kinds[1:])
            for key, value in kind.own.items()
        },
        **_drafts(candidate.replicas.drafted),
        **{f"trainer.{key}": value for key, value in candidate.trainer._asdict().items()},
        "policies.system": mode.system,
        "policies.max_staleness": mode.max_staleness,
        "policies.dispatch": mode.dispatch,
        "policies.order": mode.order,
        "sync.mode": mode.sync_mode,
        **_verifier_keys(mode.rewards),
        **_episode_keys(mode.episodes),
    }
    return {key: value for key, value in found.items() if value is not None}


def _verifier_keys(rewards: RewardReplicas | None) -> dict[str, str | int]:
    return (
        {}
        if rewards is None
        else {f"verifier.{k}": value for k, value in rewards._asdict().items()}
    )


def _episode_keys(episodes: EpisodeLimits | None) -> dict[str, int | None]:
    if episodes is None:
        return {}
    return {f"environment.{key}": value for key, value in episodes._asdict().items()}


def _drafts(drafted: int | None) -> dict[str, int | bool | None]:
    if drafted is None:
        return {}
    key = "rollout.speculative"
    return {f"{key}.enabled": drafted > 0, f"{key}.tokens": drafted or None}


def candidate_of(settings: Mapping[str, Any]) -> Candidate:
    """Return the plan that sets these keys of the run file: the inverse of `settings_of`."""
    places = range(sum(key.startswith("rollout.others.") for key in settings))
    sections = [f"rollout.others.{place}." for place in places]
    others = [section for section in sections if f"{section}pool" in settings]
    replicas: Replicas | None = None
    for section in reversed(["rollout.", *others]):
        drafted = _drafted(settings)
        own = _fields(settings, section, Replicas) | {"beside": replicas, "drafted": drafted}
        replicas = Replicas(**own)
    assert replicas is not None
    rewards = _fields(settings, "verifier.", RewardReplicas)
    has_episodes = any(key.startswith("environment.") for key in settings)
    episodes = EpisodeLimits(**_fields(settings, "environment.", EpisodeLimits))
    mode = _fields(settings, "policies.", Mode) | {
        "sync_mode": settings["sync.mode"],
        "rewards": RewardReplicas(**rewards) if rewards["pool"] is not None else None,
        "episodes": episodes if has_episodes else None,
    }
    return Candidate(replicas, Degrees(**_fields(settings, "trainer.", Degrees)), Mode(**mode))


def _fields(settings: Mapping[str, Any], section: str, kind: type[NamedTuple]) -> dict[str, Any]:
    """Return the fields of a part of a plan. Keys that are not set are None."""
    return {name: settings.get(f"{section}{name}") for name in kind._fields}


def _drafted(settings: Mapping[str, Any]) -> int | None:
    key = "rollout.speculative"
    if f"{key}.enabled" not in settings:
        return None
    return int(settings.get(f"{key}.tokens", 0))


def describe(pools: Mapping[str, PoolConfig], candidate: Candidate) -> str:
    """Return one line that describes a plan."""
    rollout, trainer = (side_of(pools, candidate, name) for name in ("rollout", "trainer"))
    rewards = reward_side_of(pools, candidate.mode.rewards)
    return plan_text(rollout, trainer, settings_of(candidate), rewards)


def own_candidate(
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    policies: PoliciesConfig,
    sync: SyncConfig,
    verifier: VerifierConfig,
    environment: EnvironmentConfig | None,
) -> Candidate:
    """Return the plan that sections of a run file have as they are."""
    replicas: Replicas | None = None
    for kind in reversed((rollout, *rollout.others)):
        replicas = Replicas(**_values(kind, Replicas), beside=replicas)
    assert replicas is not None
    rewards = RewardReplicas(**_values(verifier, RewardReplicas))
    mode = _values(policies, Mode) | {
        "sync_mode": sync.mode,
        "rewards": rewards if verifier.pool is not None else None,
    }
    if environment is not None:
        mode["episodes"] = EpisodeLimits(environment.sandboxes, environment.max_episodes)
    degrees = _values(trainer, Degrees) | {"kernels": None}  # those of the run
    return Candidate(replicas, Degrees(**degrees), Mode(**mode))


def _values(section: Section, kind: type[NamedTuple]) -> dict[str, Any]:
    """Return the fields of a plan part that a section has, with their values."""
    return {name: getattr(section, name) for name in kind._fields if hasattr(section, name)}


def group_of(candidate: Candidate) -> Hashable:
    """Return a key that is equal for variants of a plan: the same GPUs in the same system.

    Variants differ only in degrees, dispatch, sync mode, or how the trainer fits its memory.
    """
    replicas, trainer, mode = candidate
    gpus = Counter[str]()
    for kind in replicas.kinds:
        gpus[kind.pool] += kind.num_gpus
    generate = tuple(sorted(gpus.items()))
    scores = None if mode.rewards is None else (mode.rewards.pool, mode.rewards.num_gpus)
    return generate, trainer.pool, trainer.num_gpus, scores, mode.system, mode.max_staleness
