"""What the commands share: arguments, JSON on standard output, progress on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from streamrl.record.chrome_trace import chrome_trace
from streamrl.record.trace import Trace, read_trace
from streamrl.report.figures import timeline_figure

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]
TracePath = Annotated[Path, typer.Argument(help="A trace file, or a run directory.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Replace a key of the run file: rollout.replicas=8."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]

TRACE_FILE = "trace.jsonl"


def print_json(value: object) -> None:
    """Print one JSON object on a line of its own."""
    typer.echo(msgspec.json.encode(value).decode())


def trace_file(path: Path) -> Path:
    """Give a trace file, or the one in a run directory."""
    return path / TRACE_FILE if path.is_dir() else path


def open_trace(path: Path) -> Trace:
    """Read a trace file, or the one in a run directory."""
    return read_trace(trace_file(path))


def make_progress() -> Progress:
    """Make a progress bar that shows on a terminal and is silent in a pipe."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def write_views(trace: Trace, directory: Path) -> None:
    """Write what people look at: a timeline, and a trace for Chrome's and Perfetto's viewer."""
    (directory / "chrome_trace.json").write_bytes(chrome_trace(trace))
    timeline_figure(trace, directory / "timeline.png")
