"""Jobs on all cores: answers in the order of the jobs, counted as they come in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, as_completed
from typing import TypeVar

Job = TypeVar("Job")
Answer = TypeVar("Answer")


def answers(
    pool: Executor,
    work: Callable[[Job], Answer],
    jobs: Iterable[Job],
    watch: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Return the answer to each job; `watch` is called as each comes in."""
    futures = [pool.submit(work, job) for job in jobs]
    for _ in as_completed(futures):
        watch()
    return list(_results(futures))


def _results(futures: Iterable[Future[Answer]]) -> Iterator[Answer]:
    return (future.result() for future in futures)
