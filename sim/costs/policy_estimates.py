"""Compute the latencies and shares that policies need, if the run file does not set them."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

from msgspec.structs import replace

from streamrl.engine.estimates import Latency
from streamrl.engine.systems import moves_caches, needs_latency
from streamrl.hardware.memory import most_running
from streamrl.hardware.resolved import ReplicaHardware, ResolvedRun, resolve
from streamrl.runfile.config import Run
from streamrl.runfile.roles_config import LendingConfig, RolloutConfig
from streamrl.sim.costs.costs import Costs

Points: TypeAlias = tuple[tuple[int, float], ...]
HALVINGS = 60
"""Bisection steps in the search for shares."""


def fill_policies(run: Run, costs: Costs) -> Run:
    """Return the run with the seconds that its policies need; values in the run file stay."""
    resolved, policies = resolve(run), run.policies
    if needs_latency(policies) and policies.latency is None:
        policies = replace(policies, latency=latency_points(resolved.replicas[0], costs))
    if policies.migration != "none" and policies.context_time is None:
        context_time = _context_time(resolved, costs)
        policies = replace(policies, context_time=context_time)
    return replace(
        run,
        policies=policies,
        rollout=_fill_kinds(resolved, costs),
        lending=_fill_lending(resolved, costs),
    )


def empty_policies(run: Run, costs: Costs) -> Run:
    """Return a recorded run without the seconds that `fill_policies` added, so that they can be recomputed."""
    others = tuple(replace(kind, latency=None, share=None) for kind in run.rollout.others)
    empty: Run = replace(
        run,
        policies=replace(run.policies, latency=None, context_time=None),
        rollout=replace(run.rollout, others=others),
        lending=None if run.lending is None else replace(run.lending, share=None),
    )
    return empty if fill_policies(empty, costs) == run else run


def _context_time(resolved: ResolvedRun, costs: Costs) -> float:
    """Return the seconds of a token of context that moves with its rollout, or is computed again."""
    if moves_caches(resolved.run.policies.migration, resolved.run.rollout.migration_transfer):
        return costs.cache_transfer.token_time
    context = resolved.replica.longest_sequence
    return costs.prefill_time(context, context**2 / 2, 0) / context


def latency_points(replica: ReplicaHardware, costs: Costs) -> Points:
    """Return the seconds of a decode step by batch size.

    They are read at half the longest context, the middle of a rollout's life. The largest batch is
    the one that fits at this length, or at the full length if admission reserves it.
    """
    context = replica.longest_sequence / 2
    most = most_running(replica)
    if replica.config.admission == "on-demand":
        most = max(1, min(most, int(costs.kv_capacity / context)))
    batches = [b for b in (2**i for i in range(17)) if b < most] + [most]
    return tuple((b, costs.decode.step_time(b, b * context)) for b in batches)


def _fill_kinds(resolved: ResolvedRun, costs: Costs) -> RolloutConfig:
    """Return the replicas with latency and share of each kind in `rollout.others`, if they are absent."""
    rollout = resolved.run.rollout
    if not rollout.others:
        return rollout
    points = {
        kind: latency_points(replica, costs.of_kind(kind))
        for kind, replica in enumerate(resolved.replicas)
        if kind not in rollout.prefill_kinds
    }
    numbers = tuple(own.replicas for own in rollout.decode_kinds)
    num_rollouts = resolved.run.algorithm.rollouts_per_step
    shares = dict(
        zip(points, even_shares(tuple(points.values()), numbers, num_rollouts), strict=True)
    )
    filled = tuple(
        other
        if other.prefills
        else replace(
            other,
            latency=other.latency or points[kind],
            share=other.share or shares[kind] / shares[0],
        )
        for kind, other in enumerate(rollout.others, start=1)
    )
    return replace(rollout, others=filled)


def _fill_lending(resolved: ResolvedRun, costs: Costs) -> LendingConfig | None:
    """Return the lending with the share of its replicas, if it is absent. They count as if they always generated."""
    run, own, lent = resolved.run, resolved.run.lending, resolved.run.lent
    if own is None or lent is None or own.share is not None or costs.lent is None:
        return own
    there = resolve(run.of_kind(run.rollout.num_kinds)).replica
    points = (
        latency_points(resolved.replicas[0], costs),
        latency_points(there, costs.lent),
    )
    numbers = (run.rollout.replicas, lent.replicas)
    first, share = even_shares(points, numbers, run.algorithm.rollouts_per_step)
    found: LendingConfig = replace(own, share=share / first)
    return found


@lru_cache(maxsize=1024)
def even_shares(
    points: tuple[Points, ...], numbers: tuple[int, ...], num_rollouts: int
) -> tuple[float, ...]:
    """Return the rollouts per replica of each kind for which all need the same time per token.

    Args:
        points: seconds of a decode step by batch size, of each kind.
        numbers: replicas of each kind.
        num_rollouts: rollouts to divide.
    """
    latencies = [*map(Latency, points)]

    def shares(seconds: float) -> tuple[float, ...]:
        return tuple(_share_within(latency, seconds) for latency in latencies)

    low, high = 0.0, max(latency.time(num_rollouts, 1.0, 1) for latency in latencies)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        given = sum(number * share for number, share in zip(numbers, shares(middle), strict=True))
        low, high = (middle, high) if given < num_rollouts else (low, middle)
    return shares(high)


def _share_within(latency: Latency, seconds: float) -> float:
    """Return the rollouts that a replica can advance by one token in `seconds`: at least one."""
    most = latency.most_running
    if seconds >= latency.step_time(most):
        return most * seconds / latency.step_time(most)
    low, high = 1.0, float(most)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if latency.step_time(middle) < seconds else (low, middle)
    return low
