"""List the sizes of the side that computes rewards on GPUs, and compute the seconds that rewards of a batch take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.hardware.memory import check_reward_memory
from streamrl.hardware.resolved import RewardHardware
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.roles_config import VerifierConfig
from streamrl.sim.costs.reward_model import ModelRewards, StatedRewards
from streamrl.sim.planner.layouts import sizes
from streamrl.sim.planner.stage_times import DealtBatch

MOST_SIZES = 8
"""Sizes that are tried in a pool by default. Each has at least twice the GPUs of the one before."""
SAMPLE = 1024
"""Rollouts of a batch whose calls are computed. The others take as long per token."""


class RewardReplicas(NamedTuple):
    """The GPUs that compute rewards: replicas of a reward model."""

    pool: str
    workers: int
    gpus_per_worker: int

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.workers * self.gpus_per_worker

    def change(self, verifier: VerifierConfig) -> VerifierConfig:
        """Return the section of the run file with these replicas."""
        changed: VerifierConfig = replace(verifier, **self._asdict())
        return changed


def find_reward_replicas(
    reward: RewardHardware | None,
    verifier: VerifierConfig,
    pools: Mapping[str, PoolConfig],
    plan: PlanConfig,
    rollouts_per_step: int,
) -> list[RewardReplicas]:
    """Return the replicas of the reward model that plans may have; none if rewards need no GPU.

    Args:
        reward: the reward model, if the run has one.
        verifier: the section of the run file.
        pools: the offer.
        plan: the section `[plan]`.
        rollouts_per_step: rollouts whose rewards a step needs.

    Raises:
        RunError: no pool may have them, or the reward model fits no GPU.
    """
    names = [] if verifier.pool is None else plan.reward_pools or [verifier.pool]
    calls = ceil(rollouts_per_step / verifier.max_rollouts_per_call)
    found: list[RewardReplicas] = []
    refusals: list[RunError] = []
    for name in names:
        try:
            if reward is not None:
                check_reward_memory(replace(reward, pool=pools[name]))
            found += _sizes_in(name, pools[name], verifier, plan, calls)
        except RunError as error:
            refusals.append(error)
    if names and not found:
        raise refusals[0] if refusals else _no_size(names, verifier.gpus_per_worker)
    return found


def least_gpus(choices: Sequence[RewardReplicas | None]) -> dict[str, int]:
    """Return the GPUs by pool that rewards take in all of several choices."""
    pools = dict.fromkeys(each.pool for each in choices if each is not None)
    return {
        pool: min(each.num_gpus if each and each.pool == pool else 0 for each in choices)
        for pool in pools
    }


def _sizes_in(
    name: str, pool: PoolConfig, verifier: VerifierConfig, plan: PlanConfig, calls: int
) -> list[RewardReplicas]:
    """Return the replicas in one pool, the fewest first.

    Without `plan.reward_gpus` they are the run's own, and a few others. More replicas than `calls`,
    the calls of a step, would stay idle.
    """
    each = verifier.gpus_per_worker
    if plan.reward_gpus is not None:
        counts = [n for n in plan.reward_gpus if n <= pool.num_gpus and n % each == 0]
    else:
        open_sizes = [n for n in sizes(pool, plan.unit) if n % each == 0]
        counts = [n for n in _doubling(open_sizes) if n == open_sizes[0] or n // each <= calls]
        counts += [verifier.num_gpus] if verifier.num_gpus in open_sizes else []
    return [RewardReplicas(name, num_gpus // each, each) for num_gpus in sorted(set(counts))]


def _doubling(open_sizes: Sequence[int]) -> list[int]:
    """Return the smallest size, and further ones that are each at least twice the one before."""
    found: list[int] = []
    for size in open_sizes:
        if not found or size >= 2 * found[-1]:
            found.append(size)
    return found[:MOST_SIZES]


def _no_size(names: Sequence[str], each: int) -> RunError:
    key = "verifier.gpus_per_worker"
    text = (
        f"{key}={each}: no size of a side in pool {', '.join(names)} is a multiple of it; "
        "set plan.reward_gpus"
    )
    return RunError(key, each, None, text, ("plan.reward_gpus", "plan.unit"))


# Seconds ------------------------------------------------------------------------------------------


class RewardTimes(NamedTuple):
    """Seconds of the rewards of a step, on all workers together; zero if they take no time."""

    sorted: float
    """Seconds if each call has rollouts of similar length, as when a batch begins together and its
    short rollouts end first. No order takes less.
    """
    mixed: float
    """Seconds if the lengths in a call are mixed, as when many batches are under way. Each rollout is
    padded to the longest of its pass.
    """
    last: float
    """Seconds of the call with the longest rollout alone. It is the last to finish."""

    def of_batches(self, num_batches: int) -> float:
        """Return the seconds of a step's rewards if so many batches are under way at any time."""
        return self.mixed + (self.sorted - self.mixed) / num_batches


def reward_times(
    costs: StatedRewards | ModelRewards | None,
    verifier: VerifierConfig,
    batches: Sequence[DealtBatch],
) -> RewardTimes:
    """Return the seconds of computing the rewards of a batch, averaged over several batches.

    Args:
        costs: the costs of the reward model, if the run has one.
        verifier: the workers or replicas that compute rewards.
        batches: the rollouts of each step.
    """
    costs = costs or StatedRewards(verifier.time)
    if isinstance(costs, StatedRewards) and not costs.rollout_time:
        return RewardTimes(0.0, 0.0, 0.0)
    found = [_times_of(costs, verifier, batch.lengths) for batch in batches]
    return RewardTimes(*(sum(column) / len(column) for column in zip(*found, strict=True)))


def _times_of(
    costs: StatedRewards | ModelRewards, verifier: VerifierConfig, lengths: Sequence[int]
) -> RewardTimes:
    part, most = lengths[:SAMPLE], verifier.max_rollouts_per_call
    share = sum(lengths) / sum(part) / verifier.workers
    return RewardTimes(
        sorted=share * _calls_time(costs, sorted(part), most),
        mixed=share * _calls_time(costs, part, most),
        last=costs.call_time([max(lengths)]),
    )


def _calls_time(costs: StatedRewards | ModelRewards, lengths: Sequence[int], most: int) -> float:
    return sum(costs.call_time(call) for call in _chunks(lengths, most))


def _chunks(lengths: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    return (lengths[first : first + most] for first in range(0, len(lengths), most))
