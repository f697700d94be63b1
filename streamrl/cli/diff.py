"""`streamrl diff`: what differs between two plans or run files, and what that does to dollars, hours and idle time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.output import echo
from streamrl.cli.shared import AsJson, Intervals, print_json, stdout_console
from streamrl.cli.simulate_against import compare
from streamrl.record.evaluation import FinalScores, final_scores
from streamrl.record.run_comparison import Against
from streamrl.record.run_directory import RUN
from streamrl.report.diff_report import PlannedPair, changed_keys, diff_markdown, diff_report
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run, read_recorded_run
from streamrl.sim.planner.plan import PLAN_TOML, read_taken
from streamrl.sim.studies.comparable_runs import IncomparableError, check_same_work


def diff(
    a: Annotated[
        Path,
        typer.Argument(metavar="A", help="A run file, or the directory of a plan or a run."),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other one.")],
    as_markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", help="Print Markdown, for a pull request.", rich_help_panel=OUTPUT
        ),
    ] = False,
    intervals: Intervals = False,
    as_json: AsJson = False,
) -> None:
    """Show what differs between two plans, run files or executed runs.

    Figures are compared if both train the same model on the same work. Two frameworks may differ in optimizer steps,
    epochs and the passes for old log-probabilities: the table of keys names what differs. Figures of two unchanged plans are from their
    plan.json. Otherwise both are simulated on the same prompts, which may take minutes. Executed runs are not simulated:
    their last scores on held-out prompts are compared, prompt by prompt.

    Example: streamrl diff plans/7b plans/7b-cheaper --markdown
    """
    one, other = _load(a), _load(b)
    changes = changed_keys(one, other)
    scores: FinalScores | None = None
    against: Against | PlannedPair | None = None
    if _is_executed(a) and _is_executed(b):
        scores, why_not = _scores(a, b, one, other)
    else:
        against, why_not = _figures(one, other, _planned(a, b)) if changes else (None, "")
    if as_json:
        print_json(
            {
                "changes": [each._asdict() for each in changes],
                "figures": None if isinstance(against, PlannedPair) else against,
                "from_plans": against._asdict() if isinstance(against, PlannedPair) else None,
                "no_figures": why_not,
                "scores": None if scores is None else _scores_json(scores),
                "scored_unlike": [] if scores is None else scores.scored_unlike,
            }
        )
    elif as_markdown:
        echo(diff_markdown(changes, against, why_not, intervals=intervals, scores=scores))
    else:
        told = diff_report(changes, against, why_not, intervals=intervals, scores=scores)
        stdout_console().print(told)


def _is_executed(path: Path) -> bool:
    """Return whether a path is the directory of an executed run."""
    return (path / RUN).is_file()


def _scores(a: Path, b: Path, one: Run, other: Run) -> tuple[FinalScores | None, str]:
    """Return the last scores of two executed runs if both have evaluations, and what to know of them."""
    report = f"`streamrl report {a} {b}` compares the measured seconds and dollars."
    if one.evaluation is None or other.evaluation is None:
        return None, report
    if one.evaluation.passes_at != other.evaluation.passes_at:
        return None, f"Scores are not compared: evaluation.passes_at differs. {report}"
    from streamrl.executor.sampling import scored_with

    ours, theirs = (
        scored_with(each.evaluation, each.rollout, each.verifier) for each in (one, other)
    )
    unlike = tuple(key for key in ours if ours[key] != theirs.get(key))
    try:
        return final_scores(a, b, one.evaluation)._replace(scored_unlike=unlike), report
    except ValueError as error:
        return None, f"Scores are not compared: {error}. {report}"


def _scores_json(scores: FinalScores) -> dict[str, object]:
    return {
        name: {
            "a": scores.a.scores[name],
            "b": scores.b.scores[name],
            "difference": each.score,
            "num_prompts": each.num_prompts,
        }
        for name, each in scores.differences.items()
    }


def _load(path: Path) -> Run:
    if _is_executed(path):
        return read_recorded_run(path / RUN)
    return load_run(path / PLAN_TOML if path.is_dir() else path)


def _planned(a: Path, b: Path) -> PlannedPair | None:
    """Return the figures of two plans whose run files are as they were planned by this version; None for others."""
    if not (a.is_dir() and b.is_dir()):
        return None
    ours, theirs = read_taken(a), read_taken(b)
    return None if ours is None or theirs is None else PlannedPair(ours, theirs)


def _figures(
    a: Run, b: Run, planned: PlannedPair | None
) -> tuple[Against | PlannedPair | None, str]:
    """Return the comparison of two runs, or the reason why they cannot be compared."""
    try:
        if planned is not None:
            check_same_work(a, b)
            return planned, ""
        return compare(a, b), ""
    except IncomparableError as error:
        return None, f"dollars and hours are not compared: {error}"
