"""`streamrl simulate --from RUN --set KEY=VALUE`: what would have happened under another policy?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import asdict

from streamrl.cli.progress import make_progress
from streamrl.cli.shared import open_trace, print_json, stdout_console, trace_file
from streamrl.report.rerun_report import rerun_report, verdict
from streamrl.sim.studies.rerun import rerun


def simulate_again(recorded: Path, changes: Sequence[str], *, as_json: bool) -> None:
    """Simulate a recorded run as it was and with changes, and say what these would have saved."""
    with make_progress() as progress:
        task = progress.add_task("step", total=None, facts="")

        def watch(what: str, done: int, most: int) -> None:
            progress.update(task, description=what, completed=done, total=most)

        found = rerun(open_trace(recorded), trace_file(recorded), changes, watch)
    if as_json:
        print_json({**asdict(found), "verdict": verdict(found)})
    else:
        stdout_console().print(rerun_report(found))
