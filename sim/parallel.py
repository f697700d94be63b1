"""Run jobs on all cores, and return answers in the order of the jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, as_completed, wait
from typing import TypeVar

LONGEST_WAIT = 1e6
"""Longest wait in seconds, because an unlimited wait cannot be interrupted."""

Job = TypeVar("Job")
Answer = TypeVar("Answer")


def answers(
    pool: Executor,
    work: Callable[[Job], Answer],
    jobs: Iterable[Job],
    watch: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Return the answer to each job; `watch` is called for each answer that arrives."""
    futures = [pool.submit(work, job) for job in jobs]
    for _ in as_completed(futures):
        watch()
    return list(_results(futures))


def answers_in_time(
    pool: Executor,
    work: Callable[[Job], Answer],
    jobs: Sequence[Job],
    watch: Callable[[], None],
    until: float,
) -> dict[int, Answer]:
    """Return answers by job index, at least of the first job; jobs that have not begun at `until` are skipped.

    Args:
        pool: workers.
        work: function to call for each job.
        jobs: its arguments, most important first.
        watch: called for each answer that arrives.
        until: deadline, an instant of `time.perf_counter`.
    """
    futures = [pool.submit(work, job) for job in jobs]
    num_told = 0
    while pending := [each for each in futures if not each.done()]:
        left = until - time.perf_counter()
        if left <= 0:
            pending = [each for each in pending if each is futures[0] or not each.cancel()]
        wait(pending, min(left, LONGEST_WAIT) if left > 0 else None, FIRST_COMPLETED)
        num_answers = sum(each.done() and not each.cancelled() for each in futures)
        for _ in range(num_told, num_answers):
            watch()
        num_told = num_answers
    return {place: each.result() for place, each in enumerate(futures) if not each.cancelled()}


def _results(futures: Iterable[Future[Answer]]) -> Iterator[Answer]:
    return (future.result() for future in futures)
