"""Verify the checksums of pushed weight buckets with all threads of a worker."""

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
"""Environment variable with the number of threads of a worker; default 1."""


def run_concurrently(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield `work(item)` for each item, in order; take only as many items at a time as there are threads."""
    threads = num_threads()
    left = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        while some := list(islice(left, threads)):
            yield from pool.map(work, some)


def num_threads() -> int:
    """Return the number of threads of this process."""
    text = os.environ.get(THREADS, "")
    return max(1, int(text)) if text.isdecimal() else 1


def verify_buckets(manifest: Manifest) -> str:
    """Read every bucket, compare its checksum with the manifest's, and return the checksum of all.

    Raises:
        ValueError: a bucket differs from the one that was written; the message has the file and both checksums.
    """
    checksums = list(run_concurrently(lambda own: file_checksum(Path(own.path)), manifest.buckets))
    for bucket, found in zip(manifest.buckets, checksums, strict=True):
        if found != bucket.checksum:
            raise ValueError(
                f"{bucket.path}: expected checksum {bucket.checksum}, found {found} "
                f"({Path(bucket.path).stat().st_size} of {bucket.num_bytes} bytes)"
            )
    return manifest.origin or combine(checksums)
