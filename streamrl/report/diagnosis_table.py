"""Show a diagnosis: a table of stages, and lines about what helps."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from rich.table import Table

from streamrl.report.run_tables import assumed_text
from streamrl.runfile.python_values import value_text
from streamrl.sim.diagnosis.result import Diagnosis, Stage

UNKNOWN = "-"


def diagnosis_table(found: Diagnosis) -> Table:
    """Return a row for each stage and one for the whole step."""
    table = Table(box=None, pad_edge=False, title=found.source, title_justify="left")
    table.add_column("stage")
    for name in ("measured", "predicted", "normal range", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for stage in (*found.stages, found.step):
        table.add_row(*_cells(stage))
    return table


def _cells(stage: Stage) -> Iterator[str]:
    yield stage.name
    yield UNKNOWN if stage.measured is None else f"{stage.measured:.1f} s"
    yield f"{stage.predicted:.1f} s"
    yield f"{stage.band.low:.1f} to {stage.band.high:.1f} s"
    yield UNKNOWN if stage.measured is None else f"{stage.measured / stage.predicted:.2f}"
    yield stage.verdict


def diagnosis_lines(found: Diagnosis) -> Iterator[str]:
    """Yield the verdict, the longest stage, causes, changes, settings to check, and what is not the problem."""
    yield "this step is normal for the hardware" if found.is_normal else _abnormal(found)
    longest = next(stage for stage in found.stages if stage.name == found.binds)
    by = "predicted" if longest.measured is None else "measured"
    yield f"longest stage ({by}): {longest.name}"
    for text in found.causes:
        yield f"first: {text}"
    for number, each in enumerate(found.advice, start=1):
        keys = "".join(
            f" --set {key}={value_text(value, key)}" for key, value in each.settings.items()
        )
        gain = f"saves {each.seconds:.3g} s of a step ({each.share:.0%})"
        yield f"{number}. {each.what}: {gain}{keys}"
    if not found.advice:
        yield "no tried change shortens a step by 1 % or more"
    for text in found.doubtful:
        yield f"check: {text}"
    for text in found.not_the_problem:
        yield f"not the problem: {text}"
    if found.assumed:
        yield f"assumed: {assumed_text(found.assumed)}"
    for note in found.notes:
        yield f"note: {note}"


def _abnormal(found: Diagnosis) -> str:
    slow = [stage.name for stage in found.stages if stage.verdict == "slow" and stage.waste]
    stages = [stage for stage in found.stages if stage.is_of_other_work]
    fast = [found.step] if found.step.verdict == "fast" and not slow else stages
    if fast:
        facts = (
            f"{each.name} is {each.predicted / (each.measured or inf):.2g} times as fast"
            for each in fast
        )
        return (
            f"this step is not normal: {', '.join(facts)} as this run file should be on the hardware. Are the times in "
            "seconds, and of this run file: its rollouts, lengths and GPUs?"
        )
    return (
        f"this step is not normal: {', '.join(slow) or found.step.name} too slow for the hardware"
    )
