"""The steady state of a recorded or simulated run, by what its run file and its record say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm

from streamrl.engine.presets import choose_system
from streamrl.record.leader_steps import LeaderSteps
from streamrl.record.steady import LEAST_STEPS, Steady, find_steady
from streamrl.record.trace import Trace
from streamrl.runfile.config import Run
from streamrl.runfile.failure_rates import can_fail, expected_losses

LEAST_FAILURES = 10
"""Failures whose number is known within a third, so that their share in a step's seconds is no luck."""


def find_steady_of(trace: Trace, steps: LeaderSteps) -> Steady:
    """Find which of a trace's steps count.

    At the end those are left out that were under way when an endless run was cut; of a run that has all its steps
    those that nothing is generated beside any more, where enough are left without them.
    """
    run, num_steps = trace.run, len(steps)
    left_out = 0
    if trace.is_endless:
        left_out = 1
    elif num_steps >= run.algorithm.steps:
        ahead = choose_system(run.policies).staleness_bound
        left_out = ahead if num_steps - ahead >= LEAST_STEPS else 0
    return find_steady_so_far(run, steps, left_out, drifts=_drifts(trace))


def find_steady_so_far(
    run: Run, steps: LeaderSteps, left_out: int, *, drifts: bool = False
) -> Steady:
    """Find which of the steps that were made count, `left_out` at the end aside.

    Of the steps of a run with planned faults none stands for others, so that their mean has no interval.
    """
    policies = run.policies
    found = find_steady(
        steps.durations(),
        steps.num_generated,
        cycle=lcm(
            policies.sync_every, 1 if policies.tail_batching == "none" else policies.tail_every
        ),
        left_out=left_out,
        drifts=drifts,
    )
    return replace(found, half_width=None) if run.faults else found


def tell_unfinished(run: Run, version: int, stopped_for: str) -> str:
    """Say after which step a run stopped before its last one, and why; nothing where it did not.

    Args:
        run: the run file.
        version: the newest one that it made.
        stopped_for: why it stopped; empty where it did not. A simulation may go on past the last step.
    """
    if not stopped_for or version >= run.algorithm.steps:
        return ""
    return f"stopped after step {version} of {run.algorithm.steps}: {stopped_for}"


def tell_doubts(trace: Trace, steps: LeaderSteps, steady: Steady, unfinished: str) -> str:
    """Say what keeps the figures from being those of a steady state as exactly known as was asked for.

    Args:
        trace: what its header says; its entries are not looked at.
        steps: of its leader.
        steady: those that count.
        unfinished: what `tell_unfinished` gives.
    """
    doubts = [f"the run {unfinished}"] if unfinished else []
    if trace.is_cut:
        doubts.append("the trace ends inside a line, and what came after is not known")
    if trace.leg > 1:
        doubts.append(
            f"leg {trace.leg} alone of a run that was resumed, after its step {steps.num_before}; "
            "the whole run is reckoned at its pace"
        )
    if _drifts(trace):
        return "; ".join([*doubts, _tell_drift(trace.run, steady), *_tell_late(trace.run, steps)])
    if not steady.has_settled:
        doubts.append(f"no steady state was found in {steady.last} steps")
    if steady.half_width is None:
        num, verb = (
            steady.last - steady.first,
            "counts" if steady.last - steady.first == 1 else "count",
        )
        doubts.append(f"{num} step{'s' * (num != 1)} {verb}, too few for an interval")
    elif (
        trace.is_endless
        and steps.num_made > trace.run.simulate.max_steps
        and not steady.is_within(share := trace.run.simulate.interval)
    ):
        doubts.append(
            f"simulate.max_steps={trace.run.simulate.max_steps} came before the interval of "
            f"{share:.2g} that is wanted (simulate.interval)"
        )
    if can_fail(trace.run) and trace.is_endless:
        doubts += [*_tell_failures(steps), *_tell_restarts(trace.run, steady)]
    return "; ".join(doubts)


def _tell_drift(run: Run, steady: Steady) -> str:
    counted, steps = steady.last - steady.first, run.algorithm.steps
    why = "faults are planned" if run.faults else "lengths drift"
    told = f"{why}: figures are the mean over {counted} steps"
    if steady.last < steps:
        return f"{told}, which drift as far as the {steps} of the training"
    return told


def _tell_late(run: Run, steps: LeaderSteps) -> Iterator[str]:
    for number, fault in enumerate(run.faults):
        if fault.time is not None and fault.time > steps.ended_at[-1]:
            yield f"faults.{number} never struck: the run was over before its time"


def _tell_restarts(run: Run, steady: Steady) -> Iterator[str]:
    """Say that the run, as long as it is, will lose more than it replaces."""
    losses, most = expected_losses(run, steady.step_time), run.policies.max_restarts
    if losses.mean > most:
        yield (
            f"all {run.algorithm.steps:,} steps lose {losses.mean:,.3g} {losses.what} on average, and "
            f"policies.max_restarts={most} stops the run before its end"
        )


def _tell_failures(steps: LeaderSteps) -> list[str]:
    if steps.num_failures >= LEAST_FAILURES:
        return []
    seen = "1 failure was" if steps.num_failures == 1 else f"{steps.num_failures} failures were"
    return [f"{seen} seen, too few for their share to be in the interval"]


def _drifts(trace: Trace) -> bool:
    return trace.world == "simulated" and not trace.run.has_steady_state
