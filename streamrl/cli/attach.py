"""`streamrl attach`: let one more trainer follow a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamrl.cli.shared import RunDirectory
from streamrl.runfile.config import Run
from streamrl.runfile.reading import decode_run, make_run, read_table, section_of
from streamrl.runfile.sides_config import FollowerConfig
from streamrl.runfile.trainers import TRAINER, is_list
from streamrl.runfile.unused_keys import drop_unused
from streamrl.runfile.writing import run_table


def attach(
    run: RunDirectory,
    trainer: Annotated[
        Path,
        typer.Argument(metavar="TRAINER.toml", help="What a [[trainer]] section would say of it."),
    ],
) -> None:
    """Let one more trainer follow a run that goes on, or one that was detached follow it again.

    Example: streamrl attach runs/three-trainers rloo.toml
    """
    from streamrl.executor.control import Attach, ask, find_run

    follower = _read_follower(decode_run(find_run(run).read_bytes()), trainer)
    typer.echo(ask(run, Attach(section_of(follower))))


def _read_follower(run: Run, path: Path) -> FollowerConfig:
    """Return the trainer of a file, checked as if the run file had it; raises `ValueError` as a run file does."""
    section, table = read_table(path), run_table(run)
    drop_unused(table)
    trainers = table[TRAINER] if is_list(table) else [table[TRAINER]]
    names = [None, *run.follower_names]
    name = section.get("name")
    place = names.index(name) if name in run.follower_names else len(trainers)
    table[TRAINER] = [*trainers[:place], section, *trainers[place + 1 :]]
    try:
        return make_run(table).followers[place - 1]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
