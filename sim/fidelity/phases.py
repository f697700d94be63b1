"""Seconds of each stage of a colocated step, read off a trace: stages follow each other."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import NamedTuple

from streamrl.engine.messages import (
    Generated,
    PromptsDrawn,
    PushWeights,
    Score,
    Scored,
    Step,
    Stepped,
    Train,
    Trained,
    WeightsLoaded,
)
from streamrl.record.trace import Trace


class PhaseSeconds(NamedTuple):
    """Mean seconds over the steps of a run but the first, which nothing was generated or loaded before."""

    generation: float
    """From the prompts, once all replicas have the weights, to the last rollout."""
    score: float
    train: float
    """Forward and backward passes, and the optimizer step."""
    refit: float
    """From the pushed weights until the last replica has them."""
    step: float
    """From version to version."""


def phase_seconds(trace: Trace) -> PhaseSeconds:
    """Read the stages of a run whose sides take turns."""
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    scored: defaultdict[int, float] = defaultdict(float)
    trained: defaultdict[int, float] = defaultdict(float)
    stepped: dict[int, float] = {}
    pushed: dict[int, float] = {}
    refit: dict[int, float] = {}
    work_at = 0.0
    for time, event, commands in trace.entries:
        match event:
            case PromptsDrawn():
                began[len(began) + 1] = time
            case Generated():
                ended[len(began)] = time
            case Scored():
                scored[len(stepped) + 1] += time - work_at
            case Trained():
                trained[len(stepped) + 1] += time - work_at
            case Stepped(version):
                trained[version] += time - work_at
                stepped[version] = time
            case WeightsLoaded(_, version) if version in pushed:
                refit[version] = time - pushed[version]
                began[len(began)] = time
            case _:
                pass
        for command in commands:
            match command:
                case Score() | Train() | Step():
                    work_at = time
                case PushWeights(version):
                    pushed[version] = time
                case _:
                    pass
    steps = [step for step in stepped if step > 1]
    return PhaseSeconds(
        generation=fmean(ended[n] - began[n] for n in steps),
        score=fmean(scored[n] for n in steps),
        train=fmean(trained[n] for n in steps),
        refit=fmean(refit.values()),
        step=fmean(stepped[n] - stepped[n - 1] for n in steps),
    )
