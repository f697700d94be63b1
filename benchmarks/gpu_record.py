"""Write results of the GPU checks: one JSON line per result, written as soon as it is known.

A check is a function that is called through `Recorder.check`. If it raises or exceeds its time limit,
it gets a result with `ok` false, and the next checks still run.
"""

from __future__ import annotations

import json
import math
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = "results.jsonl"


class Result(NamedTuple):
    """One figure of a check."""

    name: str
    value: float | None
    """None if the check failed or was skipped."""
    unit: str
    ok: bool | None
    """Whether the figure is within its tolerance; None for a figure without one, and for a skipped check."""
    detail: str
    seconds: float
    """Wall time that the check took."""


class OutOfTimeError(KeyboardInterrupt):
    """A check exceeded its time limit. An event loop lets a `KeyboardInterrupt` through, unlike other errors."""


class Recorder:
    """Writes results to a file and to stdout."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / RESULTS
        self._began_at = time.perf_counter()

    def add(
        self, name: str, value: float | None, unit: str, ok: bool | None, detail: str = ""
    ) -> None:
        """Write one result. Its seconds are those since the current check started."""
        seconds = round(time.perf_counter() - self._began_at, 3)
        if value is not None and not math.isfinite(value):  # JSON has no such number
            value, ok, detail = None, False, f"{value}; {detail}"
        rounded = None if value is None else float(f"{value:.6g}")
        line = json.dumps(Result(name, rounded, unit, ok, detail, seconds)._asdict())
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def skip(self, name: str, why: str) -> None:
        """Write that a check was skipped, and why."""
        self.add(name, None, "", None, f"skipped: {why}")

    def check(self, name: str, bound: float, function: Callable[..., None], *args: Any) -> None:
        """Call `function(self, name, *args)`, which adds its results, with a time limit of `bound` seconds."""
        self._began_at = time.perf_counter()
        try:
            with _at_most(bound):
                function(self, name, *args)
        except OutOfTimeError:
            self.add(name, None, "", False, f"stopped after {bound:g} s")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            self.add(name, None, "", False, f"{text[:1500]} ({place})")


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise `OutOfTimeError` in the main thread after these seconds."""

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before, began_at = signal.signal(signal.SIGALRM, stop), time.perf_counter()
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    if 0 < left < seconds:  # the enclosing check has less time left
        signal.setitimer(signal.ITIMER_REAL, left)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        passed = time.perf_counter() - began_at
        signal.setitimer(signal.ITIMER_REAL, max(0.01, left - passed) if left else 0)


def read_results(directory: Path) -> list[Result]:
    """Read the results of a directory, in the order in which they were written."""
    path = directory / RESULTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [Result(**json.loads(line)) for line in lines]


def table(results: list[Result]) -> str:
    """Return the results as lines of text, failures last, with the number of failed results."""
    marks = {True: "ok", False: "FAIL", None: "-"}
    lines = []
    for one in results:
        value = "" if one.value is None else f"{one.value:.5g} {one.unit}"
        lines.append(f"{marks[one.ok]:4s} {one.name:52s} {value:>18s}  {one.detail[:100]}")
    failed = [one for one in results if one.ok is False]
    lines += ["", f"{len(results)} results, {len(failed)} failed"]
    lines += [f"FAIL {one.name}: {one.detail[:600]}" for one in failed]
    return "\n".join(lines)
