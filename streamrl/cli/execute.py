"""`streamrl execute`: run the training of a run file."""

from __future__ import annotations

import logging
import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from streamrl.cli.consoles import SafeConsole
from streamrl.cli.log_output import Quiet, Verbose, set_verbosity
from streamrl.cli.output import echo
from streamrl.cli.shared import (
    AsJson,
    Overrides,
    RunFile,
    check_ledger,
    open_trace,
    print_json,
    stdout_console,
)
from streamrl.cli.watch_run import RunWatch
from streamrl.doctor.staleness import find_idle_clips
from streamrl.engine.systems import needs_costs
from streamrl.engine.trace import LARGE
from streamrl.engine.world import RunInterruptedError
from streamrl.record.evaluation import read_evaluations
from streamrl.record.ledger import ledger_line
from streamrl.record.metrics import measure
from streamrl.record.restarts import ledger_of_run
from streamrl.record.run_directory import TRACE, with_kept_inputs
from streamrl.report.evaluation_table import evaluations_table, say_change, sources_table
from streamrl.report.figures import views_of
from streamrl.report.run_tables import metrics_table
from streamrl.runfile.files import load_run
from streamrl.runfile.result_files import write_results

if TYPE_CHECKING:
    from streamrl.executor.run_guard import PlannedStep

logger = logging.getLogger(__name__)

PLAN_JSON = "plan.json"


def execute(
    run_file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the newest checkpoint in execute.output."),
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Run the training of a run file, locally or on Ray.

    The run directory (execute.output) gets the trace, metrics, rollouts and checkpoints.

    Losses, restarts and resizes are logged to standard error, one line each.

    Example: streamrl execute examples/quickstart.toml --set algorithm.steps=10
    """
    set_verbosity(verbose, quiet)
    run = load_run(run_file, overrides or ())
    if needs_costs(run.policies, run.rollout.others, run.lending):
        from streamrl.sim.costs.costs import Costs
        from streamrl.sim.costs.policy_estimates import fill_policies

        own = with_kept_inputs(run, Path(run.execute.output)) if resume else run
        run = fill_policies(run, Costs.load(own))
    from streamrl.executor.directory_lock import HIDDEN
    from streamrl.executor.execute import ExportError
    from streamrl.executor.execute import execute as execute_run

    for finding in find_idle_clips(run):
        logger.warning(finding.text)
    output = Path(run.execute.output)
    os.umask(HIDDEN[run.execute.readers])
    not_exported: ExportError | None = None
    how = _how_to_resume(run_file, overrides or ())
    try:
        with RunWatch(
            run.algorithm.steps,
            [kind.max_running for kind in run.replica_kinds],
            SafeConsole(stderr=True, quiet=quiet),
        ) as watch:
            planned = None if overrides else _planned_step(run_file)
            trace = execute_run(run, resume, watch.see, how, watch.take, planned)
    except RunInterruptedError as error:
        with suppress(OSError), _leaving(error):  # such as a terminal that was closed
            _log_remains(output)
            echo(f"streamrl: {error}", err=True)
        raise typer.Exit(128 + error.signal) from None
    except ExportError as error:  # the run is complete
        trace, not_exported = open_trace(output), error
    except RuntimeError:
        _log_remains(output)
        raise
    except OSError:  # such as a full disk
        _log_remains(output)
        with suppress(OSError, ValueError):
            if (output / TRACE).exists():
                echo(_say_saved(output, how), err=True)
        raise
    if run.faults:
        from streamrl.executor.faults import read_struck, say_unstruck

        if text := say_unstruck(run.faults, read_struck(output)):
            logger.warning(text)
    ledger = ledger_of_run(trace, output)
    check_ledger(ledger)
    metrics = replace(measure(trace), ledger=ledger)
    if not _is_large(output):
        try:
            write_results(output, views_of(trace), trace.run_id)
        except OSError as error:  # the run is complete; its pictures are optional
            logger.warning(f"some pictures of the run could not be written: {error}")
    if as_json:
        print_json(metrics)
    else:
        console = stdout_console()
        console.print(metrics_table(metrics))
        if results := read_evaluations(output):
            console.print(evaluations_table(results))
            if results[-1].sources:
                console.print(sources_table(results[-1]))
        if run.evaluation is not None and (change := say_change(results, run.evaluation)):
            echo(change)
        echo(ledger_line(ledger))
        console.print(f"run directory: {run.execute.output}", soft_wrap=True)
    if not_exported is not None:
        raise not_exported


@contextmanager
def _leaving(error: RunInterruptedError) -> Iterator[None]:
    """Let a second signal end this process at once, with the message and the status of the first one."""
    from streamrl.executor.execute import NAMES

    def leave(*_: object) -> None:
        with suppress(OSError):
            echo(f"streamrl: {error}", err=True)
        os._exit(128 + error.signal)

    obeyed = [number for number in NAMES if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in obeyed}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log_remains(output: Path) -> None:
    """Log the ledger of an interrupted run and write its views, if it has a trace.

    No error here replaces that of the run, which matters more.
    """
    if not (output / TRACE).exists():
        return
    with suppress(Exception):
        trace = open_trace(output)
        echo(ledger_line(ledger_of_run(trace, output)), err=True)
        if not _is_large(output):
            with suppress(Exception):
                write_results(output, views_of(trace), trace.run_id)
        look = shlex.join(["streamrl", "report", str(output)])
        echo(f"what it did and learned: {look}", err=True)


def _say_saved(output: Path, how_to_resume: str) -> str:
    from streamrl.executor.checkpoints import Checkpoints

    saved = Checkpoints(output / "checkpoints").newest()
    what = "no step is saved yet" if saved is None else f"step {saved.version} is saved"
    return f"{what}; go on with: {how_to_resume}"


def _is_large(output: Path) -> bool:
    """Return whether views of the trace would take long and much memory; then only the live timeline remains."""
    return (output / TRACE).stat().st_size > LARGE


def _planned_step(run_file: Path) -> PlannedStep | None:
    """Return the planned seconds of a step, if the run file is an unchanged plan.toml beside its plan.json."""
    path = run_file.with_name(PLAN_JSON)
    if not path.is_file():
        return None
    from streamrl.executor.run_guard import PlannedStep
    from streamrl.sim.planner.plan import read_plan

    try:
        plan = read_plan(path)
    except ValueError:  # of another version
        return None
    is_own = plan.run_file == sha256(run_file.read_bytes()).hexdigest()
    return PlannedStep(plan.allocation.step_time, plan.stages) if is_own else None


def _how_to_resume(run_file: Path, overrides: Sequence[str]) -> str:
    """Return the command that continues the run."""
    changes = [word for override in overrides for word in ("--set", override)]
    return shlex.join(["streamrl", "execute", str(run_file), *changes, "--resume"])
