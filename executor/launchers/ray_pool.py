"""Simulate the jobs of plans and studies as tasks of a Ray cluster.

Jobs depend on nothing but their arguments, so the answers are those of one core. A task does a batch
of jobs, because each task costs Ray and the driver some milliseconds. A batch is a share of the jobs
that wait, so that the last ones are small and all workers end together (guided self-scheduling,
Polychronopoulos and Kuck 1987). It has at most twice as many jobs as the last task did. A task
begins no job after `BATCH_TIME`; the rest of its batch waits again. A batch whose worker is killed is
repeated on another one. The nodes of the cluster need this version of streamrl.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import ceil
from threading import RLock
from typing import Any, NamedTuple, TypeAlias

from streamrl.executor.launchers.ray_cluster import join_cluster

MOST_REPEATS = 3
"""Workers that may be killed at one batch. A job that kills more of them needs more memory than a worker has."""
BATCH_TIME = 1.0
"""Seconds after which a task begins no other job: what a killed worker loses, and some 200 times what a task costs."""
MOST_JOBS = 250
"""Most jobs of a batch: bounds its bytes."""
TASKS_PER_CPU = 2
"""Tasks that Ray has at a time for each CPU of the cluster: one that runs, and one that begins when it ends. An autoscaler
adds nodes for the second one."""
MOST_EARLY = 32
"""Most workers that start before the first job. A small study leaves the rest of a large cluster alone."""

Call: TypeAlias = Callable[[], Any]


class RayPool(Executor):
    """Submits jobs in batches, each as a task that takes one CPU."""

    def __init__(self, module: str) -> None:
        """Use the cluster that this process has joined; start workers, which import the module of the jobs."""
        import ray

        self._num_cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._do = ray.remote(num_cpus=1, max_retries=MOST_REPEATS)(_do)
        self._waiting: deque[_Job] = deque()
        self._num_tasks = 0
        self._num_done = 1
        """Jobs that the last task did."""
        self._is_closed = False
        self._lock = RLock()
        """Held while jobs are sent. A task that has ended at once calls back in the same thread."""
        for _ in range(min(self._num_cpus, MOST_EARLY)):
            self._do.remote([partial(_prepare, module)], 0.0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Add a job, and return the future of its answer. A task whose futures are all cancelled does not start."""
        job = _Job(partial(fn, *args, **kwargs), Future())
        with self._lock:
            self._waiting.append(job)
            self._send()
        return job.answer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Start no further task."""
        with self._lock:
            self._is_closed = True

    def _send(self) -> None:
        """Start tasks while the cluster has room for them and jobs wait."""
        most = 0 if self._is_closed else TASKS_PER_CPU * self._num_cpus
        while self._num_tasks < most and (jobs := self._next_jobs()):
            self._num_tasks += 1
            task = self._do.remote([job.call for job in jobs], BATCH_TIME)
            batch = _Batch(jobs, task)
            for job in jobs:
                job.answer.add_done_callback(batch.cancel)
            task.future().add_done_callback(partial(self._end, batch))

    def _next_jobs(self) -> list[_Job]:
        """Remove and return the jobs of the next task, without cancelled ones; empty if none wait."""
        share = ceil(len(self._waiting) / (TASKS_PER_CPU * self._num_cpus))
        most = min(share, 2 * self._num_done, MOST_JOBS)
        jobs: list[_Job] = []
        while self._waiting and len(jobs) < most:
            job = self._waiting.popleft()
            if not job.answer.cancelled():
                jobs.append(job)
        return jobs

    def _end(self, batch: _Batch, done: Future[list[_Ending]]) -> None:
        """Let jobs wait again that a task has not begun, start another task, and set the answers."""
        jobs, error = batch.jobs, done.exception()
        endings = done.result() if error is None else [_Ending(error=_plain(error))] * len(jobs)
        batch.task = None
        with self._lock:
            self._num_tasks -= 1
            self._num_done = len(endings)
            self._waiting.extendleft(reversed(jobs[len(endings) :]))
            self._send()
        for job, ending in zip(jobs, endings, strict=False):
            if job.answer.set_running_or_notify_cancel():
                ending.enter(job.answer)


class _Job(NamedTuple):
    """A job that waits or is in a task."""

    call: Call
    answer: Future[Any]


@dataclass
class _Batch:
    """Jobs of one task."""

    jobs: Sequence[_Job]
    task: Any
    """Ray's reference to the answer, which keeps it in memory; None after the end."""

    def cancel(self, ended: Future[Any]) -> None:
        """Keep the task from starting if nobody wants an answer any more."""
        task = self.task
        if task is not None and ended.cancelled() and all(e.answer.cancelled() for e in self.jobs):
            import ray

            ray.cancel(task)


class _Ending(NamedTuple):
    """How a job ended: its result, or its error."""

    result: Any = None
    error: BaseException | None = None

    def enter(self, answer: Future[Any]) -> None:
        """Set the answer of the job."""
        if self.error is None:
            answer.set_result(self.result)
        else:
            answer.set_exception(self.error)


def _prepare(module: str) -> None:
    import_module(module)


def _do(calls: Sequence[Call], seconds: float) -> list[_Ending]:
    """Do the first job and more of them until so many seconds have passed, in a worker; return how each ended."""
    until = time.perf_counter() + seconds
    endings = []
    for call in calls:
        endings.append(_end_of(call))
        if time.perf_counter() >= until:
            break
    return endings


def _end_of(call: Call) -> _Ending:
    try:
        return _Ending(call())
    except Exception as error:
        error.add_note(f"On a worker of the Ray cluster:\n{traceback.format_exc()}")
        return _Ending(error=error)


def _plain(error: BaseException) -> BaseException:
    """Return an error of Ray itself as one line; errors of jobs stay as they are."""
    import ray.exceptions

    if isinstance(error, ray.exceptions.RayTaskError | KeyboardInterrupt):
        return error
    if isinstance(error, ray.exceptions.RayError):
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        return RuntimeError(f"a job of the Ray cluster was lost {MOST_REPEATS + 1} times: {first}")
    return error


@contextlib.contextmanager
def ray_pool(address: str, module: str) -> Iterator[Executor]:
    """Join the cluster at `address`, and yield a pool of its CPUs until the context ends.

    Workers start at once and import the module of the jobs, while the caller prepares them.

    Raises:
        ValueError: Ray is not installed, or no cluster could be joined.
        RuntimeError: workers are killed at the same job again and again.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("--ray needs Ray: pip install 'streamrl[ray]'") from None

    with contextlib.redirect_stdout(sys.stderr):  # Ray prints events of its nodes to stdout
        join_cluster(address, "--ray")
        try:
            with RayPool(module) as pool:
                yield pool
        finally:
            ray.shutdown()
