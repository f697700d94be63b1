"""`streamrl ranker fit`, `score` and `eval`: fit, use and test rankers of output lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table as Grid

from streamrl.cli.lazy_commands import OUTPUT, PlainCommand, PlainGroup
from streamrl.cli.output import echo
from streamrl.cli.shared import RANKER, SCORED, AsJson, claim_file, print_json, stdout_console
from streamrl.runfile.result_files import write_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamrl.ranker.evaluation import Evaluation

ranker = typer.Typer(
    name="ranker",
    cls=PlainGroup,
    no_args_is_help=True,
    help="Fit, use and test rankers that predict output lengths.\n\n"
    "Example: streamrl ranker eval runs/quickstart",
)

Model = Annotated[
    str | None, typer.Option(help="Use only lengths of this model. Default: all in the file.")
]


@ranker.command("fit", cls=PlainCommand)
def fit(
    source: Annotated[
        Path,
        typer.Argument(
            help="Directory of an executed run, or a CSV with prompt_id, prompt and output_tokens."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="Write the ranker to this file.", rich_help_panel=OUTPUT
        ),
    ],
    lm: Annotated[
        str | None,
        typer.Option(
            help="Fit a probe on the activations of this language model, a Hugging Face directory. Default: use words."
        ),
    ] = None,
    model: Model = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the cross-validation folds.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Fit a ranker to prompts with known output lengths.

    The ranker is a ridge regression or boosted trees on words and shape of the prompt, by cross-validation. It needs
    scikit-learn: pip install 'streamrl[ranker]'. Name it in workload.ranker.path of a run file. With --lm it is a linear
    probe on a language model's activations. Use `streamrl ranker score` with a probe before a run.

    Example: streamrl ranker fit runs/quickstart -o ranker.npz
    """
    import numpy as np

    from streamrl.ranker.score_files import read_known
    from streamrl.ranker.text_ranker import fit_text, write_ranker

    claim_file(output, RANKER, inputs=[source])
    known = [prompt for prompt in read_known(source, model) if prompt.text is not None]
    if not known:
        raise ValueError(f"{source}: a ranker is fitted to texts: name a column prompt or text")
    texts = [prompt.text or "" for prompt in known]
    lengths = np.array([np.mean(np.log(np.maximum(1, prompt.lengths))) for prompt in known])
    if lm is not None:
        from streamrl.executor.prompt_probe import fit_probe, write_probe

        write_probe(output, fit_probe(lm, texts, lengths))
        kind = f"a probe of {lm}"
    else:
        fitted = fit_text(texts, lengths, seed)
        write_ranker(output, fitted)
        kind = f"{fitted.kind} on {len(fitted.words):,} words and shape"
    if as_json:
        print_json({"ranker": str(output), "kind": kind, "prompts": len(known)})
    else:
        echo(f"{output}: {kind}, fitted to {len(known):,} prompts")


@ranker.command("score", cls=PlainCommand)
def score(
    prompts: Annotated[
        str,
        typer.Argument(
            help="Prompts: a JSONL or Parquet file, a data set (directory or hf://NAME), or a run file that names them."
        ),
    ],
    by: Annotated[Path, typer.Option("--ranker", help="A file from `streamrl ranker fit`.")],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="Write the prompts with expected_tokens to this JSONL file.",
            rich_help_panel=OUTPUT,
        ),
    ],
) -> None:
    """Add expected output lengths to prompts.

    Prompts of a run file are written after its field names and template are applied. A run that reads the result needs
    neither.

    Example: streamrl ranker score prompts.jsonl --ranker ranker.npz -o scored.jsonl
    """
    from streamrl.executor.prompt_probe import read_probe
    from streamrl.ranker.score_files import text_of
    from streamrl.ranker.text_ranker import read_ranker
    from streamrl.runfile.files import load_run
    from streamrl.runfile.workload_config import WorkloadConfig
    from streamrl.workload.prompt_records import read_sources

    claim_file(output, SCORED, inputs=(Path(prompts), by))
    is_run = prompts.endswith(".toml")
    workload = load_run(prompts).workload if is_run else WorkloadConfig(prompts=prompts)
    records = [record for source in read_sources(workload) for record in source.records]
    if not records:
        raise ValueError(f"{prompts}: workload.prompts is missing: name the prompts to score")
    texts = [text_of(record["prompt"]) for record in records]
    probe = read_probe(by)
    scores = read_ranker(by).score(texts) if probe is None else probe.score(texts)
    lines = (
        json.dumps({**record, "expected_tokens": max(1, round(tokens))})
        for record, tokens in zip(records, scores.tolist(), strict=True)
    )
    write_file(output, "".join(f"{line}\n" for line in lines))
    echo(f"{output}: {len(records):,} prompts scored")


