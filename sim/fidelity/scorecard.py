"""Write the first half of docs/fidelity.md: published rows with predictions, limits, and the history of errors."""

from __future__ import annotations

import csv
import datetime
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import get_args

from streamrl.hardware.efficiency import scaled_errors
from streamrl.sim.fidelity.published_rows import (
    Evidence,
    Row,
    Summary,
    beside_text,
    grouped,
    in_band_text,
    range_text,
    summarise,
)
from streamrl.sim.fidelity.served import covered, read_served

HISTORY = "fidelity-history.csv"
STRANGERS = scaled_errors()
"""Errors of measured GPUs that are predicted from other generations."""
TITLES = {
    "serving": "Serving: decode steps, requests and full load",
    "served": "Served points with known inputs: milliseconds per output token under load",
    "served-ranges": "Served points with unknown inputs: workers, kind of ranks or draft tokens",
    "training": "Training: seconds of an optimizer step",
    "steps": "Steps of RL: stages of published runs",
    "memory": "Memory of replicas: KV cache that engines log at their start",
}
NOTES = {
    "served": "One line in the sample of AIConfigurator is one point; one line in seven repeats a measurement of another file. "
    f"{len(covered())} of its {len(read_served())} points have a prediction: the layout of the others is unknown. The last column has the "
    "median errors of AIConfigurator 0.12.0 for the same points, and their number if it predicts fewer.",
    "served-ranges": "The sample does not state the number of decode workers, whether GPUs are tensor or attention ranks, or whether draft "
    "tokens were used. A point is the range over all of them, and its error is that of the geometric middle. "
    "*in band* is the share of published values within the range.",
}
HOW_TO_READ = (
    "In the tables below:",
    "",
    "- *median* and *p90* are absolute errors of predictions, relative to the published value;",
    "- *bias* is the median of signed errors;",
    "- *range*: if an input is unknown, the prediction is a range, and its error is that of the geometric middle. The column",
    "  shows how wide the range is. No such row counts as exact.",
    "- *in band*: the share of published figures that are in the band which reports show for the prediction.",
    "- *not fitted*: no constant was fitted to these rows. Read their errors first.",
    "- *left out*: constants were fitted to such rows. Each row is predicted by constants without its model. Rows of the same",
    "  source stay in the fit, so errors on a new source can be larger.",
    "- *in sample*: constants were fitted to the rows themselves, so their errors are too small.",
)
LIMITS = (
    "Vision towers take memory and sync bytes, and no seconds: images are not simulated.",
    "Linear attention and sliding windows: no published step was fitted. Training of gpt-oss and Qwen3-Next is predicted 27 to 33 % "
    "too fast (rows above). The cause is unknown.",
    "Training of LoRA adapters, and optimizers in host memory or on NVMe: no published row was compared.",
    "KV cache of replicas: 13 of the 18 rows are one report about vLLM, and ten rows were derived from other figures of a log. "
    "Another version of an engine can be off by as much as its own row of fp8 experts, 23 %.",
    "Narrow formats without measurements are rooflines (int4 products, nvfp4), or as far from them as fp8 (int8, mxfp8). FP8 training "
    "of mixtures is a roofline too.",
    "GPUs without tables (AMD, TPU, L4, RTX 4090, A6000) take the seconds of measured GPUs, in proportion to datasheets. Measured GPUs "
    f"whose tables were hidden were off by {STRANGERS.decode.median * 100:.0f} % in median and {STRANGERS.decode.p90 * 100:.0f} % at p90 in decode steps, "
    f"{STRANGERS.training.median * 100:.0f} % and {STRANGERS.training.p90 * 100:.0f} % in training steps (costs.md).",
    "A run file cannot describe critics or reward models of another size than the actor, or rollout engines of mixed degrees.",
    "Steps without published output lengths are left out. Lengths determine generation, and there is no substitute for them.",
    "Prefix caches between steps and disaggregated prefill are not modelled. The acceptance rate of draft tokens is a key, not a "
    "prediction.",
    "Tuning that a source does not state: identical published layouts of one mixture differ by up to 41 %.",
)
"""Cases that have no prediction, or an uncertain one."""
SHOWN = (
    ("serving", "Llama-3.1-8B, h100 TP1, batch 255"),
    ("serving", "Qwen3-8B, h100 TP1, batch 255"),
    ("serving", "Llama-2-70B, h100 TP8, batch 1, context 1,024"),
)
"""Rows that the page shows, by the beginning of their names: 8B models at a batch of about 256, and
a 70B at 1.
"""


