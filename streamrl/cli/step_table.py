"""The figures of a run's last steps: as a table on a terminal, and each step as a line of a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class Column(NamedTuple):
    """A figure of a step as it is shown."""

    name: str
    keys: tuple[str, ...]
    """Of metrics.jsonl; nothing is shown of a step that lacks one of them."""
    form: str
    """Takes the values of `keys`."""
    meaning: str = ""
    """Of what its name does not say."""


COLUMNS = (
    Column("step", ("step",), "{:.0f}"),
    Column("seconds", ("step_time",), "{:.1f}"),
    Column("reward", ("reward", "reward_std"), "{:.3f} ± {:.3f}"),
    Column("tokens", ("length_mean", "length_max"), "{:.0f} to {:.0f}", "mean to longest"),
    Column("cut off", ("cut_off",), "{:.0%}"),
    Column("unscored", ("unscored",), "{:.0f}", "rollouts that their scorer cannot score"),
    Column("uniform", ("uniform_groups",), "{:.0%}", "groups of one reward, which teach nothing"),
    Column(
        "stale", ("staleness_mean", "staleness_max"), "{:.1f} to {:.0f}", "versions, mean to most"
    ),
    Column("loss", ("loss",), "{:+.3f}"),
    Column("gradient", ("grad_norm",), "{:.2f}", "norm before clipping"),
    Column("entropy", ("entropy",), "{:.3f}"),
    Column("KL", ("kl_k3",), "{:.1e}", "from the policy that sampled"),
    Column("KL ref", ("reference_kl",), "{:.1e}", "from the initial policy"),
    Column("tokens/s", ("speed",), "{:,.0f}"),
)
"""Those on the right are left out where a terminal is too narrow."""


def step_table(steps: Sequence[Mapping[str, float]], console: Console) -> Table:
    """Return steps as a table, with as many columns as the terminal is wide."""
    shown = [column for column in COLUMNS if any(text_of(column, step) for step in steps)]
    table = _table(steps, shown)
    while len(shown) > 1 and console.measure(table).maximum >= console.width:
        shown.pop()
        table = _table(steps, shown)
    return table


def _table(steps: Sequence[Mapping[str, float]], shown: Sequence[Column]) -> Table:
    legend = "; ".join(f"{column.name}: {column.meaning}" for column in shown if column.meaning)
    table = Table(box=None, pad_edge=False, caption=legend, caption_justify="left")
    for column in shown:
        table.add_column(column.name, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(*(text_of(column, step) for column in shown))
    return table


def line_of(step: Mapping[str, float]) -> str:
    """Return what a step was like in a line: "seconds 1.2, reward 0.685 ± 0.464, …"."""
    told = ((column.name, text_of(column, step)) for column in COLUMNS[1:])
    return ", ".join(f"{name} {text}" for name, text in told if text)


def text_of(column: Column, step: Mapping[str, float]) -> str:
    """Return a cell; nothing where the step lacks the figure."""
    if any(key not in step for key in column.keys):
        return ""
    return column.form.format(*(step[key] for key in column.keys))
