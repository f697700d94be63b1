"""Policies that a run file cannot ask for together; raises `RunError`."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.runfile.config import Run, num_extra, whole_groups
from streamrl.runfile.dispatch_choice import DEFAULT_DISPATCH, dispatch_named
from streamrl.runfile.errors import Bounds, OneOf, RunError, shown
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import LendingConfig, SecondaryTrainerConfig
from streamrl.runfile.workload_config import LengthsConfig


def _check_tail_batching(
    policies: PoliciesConfig, steps: int, lengths: LengthsConfig | None
) -> None:
    """Reject tail batching without a ranker, or past the end of the run."""
    if policies.tail_batching == "none":
        return
    every = policies.tail_every
    if lengths is not None and lengths.ranker == "none":
        raise RunError(
            "policies.tail_batching",
            policies.tail_batching,
            OneOf(["none"]),
            "policies.tail_batching 'defer' needs a ranker that orders prompts by length, "
            "got workload.lengths.ranker 'none'",
            ("workload.lengths.ranker",),
        )
    if steps % every:
        whole = steps - steps % every
        raise RunError(
            "algorithm.steps",
            steps,
            OneOf(n for n in (whole, whole + every) if n),
            f"algorithm.steps must be a multiple of policies.tail_every={every} if "
            f"policies.tail_batching is 'defer', so that the last steps include the longest prompts, "
            f"got {steps}",
            ("policies.tail_every", "policies.tail_batching"),
        )


def _check_learning(policies: PoliciesConfig, group_size: int) -> None:
    """Refuse to learn what comes too late: rollouts must be sent one by one, the longest first."""
    others = ("policies.learns_from_siblings",)
    if not policies.learns_from_siblings:
        return
    for key, value, only in (
        ("policies.dispatch", *_just_in_time(policies)),
        ("policies.order", policies.order or "fifo", "longest-first"),
        ("policies.group_placement", policies.group_placement, "split"),
    ):
        if value != only:
            text = f"{key} must be {only!r} if policies.learns_from_siblings is true, got {value!r}"
            raise RunError(key, value, OneOf([only]), text, others)
    if policies.weight_sync == "between-batches":
        raise RunError(
            "policies.weight_sync",
            policies.weight_sync,
            None,
            "policies.weight_sync 'between-batches' sends whole batches at once, so no rollout waits for lengths of its group; "
            "choose another, or policies.learns_from_siblings = false",
            others,
        )
    if group_size < 2:
        raise RunError(
            "algorithm.group_size",
            group_size,
            Bounds(2),
            f"policies.learns_from_siblings needs an algorithm.group_size of 2 or more, "
            f"got {group_size}",
            others,
        )


def _just_in_time(policies: PoliciesConfig) -> tuple[str, str]:
    """Return the dispatch policy of a run, and one that can wait for places: itself, if it can."""
    chosen = policies.dispatch or DEFAULT_DISPATCH
    return chosen, chosen if dispatch_named(chosen).sends_just_in_time else DEFAULT_DISPATCH


def _check_overrun(policies: PoliciesConfig) -> None:
    """Refuse to move rollouts to replicas of a tail that nobody has made."""
    if policies.migration == "overrun" and not dispatch_named(policies.dispatch).has_tail:
        raise RunError(
            "policies.migration",
            policies.migration,
            OneOf(["none", "consolidate"]),
            "policies.migration 'overrun' needs the replicas for long rollouts of policies.dispatch 'skewness-aware', "
            f"got policies.dispatch {policies.dispatch or DEFAULT_DISPATCH!r}",
            ("policies.dispatch",),
        )


def _check_fraction(bound: float | int | None, prompts: int) -> None:
    """Refuse a part of a step that is less than one group."""
    if bound and not whole_groups(bound, prompts):
        raise RunError(
            "policies.max_staleness",
            bound,
            Bounds(0),
            f"policies.max_staleness={bound} x algorithm.prompts_per_step={prompts} is less than one group",
            ("algorithm.prompts_per_step",),
        )


def _check_over_staleness(policies: PoliciesConfig) -> None:
    """Refuse to drop what is too stale where a step waits for the very groups that were drawn for it."""
    if policies.over_staleness == "drop" and policies.consumption != "greedy":
        raise RunError(
            "policies.over_staleness",
            policies.over_staleness,
            OneOf(["wait"]),
            "policies.over_staleness 'drop' needs policies.consumption 'greedy': strict-fifo waits for the drawn groups, "
            "so none exceeds the bound",
            ("policies.consumption",),
        )


def _check_oversampling(policies: PoliciesConfig, prompts_per_step: int) -> None:
    """Refuse to draw more than a step takes where that cannot leave the slow ones over."""
    key = "policies.oversampling"
    if policies.oversampling == 1:
        return
    text = ""
    waits = policies.waits_for_whole_batches
    if policies.consumption != "greedy":
        text = "needs policies.consumption 'greedy', which trains on the groups that finish first"
    elif policies.system == "one-step-async" if waits is None else waits:
        text = "needs policies.waits_for_whole_batches = false: surplus groups are drawn together with their step"
    elif not num_extra(policies.oversampling, prompts_per_step):
        text = f"adds no group to algorithm.prompts_per_step={prompts_per_step}"
    elif policies.tail_batching != "none":
        text = "cannot be combined with policies.tail_batching 'defer', which fixes the prompts of a step"
    if text:
        text = f"{key}={policies.oversampling} {text}"
        raise RunError(key, policies.oversampling, OneOf([1.0]), text, ("policies.consumption",))


def _check_concurrency(policies: PoliciesConfig) -> None:
    """Refuse to count places where rollouts are sent without asking for one."""
    others = ("policies.concurrency",)
    if policies.concurrency == "fixed":
        return
    for key, value, only in (
        ("policies.dispatch", *_just_in_time(policies)),
        ("policies.group_placement", policies.group_placement, "split"),
    ):
        if value != only:
            text = f"{key} must be {only!r} if policies.concurrency is {policies.concurrency!r}, got {value!r}"
            raise RunError(key, value, OneOf([only]), text, others)
    if policies.weight_sync == "between-batches":
        raise RunError(
            "policies.weight_sync",
            policies.weight_sync,
            None,
            f"policies.weight_sync 'between-batches' sends whole batches at once, so running rollouts cannot be limited; "
            f"choose another, or policies.concurrency = 'fixed', got {policies.concurrency!r}",
            others,
        )


def _check_promotion(
    policies: PoliciesConfig,
    followers: tuple[SecondaryTrainerConfig, ...],
    trainer_pool: str,
    optimizer_steps: int,
) -> None:
    """Refuse to promote nobody, or somebody who cannot lead."""
    key = "policies.promote"
    if policies.promote is None:
        if policies.on_leader_loss == "promote":
            text = f"{key} is missing: policies.on_leader_loss 'promote' needs the name of a secondary trainer"
            raise RunError(key, None, str, text, ("policies.on_leader_loss",))
        return
    names = [follower.name for follower in followers]
    if policies.promote not in names:
        known = OneOf(names) if names else "absent without secondary trainers"
        text = f"{key} must be {known}, got {shown(policies.promote)}"
        raise RunError(key, policies.promote, OneOf([*names, None]), text)
    follower = followers[names.index(policies.promote)]
    for is_wrong, why in (
        (follower.counts_only, "which only counts and has no weights"),
        (
            follower.pool != trainer_pool,
            f"which is not in the primary trainer's pool {trainer_pool!r}",
        ),
        (policies.shares_gpus, "because the primary trainer shares its GPUs with replicas"),
        (optimizer_steps > 1, "because a batch has several optimizer steps"),
    ):
        if is_wrong:
            text = f"{key} cannot be {policies.promote!r}, {why}"
            raise RunError(key, policies.promote, OneOf([None]), text)


def _pushes_late(policies: PoliciesConfig) -> bool:
    """Return whether a barrier holds weights back while rollouts of later steps are generated."""
    sync, most = policies.weight_sync, policies.max_staleness
    if most is None:
        return sync == "barrier" and policies.system in ("stream-async", "fully-async")
    return most > 0 and (sync == "barrier" or (sync is None and policies.system == "disaggregated"))


def _check_lending(policies: PoliciesConfig, lending: LendingConfig | None) -> None:
    """Refuse to lend GPUs where a policy reckons with one kind of replica, or with replicas that stay."""
    if lending is None:
        return
    for key, value, only, instead in (
        ("policies.system", policies.system, "colocated", "'stream-sync'"),
        ("policies.resize", policies.resize, "adjust", "'keep'"),
        ("policies.migration", policies.migration, "consolidate", "'none'"),
        ("policies.migration", policies.migration, "overrun", "'none'"),
        ("policies.concurrency", policies.concurrency, "kv-pressure", "'fixed'"),
        ("policies.dispatch", policies.dispatch, "skewness-aware", "absent"),
        ("policies.weight_sync", policies.weight_sync, "between-batches", "absent"),
    ):
        if value == only:
            text = f"{key} {value!r} does not work with [lending], whose replicas come and go; set it to {instead}, or remove [lending]"
            raise RunError(key, value, None, text, ("lending",))
    if policies.system == "one-step-async" and policies.weight_sync in (None, "barrier"):
        key = "policies.system"
        text = f"{key} 'one-step-async' does not work with [lending], because its weights are pushed only when no rollout is left; set it to 'stream-async', or remove [lending]"
        raise RunError(key, policies.system, None, text, ("lending",))
    if _pushes_late(policies):
        key = "policies.weight_sync"
        text = f"{key} 'barrier' does not work with [lending] if rollouts may be stale, because weights are pushed only when no rollout is left; set {key} to 'drain-then-load', or policies.max_staleness to 0"
        raise RunError(key, policies.weight_sync, None, text, ("policies.max_staleness", "lending"))
    if policies.promote is not None:
        text = f"policies.promote {policies.promote!r} does not work with [lending], which uses the GPUs of trainer 0; remove one of them"
        raise RunError("policies.promote", policies.promote, OneOf([None]), text, ("lending",))


POLICY_CHECKS: tuple[Callable[[Run], None], ...] = (
    lambda run: _check_tail_batching(run.policies, run.algorithm.steps, run.workload.lengths),
    lambda run: _check_learning(run.policies, run.algorithm.group_size),
    lambda run: _check_overrun(run.policies),
    lambda run: _check_promotion(
        run.policies, run.followers, run.trainer.pool, run.framework.optimizer_steps
    ),
    lambda run: _check_fraction(run.policies.max_staleness, run.algorithm.prompts_per_step),
    lambda run: _check_over_staleness(run.policies),
    lambda run: _check_oversampling(run.policies, run.algorithm.prompts_per_step),
    lambda run: _check_concurrency(run.policies),
    lambda run: _check_lending(run.policies, run.lending),
)
"""Each raises `RunError` where a policy lacks what it works with."""
