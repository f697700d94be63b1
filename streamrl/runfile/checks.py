"""Check that the values of a run file fit together; raises `RunError` for the first that do not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from math import ceil, fsum, inf, isfinite
from typing import get_args
from urllib.parse import urlsplit

from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.backend_choice import engine_named
from streamrl.runfile.bases import is_variable
from streamrl.runfile.cluster_config import ModelConfig, PoolConfig
from streamrl.runfile.config import DEVICE, Run
from streamrl.runfile.disaggregation_checks import check_disaggregation
from streamrl.runfile.environment_checks import check_credit, check_environment
from streamrl.runfile.errors import Bounds, OneOf, RunError, shown
from streamrl.runfile.evaluation_checks import check_checkpoints, check_evaluation
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.field_checks import (
    MOST_DRAFTED,
    MOST_ROLLOUTS,
    POSITIVE,
    SHARE,
    check_bounds,
    check_filled,
    sections_of,
)
from streamrl.runfile.gpu_pools import POOL_CHECKS, kind_key
from streamrl.runfile.keys import join_key, trainer_key
from streamrl.runfile.length_words import stated_figures
from streamrl.runfile.paths import paths_of
from streamrl.runfile.plan_config import PlanConfig, TargetName, framework_of_target
from streamrl.runfile.policies_config import SyncConfig
from streamrl.runfile.policy_checks import POLICY_CHECKS
from streamrl.runfile.roles_config import (
    NARROW,
    ReplicasConfig,
    RewardConfig,
    RolloutConfig,
    SecondaryTrainerConfig,
    SpeculativeConfig,
    VerifierConfig,
    WeightDtype,
)
from streamrl.runfile.scorer_choice import (
    REWARD_MODEL,
    SCORERS,
    function_of,
    readers_of_reward_keys,
    scorer_names,
)
from streamrl.runfile.simulation_config import (
    OF_LENDING,
    OF_REWARD_MODEL,
    FaultConfig,
    FaultKind,
    FrameworkName,
)
from streamrl.runfile.workload_config import HUB, FreeRanker, LengthsConfig, WorkloadConfig

PLAN_LISTS = (
    *("rollout_pools", "trainer_pools", "reward_pools"),
    *("rollout_gpus", "trainer_gpus", "reward_gpus"),
    *("rollout_pipeline_parallel", "rollout_data_parallel", "speculative"),
    *("rollout_tensor_parallel", "trainer_tensor_parallel", "pipeline_parallel"),
    *(
        "expert_parallel",
        "expert_tensor_parallel",
        "context_parallel",
        "micro_batch",
        "zero",
        "systems",
        "max_staleness",
        "dispatch",
    ),
    *("sync_modes", "order", "recompute", "max_running"),
)
LEAST_IN_PLAN = {"max_staleness": 0, "speculative": 0, "zero": 0}
"""Least entry of a list of numbers; 1 where it is not named."""
MOST_IN_PLAN = {"speculative": MOST_DRAFTED}
"""Largest entry, where there is one."""


def check_plan(
    plan: PlanConfig,
    speculative: SpeculativeConfig | None,
    verifier: VerifierConfig,
    pools: dict[str, PoolConfig],
) -> None:
    """Raise `RunError` where a list is empty, or names an unknown pool or a number out of bounds."""
    for name in PLAN_LISTS:
        _check_list(name, getattr(plan, name), pools)
    if plan.speculative is not None and speculative is None:
        key, named = "plan.speculative", plan.speculative
        text = f"{key}={named} needs the section rollout.speculative; set the draft model and its acceptance there"
        raise RunError(key, named, None, text, ("rollout.speculative.acceptance",))
    for name in ("reward_pools", "reward_gpus") if verifier.pool is None else ():
        if (named := getattr(plan, name)) is not None:
            key = f"plan.{name}"
            text = f"{key}={named} applies to rewards on GPUs; set verifier.pool and gpus_per_worker there"
            raise RunError(key, named, None, text, ("verifier.pool",))


def _check_target(target: TargetName | None, framework: FrameworkName | None) -> None:
    """Raise `RunError` if costs are those of another framework than the one that is to run the plan."""
    own = None if target is None else framework_of_target(target)
    if own is not None and framework not in (None, own):
        text = (
            f"framework.name is {framework!r}, and plan.target {target!r} is planned with the costs of {own}; "
            "remove one of them"
        )
        raise RunError("framework.name", framework, OneOf([own]), text, ("plan.target",))


def _check_list(
    name: str, entries: list[int] | list[str] | None, pools: dict[str, PoolConfig]
) -> None:
    key = f"plan.{name}"
    check_filled(key, entries, "the values to search")
    bounds = Bounds(LEAST_IN_PLAN.get(name, 1), MOST_IN_PLAN.get(name, inf))
    for entry in entries or []:
        if name.endswith("_pools") and entry not in pools:
            text = f"{key} names {entry!r}, which is not one of the pools {sorted(pools)}"
            raise RunError(key, entries, OneOf(sorted(pools)), text)
        if isinstance(entry, int) and not bounds.hold(entry):
            raise RunError(key, entries, bounds, f"{key} must be {bounds}, got {entry}")


KEYS_OF_ONE_SOURCE = ("prompts", "subset", "split", "fields", "template")
"""Keys of `[workload]` that each `[[workload.source]]` has of its own."""


def check_prompt_sources(workload: WorkloadConfig, verifier: VerifierConfig) -> None:
    """Refuse a mixture beside a data set of its own, two of one name, and what has no name on the hub."""
    for name in KEYS_OF_ONE_SOURCE if workload.source else ():
        if value := getattr(workload, name):
            key = f"workload.{name}"
            text = f"{key} cannot be combined with [[workload.source]]; set it in each source, got {shown(value)}"
            raise RunError(key, value, text=text, others=("workload.source",))
    for place, source in enumerate(workload.sources):
        key = workload.key(place)
        if source.prompts == HUB:
            text = f"{key} must name a data set after {HUB}, got {shown(source.prompts)}"
            raise RunError(key, source.prompts, str, text)
    names = [source.name for source in workload.source if source.name is not None]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        place = [source.name for source in workload.source].index(twice)
        key = f"workload.source.{place}.name"
        raise RunError(
            key,
            twice,
            None,
            f"{key} must differ from that of every other source, got {shown(twice)} twice",
        )
    _check_reward_sources(workload, verifier, names)


def _check_reward_sources(
    workload: WorkloadConfig, verifier: VerifierConfig, names: list[str]
) -> None:
    """Refuse a reward of a source that there is not, where every source has a name."""
    if not names or len(names) < len(workload.source):
        return
    for place, reward in enumerate(verifier.reward):
        for family in reward.families:
            if family not in names:
                key = f"verifier.reward.{place}.families"
                allowed = OneOf(names)
                raise RunError(
                    key, family, allowed, f"{key} must name {allowed}, got {shown(family)}"
                )


MOST_AT_ONCE = 256
POSITIVE_SECONDS = Bounds(0, 1e6, excludes_least=True)


def check_rewards(verifier: VerifierConfig, max_tokens: int) -> None:
    """Refuse scorers that are none, and such as lack what they need or have what they do not know."""
    if verifier.scorer is not None and verifier.reward:
        text = f"verifier.scorer {shown(verifier.scorer)} cannot be combined with {len(verifier.reward)} [[verifier.reward]]: remove one of the two"
        raise RunError("verifier.scorer", verifier.scorer, text=text, others=("verifier.reward",))
    for place, reward in enumerate(verifier.rewards):
        _check_scorer(verifier.key(place), reward)
    for place, reward in enumerate(verifier.reward):
        _check_numbers(f"verifier.reward.{place}", reward, max_tokens)
    _check_reward_model(verifier)
    labels = [reward.label for reward in verifier.rewards]
    for place, label in enumerate(labels):
        if label in labels[:place]:
            key = f"verifier.reward.{place}.name"
            text = f"{key} must differ from that of every other reward, got {shown(label)} twice"
            raise RunError(key, verifier.rewards[place].name, str, text)


def _check_evaluation_scorer(
    config: EvaluationConfig | None, verifier: VerifierConfig, *, has_environment: bool
) -> None:
    """Refuse a scorer that is none, and an evaluation that nothing but the length would score."""
    if config is None:
        return
    key, rewards = "evaluation.scorer", verifier.rewards
    if config.scorer is not None:
        _check_scorer(key, RewardConfig(scorer=config.scorer))
    elif rewards and not has_environment and all(each.scores_length for each in rewards):
        text = (
            f"{key} is missing: every verifier.reward scores the length alone, which evaluations leave out; "
            'name a scorer of answers, such as "exact"'
        )
        raise RunError(key, None, OneOf(scorer_names()), text, ("verifier.reward",))


def _check_scorer(key: str, reward: RewardConfig) -> None:
    scorer = reward.scorer
    if scorer not in SCORERS and function_of(scorer) is None:
        names = OneOf(scorer_names())
        ours = f"{names}, python:FILE.py:FUNCTION or MODULE:FUNCTION"
        raise RunError(key, scorer, names, f"{key} must be {ours}, got {shown(scorer)}")
    for name, scorers in readers_of_reward_keys().items():
        value = getattr(reward, name)
        here = f"{key.removesuffix('.scorer')}.{name}"
        if scorer in scorers and value is None:
            text = f"{here} is missing: scorer {scorer} needs it"
            if key == "verifier.scorer":
                text = f"{key} {scorer!r} needs a {name}; use a [[verifier.reward]] with scorer and {name} instead"
            elif key == "evaluation.scorer":
                text = f"{key} {scorer!r} needs a {name}; remove the key and set a [[verifier.reward]] with scorer and {name}, or name a function"
            raise RunError(here, None, text=text, others=(key,), problem="missing key")
        if scorer not in scorers and value is not None:
            text = f"{here} applies only to scorer {' and '.join(scorers)}, got {shown(value)} with scorer {shown(scorer)}"
            raise RunError(here, value, text=text, others=(key,))


def _check_reward_model(verifier: VerifierConfig) -> None:
    """Refuse a reward model without GPUs, a second one, and keys of one where there is none."""
    models = [at for at, each in enumerate(verifier.rewards) if each.has_model]
    if models and verifier.pool is None:
        text = f"verifier.pool is missing: {verifier.key(models[0])} {REWARD_MODEL!r} needs a pool with GPUs"
        raise RunError("verifier.pool", None, str, text, (verifier.key(models[0]),))
    if len(models) > 1:
        key = verifier.key(models[1])
        text = f"{key} {REWARD_MODEL!r} is a second reward model after {verifier.key(models[0])}; remove one of them, because verifier.pool has room for one"
        raise RunError(key, REWARD_MODEL, text=text, others=(verifier.key(models[0]),))
    for at, reward in enumerate(verifier.rewards):
        if reward.step_end is not None and (not reward.has_model or not reward.step_end):
            key = f"verifier.reward.{at}.step_end"
            text = f"{key} must be a text and applies only to {REWARD_MODEL}, got {shown(reward.step_end)} with scorer {reward.scorer}"
            raise RunError(key, reward.step_end, str, text, (verifier.key(at),))


def _check_judge(key: str, reward: RewardConfig) -> None:
    if not 1 <= reward.at_once <= MOST_AT_ONCE:
        raise RunError(f"{key}.at_once", reward.at_once, Bounds(1, MOST_AT_ONCE))
    if not 0 < reward.request_time <= POSITIVE_SECONDS.most:
        raise RunError(f"{key}.request_time", reward.request_time, POSITIVE_SECONDS)
    if reward.endpoint is not None:
        _check_url(f"{key}.endpoint", reward.endpoint, "http://127.0.0.1:8000/v1")


def _check_url(key: str, text: str, example: str) -> None:
    """Raise `RunError` if a text is not the URL of a server."""
    try:
        url = urlsplit(text)
        is_one = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        what = f"{key} must be the URL of a server, such as {example}, got {shown(text)}"
        raise RunError(key, text, str, what)


def _check_servers(rollout: RolloutConfig) -> None:
    """Check the section of external servers: where it belongs, and each URL."""
    key, external = "rollout.external", rollout.external
    is_external = engine_named(rollout.backend).runs_elsewhere
    if external is None:
        if is_external:
            text = f"{key}.endpoints is missing: backend {rollout.backend!r} needs the URL of a server for each replica"
            others = ("rollout.backend",)
            raise RunError(f"{key}.endpoints", None, list, text, others, problem="missing key")
        return
    if not is_external:
        text = f"{key} applies only to rollout.backend 'external', got {rollout.backend!r}; remove the section"
        raise RunError(key, None, text=text, others=("rollout.backend",))
    for place, url in enumerate(external.endpoints):
        here = f"{key}.endpoints.{place}"
        _check_url(here, url, "http://node-7:8000")
        if urlsplit(url).username is not None:
            text = f"{here} must not have a user name or password; write {key}.key instead"
            raise RunError(here, "a URL with a password", str, text)
        if url in external.endpoints[:place]:
            text = f"{here} must differ from the others, got {shown(url)} twice: each replica loads weights into its own server"
            raise RunError(here, url, str, text)
    if external.weights == "distributed" and external.directory is not None:
        text = f"{key}.directory is not used with {key}.weights 'distributed', got {shown(external.directory)}; remove it"
        raise RunError(
            f"{key}.directory", external.directory, text=text, others=(f"{key}.weights",)
        )
    if external.key is not None and not is_variable(external.key):
        text = f'{key}.key must be an environment variable, such as "${{SERVER_API_KEY}}", so that no record contains it'
        raise RunError(f"{key}.key", "a literal key", str, text)


def _check_function_keys(key: str, reward: RewardConfig) -> None:
    """Refuse keys of functions for scorers of this package, which call no code of the user."""
    if function_of(reward.scorer) is not None:
        return
    for name, value, plain in (
        ("signature", reward.signature, "plain"),
        ("sandbox", reward.sandbox, True),
    ):
        if value != plain:
            text = f"{key}.{name} applies only to your own functions, not to {reward.scorer!r}; remove it"
            raise RunError(f"{key}.{name}", value, OneOf([plain]), text, (f"{key}.scorer",))


def _check_numbers(key: str, reward: RewardConfig, max_tokens: int) -> None:
    if not isfinite(reward.weight) or reward.weight == 0:
        text = f"{key}.weight must be a finite number other than 0, got {reward.weight}"
        raise RunError(f"{key}.weight", reward.weight, float, text)
    low, high = reward.bounds
    if not (isfinite(low) and isfinite(high) and low < high):
        text = f"{key}.bounds must be two finite numbers in ascending order, got {shown(reward.bounds)}"
        raise RunError(f"{key}.bounds", reward.bounds, list, text)
    _check_judge(key, reward)
    _check_function_keys(key, reward)
    if reward.pattern is not None:
        try:
            re.compile(reward.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            text = (
                f"{key}.pattern is not a regular expression: {error}, got {shown(reward.pattern)}"
            )
            raise RunError(f"{key}.pattern", reward.pattern, str, text) from None
    if reward.beyond is None or reward.until is None:
        return
    for name, number, bounds in (
        ("beyond", reward.beyond, Bounds(0, max_tokens - 1)),
        ("until", reward.until, Bounds(reward.beyond + 1)),
    ):
        if not bounds.hold(number):
            raise RunError(f"{key}.{name}", number, bounds)


SHARE_ROUNDING = 1e-6
"""By which shares that add up to 1 may miss it as they are written down."""


def check_shares(
    followers: tuple[SecondaryTrainerConfig, ...], group_rewards: tuple[tuple[float, float], ...]
) -> None:
    """Refuse bounds that no group lies within, families without a name, several GPUs of one that counts, and rewards whose shares do not add up."""
    for number, follower in enumerate(followers, start=1):
        key = trainer_key(number)
        _check_order(key, follower, "staleness")
        _check_order(key, follower, "reward")
        _check_trainer_families(key, follower)
        _check_counting(key, follower)
    _check_group_rewards(group_rewards)


def _check_order(key: str, follower: SecondaryTrainerConfig, what: str) -> None:
    least, most = getattr(follower, f"min_{what}"), getattr(follower, f"max_{what}")
    if least is None or most is None or least <= most:
        return
    lower, upper = join_key(key, f"min_{what}"), join_key(key, f"max_{what}")
    text = f"{upper} must be at least {lower}={least:g}, got {most:g}"
    raise RunError(upper, most, Bounds(least), text, (lower,))


def _check_trainer_families(key: str, follower: SecondaryTrainerConfig) -> None:
    for place, family in enumerate(follower.families):
        if not family or family in follower.families[:place]:
            here = join_key(key, "families")
            what = "not have an empty name" if not family else "name each family once"
            text = f"{here} must {what}, got {shown(list(follower.families))}"
            raise RunError(here, list(follower.families), None, text)


def _check_counting(key: str, follower: SecondaryTrainerConfig) -> None:
    if follower.counts_only and follower.num_gpus > 1:
        here = join_key(key, "counts_only")
        text = f"{here} must be false for {follower.num_gpus} GPUs, got True; a trainer that only counts has one GPU"
        raise RunError(here, True, OneOf([False]), text, (join_key(key, "data_parallel"),))


def _check_group_rewards(pairs: tuple[tuple[float, float], ...]) -> None:
    key = "workload.group_rewards"
    for reward, share in pairs:
        if not (Bounds(-1e9, 1e9).hold(reward) and Bounds(0, 1, excludes_least=True).hold(share)):
            text = f"{key} must have pairs of a mean reward and a share in (0, 1], got {[reward, share]}"
            raise RunError(key, pairs, None, text)
    total = fsum(share for _, share in pairs)
    if pairs and abs(total - 1) > SHARE_ROUNDING:
        text = f"{key} must have shares that add up to 1, got {total:g}"
        raise RunError(key, pairs, None, text)


FAULT_MOMENTS = ("step", "time", "count")
FAULT_KEYS: dict[FaultKind, tuple[str, ...]] = {
    "link-slows": ("duration", "factor"),
    "verifier-stalls": ("duration",),
}
"""What a kind needs to be told beside its moment; the others need nothing, and take none of it."""


def check_faults(
    faults: tuple[FaultConfig, ...],
    steps: int,
    reward_model: RewardConfig | None,
    *,
    changes_sides: bool,
) -> None:
    """Raise `RunError` where a fault has no moment, or several, or says too little or too much."""
    for number, fault in enumerate(faults):
        key = f"faults.{number}"
        _check_victim(fault, f"{key}.kind", reward_model, changes_sides=changes_sides)
        _check_moment(fault, key, steps)
        for name in ("duration", "factor"):
            _check_said(fault, key, name)


def _check_victim(
    fault: FaultConfig,
    key: str,
    reward_model: RewardConfig | None,
    *,
    changes_sides: bool,
) -> None:
    if fault.kind in OF_LENDING and not changes_sides:
        text = f"{key} {fault.kind!r} strikes when GPUs change sides: add the section [lending], or trainer.borrows"
        raise RunError(key, fault.kind, None, text, ("lending", "trainer.borrows"))
    if fault.kind in OF_REWARD_MODEL and reward_model is None:
        text = f"{key} {fault.kind!r} needs a reward model, but no [[verifier.reward]] is one"
        raise RunError(key, fault.kind, None, text, ("verifier.reward",))


def _check_moment(fault: FaultConfig, key: str, steps: int) -> None:
    given = [name for name in FAULT_MOMENTS if getattr(fault, name) is not None]
    if len(given) != 1:
        text = f"{key} ({fault.kind}) needs exactly one of step, time and count, got {', '.join(given) or 'none'}"
        others = tuple(f"{key}.{name}" for name in FAULT_MOMENTS[1:])
        raise RunError(f"{key}.step", fault.step, None, text, others)
    last = fault.last_step(steps)
    if fault.step is not None and fault.step > last:
        why = " (the last version is not pushed)" if last < steps else ""
        text = (
            f"{key}.step must be at most {last} of algorithm.steps={steps}{why}, got {fault.step}"
        )
        raise RunError(f"{key}.step", fault.step, Bounds(1, last), text, ("algorithm.steps",))
    if fault.seed is not None and fault.count is None:
        text = f"{key}.seed={fault.seed} applies only to random moments; set {key}.count"
        raise RunError(f"{key}.seed", fault.seed, None, text, (f"{key}.count",))


def _check_said(fault: FaultConfig, key: str, name: str) -> None:
    value, is_needed = getattr(fault, name), name in FAULT_KEYS.get(fault.kind, ())
    if (value is not None) != is_needed:
        kinds = [kind for kind, names in FAULT_KEYS.items() if name in names]
        text = (
            f"{key}.{name} is missing: kind {fault.kind!r} needs it"
            if is_needed
            else f"{key}.{name}={value} applies only to {' and '.join(kinds)}, but kind is {fault.kind!r}"
        )
        raise RunError(f"{key}.{name}", value, OneOf(kinds), text, (f"{key}.kind",))


LONGEST_PATH, LONGEST_NAME = 4095, 255
"""Bytes, on Linux (linux/limits.h)."""


def check_run(run: Run) -> None:
    """Raise `RunError` where a value is out of bounds, or values contradict each other."""
    for check in CHECKS:
        check(run)


def _check_model(model: ModelConfig) -> None:
    if (model.name is None) == (model.path is None):
        found = f"both {model.name!r} and {shown(model.path)}" if model.name else "neither"
        text = f"model needs exactly one of name and path, got {found}"
        raise RunError("model.name", model.name, text=text, others=("model.path",))


def _check_stops(rollout: RolloutConfig) -> None:
    if "" in rollout.stop:
        text = "rollout.stop has an empty text, which would end every rollout; remove it"
        raise RunError("rollout.stop", list(rollout.stop), text=text)
    if (least := min(rollout.stop_token_ids, default=0)) < 0:
        text = f"rollout.stop_token_ids must be at least 0, got {least}"
        raise RunError("rollout.stop_token_ids", least, Bounds(0), text)


def _check_algorithms(algorithms: Iterable[AlgorithmConfig]) -> None:
    for number, algorithm in enumerate(algorithms):
        key = f"{trainer_key(number)}.algorithm" if number else "algorithm"
        _check_algorithm(algorithm, key)
        _check_optimizer(algorithm, key)


def _check_algorithm(algorithm: AlgorithmConfig, key: str) -> None:
    if algorithm.dynamic_sampling and not algorithm.trains_whole_groups:
        raise RunError(
            f"{key}.dynamic_sampling",
            algorithm.dynamic_sampling,
            OneOf([False]),
            f"{key}.dynamic_sampling drops groups with equal rewards, but {algorithm.name} learns from them",
            (f"{key}.name",),
        )
    if algorithm.kl_in == "reward" and not algorithm.has_rewards_of_tokens:
        raise RunError(
            f"{key}.kl_in",
            algorithm.kl_in,
            OneOf(["loss"]),
            f"{key}.kl_in 'reward' subtracts the KL term from the reward of each token, but {algorithm.name} has one "
            "reward per rollout; use reinforce++ or ppo, or kl_in 'loss'",
            (f"{key}.name",),
        )
    if algorithm.imitates and algorithm.correction is not None:
        raise RunError(
            f"{key}.correction",
            algorithm.correction,
            OneOf([None]),
            f"{key}.correction must be absent for {algorithm.name}, which imitates chosen rollouts of any "
            f"policy, got {algorithm.correction!r}",
            (f"{key}.name",),
        )
    if algorithm.trains_whole_groups and algorithm.group_size < 2:
        raise RunError(
            "algorithm.group_size",
            algorithm.group_size,
            Bounds(2),
            f"algorithm.group_size must be at least 2 for {algorithm.name}, "
            f"got {algorithm.group_size}",
            (f"{key}.name",),
        )


def _check_optimizer(algorithm: AlgorithmConfig, key: str) -> None:
    own, key = algorithm.optimizer, f"{key}.optimizer"
    if not all(0 <= beta < 1 for beta in own.betas):
        text = f"{key}.betas must be two numbers in [0, 1), got {list(own.betas)}"
        raise RunError(f"{key}.betas", list(own.betas), text=text)
    if own.final_rate_share and own.schedule == "constant":
        text = (
            f"{key}.final_rate_share has no effect with schedule 'constant', got {own.final_rate_share}; "
            f"set {key}.schedule to linear or cosine"
        )
        raise RunError(f"{key}.final_rate_share", own.final_rate_share, OneOf([0.0]), text)
    if own.warmup_steps >= algorithm.steps and own.warmup_steps:
        text = f"{key}.warmup_steps must be below algorithm.steps={algorithm.steps}, got {own.warmup_steps}"
        raise RunError(
            f"{key}.warmup_steps", own.warmup_steps, Bounds(0, algorithm.steps - 1), text
        )


def _check_batch(algorithm: AlgorithmConfig, ranks: int) -> None:
    if algorithm.rollouts_per_step < ranks:
        raise RunError(
            "algorithm.prompts_per_step",
            algorithm.prompts_per_step,
            Bounds(ceil(ranks / algorithm.group_size)),
            f"algorithm.prompts_per_step={algorithm.prompts_per_step} x group_size="
            f"{algorithm.group_size} gives {algorithm.rollouts_per_step} rollouts, fewer than "
            f"trainer.data_parallel={ranks}",
            ("algorithm.group_size", "trainer.data_parallel"),
        )


def _check_optimizer_steps(steps: int, rollouts: int) -> None:
    if steps > rollouts:
        raise RunError(
            "framework.optimizer_steps",
            steps,
            Bounds(1, rollouts),
            f"framework.optimizer_steps must be at most the {rollouts} rollouts of a step, got {steps}",
            ("algorithm.prompts_per_step",),
        )


def _check_step(algorithm: AlgorithmConfig) -> None:
    if algorithm.rollouts_per_step > MOST_ROLLOUTS:
        raise RunError(
            "algorithm.prompts_per_step",
            algorithm.prompts_per_step,
            Bounds(1, MOST_ROLLOUTS // algorithm.group_size),
            f"algorithm.prompts_per_step={algorithm.prompts_per_step} x group_size="
            f"{algorithm.group_size} must be at most {MOST_ROLLOUTS} rollouts",
            ("algorithm.group_size",),
        )


def _check_lengths(workload: WorkloadConfig) -> None:
    lengths, most = workload.lengths, workload.max_prompt_tokens
    if lengths is not None and lengths.kind == "stated":
        stated_figures(lengths.source)
    if lengths is not None and not 1 <= lengths.prompt_tokens <= most:
        raise RunError(
            "workload.lengths.prompt_tokens",
            lengths.prompt_tokens,
            Bounds(1, most),
            f"workload.lengths.prompt_tokens must be between 1 and workload.max_prompt_tokens="
            f"{most}, got {lengths.prompt_tokens}",
            ("workload.max_prompt_tokens",),
        )


def _check_ranker(lengths: LengthsConfig | None) -> None:
    if lengths is None:
        return
    if lengths.ranker == "scores" and lengths.ranker_scores is None:
        text = "workload.lengths.ranker_scores is missing: ranker 'scores' needs it"
        others = ("workload.lengths.ranker",)
        raise RunError("workload.lengths.ranker_scores", None, str, text, others)
    if lengths.group_correlation and lengths.kind not in ("histogram", "stated"):
        raise RunError(
            "workload.lengths.group_correlation",
            lengths.group_correlation,
            Bounds(0, 0),
            f"workload.lengths.group_correlation is for kinds histogram and stated; lengths of kind {lengths.kind!r} are as "
            "alike as those of its source: remove the key",
            ("workload.lengths.kind",),
        )
    for ranker, kind, what in (
        ("history", "groups", "which has several samples of each prompt"),
        ("recorded", "trace", "which has the recorded expectations"),
    ):
        if lengths.ranker == ranker and lengths.kind != kind:
            raise RunError(
                "workload.lengths.ranker",
                lengths.ranker,
                OneOf(get_args(FreeRanker)),
                f"workload.lengths.ranker {ranker!r} needs kind {kind!r}, {what}, got {lengths.kind!r}",
                ("workload.lengths.kind",),
            )


def _check_speculative(speculative: SpeculativeConfig | None) -> None:
    if speculative is not None and speculative.acceptance is None:
        key = "rollout.speculative.acceptance"
        text = f"{key} is missing; measure the share of drafted tokens that your model accepts, and set it"
        raise RunError(key, None, SHARE, text)


def _check_trained_drafts(speculative: SpeculativeConfig | None, sync: SyncConfig) -> None:
    """Raise `RunError` if a trained draft is no layer of the model, loses acceptance, or is not sent."""
    if speculative is None or not speculative.trained:
        return
    key = "rollout.speculative"
    if speculative.model is not None:
        text = f"{key}.trained trains the model's own draft layer; {key}.model names another model, which no trainer has"
        raise RunError(f"{key}.trained", True, OneOf([False]), text, (f"{key}.model",))
    if speculative.acceptance_to is not None:
        text = f"{key}.acceptance_to must be absent with {key}.trained, whose acceptance stays"
        raise RunError(f"{key}.acceptance_to", speculative.acceptance_to, None, text)
    if sync.mode == "lora":
        text = f"{key}.trained needs sync.mode full or delta, as adapters have no draft layer, got 'lora'"
        raise RunError(f"{key}.trained", True, OneOf([False]), text, ("sync.mode",))


def _check_sync(sync: SyncConfig, dtype: str, rollout_dtype: WeightDtype | None) -> None:
    if sync.mode == "delta" and dtype == "float32":
        raise RunError(
            "sync.mode",
            sync.mode,
            OneOf(["full", "lora"]),
            "sync.mode 'delta' needs a model.dtype of 16 bits, got 'float32', "
            "in which a step changes nearly every value",
            ("model.dtype",),
        )
    if sync.mode == "delta" and rollout_dtype in NARROW:
        raise RunError(
            "sync.mode",
            sync.mode,
            OneOf(["full", "lora"]),
            f"sync.mode 'delta' sends changes in 16 bits, so rollout.dtype must have at least 16 bits, got "
            f"{rollout_dtype!r}",
            ("rollout.dtype",),
        )
    if sync.backend == "nccl-reshard" and sync.mode != "full":
        raise RunError(
            "sync.mode",
            sync.mode,
            OneOf(["full"]),
            f"sync.backend 'nccl-reshard' moves shards of all weights, so sync.mode must be 'full', "
            f"got {sync.mode!r}",
            ("sync.backend",),
        )


def _check_precision(rollout: RolloutConfig) -> None:
    if rollout.weight_only and rollout.dtype not in NARROW:
        raise RunError(
            "rollout.weight_only",
            rollout.weight_only,
            OneOf([False]),
            f"rollout.weight_only applies only to weights in {', '.join(NARROW)}, got rollout.dtype {rollout.dtype!r}",
            ("rollout.dtype",),
        )


def _check_latencies(
    latency: tuple[tuple[int, float], ...] | None, others: tuple[ReplicasConfig, ...]
) -> None:
    _check_latency("policies.latency", latency)
    for place, other in enumerate(others):
        _check_latency(f"{kind_key(place + 1)}.latency", other.latency)


def _check_latency(key: str, points: tuple[tuple[int, float], ...] | None) -> None:
    if points is None:
        return
    batches = [batch for batch, _ in points]
    if not batches or batches != sorted(set(batches)) or batches[0] < 1:
        text = f"{key} must have batches in ascending order from 1, got {batches}"
        raise RunError(key, points, list, text)
    for batch, seconds in points:
        if not POSITIVE.hold(seconds):
            text = f"{key} at batch {batch} must be {POSITIVE}, got {seconds}"
            raise RunError(key, points, list, text)


def _check_paths(paths: Mapping[str, str]) -> None:
    for key, path in paths.items():
        names = os.fsencode(path).split(b"/")
        is_long = len(os.fsencode(path)) > LONGEST_PATH or max(map(len, names)) > LONGEST_NAME
        if is_long or "\0" in path:
            raise RunError(key, path, None, f"{key} is not a valid path, got {shown(path)}")


def _check_device(device: str) -> None:
    if not DEVICE.fullmatch(device):
        text = f"execute.device must be auto, cpu, cuda or cuda:N, got {device!r}"
        raise RunError("execute.device", device, OneOf(["auto", "cpu", "cuda"]), text)


CHECKS: tuple[Callable[[Run], None], ...] = (
    lambda run: _check_model(run.model),
    lambda run: _check_stops(run.rollout),
    lambda run: _check_servers(run.rollout),
    lambda run: check_bounds(sections_of(run)),
    *POOL_CHECKS,
    lambda run: _check_algorithms(
        run.as_seen_by(number).algorithm for number in range(run.num_trainers)
    ),
    lambda run: _check_batch(run.algorithm, run.trainer.largest.data_parallel),
    lambda run: _check_step(run.algorithm),
    lambda run: _check_optimizer_steps(
        run.framework.optimizer_steps, run.algorithm.rollouts_per_step
    ),
    lambda run: _check_lengths(run.workload),
    lambda run: _check_ranker(run.workload.lengths),
    lambda run: _check_speculative(run.rollout.speculative),
    lambda run: _check_trained_drafts(run.rollout.speculative, run.sync),
    lambda run: _check_sync(run.sync, run.model.dtype, run.rollout.dtype),
    lambda run: _check_precision(run.rollout),
    lambda run: _check_latencies(run.policies.latency, run.rollout.others),
    *POLICY_CHECKS,
    lambda run: check_disaggregation(
        run.rollout,
        run.policies,
        run.cluster.links,
        lends=run.lending is not None,
        profile=run.costs.profile,
    ),
    lambda run: check_environment(
        run.environment, run.policies, run.workload, run.rollout.kinds, run.verifier
    ),
    lambda run: check_credit(run.algorithm, run.environment),
    lambda run: check_evaluation(run.evaluation, run.workload),
    lambda run: _check_evaluation_scorer(
        run.evaluation, run.verifier, has_environment=run.environment is not None
    ),
    lambda run: check_checkpoints(run.execute.checkpoints, run.evaluation),
    lambda run: check_plan(run.plan, run.rollout.speculative, run.verifier, run.cluster.pools),
    lambda run: _check_target(run.plan.target, run.framework.name),
    lambda run: check_faults(
        run.faults,
        run.algorithm.steps,
        run.verifier.reward_model,
        changes_sides=run.lending is not None or run.trainer.borrows,
    ),
    lambda run: check_rewards(run.verifier, run.rollout.max_tokens),
    lambda run: check_prompt_sources(run.workload, run.verifier),
    lambda run: check_shares(run.followers, run.workload.group_rewards),
    lambda run: _check_paths(paths_of(run)),
    lambda run: _check_device(run.execute.device),
)
"""Each raises `RunError`; later ones rely on earlier ones."""
