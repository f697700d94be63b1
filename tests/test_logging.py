"""What a run says in its log: one line for each loss and each replacement, and how much of it a terminal shows."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.console import Console

from streamrl.cli.log_output import log_to_stderr, set_verbosity
from streamrl.cli.watch_run import RunWatch

LOGGER = logging.getLogger("streamrl.executor.world")


def shown(verbose: int = 0, quiet: bool = False) -> list[str]:
    """Return the levels of the records that reach standard error."""
    stderr = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, log_to_stderr():
        patch.setattr(sys, "stderr", stderr)
        set_verbosity(verbose, quiet)
        for level in ("debug", "info", "warning", "error"):
            getattr(LOGGER, level)(level)
    return [line.split()[-1] for line in stderr.getvalue().splitlines()]


def test_v_shows_more_and_q_shows_errors_only() -> None:
    assert shown() == ["info", "warning", "error"]
    assert shown(verbose=1) == ["debug", "info", "warning", "error"]
    assert shown(quiet=True) == ["error"]
    with pytest.raises(ValueError, match="-v and -q exclude each other"):
        shown(verbose=1, quiet=True)


def test_libraries_are_shown_with_v_twice_only(capsys: pytest.CaptureFixture[str]) -> None:
    with log_to_stderr():
        for verbose in (1, 2):
            set_verbosity(verbose)
            logging.getLogger("library").info("from a library, -v times %d", verbose)
            LOGGER.info("from streamrl, -v times %d", verbose)
    lines = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    ours = [f"from streamrl, -v times {number}" for number in (1, 2)]
    assert lines == [ours[0], "from a library, -v times 2", ours[1]]


def test_the_end_of_a_command_leaves_logging_as_it_was() -> None:
    loggers = [logging.getLogger(name) for name in ("streamrl", "asyncio", None)]
    before = [(logger.level, [*logger.handlers]) for logger in loggers]
    with log_to_stderr():
        set_verbosity(verbose=2)
    assert [(logger.level, [*logger.handlers]) for logger in loggers] == before


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")


def test_a_closed_terminal_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (Gone(), closed):
        with log_to_stderr():
            monkeypatch.setattr(sys, "stderr", stream)
            LOGGER.warning("replica 1 lost")


def test_a_log_line_is_above_the_live_table() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with log_to_stderr(), RunWatch(40, console=console):
        LOGGER.warning("replica 1 lost at step 3")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "streamrl: replica 1 lost at step 3\n" in text
    assert text.rindex("replica 1 lost") < text.rindex("0/40")
