"""Whether the chosen plan should lend GPUs of its trainer: one simulation with `[lending]`, on the same prompts.

The search itself compares plans that lend nothing. It takes the section along, so lending costs one simulation.
"""

from __future__ import annotations

from concurrent.futures import Executor

from msgspec.structs import replace

from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import decode_run, encode_run
from streamrl.runfile.roles_config import LendingConfig
from streamrl.sim.planner.plan import PlannedLending
from streamrl.sim.steady_state import UnfinishedError, measure_steady

LEAST_GAIN = 0.01
"""Least share of a step that a change of a plan must save, so that sampling error does not decide."""


def planned_lending(
    planned: Run, lending: LendingConfig | None, step_time: float, pool: Executor
) -> PlannedLending | None:
    """Simulate a plan with `lending`, and compare it with its step time in seconds without it.

    None if the run file has no `[lending]`, or the plan cannot lend.
    """
    if lending is None:
        return None
    lent = replace(planned, lending=lending)
    try:
        check_run(lent)
        seconds = pool.submit(step_time_of, encode_run(lent)).result()
    except (RunError, UnfinishedError) as error:
        return PlannedLending(reason=str(error))
    is_taken = seconds < (1 - LEAST_GAIN) * step_time
    return PlannedLending(step_time=step_time, step_time_lent=seconds, is_taken=is_taken)


def step_time_of(run: bytes) -> float:
    """Return the seconds of a steady step of an encoded run."""
    return measure_steady(decode_run(run)).step_time
