"""Tables of evaluations: scores by step, and what training changed on the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from streamrl.record.evaluation import Difference, EvaluationResult, FinalScores, difference
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.formatting import format_duration


def evaluations_table(results: Sequence[EvaluationResult]) -> Table:
    """Return a table with a row for each evaluation: its scores with their intervals, lengths and seconds."""
    names = list(results[-1].scores)
    table = Table("step", *names, "tokens", "cut off", "time", box=None, header_style="")
    for result in results:
        scores = [str(result.scores[name]) if name in result.scores else "" for name in names]
        table.add_row(
            str(result.step),
            *scores,
            f"{result.mean_tokens:,.0f}",
            f"{result.truncated_share:.0%}",
            format_duration(result.seconds),
        )
    return table


def sources_table(result: EvaluationResult) -> Table:
    """Return a table with a row for each data source of an evaluation: its prompts, and its scores with their intervals."""
    names = list(result.scores)
    table = Table("data source", "prompts", *names, box=None, header_style="")
    for source, own in result.sources.items():
        scores = [str(own.scores[name]) if name in own.scores else "" for name in names]
        table.add_row(escape(source), f"{own.num_prompts:,}", *scores)
    return table


def say_difference(found: Difference, name: str, what: str) -> str:
    """Return a line about how much a score changed."""
    score = found.score
    clear = "" if found.is_clear else "; the interval includes 0"
    return (
        f"{name} {what}: {score.value:+.3f} ({score.low:+.3f} to {score.high:+.3f}), paired over "
        f"{found.num_prompts} prompts{clear}"
    )


def say_change(results: Sequence[EvaluationResult], config: EvaluationConfig) -> str:
    """Return a line about the change from the first to the last evaluation of a run; empty with fewer than two."""
    if len(results) < 2:
        return ""
    first, last = results[0], results[-1]
    changes = difference(last, first, config)
    if last.main not in changes:
        return ""
    return say_difference(changes[last.main], last.main, f"from step {first.step} to {last.step}")


def final_score_rows(found: FinalScores) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each score of two runs: its name, both values and their difference, with intervals."""
    for name, each in found.differences.items():
        score = each.score
        change = f"{score.value:+.3f} ({score.low:+.3f} to {score.high:+.3f})"
        yield name, str(found.a.scores[name]), str(found.b.scores[name]), change


def say_final_scores(found: FinalScores) -> str:
    """Return a line about what the rows of `final_score_rows` compare."""
    (num, *_) = [each.num_prompts for each in found.differences.values()] or [0]
    counts = [each.num_prompts for each in (found.a, found.b)]
    others = (
        ""
        if counts == [num, num]
        else (
            f" A has {counts[0]:,} prompts and B {counts[1]:,}, so it is not the difference of the two columns."
        )
    )
    unlike = ", ".join(f"evaluation.{key}" for key in found.scored_unlike)
    other_scale = (
        f" A and B are scored differently ({unlike}), so the difference is not one of the models alone."
        if unlike
        else ""
    )
    return (
        f"Scores on held-out prompts: step {found.a.step:,} of A, step {found.b.step:,} of B. The difference is "
        f"paired over {num:,} prompts.{other_scale}{others} The intervals do not cover the seed of the training."
    )
