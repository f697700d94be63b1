"""Simulate the jobs of plans and studies as tasks of a Ray cluster.

Jobs depend on nothing but their arguments, so the answers are those of one core. A task whose worker
is killed is repeated on another one. The nodes of the cluster need this version of streamrl.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

from streamrl.executor.launchers.ray_cluster import join_cluster

MOST_REPEATS = 3
"""Workers that may be killed at one job. A job that kills more of them needs more memory than a worker has."""


class RayPool(Executor):
    """Submits each job as a task that takes one CPU."""

    def __init__(self) -> None:
        """Use the cluster that this process has joined."""
        import ray

        self._call = ray.remote(num_cpus=1, max_retries=MOST_REPEATS)(_call)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a task, and return the future of its answer. A cancelled future keeps a waiting task from starting."""
        import ray

        answer: Future[Any] = Future()
        task = self._call.remote(fn, args, kwargs)

        def finish(done: Future[Any]) -> None:
            if answer.cancelled():
                return
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            else:
                answer.set_exception(_plain(error))

        def end(ended: Future[Any]) -> None:
            if ended.cancelled():
                ray.cancel(task)

        answer.add_done_callback(end)
        task.future().add_done_callback(finish)
        return answer


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


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
def ray_pool(address: str) -> Iterator[Executor]:
    """Join the cluster at `address`, and yield a pool of its CPUs until the context ends.

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
            yield RayPool()
        finally:
            ray.shutdown()
