"""Read the sampled completions of each step and choose which of them to show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from streamrl.record.run_directory import SAMPLES, read_samples


class SampledPart(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the policy, or an observation of its environment."""

    text: str
    """Without the middle part if it is long."""
    is_policy: bool


class SampledRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that was trained on."""

    rollout: int
    text: str
    """Output text, without the middle part if it is long."""
    reward: float
    advantage: float
    num_tokens: int
    finish: Literal["stop", "length"]
    """stop: the model ended the output; length: the output reached `rollout.max_tokens`."""
    version: int
    """Version that sampled its first token."""
    verifier: str | None = None
    """Why the verifier could not score it; None if it did."""
    parts: tuple[SampledPart, ...] = ()
    """Turns and observations of an episode in order; empty without an environment."""


class SampledGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Some rollouts of one prompt that a step trained on."""

    step: int
    prompt: str
    mean_reward: float
    """Mean over the whole group, not only the shown rollouts."""
    size: int
    """Number of rollouts in the whole group."""
    rollouts: tuple[SampledRollout, ...]
    """The shown rollouts by decreasing reward: the best, the worst, and others evenly between them."""


def read_completions(directory: Path) -> tuple[SampledGroup, ...]:
    """Return the samples of each step that was not rolled back, in order.

    Raises:
        ValueError: samples.jsonl is missing, or one of its lines is not a sample.
    """
    lines = read_samples(directory)
    try:
        return tuple(msgspec.convert(line, SampledGroup) for line in lines)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{directory / SAMPLES}: a line is not a sample of this version of streamrl: {error}"
        ) from None


def most_varied_group(groups: Sequence[Sequence[float]]) -> int:
    """Return the index of the group whose rewards differ most: the step learned most from it.

    If several groups differ equally, return the first one.
    """
    return max(range(len(groups)), key=lambda index: max(groups[index]) - min(groups[index]))


def spread_over(rewards: Sequence[float], count: int) -> list[int]:
    """Return the indices of `count` rollouts by decreasing reward: the best, the worst, and others evenly between."""
    ranked = sorted(range(len(rewards)), key=lambda index: (-rewards[index], index))
    last, count = len(ranked) - 1, min(count, len(ranked))
    if count < 2:
        return ranked[:count]
    return [ranked[round(rank * last / (count - 1))] for rank in range(count)]


def shortened(text: str, most: int) -> str:
    """Return a text of over `most` characters without its middle, and with the number of characters left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
