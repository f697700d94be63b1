"""`streamrl ranker eval`: how well rankers find the longest rollouts, on held-out data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as Grid

from streamrl.cli.shared import AsJson, print_json
from streamrl.workload.ranker_eval import (
    SHARES,
    Evaluation,
    evaluate_history,
    evaluate_scores,
    lengths_by_prompt,
    read_table,
    score_columns,
)

ranker = typer.Typer(
    name="ranker",
    no_args_is_help=True,
    help="Expected output lengths, and how good they are.\n\n"
    "Example: streamrl ranker eval scores.csv.gz",
)


@ranker.callback()
def _group() -> None:
    """Keep `eval` a command of its own while it is the only one."""


@ranker.command("eval")
def evaluate(
    file: Annotated[
        Path,
        typer.Argument(
            help="Held-out scores, or with --history lengths by prompt: a CSV, may be .gz."
        ),
    ],
    score: Annotated[
        list[str] | None,
        typer.Option(help="Column of scores; score where absent, all with --lengths."),
    ] = None,
    lengths: Annotated[
        list[Path] | None,
        typer.Option(help="Lengths by prompt_id, where the scores have no column output_tokens."),
    ] = None,
    history: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Rank each sample by the mean of so many others of its prompt."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Only lengths of this model, where a file has several.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the recall of rankers by task family: which share of the longest they find.

    FILE has columns score and output_tokens, and family, source or dataset where there are several. With
    --json each ranker is one line. A run file uses such scores with workload.lengths.ranker = "scores".

    Example: streamrl ranker eval scores.csv.gz --lengths lengths.csv.gz --json
    """
    if history:
        if score or lengths:
            raise ValueError("--history ranks by lengths alone: leave out --score and --lengths")
        table = read_table(file, model)
        found = [evaluate_history(table, num_past) for num_past in history]
    else:
        scores = read_table(file, None if lengths else model)
        by_prompt = lengths_by_prompt(read_table(path, model) for path in lengths or ())
        columns = score_columns(scores, score or (), bool(lengths))
        found = [evaluate_scores(scores, c, by_prompt if lengths else None) for c in columns]
    if as_json:
        for one in found:
            print_json(one)
        return
    for family in dict.fromkeys(family for one in found for family in one.recall):
        Console().print(recall_table(family, [one for one in found if family in one.recall]))
        Console().print()


def recall_table(family: str, found: list[Evaluation]) -> Grid:
    """Lay out recall and correlation in one family, a line for each ranker."""
    grid = Grid("ranker", title=family, title_justify="left", box=None, pad_edge=False)
    for title in (*(f"recall@{share:.0%}" for share in SHARES), "Spearman", "prompts"):
        grid.add_column(title, justify="right")
    for one in found:
        recalls = [f"{one.recall[family][str(share)]:.2f}" for share in SHARES]
        rest = [f"{one.spearman[family]:.2f}", str(one.num_prompts[family])]
        grid.add_row(one.ranker, *recalls, *rest)
    grid.add_row("at random", *(f"{share:.2f}" for share in SHARES), "0.00", "")
    return grid
