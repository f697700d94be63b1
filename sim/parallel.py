"""Run jobs on all cores, or on the pool that `spread_over` sets, and return answers in the order of the jobs."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from multiprocessing import active_children, parent_process
from threading import Thread
from typing import TypeVar

KILLED = (
    "a worker process was killed; if memory ran out, use fewer cores (taskset) or a smaller run"
)
SEMAPHORES = "/dev/shm"
"""Where Linux has the semaphores of a pool of processes."""
LONGEST_WAIT = 1e6
"""Longest wait in seconds, because an unlimited wait cannot be interrupted."""

Job = TypeVar("Job")
Answer = TypeVar("Answer")
MakePool = Callable[[], AbstractContextManager[Executor]]
_MAKE_POOL: ContextVar[MakePool | None] = ContextVar("make_pool", default=None)


@contextmanager
def spread_over(make: MakePool) -> Iterator[None]:
    """Let `worker_pool` yield the pool that `make` opens, such as one of a cluster, until the context ends."""
    before = _MAKE_POOL.set(make)
    try:
        yield
    finally:
        _MAKE_POOL.reset(before)


@contextmanager
def worker_pool(begin: Callable[[], object] | None = None) -> Iterator[Executor]:
    """Yield the workers of plans and studies: those of `spread_over`, or else a process for each core.

    Each own process calls `begin` first; workers of `spread_over` do not.

    Raises:
        RuntimeError: a worker was killed, for example because memory ran out.
    """
    make = _MAKE_POOL.get()
    with _own_processes(begin) if make is None else make() as pool:
        yield pool


@contextmanager
def _own_processes(begin: Callable[[], object] | None) -> Iterator[Executor]:
    """Yield a process for each core. The processes end with this one, however it ends.

    After an error or Ctrl-C, they are killed at once. Each process calls `begin` first.

    Raises:
        RuntimeError: a process was killed, for example because memory ran out.
    """
    others = active_children()
    try:
        pool = ProcessPoolExecutor(initializer=_begin_worker, initargs=(begin,))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(error.errno, error.strerror, SEMAPHORES) from None
    try:
        yield pool
    except BaseException as error:  # also Ctrl-C: running jobs may take a minute
        # the pool does not know a process that was just being started
        for process in active_children():
            if process not in others:
                process.kill()
        if isinstance(error, BrokenProcessPool):
            raise RuntimeError(KILLED) from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(begin: Callable[[], object] | None) -> None:
    """Leave signals of the terminal to the parent process, and end when it does, even if it was killed."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()
    if begin is not None:
        begin()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "only a worker process calls this"
    parent.join()
    os._exit(1)


def answers(
    pool: Executor,
    work: Callable[[Job], Answer],
    jobs: Iterable[Job],
    watch: Callable[[], None] = lambda: None,
    keep: Callable[[Job, Answer], None] = lambda job, answer: None,
) -> list[Answer]:
    """Return the answer to each job; `watch` and `keep` are called for each answer that arrives."""
    futures = {pool.submit(work, job): job for job in jobs}
    for future in as_completed(futures):
        keep(futures[future], future.result())
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
