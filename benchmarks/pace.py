"""Measure the current speed of this machine relative to a profile of it.

On a shared host, other guests change the speed within minutes.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import mean

import msgspec

from streamrl.executor.profiling.measurements import Limits, full_plan
from streamrl.executor.profiling.profile_file import make_setup
from streamrl.executor.profiling.profiler import measure
from streamrl.hardware.measured_profile import MeasuredProfile, scaled_to_mean_speed
from streamrl.hardware.profile_fit import MEDIAN

REPEATS = 6
"""Readings of a point. Slow spells last seconds, so only a few readings are in one of them."""


def measure_pace(model: Path, profile: MeasuredProfile, limits: Limits) -> float:
    """Return the current slowdown of decode steps and training passes relative to the profile. It takes about 20 s.

    A few points of the profile are measured again in the same way. The result is the geometric mean
    of measured over predicted seconds. Predictions are at the profile's own speed.
    """
    profile = scaled_to_mean_speed(profile)
    plan = full_plan(limits)
    middle = sorted({context for _, context in plan.decode})[1]
    batches = sorted({row.running for row in profile.decode})
    decode = [(batches[place], middle) for place in (0, len(batches) // 2, -1)]
    passes = sorted(plan.passes, key=lambda one: one[0] * one[1])
    few = replace(
        plan,
        repeats=REPEATS,
        decode=decode,
        passes=[passes[len(passes) // 2]],
        **{"mixed": [], "prefill": [], "join": [], "calls": [], "companies": []},
    )
    setup = make_setup(
        model,
        gpu=profile.gpu,
        dtype=profile.dtype,
        threads=profile.host.threads,
        limits=limits,
        is_quick=False,
        packing=profile.packing,
    )
    found = measure(msgspec.structs.replace(setup, plan=few), lambda what: None)
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
