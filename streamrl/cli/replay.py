"""`streamrl replay`: would today's engine decide as the recorded one did?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamrl.cli.shared import AsJson, open_trace, print_json
from streamrl.record.trace import replay as replay_trace


def replay(
    traces: Annotated[list[Path], typer.Argument(help="Trace files or run directories.")],
    as_json: AsJson = False,
) -> None:
    """Feed recorded events to a fresh engine; every decision must be the recorded one.

    Example: streamrl replay runs/quickstart
    """
    differing = 0
    for path in traces:
        trace = open_trace(path)
        try:
            divergence = replay_trace(trace)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        differing += divergence is not None
        facts: dict[str, object] = {
            "trace": str(path),
            "world": trace.world,
            "events": len(trace.entries),
            "decisions": sum(len(entry.commands) for entry in trace.entries),
            "is_identical": divergence is None,
        }
        if divergence is not None:
            facts["first_difference"] = divergence._asdict()
        if as_json:
            print_json(facts)
        else:
            typer.echo(_line(facts))
    if differing:
        raise RuntimeError(f"{differing} of {len(traces)} traces are decided differently")


def _line(facts: dict[str, object]) -> str:
    line = (
        f"{facts['trace']}: {facts['events']} events of a {facts['world']} run, "
        f"{facts['decisions']} decisions, "
    )
    if facts["is_identical"]:
        return line + "all decided identically"
    return line + f"decided differently at {facts['first_difference']}"
