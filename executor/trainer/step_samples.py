"""What a step was trained on, to read: some rollouts of one of its groups, with their texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from streamrl.executor.buffer import RolloutBuffer
from streamrl.record.completions import (
    SampledGroup,
    SampledRollout,
    most_telling,
    shortened,
    spread_over,
)

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
    chosen = most_telling(rewards)
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
