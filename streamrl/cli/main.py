"""`streamrl COMMAND …`: exit status 0 done, 2 wrong input with one clear line, 1 failed."""

from __future__ import annotations

import sys

import typer

from streamrl.cli.compare import compare
from streamrl.cli.doctor import doctor
from streamrl.cli.execute import execute
from streamrl.cli.plan import plan
from streamrl.cli.profile import profile
from streamrl.cli.ranker import ranker
from streamrl.cli.replay import replay
from streamrl.cli.report import report
from streamrl.cli.simulate import simulate
from streamrl.cli.validate import validate

WRONG_INPUT = 2
FAILED = 1

app = typer.Typer(
    help="Plan, simulate and run disaggregated RL post-training of LLMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(simulate)
app.command()(plan)
app.command()(execute)
app.command()(replay)
app.command()(compare)
app.command()(report)
app.command()(validate)
app.command()(doctor)
app.add_typer(profile)
app.add_typer(ranker)


def main() -> None:
    """Run a command; say in one line what was wrong with its input, or why it failed."""
    try:
        app()
    except ValueError as error:
        _say(error)
        sys.exit(WRONG_INPUT)
    except RuntimeError as error:
        _say(error)
        sys.exit(FAILED)


def _say(error: Exception) -> None:
    print(f"streamrl: {' '.join(str(error).split())}", file=sys.stderr)
