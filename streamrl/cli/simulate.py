"""`streamrl simulate`: predict time, cost and GPU idle time of a run."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import asdict, replace

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.output import echo
from streamrl.cli.progress import make_progress
from streamrl.cli.shared import (
    AsJson,
    Intervals,
    Overrides,
    RayAddress,
    check_ledger,
    print_json,
    sole_writer,
    stdout_console,
)
from streamrl.engine.trace import Trace, recorded_world
from streamrl.hardware.resolved import resolve
from streamrl.record.ledger import ledger_line
from streamrl.record.metrics import (
    BorrowingMetrics,
    LendingMetrics,
    Metrics,
    ResizeMetrics,
    measure,
)
from streamrl.record.run_directory import TRACE, read_inputs
from streamrl.report.run_tables import metrics_table
from streamrl.report.study_file import is_study
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.runfile.formatting import counted, format_duration, format_share, format_step_time
from streamrl.runfile.paths import paths_of
from streamrl.runfile.result_files import write_results
from streamrl.sim.costs.corrections import framework_sources
from streamrl.sim.steady_state import UnfinishedError, measure_steady, simulate_steady

if TYPE_CHECKING:
    from streamrl.sim.planner.plan import SpotSavings

STUDIES = "Studies: many values"
COMPARISONS = "Comparisons: two runs"


def simulate(
    run_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.toml", help="A run file or a study file. Leave it out with --from."
        ),
    ] = None,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write results to this directory, for `streamrl report`. A run writes trace.jsonl, timeline.png and "
            "chrome_trace.json. A study writes study.csv, study.json and a figure per metric. --against writes against.json.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=STUDIES,
            metavar="KEY=V1,V2",
            help="Simulate every combination of these values. Repeat for more keys. "
            "'KEY=V1,V2; KEY=W1,W2' changes keys together.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=COMPARISONS,
            metavar="B.toml",
            help="Compare with this run file, on the same prompts, until the difference is known. --set changes both runs; "
            "--set A:KEY=VALUE or B:KEY=VALUE changes one.",
        ),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--from",
            rich_help_panel=COMPARISONS,
            metavar="RUN",
            help="Simulate a finished run (directory or trace) unchanged and with --set KEY=VALUE, with its recorded lengths.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=STUDIES,
            metavar="N",
            help="Simulations per combination, each with its own seed. Default: as in the study file, or 1.",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=STUDIES,
            metavar="METRIC",
            help="Draw this metric of a study: step_time, idle.skew, … Repeat for more.",
        ),
    ] = None,
    skip_infeasible: Annotated[
        bool,
        typer.Option(
            "--skip-infeasible",
            rich_help_panel=STUDIES,
            help="Leave out combinations that are not possible, such as those that do not fit in memory.",
        ),
    ] = False,
    intervals: Intervals = False,
    as_json: AsJson = False,
    ray: RayAddress = None,
) -> None:
    """Predict time, cost and GPU idle time of a run.

    The first rows are for the whole run: all `algorithm.steps` with the start. All other figures are for the steady
    state. The command simulates as many steps as `simulate.interval` needs, at most `simulate.max_steps`, whatever
    `algorithm.steps` is. Without --output, memory use does not grow with the number of steps.

    With --sweep, or a study file instead of a run file, it simulates every combination of values, and prints a finding.
    If it is interrupted, the same command with the same --output continues after the finished simulations.

    With --against, it compares two runs that do the same work. It shows time and cost of both, and whether the
    difference is more than chance. It also shows at which price or bandwidth both cost the same per token.

    With --from, it shows what a change would have saved in a finished run. Both simulations use the recorded lengths,
    expectations and share of non-zero advantages.

    Example: streamrl simulate examples/h20-h800.toml --set policies.system=stream-sync -o runs/what-if

    Example: streamrl simulate examples/h20-h800.toml --sweep policies.system=stream-sync,stream-async

    Example: streamrl simulate examples/against.toml --against examples/against-colocated.toml

    Example: streamrl simulate --from runs/quickstart --set policies.system=stream-sync
    """
    of_studies = _given_of_studies(seeds is not None, bool(metric), skip_infeasible)
    of_studies["--ray"] = ray is not None
    others = {"--sweep": bool(sweep), **of_studies}
    if recorded is not None:
        from streamrl.cli.simulate_against import simulate_again

        given = {"RUN.toml": run_file is not None, "--output": output is not None}
        given |= {"--against": against is not None, **others}
        _refuse_beside("--from, which takes the run file from its record", given)
        simulate_again(recorded, overrides or (), as_json=as_json, intervals=intervals)
        return
    if run_file is None:
        raise ValueError("RUN.toml is missing: name a run file, or a recorded run with --from")
    if against is not None:
        from streamrl.cli.simulate_against import simulate_against

        _refuse_beside("--against, which simulates two runs", others)
        simulate_against(
            run_file, against, overrides or (), output, as_json=as_json, intervals=intervals
        )
        return
    if output is not None:
        refuse_real_run(output)
    with nullcontext() if output is None else sole_writer(output):
        if sweep or is_study(run_file):
            from streamrl.cli.simulate_sweep import make_study, run_study

            study = make_study(run_file, sweep or (), overrides or (), seeds, metric or ())
            run_study(
                study, output, ray, skips=skip_infeasible, as_json=as_json, intervals=intervals
            )
            return
        _refuse_options_of_studies(of_studies)
        run = load_run(run_file, overrides or ())
        metrics = _simulate(run, output)
        facts = list(framework_sources(resolve(run)))
        is_compared = any(each.on_demand_price for each in run.cluster.pools.values())
        spot = _spot_savings(run) if is_compared and not metrics.unfinished else None
        if as_json:
            more = {} if spot is None else {"spot": spot}
            whole = {"whole_run": metrics.whole_run, **asdict(metrics), "framework": facts}
            print_json({**whole, **more})
        else:
            stdout_console().print(metrics_table(metrics, intervals=intervals))
            for resize in metrics.resizes:
                echo(_resize_text(resize))
            if metrics.lending is not None and not metrics.unfinished:
                alone = measure_steady(replace(run, lending=None)).step_time
                echo(_lending_text(metrics.lending, metrics.step_time, alone))
            if metrics.borrowing is not None and not metrics.unfinished:
                trainer = replace(run.trainer, borrows=False)
                alone = measure_steady(replace(run, trainer=trainer)).step_time
                echo(_borrowing_text(metrics.borrowing, metrics.step_time, alone))
            if spot is not None:
                from streamrl.report.plan_report import spot_text

                echo(spot_text(spot))
            for fact in facts:
                echo(fact)
            echo(ledger_line(metrics.ledger))
            if output is not None:
                echo(
                    f"written to {output}; next: {shlex.join(['streamrl', 'report', str(output)])}"
                )
        check_ledger(metrics.ledger)
        if metrics.unfinished:
            raise UnfinishedError(metrics.unfinished)


def _resize_text(resize: ResizeMetrics) -> str:
    """Return what a change of the trainer's ranks took."""
    return (
        f"trainer.resize: {counted(resize.data_parallel, 'data-parallel rank')} from step {resize.step} on; the trainer "
        f"waits {format_duration(resize.seconds)} for the change"
    )


