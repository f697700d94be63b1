"""`streamrl resize`: add or remove data-parallel ranks of the trainer of a running job."""

from __future__ import annotations

from typing import Annotated

import typer

from streamrl.cli.output import echo
from streamrl.cli.shared import RunDirectory


def resize(
    run: RunDirectory,
    data_parallel: Annotated[
        int, typer.Option(metavar="N", help="Data-parallel ranks that the trainer is to have.")
    ],
) -> None:
    """Add or remove ranks of the trainer of a running job.

    The trainer finishes its step. Ranks that stay do not restart. Added ranks get weights and optimizer state from
    them, without a checkpoint. A later entry of trainer.resize changes the ranks again.

    Example: streamrl resize runs/elastic --data-parallel 2
    """
    from streamrl.executor.subscribers.attach_requests import RanksRequest, ask

    echo(ask(run, RanksRequest(data_parallel)))
