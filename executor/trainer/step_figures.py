"""What a step was made of, as numbers to watch: rewards, lengths, staleness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from streamrl.executor.buffer import BufferedRollout
from streamrl.record.run_lines import OF_SCORER


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
