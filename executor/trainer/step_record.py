"""Compute the metrics of a training step, and choose sample rollouts for people to read."""

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
    SampledPart,
    SampledRollout,
    most_varied_group,
    shortened,
    spread_over,
)


def step_figures(
    trained: Sequence[BufferedRollout], staleness: Sequence[int], max_tokens: int
) -> dict[str, float]:
    """Compute the figures of a step from its rollouts and their staleness at training.

    | key             | of the trained rollouts                                                    |
    |-----------------|----------------------------------------------------------------------------|
    | reward          | mean                                                                       |
    | reward/NAME     | with several scorers: mean score of this one, before weighting             |
    | reward_std      | standard deviation over all rollouts                                       |
    | uniform_groups  | share of groups whose rewards are all equal, so that they teach nothing    |
    | output_tokens   | total                                                                      |
    | length_mean     | mean number of output tokens                                               |
    | length_max      | largest number of output tokens                                            |
    | cut_off         | share that reached `max_tokens`                                            |
    | staleness_mean  | version of the primary trainer minus the version that sampled the first token |
    | staleness_max   | the largest staleness                                                      |
    | verify_time     | mean seconds from the end of a rollout to its reward                       |
    | unscored        | number of rollouts that could not be scored and got the worst score        |
    | late_actions    | number of actions that reached `environment.action_time_limit`; absent if 0 |
    """
    rewards = [buffered.reward for buffered in trained]
    lengths = [buffered.num_tokens for buffered in trained]
    mean = math.fsum(rewards) / len(rewards)
    num_late = sum(buffered.num_late for buffered in trained)
    groups = [
        {buffered.reward for buffered in group}
        for _, group in groupby(trained, key=attrgetter("group"))
    ]
    return {
        "reward": mean,
        **_means_by_scorer(trained),
        "reward_std": math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)),
        "uniform_groups": sum(len(distinct) == 1 for distinct in groups) / len(groups),
        "output_tokens": sum(lengths),
        "length_mean": sum(lengths) / len(lengths),
        "length_max": max(lengths),
        "cut_off": sum(length >= max_tokens for length in lengths) / len(lengths),
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        "verify_time": math.fsum(buffered.verify_time for buffered in trained) / len(trained),
        "unscored": sum(buffered.fault is not None for buffered in trained),
        **({"late_actions": num_late} if num_late else {}),
    }


def _means_by_scorer(trained: Sequence[BufferedRollout]) -> dict[str, float]:
    """Compute the mean of each scorer over the rollouts that it scored."""
    by_scorer: dict[str, list[float]] = {}
    for buffered in trained:
        for name, score in buffered.scores.items():
            by_scorer.setdefault(f"{OF_SCORER}{name}", []).append(score)
    return {key: math.fsum(scores) / len(scores) for key, scores in sorted(by_scorer.items())}


MOST_TEXT = 2000
"""Maximum characters of a prompt and of a completion: 10,000 steps with three samples take at most 80 MB."""


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
        buffer: the buffer, which still has the rollouts of the step.
        groups: groups of the step.
        step: version that the step makes.
        count: maximum number of rollouts, at least 1.
        max_tokens: maximum length of a rollout.
        advantage: returns the advantage of a rollout.
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
            parts=_parts_of(buffer, buffered),
        )

    return SampledGroup(
        step=step,
        prompt=shortened(_text_of(buffer.record(group[0])["prompt"]), MOST_TEXT),
        mean_reward=sum(own) / len(own),
        size=len(own),
        rollouts=tuple(sampled(group[index]) for index in spread_over(own, count)),
    )


def _parts_of(buffer: RolloutBuffer, buffered: BufferedRollout) -> tuple[SampledPart, ...]:
    """Return the turns and observations of an episode, whose texts have `MOST_TEXT` characters together."""
    found = buffer.parts(buffered) if buffer.has_episodes else []
    return tuple(
        SampledPart(text=shortened(text, MOST_TEXT // len(found)), is_policy=is_policy)
        for text, is_policy in found
    )


def _text_of(prompt: object) -> str:
    """Return a prompt as text; a list of messages becomes JSON, as in the prompts file."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
