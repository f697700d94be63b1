"""The first half of docs/fidelity.md: published rows beside predictions, what is left out, and a line a version."""

from __future__ import annotations

import csv
import datetime
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from streamrl.sim.fidelity.published_rows import Row, grouped, range_text, summarise

HISTORY = "fidelity-history.csv"
TITLES = {
    "serving": "Serving: decode steps, requests and full load",
    "training": "Training: seconds of an optimizer step",
    "steps": "Steps of RL: stages of published runs",
}
LIMITS = (
    "state-space layers, vision towers: no costs; refused. Linear attention and sliding windows have costs that no published "
    "step was fitted on: training of gpt-oss and Qwen3-Next comes out 27 to 33 % too fast (the rows above), of which no published figure tells the cause",
    "LoRA adapters' training, optimizers on the host: not modelled; published "
    "rows of them are left out",
    "narrow formats that nobody measured: rooflines (int4 products, nvfp4), or as far from them as fp8 (int8, mxfp8); FP8 training of mixtures too",
    "critics or reward models of another size than the actor, and rollout engines of mixed degrees: not expressible",
    "steps whose output lengths are not published: lengths decide generation, and nothing can stand in for them",
    "prefix caches between steps, disaggregated prefill: not modelled; how many drafted tokens are accepted: a key, not a prediction",
    "tuning that a page does not state: identical published layouts of one mixture lie up to 41 % apart",
)
"""What the tool cannot predict."""
SHOWN = (
    ("serving", "Llama-3.1-8B, h100 TP1, batch 255"),
    ("serving", "Qwen3-8B, h100 TP1, batch 255"),
    ("serving", "Llama-2-70B, h100 TP8, batch 1, context 1,024"),
)
"""Rows that stand on the page itself, by the beginning of their names: an 8B at a batch of about 256, a 70B at 1."""


def sections(sets: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Yield the lines of each set of published rows: errors by group, and rows that are often asked for."""
    for name, rows in sets.items():
        yield from ("", f"## {TITLES[name]}", "")
        yield f"`streamrl validate {name} --rows` prints each row. Errors of rows that a fit saw are those of a fit without"
        yield "their model; a row with unknown inputs is a range, its error is that of the nearest end, and `range` says how wide it is."
        yield from (
            "",
            "| group | rows | median | p90 | bias | range |",
            "|---|---|---|---|---|---|",
        )
        for group, some in (*grouped(rows).items(), ("all", rows)):
            found = summarise(some)
            yield (
                f"| {group} | {found.rows} | {found.median:.1%} | {found.p90:.1%} | {found.bias:+.1%} | {found.width:.0%} |"
            )
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
    yield from ("", "## What it cannot predict", "")
    yield from (f"- {limit}" for limit in LIMITS)


def stamp() -> str:
    """Return version, commit and date of what is running."""
    return f"streamrl {version('streamrl')}, commit {_commit()}, {datetime.date.today()}"


def write_history(
    sets: Mapping[str, Sequence[Row]], paper: Mapping[str, float], path: Path
) -> None:
    """Append a line with the errors of this version, or replace the one of this commit.

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
    """Return the commit that is checked out; "unknown" where this is no checkout."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _is_shown(name: str, row: Row) -> bool:
    """Whether a row stands on the page: all of those of whole steps, and a few others."""
    return name == "steps" or any(name == of and row.name.startswith(begin) for of, begin in SHOWN)
