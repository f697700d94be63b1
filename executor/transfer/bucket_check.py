"""Verify the checksums of pushed weight buckets, on all threads of a worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

from streamrl.executor.checksums import combine, file_checksum
from streamrl.executor.roles import Manifest

T = TypeVar("T")
R = TypeVar("R")

THREADS = "OMP_NUM_THREADS"
"""Where a worker finds how many threads it has; one where nobody says so."""


def run_concurrently(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
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


def verify_buckets(manifest: Manifest) -> str:
    """Read every bucket, and return the checksum of what was found, which is the manifest's.

    Raises:
        ValueError: a bucket is another than was written; the message names the file and both checksums.
    """
    checksums = list(run_concurrently(lambda own: file_checksum(Path(own.path)), manifest.buckets))
    for bucket, found in zip(manifest.buckets, checksums, strict=True):
        if found != bucket.checksum:
            raise ValueError(
                f"{bucket.path}: expected checksum {bucket.checksum}, found {found} "
                f"({Path(bucket.path).stat().st_size} of {bucket.num_bytes} bytes)"
            )
    return manifest.origin or combine(checksums)
