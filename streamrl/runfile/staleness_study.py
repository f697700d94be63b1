"""What staleness costs, from a study that the user made: steps to a reward at several lags, and a line through them.

    steps to the reward = steps at the least lag x (1 + cost x (lag - least lag))

A study is a JSON file with runs of one task at several staleness bounds. Each run has its
correction, the mean lag of its rollouts in versions, and the steps that it needed to reach a common
target reward. `examples/staleness.py` makes one.
"""

from __future__ import annotations

from collections import defaultdict
from math import fsum, sqrt
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec

from streamrl.runfile.reading import decode_json

LEAST_APART = 0.1
"""Versions by which lags differ at least, so that a line through them says something."""


class StudiedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    staleness: int
    """`policies.max_staleness`."""
    correction: str
    seed: int
    lag: float
    """Mean versions that rollouts were behind."""
    steps: int | None
    """To the reward; None where it never came there."""
    seconds: float | None = None


class StalenessStudy(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one task."""

    task: str
    target_reward: float
    runs: tuple[StudiedRun, ...]


class StalenessModel(NamedTuple):
    """The line through a study's runs."""

    study: str
    task: str
    target_reward: float
    correction: str
    base_steps: float
    """Mean steps at the least lag."""
    base_lag: float
    percent: float
    """More steps for each further version."""
    error: float | None
    """Standard error of that; None of too few runs."""
    num_runs: int

    def __str__(self) -> str:
        sure = "" if self.error is None else f" +- {self.error:.2g}"
        return (
            f"{self.study} ({self.task}, {self.num_runs} runs with {self.correction}): steps to a reward of "
            f"{self.target_reward:g} = {self.base_steps:.3g} x (1 + ({self.percent:.3g}{sure}) % x (lag - {self.base_lag:.2g}))"
        )


def read_staleness_model(path: str, correction: str) -> StalenessModel:
    """Read a study, and put the line through its runs with a correction.

    Raises:
        ValueError: it cannot be read, or says nothing of what staleness costs.
    """
    key = f"plan.staleness_study {path!r}"
    try:
        study = decode_json(path, StalenessStudy)
    except OSError as error:
        raise ValueError(f"{key}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{key}: not a study of staleness: {error}") from None
    runs = [run for run in study.runs if run.correction == correction]
    if not runs:
        known = ", ".join(sorted({run.correction for run in study.runs})) or "none"
        raise ValueError(f"{key}: has no runs with algorithm.correction {correction!r}: {known}")
    if any(run.steps is None for run in runs):
        missing = sum(run.steps is None for run in runs)
        raise ValueError(
            f"{key}: {missing} of {len(runs)} runs with {correction} never reached a reward of {study.target_reward:g}; "
            "choose a target_reward that all runs reach"
        )
    return _fit(study, Path(path).name, correction, runs)


def _fit(
    study: StalenessStudy, name: str, correction: str, runs: list[StudiedRun]
) -> StalenessModel:
    """Put the line through the point of the least lag that fits the others best."""
    by_bound: dict[int, list[StudiedRun]] = defaultdict(list)
    for run in runs:
        by_bound[run.staleness].append(run)
    first = by_bound[min(by_bound)]
    base_lag, base = fmean(r.lag for r in first), fmean(r.steps or 0 for r in first)
    others = [run for run in runs if run.lag - base_lag >= LEAST_APART]
    if not others or not base:
        raise ValueError(
            f"plan.staleness_study {name!r}: its runs with {correction} have equal lags, so the cost of staleness is unknown; add a run with another lag"
        )
    pairs = [(run.lag - base_lag, (run.steps or 0) / base - 1) for run in others]
    squares = fsum(x * x for x, _ in pairs)
    slope = fsum(x * y for x, y in pairs) / squares
    error = None
    if len(pairs) > 1:
        spread = fsum((y - slope * x) ** 2 for x, y in pairs) / (len(pairs) - 1)
        error = 100 * sqrt(spread / squares)
    return StalenessModel(
        study=name,
        task=study.task,
        target_reward=study.target_reward,
        correction=correction,
        base_steps=base,
        base_lag=base_lag,
        percent=100 * slope,
        error=error,
        num_runs=len(runs),
    )
