"""`streamrl replay`: would today's engine decide as the recorded one did, and do the books of the run balance?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamrl.cli.shared import AsJson, check_ledger, open_trace, print_json, trace_file
from streamrl.record.balance import Balance
from streamrl.record.legs import balance_books
from streamrl.record.trace import Trace
from streamrl.record.trace import replay as replay_trace
from streamrl.report.ledger_line import ledger_line


def replay(
    traces: Annotated[list[Path], typer.Argument(help="Trace files or run directories.")],
    as_json: AsJson = False,
) -> None:
    """Feed recorded events to a fresh engine; every decision must be the recorded one, and the ledger must balance.

    Example: streamrl replay runs/quickstart
    """
    differing = 0
    ledgers: list[Balance] = []
    for path in traces:
        trace = open_trace(path)
        ledger = balance_books(trace, trace_file(path).parent)
        difference = _first_difference(path, trace, ledger)
        ledgers.append(ledger)
        differing += difference is not None
        facts: dict[str, object] = {
            "trace": str(path),
            "world": trace.world,
            "events": len(trace.entries),
            "decisions": sum(len(entry.commands) for entry in trace.entries),
            "is_identical": difference is None,
        }
        if difference is not None:
            facts["first_difference"] = difference
        if as_json:
            print_json({**facts, "ledger": ledger})
        else:
            typer.echo(_line(facts))
            typer.echo(ledger_line(ledger))
    check_ledger(*ledgers)
    if differing:
        raise RuntimeError(f"{differing} of {len(traces)} traces are decided differently")


def _first_difference(path: Path, trace: Trace, ledger: Balance) -> object:
    """Return where today's engine decides otherwise, or finds what cannot be, as data; None where nowhere.

    Raises:
        ValueError: what cannot be, though the books balance.
    """
    try:
        divergence = replay_trace(trace)
    except ValueError as error:
        if ledger.is_balanced:
            raise ValueError(f"{path}: {error}") from None
        return str(error)
    return None if divergence is None else divergence._asdict()


def _line(facts: dict[str, object]) -> str:
    line = (
        f"{facts['trace']}: {facts['events']} events of a {facts['world']} run, "
        f"{facts['decisions']} decisions, "
    )
    if facts["is_identical"]:
        return line + "all decided identically"
    return line + f"decided differently at {facts['first_difference']}"