def _borrowing_text(borrowing: BorrowingMetrics, step_time: float, alone: float) -> str:
    """Return how often GPUs were borrowed, and the seconds of a step with `trainer.borrows` and without it."""
    change = step_time / alone - 1
    return (
        f"trainer.borrows: GPUs of replicas trained in {borrowing.num_borrowed:,} of {borrowing.steps:,} steps, for "
        f"{format_share(borrowing.training)} of the time; a step takes {format_step_time(step_time, None)}, and "
        f"{format_step_time(alone, None)} without it ({change:+.1%})"
    )


def _lending_text(lending: LendingMetrics, step_time: float, alone: float) -> str:
    """Return how often GPUs were lent, and the seconds of a step with `[lending]` and without it."""
    change = step_time / alone - 1
    return (
        f"[lending]: GPUs were lent in {lending.num_lent:,} of {lending.steps:,} steps; GPUs of the trainer generate for "
        f"{format_share(lending.generating)} and switch for {format_share(lending.switching)} of their time; a step takes "
        f"{format_step_time(step_time, None)}, and {format_step_time(alone, None)} without [lending] ({change:+.1%})"
    )


def _spot_savings(simulated: Run) -> SpotSavings | None:
    """Return what the spot machines of a run save; None if it uses none with an `on_demand_price`."""
    from streamrl.sim.parallel import worker_pool
    from streamrl.sim.planner.spot_savings import spot_savings

    with worker_pool() as pool:
        return spot_savings(simulated, pool)


def _given_of_studies(has_seeds: bool, has_metrics: bool, skips: bool) -> dict[str, bool]:
    """Return whether each option that only studies have was set."""
    return {"--seeds": has_seeds, "--metric": has_metrics, "--skip-infeasible": skips}


def _refuse_beside(what: str, options: dict[str, bool]) -> None:
    for option, is_given in options.items():
        if is_given:
            raise ValueError(f"{option} does not go with {what}")


def _refuse_options_of_studies(options: dict[str, bool]) -> None:
    for option, is_given in options.items():
        if is_given:
            raise ValueError(f"{option} applies only to studies: add --sweep key=v1,v2")


def refuse_real_run(output: Path) -> None:
    """Raise `ValueError` if a directory has the results of an executed run, which no simulation can restore."""
    if (output / TRACE).exists() and recorded_world(output / TRACE) == "real":
        raise ValueError(
            f"--output {output} holds an executed run, which would be overwritten; choose another directory"
        )


def _simulate(run: Run, output: Path | None) -> Metrics:
    with make_progress() as progress:
        task = progress.add_task("step", total=run.simulate.max_steps, facts="")

        def watch(version: int) -> None:
            progress.update(task, completed=version)

        if output is None:
            return measure_steady(run, watch)
        trace = simulate_steady(run, watch)
    metrics = measure(trace)
    _write(trace, output)
    return metrics


def _write(trace: Trace, output: Path) -> None:
    from streamrl.report.figures import views_of

    inputs = read_inputs(paths_of(trace.run), output)
    write_results(output, {**inputs, **views_of(trace), TRACE: trace.encode()})
