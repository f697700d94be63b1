"""The command line in this process: what a user sees of it, without the second that a process takes to start."""

from __future__ import annotations

import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
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
    os.umask(mask := os.umask(0o022))  # a command sets it for its process
    with patch.object(sys, "argv", argv), redirect_stdout(output), redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            status = end.code
    os.umask(mask)
    return Done(int(status or 0), output.getvalue(), errors.getvalue())


SEMAPHORE = 40
"""Bytes that a semaphore of a process pool needs, which is a file too."""


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file grow beyond some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def on_terminal(arguments: list[str], answers: list[str], columns: int = 100) -> str:
    """Run a command in a process on a pseudo-terminal, type the answers, and return all that it shows."""
    here, there = pty.openpty()
    command = [sys.executable, "-c", "from streamrl.cli import main; main()", *arguments]
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "dumb"}
    streams = {"stdin": there, "stdout": there, "stderr": there}
    with subprocess.Popen(command, **streams, env=environment, close_fds=True) as process:
        os.close(there)
        os.write(here, "".join(f"{answer}\n" for answer in answers).encode())
        shown = b""
        while True:
            try:
                part = os.read(here, 65_536)
            except OSError:  # Linux says so that the other end has closed
                break
            if not part:
                break
            shown += part
        process.wait(60)
    os.close(here)
    return shown.decode().replace("\r\n", "\n")
