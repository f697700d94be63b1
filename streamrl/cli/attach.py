"""`streamrl attach` and `streamrl detach`: add a trainer to a running job or remove one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from streamrl.cli.output import echo
from streamrl.cli.shared import RunDirectory
from streamrl.runfile.field_checks import drop_unused
from streamrl.runfile.files import (
    make_run,
    read_recorded_run,
    read_table,
    run_table,
    secondary_trainer_section,
)
from streamrl.runfile.keys import TRAINER, is_list
from streamrl.runfile.roles_config import SecondaryTrainerConfig


def attach(
    run: RunDirectory,
    trainer: Annotated[
        Path,
        typer.Argument(
            metavar="TRAINER.toml", help="A TOML file with the keys of one [[trainer]] section."
        ),
    ],
) -> None:
    """Add a trainer to a running job, or re-attach one.

    The job does not stop. The trainer joins as a secondary trainer, and learns from groups that start afterwards. A
    trainer that was detached continues from its own checkpoint.

    Example: streamrl attach runs/three-trainers rloo.toml
    """
    from streamrl.executor.subscribers.attach_requests import Attach, ask, find_run

    running = read_recorded_run(find_run(run))
    names = running.secondary_trainer_names
    follower = _read_secondary_trainer(trainer, run_table(running), names)
    echo(ask(run, Attach(secondary_trainer_section(follower))))


def _read_secondary_trainer(
    path: Path, table: dict[str, Any], names: Sequence[str]
) -> SecondaryTrainerConfig:
    """Return the trainer of a file, checked as if it were in the run file; it raises the same `ValueError`.

    Args:
        path: the file of the trainer.
        table: the table of the job's run file, which is changed here.
        names: the names of its secondary trainers.
    """
    section = read_table(path)
    drop_unused(table)
    trainers = table[TRAINER] if is_list(table) else [table[TRAINER]]
    name = section.get("name")
    place = names.index(name) + 1 if name in names else len(trainers)
    table[TRAINER] = [*trainers[:place], section, *trainers[place + 1 :]]
    try:
        return make_run(table).followers[place - 1]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def detach(
    run: RunDirectory,
    name: Annotated[str, typer.Argument(help="The name of the trainer to remove.")],
) -> None:
    """Save a trainer's checkpoint and remove it from a running job.

    The trainer finishes its current work first. Other trainers continue.

    Example: streamrl detach runs/three-trainers rloo
    """
    from streamrl.executor.subscribers.attach_requests import Detach, ask

    echo(ask(run, Detach(name)))
