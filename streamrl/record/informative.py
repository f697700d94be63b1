"""What a recorded run worked on: its lengths, and which rollouts had a gradient."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.engine.messages import PromptsDrawn, Train, Verified
from streamrl.record.trace import Trace
from streamrl.runfile.workload_config import LengthsConfig, WorkloadConfig


def recorded_workload(trace: Trace, file: Path) -> WorkloadConfig:
    """Give the workload that a run had: the lengths in its trace file, and the share of its advantages."""
    workload: WorkloadConfig = msgspec.structs.replace(
        trace.run.workload,
        lengths=LengthsConfig(kind="trace", source=str(file)),
        informative_share=informative_share(trace),
    )
    return workload


def informative_share(trace: Trace) -> float:
    """Give the share of trained rollouts with a non-zero advantage, 1 where none was trained on.

    An advantage under a group baseline is zero where all rewards of the group are equal, and one without a
    baseline where the reward is zero.
    """
    rewards: dict[int, float] = {}
    siblings: dict[int, tuple[int, ...]] = {}
    trained: list[int] = []
    for _, event, commands in trace.entries:
        match event:
            case Verified(rollout, reward):
                rewards[rollout] = reward
            case PromptsDrawn():
                siblings.update(
                    (r, group.rollouts) for group in event.groups for r in group.rollouts
                )
            case _:
                pass  # says nothing of rewards
        for command in commands:
            if isinstance(command, Train):
                trained.extend(command.rollouts)
    has_baseline = trace.run.algorithm.trains_whole_groups
    informative = sum(
        len({rewards[other] for other in siblings[rollout]}) > 1
        if has_baseline
        else rewards[rollout] != 0
        for rollout in trained
    )
    return informative / len(trained) if trained else 1.0
