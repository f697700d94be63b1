"""`streamrl replay`: repeat the decisions of a finished run, and check its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from streamrl.cli.output import echo
from streamrl.cli.shared import AsJson, check_ledger, open_trace, print_json, trace_file
from streamrl.engine.messages import Command
from streamrl.engine.trace import Divergence, Trace
from streamrl.engine.trace import replay as replay_trace
from streamrl.record.ledger import Ledger, ledger_line
from streamrl.record.restarts import ledger_of_run


def replay(
    traces: Annotated[
        list[Path], typer.Argument(help="Trace files or run directories, executed or simulated.")
    ],
    as_json: AsJson = False,
) -> None:
    """Check a finished run: repeat its decisions and account for each rollout.

    A fresh control engine gets the recorded events. Each decision must equal the recorded one. Each rollout must have been
    trained on once, or dropped with a reason. Exit status 1 means that this is not so.

    Example: streamrl replay runs/quickstart
    """
    differing = 0
    ledgers: list[Ledger] = []
    for path in traces:
        trace = open_trace(path)
        ledger = ledger_of_run(trace, trace_file(path).parent)
        difference = _first_difference(trace)
        ledgers.append(ledger)
        differing += difference is not None
        facts: dict[str, object] = {
            "trace": str(path),
            "world": trace.world,
            "events": len(trace.entries),
            "decisions": sum(len(entry.commands) for entry in trace.entries),
            "is_identical": difference is None,
            "is_cut": trace.is_cut,
        }
        if difference is not None:
            told = difference if isinstance(difference, str) else difference._asdict()
            facts["first_difference"] = told
        if as_json:
            print_json({**facts, "ledger": ledger})
        else:
            echo(f"{_describe(facts)}, {_tell(difference)}")
            echo(ledger_line(ledger))
    check_ledger(*ledgers)
    if differing:
        raise RuntimeError(f"{differing} of {len(traces)} traces have different decisions")


def _first_difference(trace: Trace) -> Divergence | str | None:
    """Return the first different decision, or a line on an invalid event; None if there is no difference."""
    try:
        return replay_trace(trace)
    except ValueError as error:
        return str(error)


def _tell(difference: Divergence | str | None) -> str:
    if difference is None:
        return "all decided identically"
    if isinstance(difference, str):
        return f"decided differently: {difference}"
    recorded, decided = (_encode(each) for each in (difference.recorded, difference.decided))
    return (
        f"decided differently at entry {difference.entry}: recorded {recorded}, decided {decided}"
    )


def _encode(commands: list[Command]) -> str:
    return msgspec.json.encode(commands).decode()


def _describe(facts: dict[str, object]) -> str:
    return (
        f"{facts['trace']}: {facts['events']} events of a {facts['world']} run, "
        f"{facts['decisions']} decisions"
        + (" (it ends inside a line: what came after is not known)" if facts["is_cut"] else "")
    )
