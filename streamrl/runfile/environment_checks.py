"""Check `[environment]`, and refuse what does not work with episodes of several turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.distribution_words import read_distribution
from streamrl.runfile.environment_choice import ENVIRONMENTS, MCP, class_of
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import Bounds, OneOf, RunError
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import RolloutConfig, VerifierConfig
from streamrl.runfile.units import quantity_text
from streamrl.runfile.workload_config import WorkloadConfig

COUNTED, TIMED = ("turns", "observation_tokens"), ("action_time", "start_time")
"""Distributions of counts, and of seconds."""
ONE_TURN = "is for episodes of one turn"


def check_environment(
    config: EnvironmentConfig | None,
    policies: PoliciesConfig,
    workload: WorkloadConfig,
    kinds: Sequence[RolloutConfig],
    verifier: VerifierConfig,
) -> None:
    """Raise `RunError` if a value does not fit the others, or needs episodes of one turn."""
    if config is None:
        _check_recorded(workload)
        _check_offload(kinds)
        return
    for name in (*COUNTED, *TIMED):
        if (text := getattr(config, name)) is not None:
            read_distribution(f"environment.{name}", text, is_time=name in TIMED)
    _check_context(config, workload)
    _check_implementation(config)
    _check_scorer(config, verifier)
    if config.sandbox_price and config.sandboxes is None:
        key = "environment.sandbox_price"
        text = f"{key} {config.sandbox_price:g} needs the number of sandboxes that are paid for: set environment.sandboxes"
        raise RunError(key, config.sandbox_price, text=text, others=("environment.sandboxes",))
    for key, value, instead in _of_one_turn(policies):
        if value != instead:
            text = f"{key} {value!r} {ONE_TURN}; remove it or the section [environment]"
            raise RunError(key, value, OneOf([instead]), text, ("environment",))
    if workload.ranker is not None:
        text = f"workload.ranker {ONE_TURN}; remove it or the section [environment]"
        raise RunError("workload.ranker", None, text=text, others=("environment",))
    for kind in kinds:
        if kind.admission == "reserve":
            text = f"rollout.admission 'reserve' {ONE_TURN}; set 'on-demand'"
            raise RunError("rollout.admission", "reserve", OneOf(["on-demand"]), text)


def check_credit(algorithm: AlgorithmConfig, environment: EnvironmentConfig | None) -> None:
    """Raise `RunError` if turns cannot have advantages of their own."""
    key, value = "algorithm.credit", algorithm.credit
    if value == "episode":
        return
    if environment is None:
        text = f"{key} {value!r} needs the section [environment]: without it a rollout has one turn"
        raise RunError(key, value, OneOf(["episode"]), text, ("environment",))
    if algorithm.has_critic or algorithm.imitates:
        text = f"{key} {value!r} is not for algorithm.name {algorithm.name!r}, which has no advantages of groups; set 'episode'"
        raise RunError(key, value, OneOf(["episode"]), text, ("algorithm.name",))


def _of_one_turn(policies: PoliciesConfig) -> Iterator[tuple[str, object, object]]:
    """Yield keys of policies that only work with one turn: the key, its value, and the value to set."""
    yield "policies.migration", policies.migration, "none"
    yield "policies.concurrency", policies.concurrency, "fixed"
    yield "policies.learns_from_siblings", policies.learns_from_siblings, False
    if policies.weight_sync == "between-batches":
        yield "policies.weight_sync", policies.weight_sync, None


def _check_implementation(config: EnvironmentConfig) -> None:
    """Check what only executed runs need."""
    key, name = "environment.implementation", config.implementation
    if name is None:
        return
    chosen = ENVIRONMENTS.get(name)
    if chosen is None and class_of(name) is None:
        text = (
            f'{key} {name!r} is no environment; write a class as "python:FILE.py:CLASS" or "MODULE:CLASS", '
            f"or one of {', '.join(ENVIRONMENTS)}"
        )
        raise RunError(key, name, OneOf([*ENVIRONMENTS]), text)
    has_tools = chosen is not None and chosen.has_tools
    if has_tools and not config.tools:
        text = f"environment.tools is missing: {key} {name!r} needs at least one tool"
        raise RunError("environment.tools", None, text=text, others=(key,))
    if config.tools and not has_tools:
        text = f'environment.tools is only for {key} = "tools"; a class has its tools itself: remove the key'
        raise RunError("environment.tools", list(config.tools), text=text, others=(key,))
    if config.sandbox and any(each.startswith(MCP) for each in config.tools):
        text = "environment.sandbox must be false for tools of MCP servers, which are processes or remote"
        raise RunError("environment.sandbox", True, OneOf([False]), text)
    for argument in () if chosen is None else chosen.needs:
        if argument not in config.arguments:
            text = f"environment.arguments.{argument} is missing: {key} {name!r} needs it"
            raise RunError("environment.arguments", None, text=text, others=(key,))
    if chosen is not None and chosen.has_one_episode:
        for own, value, must in (
            ("sandboxes", config.sandboxes, 1),
            ("scores_in_sandbox", config.scores_in_sandbox, True),
        ):
            if value != must:
                text = f"environment.{own} must be {str(must).lower()} for {key} {name!r}: its server has one episode at a time"
                raise RunError(f"environment.{own}", value, OneOf([must]), text, (key,))
    if chosen is not None and chosen.leaves_sandbox and config.sandbox:
        text = (
            f"environment.sandbox must be false for {key} {name!r}, which {chosen.leaves_sandbox}"
        )
        raise RunError("environment.sandbox", True, OneOf([False]), text)


def _check_scorer(config: EnvironmentConfig, verifier: VerifierConfig) -> None:
    """Refuse an environment without rewards if no scorer gives them."""
    chosen = ENVIRONMENTS.get(config.implementation or "")
    if chosen is not None and chosen.needs_scorer and not verifier.rewards:
        key, name = "verifier.scorer", config.implementation
        text = (
            f"{key} is missing: environment.implementation {name!r} gives no reward itself, so nothing would be learned; "
            "set a scorer of the last turn, or write a class whose step returns a reward"
        )
        raise RunError(key, None, text=text, others=("environment.implementation",))


def _check_context(config: EnvironmentConfig, workload: WorkloadConfig) -> None:
    least = workload.max_prompt_tokens
    if config.max_context <= least:
        key = "environment.max_context"
        text = f"{key} must be above workload.max_prompt_tokens={least}, got {config.max_context}"
        others = ("workload.max_prompt_tokens",)
        raise RunError(key, config.max_context, Bounds(least + 1), text, others)


def _check_offload(kinds: Sequence[RolloutConfig]) -> None:
    for kind in kinds:
        if kind.kv_offload is not None:
            key = "rollout.kv_offload"
            text = f"{key} {quantity_text(kind.kv_offload)} is for contexts of several turns; remove it or add [environment]"
            raise RunError(key, kind.kv_offload, text=text, others=("environment",))


def _check_recorded(workload: WorkloadConfig) -> None:
    if workload.lengths is not None and workload.lengths.kind == "episodes":
        key = "workload.lengths.kind"
        text = f"{key} 'episodes' needs the section [environment]; add it with max_turns and max_context"
        raise RunError(key, "episodes", text=text, others=("environment",))
