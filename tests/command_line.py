"""The command line in this process: what a user sees of it, without the second that a process takes to start."""

from __future__ import annotations

import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from streamrl.cli import main


class Done(NamedTuple):
    """What a command printed, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


def streamrl(*arguments: str | Path) -> Done:
    """Run a command through `main`, as a shell would."""
    status: str | int | None = None
    output, errors = StringIO(), StringIO()
    argv = ["streamrl", *map(str, arguments)]
    with patch.object(sys, "argv", argv), redirect_stdout(output), redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            status = end.code
    return Done(int(status or 0), output.getvalue(), errors.getvalue())
