"""`streamrl notice`: tell a running job that machines of replicas will be taken away."""

from __future__ import annotations

from typing import Annotated

import typer

from streamrl.cli.output import echo
from streamrl.cli.shared import RunDirectory
from streamrl.runfile.field_checks import SECONDS
from streamrl.runfile.units import Duration


def notice(
    run: RunDirectory,
    replica: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", help="Number of a replica. Repeat for more. Default: all replicas."
        ),
    ] = None,
    warning: Annotated[
        str, typer.Option(metavar="TIME", help="Time until the machines are taken away.")
    ] = "120 s",
    replacement: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Time from then until other machines are there in their place."
        ),
    ] = "0 s",
) -> None:
    """Tell a running job that machines of replicas will be taken away.

    Each replica gets no more rollouts. Its rollouts finish or continue on other replicas, and it stops in time.
    A replica that still runs when its time is over is killed. No rollout is lost. A new replica starts when the
    replacement is there. With Ray, `ray drain-node` does the same for all replicas of a node.

    Example: streamrl notice runs/spot --replica 2 --warning "120 s"
    """
    from streamrl.executor.subscribers.attach_requests import Notice, ask

    warned, replaced = _seconds("--warning", warning), _seconds("--replacement", replacement)
    echo(ask(run, Notice(tuple(replica or ()), warned, replaced)))


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(Duration.parse(text))
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    if not 0 <= seconds <= SECONDS.most:
        raise ValueError(f"{option} must be in [0 s, {SECONDS.most:.0f} s], got {text!r}")
    return seconds
