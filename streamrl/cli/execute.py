"""`streamrl execute`: run a run file for real."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress, TaskID

from streamrl.cli.progress import make_progress
from streamrl.cli.shared import (
    TRACE_FILE,
    AsJson,
    Overrides,
    RunFile,
    check_ledger,
    open_trace,
    print_json,
)
from streamrl.cli.views import write_views
from streamrl.engine.messages import Event, Generated, Stepped, Verified
from streamrl.engine.state import State
from streamrl.engine.systems import needs_costs
from streamrl.engine.world import RunInterruptedError
from streamrl.record.legs import balance_books
from streamrl.record.metrics import measure
from streamrl.report.ledger_line import ledger_line
from streamrl.report.run_tables import metrics_table
from streamrl.runfile.reading import load_run

RECENT = 200  # rollouts that the progress bar's reward is the mean of


def execute(
    run_file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in execute.output.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a run file on real processes, and leave trace, metrics, rollouts and checkpoints.

    Example: streamrl execute examples/quickstart.toml --set algorithm.steps=10
    """
    run = load_run(run_file, overrides or ())
    if needs_costs(run):
        from sim.costs.costs import Costs
        from sim.costs.fill import fill_policies

        run = fill_policies(run, Costs.load(run))
    from executor.execute import execute as execute_run

    output = Path(run.execute.output)
    try:
        with make_progress() as progress:
            watch = _Watch(progress, run.algorithm.steps)
            trace = execute_run(run, resume, watch, _how_to_resume(run_file, overrides or ()))
    except RunInterruptedError as error:
        _tell_ledger(output)
        typer.echo(f"streamrl: {error}", err=True)
        raise typer.Exit(128 + error.signal) from None
    except RuntimeError:
        _tell_ledger(output)
        raise
    ledger = balance_books(trace, output)
    check_ledger(ledger)
    metrics = replace(measure(trace), ledger=ledger)
    write_views(trace, output)
    if as_json:
        print_json(metrics)
    else:
        console = Console()
        console.print(metrics_table(metrics))
        typer.echo(ledger_line(ledger))
        console.print(f"run directory: {run.execute.output}", soft_wrap=True)


def _tell_ledger(output: Path) -> None:
    """Say how the books of a run stand that was cut short, where it has left any."""
    if (output / TRACE_FILE).exists():
        typer.echo(ledger_line(balance_books(open_trace(output), output)), err=True)


def _how_to_resume(run_file: Path, overrides: Sequence[str]) -> str:
    """Return the command that goes on with the run."""
    changes = [word for override in overrides for word in ("--set", override)]
    return shlex.join(["streamrl", "execute", str(run_file), *changes, "--resume"])


class _Watch:
    """Keeps the progress bar up to date: steps, recent reward, rollouts trained + running, staleness."""

    def __init__(self, progress: Progress, num_steps: int) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("step", total=num_steps, facts="starting")
        self._rewards: deque[float] = deque(maxlen=RECENT)
        self._tokens = 0

    def __call__(self, event: Event, state: State, now: float) -> None:
        if isinstance(event, Generated):
            self._tokens += event.tokens
        elif isinstance(event, Verified):
            self._rewards.append(event.reward)
        elif not isinstance(event, Stepped):
            return
        reward = sum(self._rewards) / len(self._rewards) if self._rewards else 0.0
        leader, replicas = state.leader, state.fleet.replicas.values()
        behind = leader.version - min(
            (r.version for r in replicas if r.is_serving), default=leader.version
        )
        facts = (
            f"reward {reward:.3f}  rollouts {leader.num_trained}+{state.num_generating}  "
            f"staleness {behind}  {self._tokens / now:,.0f} tokens/s"
        )
        self._progress.update(self._task, completed=leader.version, facts=facts)
