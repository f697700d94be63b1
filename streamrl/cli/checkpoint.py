"""`streamrl checkpoint`: list the checkpoints of a run, and export one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from streamrl.cli.lazy_commands import PlainCommand, PlainGroup
from streamrl.cli.output import echo
from streamrl.cli.shared import AsJson, claim_directory, print_json, stdout_console
from streamrl.record.evaluation import read_evaluations
from streamrl.record.run_directory import RUN
from streamrl.runfile.config import AdapterForm, CheckpointChoice, Run
from streamrl.runfile.errors import shown
from streamrl.runfile.files import read_recorded_run
from streamrl.runfile.workload_config import HUB

checkpoint = typer.Typer(
    name="checkpoint",
    cls=PlainGroup,
    no_args_is_help=True,
    help="List the checkpoints of a run, or export one.\n\n"
    "Example: streamrl checkpoint export runs/quickstart -o build/model",
)

MOST_DIGITS = 12
"""Digits of a step that a run may have."""
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="The directory of a run (execute.output).")
]


@checkpoint.command("list", cls=PlainCommand)
def list_checkpoints(run: RunPath, as_json: AsJson = False) -> None:
    """List a run's checkpoints with their evaluation scores.

    The best and the exported one are marked.

    Example: streamrl checkpoint list runs/quickstart
    """
    from rich.markup import escape
    from rich.table import Table

    from streamrl.executor.checkpoint_export import best_kept, exported_step
    from streamrl.executor.checkpoints import Checkpoints

    config = _run_in(run).execute.checkpoints
    scores = {result.step: result.scores for result in read_evaluations(run)}
    kept = Checkpoints(run / "checkpoints").versions()
    best, exported = best_kept(run, kept), exported_step(run, config)
    if as_json:
        facts = [{"step": s, "best": s == best, "exported": s == exported} for s in kept]
        print_json([{**each, "scores": scores.get(each["step"], {})} for each in facts])
        return
    table = Table("step", "scores", "", box=None)
    for step in kept:
        own = ", ".join(f"{name} {score}" for name, score in scores.get(step, {}).items())
        marks = [
            *(["best"] if step == best else []),
            *([f"exported to {config.export}"] if step == exported else []),
        ]
        table.add_row(str(step), own or "not evaluated", escape(", ".join(marks)))
    stdout_console().print(table)


@checkpoint.command("export", cls=PlainCommand)
def export(
    run: RunPath,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="DIR", help="A directory, or hf://OWNER/NAME."),
    ],
    step: Annotated[
        str, typer.Option("--step", metavar="STEP", help="last, best, or the number of a step.")
    ] = "last",
    adapters: Annotated[
        str,
        typer.Option("--adapters", help="merged: whole weights. apart: LoRA adapters alone."),
    ] = "merged",
) -> None:
    """Write a checkpoint as a Hugging Face directory, or upload it.

    The directory has weights, config, tokenizer and checksums, for the readers of the run (execute.readers).
    `from_pretrained` and vLLM load it. With hf://OWNER/NAME it is pushed to a model repository of the Hugging Face hub.

    Example: streamrl checkpoint export runs/quickstart -o build/model --step best
    """
    from streamrl.executor.checkpoint_export import (
        choose_checkpoint,
        export_checkpoint,
        say_choice,
    )
    from streamrl.executor.directory_lock import HIDDEN

    os.umask(HIDDEN[_run_in(run).execute.readers])
    if not output.startswith(HUB):
        claim_directory(Path(output))
    choice = step_of(step)
    chosen = choose_checkpoint(run, choice)
    place = export_checkpoint(chosen, output, _form_of(adapters))
    why = f" ({say_choice(run, choice, chosen.version)})" if choice == "best" else ""
    echo(f"step {chosen.version}: {place}{why}")


def _run_in(directory: Path) -> Run:
    """Return the run of a run directory.

    Raises:
        ValueError: it is none.
    """
    if not (directory / RUN).is_file():
        raise ValueError(f"{directory} is no run directory (no {RUN}); name that of execute.output")
    return read_recorded_run(directory / RUN)


def step_of(text: str) -> CheckpointChoice | int:
    """Return which checkpoint an option names.

    Raises:
        ValueError: it names none.
    """
    match text:
        case "last" | "best":
            return text
        case _ if text.isdecimal() and len(text) <= MOST_DIGITS:
            return int(text)
    raise ValueError(f"--step is {shown(text)}; write last, best, or the number of a step")


def _form_of(text: str) -> AdapterForm:
    match text:
        case "merged" | "apart":
            return text
    raise ValueError(f"--adapters is {text!r}; write merged or apart")