def sections(sets: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Yield the lines of each set of published rows: errors by group, and the rows in `SHOWN`."""
    yield from _summary(sets)
    for name, rows in sets.items():
        yield from (
            "",
            f"## {TITLES[name]}",
            "",
            f"`streamrl validate {name} --rows` prints each row.",
        )
        if name in NOTES:
            yield from ("", NOTES[name])
        has_other = any(row.beside is not None for row in rows)
        yield from (
            "",
            "| group | rows | median | p90 | bias | range | in band |"
            + " AIConfigurator |" * has_other,
            "|---|---|---|---|---|---|---|" + "---|" * has_other,
        )
        for group, some in (*grouped(rows).items(), ("all", rows)):
            found = summarise(some)
            beside = f" {beside_text(found)} |" if has_other else ""
            yield f"| {group} | {_figures(found)} |{beside}"
        shown = [row for row in rows if _is_shown(name, row)]
        if shown:
            yield from (
                "",
                "| row | published | predicted | without its model |",
                "|---|---|---|---|",
            )
        for row in shown:
            without = "" if row.left_out is None else f"{row.left_out:.3g}"
            figures = f"{range_text(row.published, 3)} {row.unit} | {range_text(row.predicted, 3)} | {without}"
            yield f"| {row.name} | {figures} |"
    yield from ("", "## Limits of the predictions", "")
    yield from (f"- {limit}" for limit in LIMITS)


def _summary(sets: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Yield the errors of each set of published rows, rows without a fit first, and how to read the tables."""
    if sets:
        yield from (
            "",
            "| rows | published | number | median error | p90 | bias | range | in band |",
        )
        yield "|---|---|---|---|---|---|---|---|"
    for evidence in get_args(Evidence):
        for name, rows in sets.items():
            some = [row for row in rows if row.evidence == evidence]
            if some:
                yield f"| {evidence} | {TITLES[name]} | {_figures(summarise(some))} |"
    if sets:
        yield from ("", *HOW_TO_READ)


def _figures(found: Summary) -> str:
    """Return the cells of a summary."""
    errors = f"{found.median:.1%} | {found.p90:.1%} | {found.bias:+.1%}"
    return f"{found.rows} | {errors} | {found.width:.0%} | {in_band_text(found)}"


def stamp() -> str:
    """Return the version, commit and date of the code."""
    return f"streamrl {version('streamrl')}, commit {_commit()}, {datetime.date.today()}"


def write_history(
    sets: Mapping[str, Sequence[Row]], paper: Mapping[str, float], path: Path
) -> None:
    """Append a line with the errors of this version, or replace the line of this commit.

    Args:
        sets: published rows by name.
        paper: mean error by figure of the paper.
        path: the table.
    """
    line = {"date": str(datetime.date.today()), "commit": _commit(), "version": version("streamrl")}
    for name, rows in sets.items():
        found = summarise(rows)
        line |= {f"{name}_median": f"{found.median:.4f}", f"{name}_p90": f"{found.p90:.4f}"}
        line |= {f"{name}_bias": f"{found.bias:.4f}"}
    line |= {f"paper_{name}": f"{error:.4f}" for name, error in paper.items()}
    lines = []
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            lines = [one for one in csv.DictReader(file) if one["commit"] != line["commit"]]
    names = list(dict.fromkeys(key for one in (*lines, line) for key in one))
    with path.open("w", encoding="utf-8") as file:
        table = csv.DictWriter(file, names, lineterminator="\n")
        table.writeheader()
        table.writerows([*lines, line])


def _commit() -> str:
    """Return the current commit; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _is_shown(name: str, row: Row) -> bool:
    """Return whether a row is shown on the page: all rows of whole steps, and a few others."""
    return name == "steps" or any(name == of and row.name.startswith(begin) for of, begin in SHOWN)
