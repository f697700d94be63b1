"""Record the speed of the cores. On a shared host, each core can slow down by up to a half for seconds at a time.

`python benchmarks/core_watch.py CORE FILE` computes a small reference work on a core three times a
second, and writes its CPU seconds. This takes 1 % of the core. Other work on the cores does not
change the reading: it alternates with the watch, and the caches are warm when the work is timed. A
check on two cores of a virtual machine gave 1.335 ms at rest and 1.337 ms with other work in turns
(medians of six).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean

import numpy as np

INTERVAL = 0.3
"""Seconds between two readings."""
WARM_UP, TIMED = 100, 200
"""Untimed and timed matrix products of a reading. A core that was idle needs some work to reach its
full speed.
"""


class CoreWatch:
    """Readings of every core, read from the files of the watches."""

    def __init__(self, files: Mapping[int, Path]) -> None:
        self._files = files

    def mean_time(self, began_at: float, ended_at: float) -> float:
        """Return the mean seconds of the reference work over all cores, between two times of `time.monotonic`.

        Raises:
            ValueError: a core has no reading in between.
        """
        found = []
        for core, file in self._files.items():
            lines = (line.split() for line in file.read_text(encoding="ascii").splitlines())
            read = [float(taken) for at, taken in lines if began_at <= float(at) <= ended_at]
            if not read:
                raise ValueError(
                    f"core {core} has no reading between {began_at} and {ended_at} s; measure for longer"
                )
            found.append(mean(read))
        return mean(found)


@contextlib.contextmanager
def watched_cores() -> Iterator[CoreWatch]:
    """Watch every core that this process may use, until the context ends.

    Raises:
        RuntimeError: the watch of a core has ended.
    """
    with tempfile.TemporaryDirectory(prefix="core-watch-") as name, contextlib.ExitStack() as ends:
        files = {}
        for core in sorted(os.sched_getaffinity(0)):
            files[core] = Path(name) / str(core)
            command = [sys.executable, __file__, str(core), str(files[core])]
            process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
            ends.callback(process.wait)
            ends.callback(process.kill)
            while not files[core].exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the watch of core {core} has ended: {command}")
                time.sleep(INTERVAL)
        yield CoreWatch(files)


def _watch(core: int, file: Path) -> None:
    watcher = os.getppid()
    os.sched_setaffinity(0, {core})
    matrix = np.full((64, 64), 1.0 / 64, dtype=np.float32)
    with file.open("w", encoding="ascii", buffering=1) as readings:
        while os.getppid() == watcher:  # ends also if the parent was killed
            _work(matrix, WARM_UP)
            began = time.thread_time()
            _work(matrix, TIMED)
            readings.write(f"{time.monotonic()} {time.thread_time() - began}\n")
            time.sleep(INTERVAL)


def _work(matrix: np.ndarray, num_products: int) -> None:
    """Compute the reference work: small matrix products and Python between them, as in decode steps of a small model."""
    product = matrix
    for _ in range(num_products):
        product = product @ matrix
        for _ in range(50):
            pass


if __name__ == "__main__":
    _watch(int(sys.argv[1]), Path(sys.argv[2]))
