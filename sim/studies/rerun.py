"""Simulate a recorded run twice, unchanged and with changes, both with the recorded rollouts: a what-if study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import asdict, replace

from streamrl.engine.trace import Trace
from streamrl.record.ledger import describe_faults
from streamrl.record.recorded_inputs import RecordedInputs, recorded_inputs
from streamrl.record.restarts import ledger_of_run
from streamrl.record.run_comparison import Rerun, compare_rerun
from streamrl.record.steady_state import read_steps
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError, shown
from streamrl.runfile.files import change_run
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import empty_policies
from streamrl.sim.steady_state import UnfinishedError, open_world
from streamrl.sim.studies.comparable_runs import check_same_work
from streamrl.sim.studies.comparison import Watch
from streamrl.sim.world import SimWorld, simulate


def rerun(
    trace: Trace,
    file: Path | str,
    changes: Sequence[str],
    watch: Watch = lambda what, done, most: None,
) -> Rerun:
    """Simulate a recorded run twice, unchanged and with changes.

    Both simulations have the recorded prompts, lengths and share of advantages. Both use the seconds
    of the run's profile, so errors that affect both cancel in their ratio.

    Args:
        trace: an executed or a simulated run.
        file: its trace file, which has the lengths.
        changes: `key=value` of its run file; `workload.lengths.ranker` sets the expected lengths.
            By default, the recorded run's expectations are used.
        watch: receives progress.

    Raises:
        ValueError: no finished group or step is recorded, the record's ledger does not balance, or
            a change is invalid or changes the work itself.
        RuntimeError: a simulation stops before the recorded number of steps.
    """
    file, num_steps = Path(file), len(read_steps(trace))
    if not num_steps:
        raise ValueError(f"{file} has no finished step, so there is nothing to simulate again")
    if not (ledger := ledger_of_run(trace, file.parent)).is_balanced:
        raise ValueError(f"the ledger of {file} does not balance: {describe_faults(ledger)}")
    base = change_run(_as_recorded(recorded_inputs(trace, file)), ())
    changed = change_run(base, changes)
    _check_order(base, changed)
    check_same_work(changed, base, ("with --set", f"in {file}"))
    is_cut = trace.is_endless or num_steps < base.algorithm.steps
    simulated = []
    for run, what in ((base, "as it was"), (changed, "changed")):
        tell = partial(_tell, watch, what, num_steps)
        if is_cut:
            made = _simulate_steps(open_world(run), num_steps, what, tell)
        else:
            made = simulate(run, tell)
            if not read_steps(made):
                raise _unfinished(what, 0, num_steps)
        simulated.append(made)
    return compare_rerun((trace, simulated[0], simulated[1]), list(changes))


def simulate_as_recorded(
    recorded: RecordedInputs, num_steps: int, changes: Sequence[str] = ()
) -> Trace:
    """Simulate a recorded run with its lengths and advantages, without its faults.

    Args:
        recorded: the manifest and the workload of the recorded run.
        num_steps: steps to simulate.
        changes: `key=value` of its run file.

    Raises:
        ValueError: no lengths are recorded, costs are missing, or a change is invalid.
        IncomparableError: a change is one of the work, so the figures would not be of the recorded run.
    """
    run = recorded.manifest.run
    if changes:
        changed = change_run(run, changes)
        check_same_work(changed, run, ("with --set", "in the recorded run"))
        run = changed
    algorithm = replace(run.algorithm, steps=num_steps)
    return simulate(replace(run, workload=recorded.workload, algorithm=algorithm, faults=()))


def _as_recorded(recorded: RecordedInputs) -> Run:
    run = recorded.manifest.run
    run = empty_policies(run, Costs.load(run))
    return replace(run, workload=recorded.workload, faults=())


def _check_order(base: Run, changed: Run) -> None:
    """Reject changes that would give a step other prompts than those with recorded lengths."""
    ours, theirs = (_order_of(run.policies, run.workload.lengths) for run in (base, changed))
    for key, was in ours.items():
        value = theirs.get(key, was)
        if value != was:
            text = f"{key} is {shown(value)} with --set, not {shown(was)}; remove the change, because each step keeps its recorded prompts"
            raise RunError(key, value, None, text)


def _order_of(policies: PoliciesConfig, lengths: LengthsConfig | None) -> dict[str, object]:
    """Return the keys and values that decide which prompts a step gets."""
    found: dict[str, object] = {"policies.tail_batching": policies.tail_batching}
    if policies.tail_batching != "none" and lengths is not None:
        found["policies.tail_every"] = policies.tail_every
        of_ranker = {key: value for key, value in asdict(lengths).items() if "ranker" in key}
        found |= {f"workload.lengths.{key}": value for key, value in of_ranker.items()}
    return found


def _tell(watch: Watch, what: str, num_steps: int, version: int) -> None:
    watch(what, version, num_steps)


def _simulate_steps(
    world: SimWorld, num_steps: int, what: str, tell: Callable[[int], None]
) -> Trace:
    """Simulate as many steps as the record has, which may have been cut off."""
    made = world.run(tell, lambda: len(world.steps) >= num_steps)
    if len(world.steps) < num_steps:
        raise _unfinished(what, len(world.steps), num_steps, world.engine.stop_reason)
    return made


def _unfinished(
    what: str, num_made: int, num_steps: int, reason: str | None = None
) -> UnfinishedError:
    why = reason or "it stops"
    return UnfinishedError(f"{what} stopped after step {num_made} of {num_steps}: {why}")