@ranker.command("eval", cls=PlainCommand)
def evaluate(
    source: Annotated[
        Path,
        typer.Argument(
            help="Directory of an executed run, or a CSV (or .csv.gz) of lengths by prompt or of scores."
        ),
    ],
    score: Annotated[
        list[str] | None,
        typer.Option(help="Column of scores. Default: score, or all columns with --lengths."),
    ] = None,
    lengths: Annotated[
        list[Path] | None,
        typer.Option(
            help="CSV of lengths by prompt_id, if SOURCE has scores without output_tokens."
        ),
    ] = None,
    history: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Number of past outputs that history rankers know. Repeat for more."
        ),
    ] = None,
    scores: Annotated[
        Path | None, typer.Option(help="CSV of scores by prompt_id, tested as another prior.")
    ] = None,
    past_of: Annotated[
        str | None,
        typer.Option(help="Use the lengths of this model as the past. Default: the same model."),
    ] = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Measure how many of the longest outputs a ranker finds.

    Recall is shown by task family, with standard errors over prompts. From lengths by prompt, the command tests prompt
    length, text (fitted to other prompts), past outputs, both, and hindsight. From a file with columns score and
    output_tokens, it tests these scores. Slope is that of log lengths over log expectations; 1 means that expected
    tokens are right on average. With --json, each ranker is one line.

    Example: streamrl ranker eval lengths.csv.gz --history 1 --history 4
    """
    from streamrl.ranker.evaluation import POOLED, evaluate_scores, rank_all
    from streamrl.ranker.score_files import (
        SCORE,
        lengths_by_prompt,
        read_known,
        read_table,
        score_columns,
        scores_by_prompt,
    )

    is_scores = not source.is_dir() and not history and scores is None
    table = read_table(source, None if lengths else model) if is_scores else None
    if (history or scores) and (score or lengths) and scores is None:
        raise ValueError("--history ranks by lengths alone: leave out --score and --lengths")
    if table is not None and (lengths or score or SCORE in table.columns):
        by_prompt = lengths_by_prompt(read_table(path, model) for path in lengths or ())
        columns = score_columns(table, score or (), bool(lengths))
        found = [evaluate_scores(table, c, by_prompt if lengths else None) for c in columns]
    else:
        known = read_known(source, model)
        past = lengths_by_prompt([read_table(source, past_of)]) if past_of else None
        priors = scores_by_prompt(read_table(scores), score or ()) if scores else None
        found = _collect(rank_all(known, history or (), past, priors))
    if as_json:
        for one in found:
            print_json(one)
        return
    console = stdout_console()
    for family in dict.fromkeys(family for one in found for family in one.recall):
        console.print(recall_table(family, [one for one in found if family in one.recall]))
        if family == POOLED:
            console.print("A mixture of families flatters any ranker that tells them apart.")
        console.print()


def _collect(evaluations: Iterator[Evaluation]) -> list[Evaluation]:
    """Return all evaluations, and show progress: texts and errors take minutes."""
    from streamrl.cli.progress import make_progress

    found = []
    with make_progress() as progress:
        task = progress.add_task("rankers", total=None, facts="")
        for one in evaluations:
            found.append(one)
            progress.update(task, advance=1, facts=one.ranker)
    return found


def recall_table(family: str, found: list[Evaluation]) -> Grid:
    """Lay out recall and correlation in one family, a line for each ranker."""
    from streamrl.ranker.evaluation import SHARES

    grid = Grid("ranker", title=family, title_justify="left", box=None, pad_edge=False)
    columns = (*(f"recall@{share:.0%}" for share in SHARES), "Spearman", "slope", "prompts")
    for title in columns:
        grid.add_column(title, justify="right", no_wrap=True)
    grid.add_row("at random", *(f"{share:.2f}" for share in SHARES), "0.00", "", "")
    for one in found:
        recalls = [
            f"{one.recall[family][str(share)]:.2f} ±{one.recall_error[family][str(share)]:.2f}"
            for share in SHARES
        ]
        slope = one.calibration.get(family)
        rest = ["" if slope is None else f"{slope:.2f}", str(one.num_prompts[family])]
        grid.add_row(one.ranker, *recalls, f"{one.spearman[family]:.2f}", *rest)
    return grid
