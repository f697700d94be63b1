"""Check the staleness bound, its correction by the algorithm, and whether a configured clip can act."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from streamrl.engine.presets import System, choose_system
from streamrl.runfile.algorithm_config import CLIP, AlgorithmConfig
from streamrl.runfile.config import Run, num_extra
from streamrl.runfile.findings import Changes, Finding, Fix, Level
from streamrl.runfile.keys import trainer_key
from streamrl.runfile.roles_config import AlgorithmChanges


def find_idle_clips(run: Run) -> Iterator[Finding]:
    """Find configured clips that cannot act."""
    for text in idle_clips(run):
        yield Finding(level="warning", topic="staleness", name="idle-clip", text=text)


def idle_clips(run: Run) -> Iterator[str]:
    """Yield a line for each trainer with a configured clip, different from the default, that cannot act."""
    for number in range(run.num_trainers):
        own = run.followers[number - 1].algorithm if number else run.algorithm
        if sets_clip(own) and (why := _idle_for(run.as_seen_by(number), number > 0)):
            key = f"{trainer_key(number)}.algorithm" if number else "algorithm"
            name, value = (
                ("clip", own.clip) if own.clip_high is None else ("clip_high", own.clip_high)
            )
            yield f"{key}.{name}={value:g} cannot act with framework.optimizer_steps=1: {why}"


def sets_clip(algorithm: AlgorithmConfig | AlgorithmChanges) -> bool:
    """Return whether the run file asks for another clip than the default."""
    return algorithm.clip not in (None, CLIP) or algorithm.clip_high is not None


def _idle_for(run: Run, follows: bool) -> str | None:
    """Return why the reference policy equals the trained policy; None if they may differ.

    A secondary trainer learns from rollouts that the primary trainer's weights sampled.
    """
    if run.framework.optimizer_steps > 1 or run.framework.epochs > 1:
        return None
    correction, system = run.algorithm.corrected_by, choose_system(run.policies)
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


def find(run: Run) -> Iterator[Finding]:
    """Report the maximum staleness, and find settings that make the bound void or leave staleness uncorrected."""
    system = choose_system(run.policies)
    bound = system.staleness_bound
    if not system.keeps_bound and (bound or _keeps(run)):
        yield _finding("warning", "unbounded-staleness", _unbounded(system))
    else:
        yield _finding("ok", "staleness-bound", _bounded(run, system))
    if bound and run.algorithm.corrected_by == "none":
        text = (
            f"rollouts are up to {bound} versions stale, and algorithm.correction 'none' weights them as if "
            f"the newest policy had sampled them"
        )
        yield _finding("warning", "uncorrected", text)
    if bound >= run.algorithm.steps:
        text = (
            f"{_keys_of_bound(system)} lets every prompt of the {run.algorithm.steps} steps start from the "
            f"first weights: nothing that is learned is sampled from"
        )
        yield _finding("warning", "all-at-once", text)
    yield from _left_over(run, system)


def _keeps(run: Run) -> bool:
    """Return whether surplus groups of a step continue in a later step."""
    return run.policies.oversampling > 1 and run.policies.left_over == "keep"


def _keys_of_bound(system: System) -> str:
    also = "" if system.sync_every == 1 else f" with policies.sync_every={system.sync_every}"
    return f"policies.max_staleness={system.max_staleness}{also}"


def _unbounded(system: System) -> str:
    return (
        f"policies.consumption 'greedy' trains on what is complete first: max_staleness={system.max_staleness} bounds "
        f"when a rollout may start, not how often it is overtaken, so a straggler grows staler with every step"
    )


def _left_over(run: Run, system: System) -> Iterator[Finding]:
    """Find settings for surplus groups where there are none, or where none can be used."""
    policies = run.policies
    if policies.left_over == "keep" and policies.oversampling == 1:
        text = "policies.left_over 'keep' keeps nothing: policies.oversampling=1.0 draws no surplus group"
        yield _finding("warning", "nothing-left-over", text)
    if _keeps(run) and policies.over_staleness == "drop" and not system.staleness_bound:
        text = (
            "policies.left_over 'keep' goes on with rollouts one version later, where policies.over_staleness 'drop' "
            "gives them up: policies.max_staleness=0 allows none"
        )
        yield _finding("warning", "kept-in-vain", text)
    if policies.oversampling > 1 and policies.left_over == "drop":
        drawn = run.algorithm.prompts_per_step + num_extra(
            run.policies.oversampling, run.algorithm.prompts_per_step
        )
        text = (
            f"policies.oversampling={policies.oversampling} draws up to {drawn} groups for a step of "
            f"{run.algorithm.prompts_per_step}: the longest are aborted, so that steps train on shorter rollouts"
        )
        yield _finding("ok", "oversampling", text)


def _bounded(run: Run, system: System) -> str:
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
        f"{run.policies.system}: a prompt starts at most {system.max_staleness} steps ahead{seldom} and "
        f"{trains}, so no rollout is trained on more than {bound} versions stale{mixed}"
    )


def _finding(level: Level, name: str, text: str) -> Finding:
    return Finding(level=level, topic="staleness", name=name, text=text)


def _strict(run: Run) -> Iterator[Changes]:
    yield {"policies.consumption": "strict-fifo"}
    yield {"policies.over_staleness": "drop"}


def _corrected(run: Run) -> Iterator[Changes]:
    """Yield corrections.

    Keep the clip if it is configured or has several optimizer steps to act in. Otherwise,
    importance weights alone correct staleness at a lower cost.
    """
    keeps_clip = sets_clip(run.algorithm) or run.framework.optimizer_steps > 1
    yield {"algorithm.correction": "decoupled" if keeps_clip else "token-tis"}


def _fresher(run: Run) -> Iterator[Changes]:
    system = choose_system(run.policies)
    most = min(ceil(system.max_staleness), run.algorithm.steps)
    for bound in range(most - 1, -1, -1):
        yield {"policies.max_staleness": bound}
    for every in range(min(system.sync_every, run.algorithm.steps) - 1, 0, -1):
        yield {"policies.sync_every": every}


def _drop_left_over(run: Run) -> Iterator[Changes]:
    yield {"policies.left_over": "drop"}


FIXES = {
    "nothing-left-over": Fix(_drop_left_over, "set policies.oversampling above 1"),
    "kept-in-vain": Fix(_drop_left_over, "set policies.max_staleness to 1 or more"),
    "unbounded-staleness": Fix(_strict, "train on groups in the order of their draws"),
    "uncorrected": Fix(_corrected, "choose a correction, or policies.max_staleness=0"),
    "all-at-once": Fix(_fresher, "train for more steps"),
}
