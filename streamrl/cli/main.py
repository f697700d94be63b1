"""`streamrl COMMAND …`: exit status 0 done, 2 wrong input with one clear line, 1 failed."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated, ClassVar

import typer

from streamrl import __version__
from streamrl.cli.lazy_commands import CommandTable, LazyGroup
from streamrl.cli.log_output import log_to_stderr

WRONG_INPUT = 2
FAILED = 1
MOST_SAID = 1000
"""Characters of a line that quotes a file, whatever is in it."""


class Commands(LazyGroup):
    """All commands, in the order of their use."""

    table: ClassVar[CommandTable] = {
        "simulate": (
            "streamrl.cli.simulate:simulate",
            "Simulate a run file and say what its whole training and a step take and cost, and where GPUs stand idle.",
        ),
        "plan": (
            "streamrl.cli.plan:plan",
            "Choose GPUs, parallelism and mode for a run: its pools are the offer, `nodes` the most that may be rented.",
        ),
        "export": (
            "streamrl.cli.export:export",
            "Write what was planned as the launch arguments of verl, NeMo-RL, slime or OpenRLHF.",
        ),
        "execute": (
            "streamrl.cli.execute:execute",
            "Run a run file on real processes, and leave trace, metrics, rollouts and checkpoints.",
        ),
        "attach": (
            "streamrl.cli.attach:attach",
            "Let one more trainer follow a run that goes on, or one that was detached follow it again.",
        ),
        "detach": (
            "streamrl.cli.attach:detach",
            "Let a trainer end what it does, save itself, and leave a run that goes on.",
        ),
        "replay": (
            "streamrl.cli.replay:replay",
            "Feed recorded events to a fresh engine; every decision must be the recorded one, and the ledger must balance.",
        ),
        "compare": (
            "streamrl.cli.compare:compare",
            "Compare a run with its simulation: step time, throughput, and idle time by cause.",
        ),
        "calibrate": (
            "streamrl.cli.calibrate:calibrate",
            "Fit factors by stage to the seconds of your own steps: a framework's log, a CSV, or an executed run.",
        ),
        "import": (
            "streamrl.cli.import_log:import_log",
            "Make a workload of a framework's log, or of a data set of rollouts, with the steps that calibrate reads.",
        ),
        "report": (
            "streamrl.cli.report:report",
            "Write one self-contained HTML page: the answer, alternatives, idle time, sensitivity, and how sure it is.",
        ),
        "samples": (
            "streamrl.cli.samples:samples",
            "Print what a run was trained on: prompt, completions, rewards and advantages of a group of a step.",
        ),
        "validate": (
            "streamrl.cli.validate:validate",
            "Compare predictions with published measurements: serving row by row, the paper figure by figure.",
        ),
        "doctor": (
            "streamrl.cli.doctor:doctor",
            "Examine a run file before any GPU is taken: memory, divisibility, batches, staleness, link, versions, files.",
        ),
        "profile": (
            "streamrl.cli.profile:profile",
            "Measure what operations take, and look at what was measured.",
        ),
        "ranker": (
            "streamrl.cli.ranker:ranker",
            "Expected output lengths: fit a ranker of prompts, score prompts, and how good it is.",
        ),
    }


app = typer.Typer(
    cls=Commands,
    help="Plan, simulate and run disaggregated RL post-training of LLMs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"streamrl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of `streamrl` itself."""


def main() -> None:
    """Run a command; say in one line what was wrong with its input, or why it failed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot show is no failure
    try:
        with log_to_stderr():
            app(prog_name="streamrl")
    except ValueError as error:
        _say(error)
        sys.exit(WRONG_INPUT)
    except RuntimeError as error:
        _say(error)
        sys.exit(FAILED)
    except OSError as error:  # of a disk that is full, or a file that went meanwhile
        _say(f"{error.filename}: {error.strerror}" if error.filename else error)
        sys.exit(FAILED)


def _say(error: Exception | str) -> None:
    text = " ".join(str(error).split())
    shown = text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}..."
    print(f"streamrl: {shown}", file=sys.stderr)
