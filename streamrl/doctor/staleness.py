"""Check the staleness bound, its correction by the algorithm, and whether a configured clip can act."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from streamrl.engine.presets import System, choose_system
from streamrl.runfile.algorithm_config import CLIP, AlgorithmConfig
from streamrl.runfile.config import Run, num_extra
from streamrl.runfile.findings import Changes, Finding, Fix, Level
from streamrl.runfile.keys import trainer_key
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import AlgorithmChanges
from streamrl.runfile.simulation_config import FrameworkConfig


def find_idle_clips(run: Run) -> Iterator[Finding]:
    """Find trainers with a configured clip, different from the default, that cannot act."""
    for number in range(run.num_trainers):
        own = run.followers[number - 1].algorithm if number else run.algorithm
        if not sets_clip(own):
            continue
        seen = run.as_seen_by(number)
        system = choose_system(seen.policies)
        if why := _idle_for(seen.algorithm, seen.framework, system, number > 0):
            key = f"{trainer_key(number)}.algorithm" if number else "algorithm"
            name, value = (
                ("clip", own.clip) if own.clip_high is None else ("clip_high", own.clip_high)
            )
            text = f"{key}.{name}={value:g} cannot act with framework.optimizer_steps=1: {why}"
            yield _finding("warning", "idle-clip", text)


def sets_clip(algorithm: AlgorithmConfig | AlgorithmChanges) -> bool:
    """Return whether the run file asks for another clip than the default."""
    return algorithm.clip not in (None, CLIP) or algorithm.clip_high is not None


def _idle_for(
    algorithm: AlgorithmConfig, framework: FrameworkConfig, system: System, follows: bool
) -> str | None:
    """Return why the reference policy equals the trained policy; None if they may differ.

    A secondary trainer learns from rollouts that the primary trainer's weights sampled.
    """
    if framework.optimizer_steps > 1 or framework.epochs > 1:
        return None
    correction = algorithm.corrected_by
    if correction == "decoupled":
        return "correction 'decoupled' holds the policy near the one that the batch began with, and trains on it as that one"
    is_fresh = not follows and not system.staleness_bound and system.keeps_bound
    if correction in ("none", "gspo") and is_fresh:
        return f"correction {correction!r} holds the policy near the one that sampled, which it still is with policies.max_staleness=0"
    return None


CLIP_FIXES = {
    "idle-clip": Fix(
        lambda run: iter(()),
        "set framework.optimizer_steps above 1, as DAPO has it, or leave the clip as it comes",
    )
}


MIXED = ("load-in-flight", "abort-and-resume")
"""Weight-sync modes that sample one rollout from several versions."""


def find(policies: PoliciesConfig, algorithm: AlgorithmConfig) -> Iterator[Finding]:
    """Report the maximum staleness, and find settings that make the bound void or leave staleness uncorrected."""
    system = choose_system(policies)
    bound = system.staleness_bound
    if not system.keeps_bound and (bound or _keeps(policies)):
        yield _finding("warning", "unbounded-staleness", _unbounded(system))
    else:
        yield _finding("ok", "staleness-bound", _bounded(policies.system, system))
    if bound and algorithm.corrected_by == "none":
        text = (
            f"rollouts are up to {bound} versions stale, and algorithm.correction 'none' weights them as if "
            f"the newest policy had sampled them"
        )
        yield _finding("warning", "uncorrected", text)
    if bound >= algorithm.steps:
        text = (
            f"{_keys_of_bound(system)} lets every prompt of the {algorithm.steps} steps start from the "
            f"first weights: nothing that is learned is sampled from"
        )
        yield _finding("warning", "all-at-once", text)
    yield from _left_over(policies, algorithm.prompts_per_step, bound)


def _keeps(policies: PoliciesConfig) -> bool:
    """Return whether surplus groups of a step continue in a later step."""
    return policies.oversampling > 1 and policies.left_over == "keep"


def _keys_of_bound(system: System) -> str:
    also = "" if system.sync_every == 1 else f" with policies.sync_every={system.sync_every}"
    return f"policies.max_staleness={system.max_staleness}{also}"


def _unbounded(system: System) -> str:
    return (
        f"policies.consumption 'greedy' trains on what is complete first: max_staleness={system.max_staleness} bounds "
        f"when a rollout may start, not how often it is overtaken, so a straggler grows staler with every step"
    )


def _left_over(policies: PoliciesConfig, prompts: int, bound: int) -> Iterator[Finding]:
    """Find settings for surplus groups where there are none, or where none can be used."""
    if policies.left_over == "keep" and policies.oversampling == 1:
        text = "policies.left_over 'keep' keeps nothing: policies.oversampling=1.0 draws no surplus group"
        yield _finding("warning", "nothing-left-over", text)
    if _keeps(policies) and policies.over_staleness == "drop" and not bound:
        text = (
            "policies.left_over 'keep' goes on with rollouts one version later, where policies.over_staleness 'drop' "
            "gives them up: policies.max_staleness=0 allows none"
        )
        yield _finding("warning", "kept-in-vain", text)
    if policies.oversampling > 1 and policies.left_over == "drop":
        drawn = prompts + num_extra(policies.oversampling, prompts)
        text = (
            f"policies.oversampling={policies.oversampling} draws up to {drawn} groups for a step of "
            f"{prompts}: the longest are aborted, so that steps train on shorter rollouts"
        )
        yield _finding("ok", "oversampling", text)


def _bounded(name: str, system: System) -> str:
    """Return which bound holds and why: see `streamrl.engine.policies.staleness`."""
    bound = system.staleness_bound
    mixed = (
        f"; {system.weight_sync} samples one rollout from several versions, its first token's counts"
        if system.weight_sync in MIXED and bound
        else ""
    )
    trains = (
        f"{system.consumption} trains in the order of the draws"
        if system.consumption == "strict-fifo" or not bound
        else "what would be staler is dropped"
    )
    seldom = (
        ""
        if system.sync_every == 1
        else f", weights are pushed every {system.sync_every} steps (policies.sync_every)"
    )
    return (
        f"{name}: a prompt starts at most {system.max_staleness} steps ahead{seldom} and "
        f"{trains}, so no rollout is trained on more than {bound} versions stale{mixed}"
    )


def _finding(level: Level, name: str, text: str) -> Finding:
    return Finding(level=level, topic="staleness", name=name, text=text)


def _corrected(algorithm: AlgorithmConfig, optimizer_steps: int) -> Iterator[Changes]:
    """Yield corrections.

    Keep the clip if it is configured or has several optimizer steps to act in. Otherwise,
    importance weights alone correct staleness at a lower cost.
    """
    keeps_clip = sets_clip(algorithm) or optimizer_steps > 1
    yield {"algorithm.correction": "decoupled" if keeps_clip else "token-tis"}


def _fresher(system: System, steps: int) -> Iterator[Changes]:
    most = min(ceil(system.max_staleness), steps)
    for bound in range(most - 1, -1, -1):
        yield {"policies.max_staleness": bound}
    for every in range(min(system.sync_every, steps) - 1, 0, -1):
        yield {"policies.sync_every": every}


STRICT: tuple[Changes, ...] = (
    {"policies.consumption": "strict-fifo"},
    {"policies.over_staleness": "drop"},
)
DROP_LEFT_OVER: tuple[Changes, ...] = ({"policies.left_over": "drop"},)

FIXES = {
    "nothing-left-over": Fix(lambda run: iter(DROP_LEFT_OVER), "set policies.oversampling above 1"),
    "kept-in-vain": Fix(
        lambda run: iter(DROP_LEFT_OVER), "set policies.max_staleness to 1 or more"
    ),
    "unbounded-staleness": Fix(
        lambda run: iter(STRICT), "train on groups in the order of their draws"
    ),
    "uncorrected": Fix(
        lambda run: _corrected(run.algorithm, run.framework.optimizer_steps),
        "choose a correction, or policies.max_staleness=0",
    ),
    "all-at-once": Fix(
        lambda run: _fresher(choose_system(run.policies), run.algorithm.steps),
        "train for more steps",
    ),
}
