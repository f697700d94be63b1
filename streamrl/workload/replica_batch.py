"""Compute mean lengths of a run and the limit of a replica's batch: KV memory, max_running or admission."""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from streamrl.engine.presets import choose_system, window_of
from streamrl.hardware.memory import kv_capacity, most_running
from streamrl.hardware.resolved import ResolvedRun
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.config import Run
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.workload.workload import BLOCK, RecordedGroups, load_source


class MeanLengths(NamedTuple):
    """Tokens of an average rollout."""

    prompt: float
    output: float
    context: float
    """Mean context during decoding, at a random moment; long rollouts weigh more because they run longer."""
    cut_off: float
    """Share of the outputs that would be longer than `rollout.max_tokens` and are cut off there."""

    @property
    def total(self) -> float:
        """Return prompt plus output tokens."""
        return self.prompt + self.output


def mean_lengths(run: Run) -> MeanLengths | None:
    """Return the mean lengths of the first groups of a run, without drift; None if there are no lengths.

    Unreadable lengths also give None, because the check of files reports them.
    """
    if run.workload.lengths is None:
        return None
    try:
        return _mean(
            run.workload.lengths, run.algorithm.group_size, run.rollout.max_tokens, run.seed
        )
    except ValueError:
        return None


@lru_cache(maxsize=64)
def _mean(config: LengthsConfig, group_size: int, most: int, seed: int) -> MeanLengths:
    source = load_source(config)
    if isinstance(source, RecordedGroups):
        lengths, prompts = source.block(0, BLOCK, group_size)
    else:
        lengths, prompts = source.sample(np.random.default_rng([seed, 0]), BLOCK, group_size)
    whole = np.rint(lengths * config.scale)
    capped = np.clip(whole, 1, most)
    prompt, halfway = float(prompts.mean()), float((capped**2).sum() / capped.sum() / 2)
    return MeanLengths(prompt, float(capped.mean()), prompt + halfway, float((whole > most).mean()))


Limit = Literal["memory", "max_running", "share"]


class ReplicaBatch(NamedTuple):
    """Number of rollouts that a replica can decode at once, for each of three limits."""

    held: float
    """Rollouts that fit the KV cache, each with the mean context of a running one."""
    max_running: int
    share: float
    """The replica's share of the rollouts that admission lets run at once."""

    @property
    def limit(self) -> Limit:
        """Return the smallest of the three limits; on a tie, the share comes first."""
        least = min(self)
        if self.share == least:
            return "share"
        return "max_running" if self.max_running == least else "memory"


def replica_batch(resolved: ResolvedRun) -> ReplicaBatch | None:
    """Return the limits of a replica's batch; None if the run file names no lengths.

    Raises:
        ValueError: the model does not fit a replica.
    """
    run = resolved.run
    lengths = mean_lengths(run)
    if lengths is None:
        return None
    replica = resolved.replica
    held = kv_capacity(replica) / lengths.context
    if run.rollout.admission == "reserve":
        running = most_running(replica)
        held = running if running < run.rollout.max_running else inf
    share = rollouts_under_way(run.policies, run.algorithm) / run.rollout.num_decode_replicas
    return ReplicaBatch(held, run.rollout.max_running, share)


def rollouts_under_way(policies: PoliciesConfig, algorithm: AlgorithmConfig) -> int:
    """Return the largest number of rollouts that admission lets run at once, in whole batches."""
    window = window_of(policies, algorithm.prompts_per_step)
    if choose_system(policies).waits_for_whole_batches:
        groups = min(window.sync_every, algorithm.steps) * algorithm.prompts_per_step
    else:
        groups = window.num_allowed(0, algorithm.steps) + window.num_extra
    return groups * algorithm.group_size
