"""Write log records of a command to standard error, and choose how many with `-v` and `-q`."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TextIO

import typer

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.runfile.escaping import visible

Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        help="Also log every command and event; twice: also what libraries log.",
        rich_help_panel=OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Log errors only, and no progress.", rich_help_panel=OUTPUT),
]

BRIEF = "streamrl: %(message)s"
DETAILED = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current standard error at each record, so above a live table.

    A closed terminal is not an error.
    """

    @property
    def stream(self) -> TextIO:
        """Return standard error, which a live table replaces while it is shown."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore another stream."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (name of the base class)
        """Ignore a closed standard error; report every other error."""
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handleError(record)


class VisibleFormatter(logging.Formatter):
    """Escapes control characters of messages."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return visible(super().format(record))


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Log a warning of a library as one line, without a path and a line of its source."""
    logging.getLogger("streamrl.warnings").warning(
        "%s: %s", category.__name__, " ".join(str(message).split())
    )


HANDLER = StderrHandler()
OURS, ASYNCIO, EVERYBODY = map(logging.getLogger, ("streamrl", "asyncio", None))


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Log to standard error until the end of the context, also what libraries warn of."""
    before = [(logger, logger.level) for logger in (OURS, ASYNCIO, EVERYBODY)]
    ASYNCIO.setLevel(logging.ERROR)
    set_verbosity()
    shown, warnings.showwarning = warnings.showwarning, _log_warning
    try:
        yield
    finally:
        warnings.showwarning = shown
        for logger, level in before:
            logger.removeHandler(HANDLER)
            logger.setLevel(level)


def set_verbosity(verbose: int = 0, quiet: bool = False) -> None:
    """Log more, or errors only.

    Raises:
        ValueError: both are set.
    """
    if verbose and quiet:
        raise ValueError("-v and -q exclude each other; use one of them")
    OURS.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)
    HANDLER.setFormatter(VisibleFormatter(DETAILED if verbose else BRIEF))
    OURS.addHandler(HANDLER)
    if verbose > 1:
        OURS.removeHandler(HANDLER)
        EVERYBODY.addHandler(HANDLER)
        EVERYBODY.setLevel(logging.INFO)
