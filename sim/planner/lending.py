"""Whether GPUs of the chosen plan should change sides: one simulation with `[lending]` or `trainer.borrows`, on the same prompts.

The search itself compares plans whose GPUs stay. It takes these settings along, so each costs one simulation.
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
    return _compare(replace(planned, lending=lending), step_time, pool)


def planned_borrowing(
    planned: Run, borrows: bool, step_time: float, pool: Executor
) -> PlannedLending | None:
    """Simulate a plan whose trainer borrows GPUs of replicas, and compare it with its step time in seconds without that.

    None if the run file does not ask for it.
    """
    if not borrows:
        return None
    return _compare(with_borrowing(planned), step_time, pool)


def with_borrowing(planned: Run) -> Run:
    """Return a plan whose trainer borrows GPUs of replicas."""
    changed: Run = replace(planned, trainer=replace(planned.trainer, borrows=True))
    return changed


def _compare(changed: Run, step_time: float, pool: Executor) -> PlannedLending:
    try:
        check_run(changed)
        seconds = pool.submit(step_time_of, encode_run(changed)).result()
    except (RunError, UnfinishedError) as error:
        return PlannedLending(reason=str(error))
    is_taken = seconds < (1 - LEAST_GAIN) * step_time
    return PlannedLending(step_time=step_time, step_time_lent=seconds, is_taken=is_taken)


def step_time_of(run: bytes) -> float:
    """Return the seconds of a steady step of an encoded run."""
    return measure_steady(decode_run(run)).step_time
