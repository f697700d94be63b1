"""What may not stand together in a run file: checks that need more than one key, or a bound."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import get_type_hints

from streamrl.runfile.config import Run
from streamrl.runfile.failures_config import check_failures
from streamrl.runfile.plan_checks import check_plan
from streamrl.runfile.policy_checks import check_policies
from streamrl.runfile.pools import check_pools
from streamrl.runfile.section import Section
from streamrl.runfile.workload_config import TAIL_SHARE


def check_run(run: Run) -> None:
    """Raise `ValueError` where values contradict each other."""
    for check in run_checks():
        check(run)


def run_checks() -> tuple[Callable[[Run], None], ...]:
    """Give the checks that need more than one key, each of which raises `ValueError`; later ones rely on earlier ones."""
    return (
        _check_model,
        _check_positive,
        check_pools,
        _check_algorithm,
        _check_lengths,
        _check_sync,
        _check_latency,
        _check_shares,
        check_policies,
        check_plan,
        lambda run: check_failures(run.failures),
    )


def _check_model(run: Run) -> None:
    if (run.model.name is None) == (run.model.path is None):
        raise ValueError("model needs exactly one of name and path")


def _check_positive(run: Run) -> None:
    for section in (
        run.rollout,
        run.trainer,
        run.algorithm,
        run.workload,
        run.verifier,
        run.sync,
        run.execute,
    ):
        for key, kind in get_type_hints(type(section)).items():
            value = getattr(section, key)
            if kind is int and value < 1:
                raise ValueError(f"{_name(run, section)}.{key} must be at least 1, got {value}")
    for name, pool in run.cluster.pools.items():
        for key, value in (("nodes", pool.nodes), ("gpus_per_node", pool.gpus_per_node)):
            if value < 1:
                raise ValueError(f"cluster.pools.{name}.{key} must be at least 1, got {value}")
    if not 0 < run.rollout.memory_utilization <= 1:
        raise ValueError(
            f"rollout.memory_utilization must be in (0, 1], got {run.rollout.memory_utilization}"
        )
    for name, factor in (
        ("generation_factor", run.costs.generation_factor),
        ("training_factor", run.costs.training_factor),
    ):
        if not (isfinite(factor) and factor > 0):
            raise ValueError(f"costs.{name} must be above 0, got {factor}")
    for name, number, least in (
        ("seed", run.seed, 0),
        ("warm_up_steps", run.warm_up_steps, 0),
        ("policies.max_staleness", run.policies.max_staleness, 0),
        ("policies.max_attempts", run.policies.max_attempts, 1),
        ("policies.max_restarts", run.policies.max_restarts, 0),
        ("policies.resize_unit", run.policies.resize_unit, 1),
        ("policies.max_replicas", run.policies.max_replicas, 1),
        ("policies.resize_window", run.policies.resize_window, 1),
        ("policies.tail_every", run.policies.tail_every, 2),
        ("policies.shrink_after", run.policies.shrink_after, 1),
    ):
        if number is not None and number < least:
            raise ValueError(f"{name} must be {least} or more, got {number}")


def _check_algorithm(run: Run) -> None:
    algorithm = run.algorithm
    if algorithm.trains_whole_groups and algorithm.group_size < 2:
        raise ValueError(
            f"algorithm.group_size must be at least 2 for {algorithm.name}, "
            f"got {algorithm.group_size}"
        )
    if algorithm.rollouts_per_step < run.trainer.data_parallel:
        raise ValueError(
            f"algorithm.prompts_per_step x group_size gives {algorithm.rollouts_per_step} rollouts, "
            f"fewer than trainer.data_parallel={run.trainer.data_parallel}"
        )


def _check_lengths(run: Run) -> None:
    share = run.workload.informative_share
    if not 0 <= share <= 1:
        raise ValueError(f"workload.informative_share must be in [0, 1], got {share}")
    lengths = run.workload.lengths
    if lengths is None:
        return
    for key, scale in (("scale", lengths.scale), ("scale_to", lengths.scale_to)):
        if scale is not None and not (isfinite(scale) and scale > 0):
            raise ValueError(f"workload.lengths.{key} must be above 0, got {scale}")
    if lengths.drift_steps is not None and lengths.drift_steps < 2:
        raise ValueError(
            f"workload.lengths.drift_steps must be 2 or more, got {lengths.drift_steps}"
        )
    most = run.workload.max_prompt_tokens
    if not 1 <= lengths.prompt_tokens <= most:
        raise ValueError(
            f"workload.lengths.prompt_tokens must be between 1 and workload.max_prompt_tokens="
            f"{most}, got {lengths.prompt_tokens}"
        )


def _check_latency(run: Run) -> None:
    points = run.policies.latency
    if points is None:
        return
    batches = [batch for batch, _ in points]
    if not batches or batches != sorted(set(batches)) or batches[0] < 1:
        raise ValueError(
            f"policies.latency must hold batches in rising order from 1, got {batches}"
        )
    for batch, seconds in points:
        if not (isfinite(seconds) and seconds > 0):
            raise ValueError(f"policies.latency at batch {batch} must be positive, got {seconds}")


def _check_shares(run: Run) -> None:
    """Raise `ValueError` where a share of the tail's dispatch, or of a ranker, is out of bounds."""
    shares: list[tuple[str, float | None, float]] = [
        ("policies.tail_share", run.policies.tail_share, 0)
    ]
    if (lengths := run.workload.lengths) is not None:
        shares += [
            ("workload.lengths.ranker_recall", lengths.ranker_recall, TAIL_SHARE),
            ("workload.lengths.ranker_recall_to", lengths.ranker_recall_to, TAIL_SHARE),
            ("workload.lengths.ranker_correlation", lengths.ranker_correlation, 0),
        ]
        if lengths.ranker_history < 1:
            raise ValueError(
                f"workload.lengths.ranker_history must be at least 1, got {lengths.ranker_history}"
            )
    for name, share, least in shares:
        if share is not None and not least <= share <= 1:
            raise ValueError(f"{name} must be in [{least:g}, 1], got {share}")


def _check_sync(run: Run) -> None:
    sync = run.sync
    if not sync.bucket_size > 0:
        raise ValueError(f"sync.bucket_size must be above 0, got {sync.bucket_size:g} bytes")
    if not 0 < sync.changed_share <= 1:
        raise ValueError(f"sync.changed_share must be in (0, 1], got {sync.changed_share}")
    if sync.mode == "delta" and run.model.dtype == "float32":
        raise ValueError(
            "sync.mode 'delta' needs a model.dtype of 16 bits, got 'float32', "
            "in which a step changes nearly every value"
        )
    if sync.backend == "nccl-reshard" and sync.mode != "full":
        raise ValueError(
            f"sync.backend 'nccl-reshard' moves shards of all weights, so sync.mode must be 'full', "
            f"got {sync.mode!r}"
        )


def _name(run: Run, section: Section) -> str:
    return next(key for key in run.__struct_fields__ if getattr(run, key) is section)
