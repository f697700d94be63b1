"""Build the workload section that simulates a recorded run again: lengths, group rewards, informative share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import fsum
from pathlib import Path
from statistics import mean

import msgspec

from streamrl.engine.messages import (
    HELD_OUT,
    Drop,
    PromptsDrawn,
    RunStarted,
    Skip,
    Stepped,
    Train,
    TrainerLost,
    Verified,
)
from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import LEADER, UNIFORM
from streamrl.runfile.workload_config import LengthsConfig, WorkloadConfig

MOST_MEANS = 100
"""Maximum number of different mean rewards of groups. With rewards of 0 and 1 there are `group_size` + 1."""


def recorded_workload(trace: Trace, file: Path) -> WorkloadConfig:
    """Return the workload of a recorded run. Lengths and predicted lengths are read from its trace file."""
    config = trace.run.workload
    lengths = LengthsConfig(
        kind="trace",
        source=str(file),
        ranker="recorded",
        prompt_tokens=config.max_prompt_tokens,  # the trace has the real number for each prompt
    )
    workload: WorkloadConfig = msgspec.structs.replace(
        config,
        lengths=lengths,
        informative_share=informative_share(trace),
        group_rewards=group_rewards(trace),
    )
    return workload


def group_rewards(trace: Trace) -> tuple[tuple[float, float], ...]:
    """Return the mean rewards of groups in an executed run, each with the share of groups that had it.

    They are computed only if a trainer selects groups by rewards. More than `MOST_MEANS` different
    means become as many quantiles. A simulated run returns the value in its run file.
    """
    if trace.world == "simulated" or not trace.run.filters_by_reward:
        return trace.run.workload.group_rewards
    means = sorted(_mean_rewards(trace))
    if len(set(means)) > MOST_MEANS:
        means = [means[(2 * n + 1) * len(means) // (2 * MOST_MEANS)] for n in range(MOST_MEANS)]
    return tuple((mean, count / len(means)) for mean, count in Counter(means).items())


def _mean_rewards(trace: Trace) -> Iterator[float]:
    """Yield the mean reward of each group that became complete."""
    size = trace.run.algorithm.group_size
    incomplete: dict[int, list[float]] = {}
    for _, event, _ in trace.entries:
        if isinstance(event, Verified) and event.rollout < HELD_OUT:
            rewards = incomplete.setdefault(event.rollout // size, [])
            rewards.append(event.reward)
            if len(rewards) == size:
                yield fsum(incomplete.pop(event.rollout // size)) / size


def informative_share(trace: Trace) -> float:
    """Return the share of the primary trainer's rollouts with a non-zero advantage; 1 where it has no rollouts.

    Rollouts count if it trained on them, or left them out because the rewards of their group were
    all equal. With a group baseline, the advantage is zero where all rewards of the group are
    equal. With the mean of the last batch as baseline, it is zero where the reward equals that
    mean, which is 0 in the first step. Simulated rewards carry no information, so a simulation
    takes the share from its run file.
    """
    if trace.world == "simulated":
        return trace.run.workload.informative_share
    whole_groups = trace.run.algorithm.trains_whole_groups
    is_informative = list(_in_group(trace) if whole_groups else _against_last_batch(trace))
    return sum(is_informative) / len(is_informative) if is_informative else 1.0


def _in_group(trace: Trace) -> Iterator[bool]:
    """Yield for each trained rollout whether the rewards of its group differ."""
    rewards: dict[int, float] = {}
    siblings: dict[int, tuple[int, ...]] = {}
    for _, event, commands in trace.entries:
        match event:
            case Verified(rollout, reward):
                rewards[rollout] = reward
            case PromptsDrawn():
                siblings.update(
                    (r, drawn.rollouts) for drawn in event.groups for r in drawn.rollouts
                )
            case _:
                pass  # has no reward
        for command in commands:
            if isinstance(command, Train) and command.trainer == LEADER:
                for rollout in command.rollouts:
                    yield len({rewards[other] for other in siblings[rollout]}) > 1
            elif isinstance(command, Skip) and (command.trainer, command.reason) == (
                LEADER,
                UNIFORM,
            ):
                yield from [False] * trace.run.algorithm.group_size


def _against_last_batch(trace: Trace) -> Iterator[bool]:
    """Yield for each trained rollout whether its reward differs from the mean of the last step's batch."""
    rewards: dict[int, float] = {}
    groups: dict[int, tuple[int, ...]] = {}
    batch: dict[int, None] = {}
    baseline: float | None = 0.0
    for _, event, commands in trace.entries:
        match event:
            case RunStarted(version) if version:
                baseline = None  # it is in the checkpoint, not in the trace
            case Verified(rollout, reward):
                rewards[rollout] = reward
            case PromptsDrawn():
                groups.update((drawn.group, drawn.rollouts) for drawn in event.groups)
            case Stepped(_, trainer) if trainer == LEADER:
                baseline, batch = mean(rewards[rollout] for rollout in batch), {}
            case TrainerLost(trainer) if trainer == LEADER:
                baseline, batch = None, {}  # it is in the checkpoint, not in the trace
            case _:
                pass  # has no reward
        for command in commands:
            match command:
                case Train(rollouts, trainer) if trainer == LEADER:
                    batch.update(dict.fromkeys(rollouts))
                    yield from (rewards[rollout] != baseline for rollout in rollouts)
                case Skip(trainer=trainer) if trainer != LEADER:
                    pass  # the primary trainer still trains on it
                case Drop(group) | Skip(group):
                    for rollout in groups[group]:
                        batch.pop(rollout, None)
                case _:
                    pass  # does not change the batch
