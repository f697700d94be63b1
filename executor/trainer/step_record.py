"""Compute the metrics of a training step, and pick sample rollouts of it to read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

from streamrl.executor.buffer import BufferedRollout, RolloutBuffer
from streamrl.record.run_directory import OF_SCORER
from streamrl.record.samples import (
    SampledGroup,
    SampledRollout,
    most_varied_group,
    shortened,
    spread_over,
)


def step_figures(
    trained: Sequence[BufferedRollout], staleness: Sequence[int], max_tokens: int
) -> dict[str, float]:
    """Return the figures of a step, by its rollouts and how stale each was when it was trained on.

    | key             | of the rollouts that were trained on                                       |
    |-----------------|----------------------------------------------------------------------------|
    | reward          | mean                                                                       |
    | reward/NAME     | of several scorers, the mean of what each gave, weights left out           |
    | reward_std      | standard deviation over all of them                                        |
    | uniform_groups  | share of groups whose rewards are all the same, which teach nothing        |
    | output_tokens   | in all                                                                     |
    | length_mean     | output tokens                                                              |
    | length_max      | output tokens                                                              |
    | cut_off         | share as long as `max_tokens` lets them be                                 |
    | staleness_mean  | the leader's version by then, less the one that sampled their first token  |
    | staleness_max   |                                                                            |
    | verify_time     | mean seconds from the end of a rollout to its reward                       |
    | unscored        | how many could not be scored, and have the worst score for it              |
    """
    rewards = [buffered.reward for buffered in trained]
    lengths = [buffered.num_tokens for buffered in trained]
    mean = math.fsum(rewards) / len(rewards)
    groups = [
        {buffered.reward for buffered in group}
        for _, group in groupby(trained, key=attrgetter("group"))
    ]
    return {
        "reward": mean,
        **_means_by_scorer(trained),
        "reward_std": math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)),
        "uniform_groups": sum(len(found) == 1 for found in groups) / len(groups),
        "output_tokens": sum(lengths),
        "length_mean": sum(lengths) / len(lengths),
        "length_max": max(lengths),
        "cut_off": sum(length >= max_tokens for length in lengths) / len(lengths),
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        "verify_time": math.fsum(buffered.verify_time for buffered in trained) / len(trained),
        "unscored": sum(buffered.fault is not None for buffered in trained),
    }


def _means_by_scorer(trained: Sequence[BufferedRollout]) -> dict[str, float]:
    """Return the mean of each scorer over the rollouts that it scored."""
    found: dict[str, list[float]] = {}
    for buffered in trained:
        for name, score in buffered.scores.items():
            found.setdefault(f"{OF_SCORER}{name}", []).append(score)
    return {key: math.fsum(scores) / len(scores) for key, scores in sorted(found.items())}


MOST_TEXT = 2000
"""Characters of a prompt and of a completion: ten thousand steps of three of them take 80 MB at most."""


def step_samples(
    buffer: RolloutBuffer,
    groups: Sequence[int],
    step: int,
    count: int,
    max_tokens: int,
    advantage: Callable[[int], float],
) -> SampledGroup:
    """Return up to `count` rollouts of the group whose rewards differ most.

    Args:
        buffer: in which the rollouts of the step are still open.
        groups: that the step was made of.
        step: its version.
        count: of rollouts, at least 1.
        max_tokens: at which a rollout is cut off.
        advantage: of a rollout.
    """
    rewards = [[buffered.reward for buffered in buffer.rollouts_of([group])] for group in groups]
    chosen = most_varied_group(rewards)
    own = rewards[chosen]
    group = buffer.rollouts_of([groups[chosen]])[0].group

    def sampled(rollout: int) -> SampledRollout:
        buffered = buffer.rollouts[rollout]
        return SampledRollout(
            rollout=rollout,
            text=shortened(buffer.reread(rollout), MOST_TEXT),
            reward=buffered.reward,
            advantage=advantage(rollout),
            num_tokens=buffered.num_tokens,
            finish="length" if buffered.num_tokens >= max_tokens else "stop",
            version=buffered.versions[0][0],
            verifier=buffered.fault,
        )

    return SampledGroup(
        step=step,
        prompt=shortened(_text_of(buffer.record(group[0])["prompt"]), MOST_TEXT),
        mean_reward=sum(own) / len(own),
        size=len(own),
        rollouts=tuple(sampled(group[index]) for index in spread_over(own, count)),
    )


def _text_of(prompt: object) -> str:
    """Return a prompt as text; one of several messages as they stand in the prompts file."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
