"""Measure the current speed of this machine relative to a profile of it.

On a shared host, other guests change the speed within minutes.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from streamrl.executor.profiling.environment_times import MeasuredEnvironment
from streamrl.executor.profiling.measurements import (
    BESIDE_ENVIRONMENTS,
    Limits,
    Measurements,
    Readings,
    full_plan,
)
from streamrl.executor.profiling.profile_file import make_setup
from streamrl.executor.profiling.profiler import measure
from streamrl.hardware.measured_profile import MeasuredProfile, scaled_to_mean_speed
from streamrl.hardware.profile_fit import MEDIAN

REPEATS = 6
"""Readings of a point. Slow spells last seconds, so only a few readings are in one of them."""
BESIDE_REPEATS = 2
"""Readings of roles beside environments, each of some seconds."""
TOGETHER = BESIDE_ENVIRONMENTS[-1]
"""A replica and a trainer, beside environments."""


def measure_pace(
    model: Path,
    profile: MeasuredProfile,
    limits: Limits,
    environment: MeasuredEnvironment | None = None,
) -> float:
    """Return the current slowdown of decode steps and training passes relative to the profile. It takes about 20 s.

    A few points of the profile are measured again in the same way. The result is the geometric mean
    of measured over predicted seconds. Predictions are at the profile's own speed.

    With an environment, a replica and a trainer are also measured beside it. The cores of a shared host do
    not always slow each other down by the same factor. Six runs of one file within ten minutes had steps of 4.9 to
    5.9 s. The speed of roles alone changed by 8 % meanwhile.
    """
    profile = scaled_to_mean_speed(profile)
    alone = _alone(model, profile, limits)
    return alone if environment is None else alone * _beside(model, profile, limits, environment)


def _alone(model: Path, profile: MeasuredProfile, limits: Limits) -> float:
    """Return the slowdown of roles that have the machine to themselves."""
    plan = full_plan(limits)
    middle = sorted({context for _, context in plan.decode})[1]
    batches = sorted({row.running for row in profile.decode})
    decode = [(batches[place], middle) for place in (0, len(batches) // 2, -1)]
    few = replace(_nothing(plan), repeats=REPEATS, decode=decode)
    found = _measured(model, profile, limits, few)
    ratios = []
    for running, context in decode:
        row = min(
            (row for row in profile.decode if row.running == running),
            key=lambda row: abs(row.context - context),
        )
        ratios.append(mean(found.decode[running, context][1:]) / row.seconds[MEDIAN])
    for row in profile.train:
        if (row.rollouts, row.tokens) in found.train:
            ratios.append(mean(found.train[row.rollouts, row.tokens][1:]) / row.seconds[MEDIAN])
    return exp(mean(map(log, ratios)))


def _beside(
    model: Path, profile: MeasuredProfile, limits: Limits, environment: MeasuredEnvironment
) -> float:
    """Return the further slowdown of a replica and a trainer beside environments."""
    few = replace(_nothing(full_plan(limits)), repeats=BESIDE_REPEATS, beside=[TOGETHER])
    found = _measured(model, profile, limits, few, environment)
    rows = (row for row in profile.sharing if row.acting)
    row = next(row for row in rows if (row.generating, row.training) == TOGETHER[:2])
    assert row.train is not None, "a trainer is part of it"
    ratios = [
        row.generation[MEDIAN] / mean(found.generation[TOGETHER]),
        row.train[MEDIAN] / mean(found.training[TOGETHER]),
    ]
    return exp(mean(map(log, ratios)))


def _nothing(plan: Measurements) -> Measurements:
    """Return a plan without points, except the training pass of medium size, which runs beside others too."""
    passes = sorted(plan.passes, key=lambda one: one[0] * one[1])
    empty: dict[str, list[Any]] = {
        each: [] for each in ("decode", "mixed", "prefill", "join", "calls", "companies", "beside")
    }
    return replace(plan, passes=[passes[len(passes) // 2]], **empty)


def _measured(
    model: Path,
    profile: MeasuredProfile,
    limits: Limits,
    plan: Measurements,
    environment: MeasuredEnvironment | None = None,
) -> Readings:
    setup = make_setup(
        model,
        gpu=profile.gpu,
        dtype=profile.dtype,
        threads=profile.host.threads,
        limits=limits,
        is_quick=False,
        packing=profile.packing,
        environment=environment,
    )
    return measure(msgspec.structs.replace(setup, plan=plan), lambda what: None)
