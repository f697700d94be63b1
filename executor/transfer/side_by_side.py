"""Work on files that a worker does with all of its threads: writing and checking buckets of weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

THREADS = "OMP_NUM_THREADS"
"""Where a worker finds how many threads it has; one where nobody says so."""


def side_by_side(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield what `work` makes of each item, in order; as many are taken at a time as there are threads."""
    threads = num_threads()
    left = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        while some := list(islice(left, threads)):
            yield from pool.map(work, some)


def num_threads() -> int:
    """Return the threads of this process."""
    text = os.environ.get(THREADS, "")
    return max(1, int(text)) if text.isdecimal() else 1
