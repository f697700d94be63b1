"""Write the sections on evaluations: scores on held-out prompts over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from streamrl.record.evaluation import EvaluationResult, Score, best_step
from streamrl.report.evaluation_table import say_change
from streamrl.report.page.learning import COLOURS, spread_places
from streamrl.report.page.parts import PageCell, PageSection, PageTable
from streamrl.report.page.sources import RecordedRun
from streamrl.report.pictures.drawing import Picture
from streamrl.report.pictures.step_curves import Curve, curves_picture
from streamrl.report.words import percent, seconds

NO_SCORE = float("nan")


def evaluation_sections(runs: Sequence[RecordedRun]) -> Iterator[PageSection]:
    """Yield a section for each run that has evaluated its policy."""
    for number, run in enumerate(runs, start=1):
        if run.evaluations:
            yield _section(f"evaluations-{number}", run)


def _section(name: str, run: RecordedRun) -> PageSection:
    results, last = run.evaluations, run.evaluations[-1]
    section = PageSection(name, f"Scores of {run.name} on held-out prompts", is_pair=True)
    section.text.append(_summary(results))
    if run.run.evaluation is not None and (change := say_change(results, run.run.evaluation)):
        section.text.append(f"{change}.")
    section.pictures += _pictures(name, results)
    section.tables.append(_table(results))
    if last.sources:
        section.tables.append(_sources_table(last))
    section.notes.append(
        f"Intervals have a confidence of {last.confidence:.0%}. They cover the choice of prompts and the "
        "sampling of rollouts, but not the seed of the training. Steps that were rolled back are left out."
    )
    if any(result.num_failed for result in results):
        section.notes.append("Failed rollouts have no reward and count for no score.")
    return section


def _summary(results: Sequence[EvaluationResult]) -> str:
    last = results[-1]
    best = best_step(results)
    which = "the best of the run" if best == last.step else f"step {best} has the best {last.main}"
    scores = ", ".join(f"{name} {score.value:.3f}" for name, score in last.scores.items())
    return (
        f"Step {last.step} has {scores} on {last.num_prompts:,} prompts with {last.samples} rollouts each"
        + (f"; {which}." if len(results) > 1 else ".")
    )


def _names(results: Sequence[EvaluationResult]) -> list[str]:
    """Return the names of all scores in the order of the newest evaluation."""
    return list(dict.fromkeys(name for result in reversed(results) for name in result.scores))


def _pictures(name: str, results: Sequence[EvaluationResult]) -> Iterator[Picture]:
    """Yield pictures of all scores, each with as many as curves can be distinguished."""
    names, steps = _names(results), [result.step for result in results]
    for first in range(0, len(names), len(COLOURS)):
        shown = names[first : first + len(COLOURS)]
        curves = [_curve(each, results, css) for each, css in zip(shown, COLOURS, strict=False)]
        title = f"{', '.join(shown)} on held-out prompts"
        yield curves_picture(f"{name}-{first}", title, steps, curves, "{:.3f}".format)


def _curve(name: str, results: Sequence[EvaluationResult], css: str) -> Curve:
    scores = [result.scores.get(name) for result in results]
    values = [NO_SCORE if score is None else score.value for score in scores]
    ends = [(NO_SCORE, NO_SCORE) if score is None else (score.low, score.high) for score in scores]
    return Curve(name, values, css, ends)


def _table(results: Sequence[EvaluationResult]) -> PageTable:
    """Return a table of some evaluations, spread evenly over the run, with the first and the last."""
    names, places = _names(results), spread_places(len(results))
    rows = [_row(results[at], names) for at in places]
    is_whole = len(places) == len(results)
    what = "All evaluations" if is_whole else f"{len(places)} of {len(results)} evaluations"
    head = ("step", *names, "tokens", "cut off", "failed", "took")
    return PageTable(
        f"{what}, each score with its interval.",
        head,
        rows,
        range(len(head)),
        is_cards=True,
        is_grid=True,
    )


def _sources_table(result: EvaluationResult) -> PageTable:
    """Return a table of the data sources of an evaluation."""
    names = list(result.scores)
    head = ("data source", "prompts", *names)
    rows = [
        [
            PageCell(source),
            PageCell(f"{own.num_prompts:,}"),
            *_score_cells([own.scores.get(name) for name in names]),
        ]
        for source, own in result.sources.items()
    ]
    return PageTable(
        f"Scores of step {result.step:,} by data source.", head, rows, range(1, len(head))
    )


def _score_cells(scores: Iterable[Score | None]) -> Iterator[PageCell]:
    """Yield a cell for each score, with its interval; an empty one where there is none."""
    for score in scores:
        if score is None:
            yield PageCell("")
        else:
            yield PageCell(f"{score.value:.3f}", f"{score.low:.3f} to {score.high:.3f}")


def _row(result: EvaluationResult, names: Sequence[str]) -> list[PageCell]:
    return [
        PageCell(f"{result.step:,}"),
        *_score_cells([result.scores.get(name) for name in names]),
        PageCell(f"{result.mean_tokens:,.1f}"),
        PageCell(percent(result.truncated_share)),
        PageCell(f"{result.num_failed:,}"),
        PageCell(seconds(result.seconds)),
    ]


def evaluations_json(runs: Sequence[RecordedRun]) -> list[dict[str, object]]:
    """Return the same as data, without the rewards of prompts."""
    return [
        {"name": run.name, "results": [replace(each, rewards={}) for each in run.evaluations]}
        for run in runs
        if run.evaluations
    ]
