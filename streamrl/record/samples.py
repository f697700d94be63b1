"""Read the sampled completions of each step and choose which of them to show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from streamrl.record.run_directory import read_samples


class SampledRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that was trained on."""

    rollout: int
    text: str
    """Its output; the middle of a long one is left out."""
    reward: float
    advantage: float
    num_tokens: int
    finish: Literal["stop", "length"]
    """stop: it ended itself; length: it was cut off at `rollout.max_tokens`."""
    version: int
    """That sampled its first token."""
    verifier: str | None = None
    """What became of it where it could not be scored."""


class SampledGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Some rollouts of one prompt that a step was trained on."""

    step: int
    prompt: str
    mean_reward: float
    """Of the whole group."""
    size: int
    """Rollouts of the whole group."""
    rollouts: tuple[SampledRollout, ...]
    """By falling reward: the best, the worst, and where there are more of them what lies evenly between."""


def read_completions(directory: Path) -> tuple[SampledGroup, ...]:
    """Return what was kept of each step that stayed, in order.

    Raises:
        ValueError: there is no such file, or a line of it is none of a run.
    """
    lines = read_samples(directory)
    try:
        return tuple(msgspec.convert(line, SampledGroup) for line in lines)
    except msgspec.ValidationError as error:
        raise ValueError(f"{directory}: not samples of a run: {error}") from None


def most_varied_group(groups: Sequence[Sequence[float]]) -> int:
    """Return which group's rewards differ most, the first where several do: it is what was learned from most."""
    return max(range(len(groups)), key=lambda index: max(groups[index]) - min(groups[index]))


def spread_over(rewards: Sequence[float], count: int) -> list[int]:
    """Return which rollouts to show, by falling reward: the best, the worst, and evenly between them."""
    ranked = sorted(range(len(rewards)), key=lambda index: (-rewards[index], index))
    last, count = len(ranked) - 1, min(count, len(ranked))
    if count < 2:
        return ranked[:count]
    return [ranked[round(place * last / (count - 1))] for place in range(count)]


def shortened(text: str, most: int) -> str:
    """Leave out the middle of a text of over `most` characters, and say how much that is."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"


def escape_control_characters(text: str) -> str:
    """Return a text in which what would steer a terminal, or is no character of a page, is written as Python does."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
