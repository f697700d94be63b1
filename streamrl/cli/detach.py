"""`streamrl detach`: let a trainer follow a run no longer."""

from __future__ import annotations

from typing import Annotated

import typer

from streamrl.cli.shared import RunDirectory


def detach(
    run: RunDirectory,
    name: Annotated[str, typer.Argument(help="The trainer that is to leave.")],
) -> None:
    """Let a trainer end what it does, save itself, and leave a run that goes on.

    Example: streamrl detach runs/three-trainers rloo
    """
    from streamrl.executor.control import Detach, ask

    typer.echo(ask(run, Detach(name)))
