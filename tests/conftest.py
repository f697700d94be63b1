"""What holds for the tests of every file."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator

import pytest

from tests import fuzzing

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Threads of numpy, scikit-learn and torch, read at their import. The matrices of tests are small, and processes share
the cores: a second thread of each would spend its CPU time waiting for a core.
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection: what is imported and collected stays, and is not scanned later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def ray_ends_with_its_file() -> Iterator[None]:
    """Leave the Ray cluster that a file's tests joined: a process can join one, and files share processes."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many inputs `make fuzz` has tried."""
    if fuzzing.EXAMPLES:
        count, tests = sum(fuzzing.inputs.values()), len(fuzzing.inputs)
        terminalreporter.write_line(f"{count:,} inputs of {tests} readers' tests")
