"""What a rollout takes of those that compute nothing: CPU seconds, of a few steps that are executed.

They are the process that decides, the verifier, and of a replica the thread that reads calls and writes answers while
another one generates. A trainer's serves it before it computes: that is in the seconds of its calls.

Over Ray, what it takes beyond: Ray's own processes bring what roles say, and threads of each actor read and write it. So
they count too, and of the actors on this machine all threads but the one that computes, which takes most: each role has
one that does. What its other threads take to push and load weights, once a step, a profile has already: it is left out.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from streamrl.engine.messages import Event, Stepped
from streamrl.engine.state import State
from streamrl.executor.execute import execute
from streamrl.executor.launchers import worker
from streamrl.executor.launchers.launcher import REPLICA
from streamrl.executor.profiling.measurements import SHORT, RayPlace, Readings, Setup
from streamrl.executor.prompts import load_tokenizer
from streamrl.record.timeline import read_timeline
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run

STEPS = 8
"""Of which the first is left out: it loads what all need."""
PROMPTS, GROUP_SIZE = 12, 8
RUNNING = 16
"""Rollouts at once, so that they end one by one, as those of longer runs do: each end wakes who serves it."""
RAY_PROCESSES = ("raylet", "gcs_server")
"""What brings calls and answers of actors, and knows where they are."""
ACTOR = "ray::RayRole"
"""How the names of our actors begin."""
SCORER = "reasoning-gym"
"""Grades what may be code in a process of its own, as most scorers do."""
RECORD = {
    "prompt": "1 + 1 =",
    "task": "chain_sum",
    "entry": {"question": "1 + 1 =", "answer": "2", "metadata": {}},
}


class Taken(NamedTuple):
    """What rollouts took of those that compute nothing."""

    handling: Sequence[float] = ()
    """CPU seconds of a rollout, a mean for each step."""
    pushes: Sequence[float] = ()
    """Seconds of each push, of what stays on the machine: whole weights, or adapters where those are measured."""


def has_tokenizer(model: Path) -> bool:
    """Whether runs of a model can be executed: a profile needs its weights alone."""
    try:
        return len(load_tokenizer(str(model)).encode(RECORD["prompt"])) > 0
    except (OSError, ValueError):
        return False


def read_handling(setup: Setup, readings: Readings, watch: Callable[[str], None]) -> None:
    """Enter what executed runs take beside what roles compute, and over Ray where that is asked for."""
    if setup.plan.companies:
        readings.handling += measure_handling(setup).handling
        watch("handling")
    if setup.ray is not None:
        over_ray = measure_handling(setup, setup.ray)
        synced = (median(readings.push) + median(readings.load)) / (PROMPTS * GROUP_SIZE)
        readings.handling_over_ray += [max(0.0, each - synced) for each in over_ray.handling]
        readings.push_over_ray += over_ray.pushes if setup.device == "cpu" else []  # by a CPU
        watch("handling over Ray")


def measure_handling(setup: Setup, ray: RayPlace | None = None) -> Taken:
    """Execute a short run of the model to be measured, and return what its rollouts take.

    Nothing where its runs cannot be executed. Roles are processes of this one, or actors of a cluster, whose own
    processes count then.
    """
    if not has_tokenizer(Path(setup.model)):
        return Taken()
    with tempfile.TemporaryDirectory(prefix="streamrl-profile-") as scratch:
        clock = _Clock(is_over_ray=ray is not None)
        trace = execute(handled_run(setup, ray, Path(scratch)), watch=clock)
    pushes = read_timeline(trace).link
    return Taken(clock.handling[1:], [span.end - span.start for span in pushes[1:]])


def handled_run(setup: Setup, ray: RayPlace | None, scratch: Path) -> Run:
    """Return the run that is executed, whose prompts are written to a directory."""
    pool = "local" if ray is None else ray.pool
    prompts = scratch / "prompts.jsonl"
    prompts.write_text(f"{json.dumps(RECORD)}\n" * PROMPTS, encoding="utf-8")
    rank = setup.lora_rank
    return make_run(
        {
            "model": {"path": setup.model, "dtype": setup.dtype},
            "cluster": {"pools": {pool: {"gpu": "cpu", "gpus_per_node": 2}}},
            "rollout": {
                "pool": pool,
                "replicas": 1,
                "max_running": RUNNING,
                "max_tokens": min(2 * SHORT, setup.limits.max_context // 2),
            },
            "trainer": {"pool": pool},
            "algorithm": {
                "name": "grpo",
                "steps": STEPS,
                "prompts_per_step": PROMPTS,
                "group_size": GROUP_SIZE,
            },
            "workload": {"prompts": str(prompts)},
            "verifier": {"scorer": SCORER},
            "policies": {"system": "stream-sync"},
            "sync": {} if rank is None else {"mode": "lora", "lora_rank": rank},
            "execute": {
                "output": str(scratch / "run"),
                "checkpoint_every": STEPS + 1,
                "threads": setup.threads if ray is None else 1,  # of an actor one computes
                **({} if ray is None else {"launcher": "ray", "ray_address": ray.address}),
            },
        }
    )


class _Clock:
    """Reads CPU times once a step."""

    def __init__(self, *, is_over_ray: bool) -> None:
        self._watch = HandlingWatch(is_over_ray=is_over_ray)
        self.handling: list[float] = []

    def __call__(self, event: Event, state: State, now: float) -> None:
        if isinstance(event, Stepped):
            self.handling.append(self._watch.take() / (PROMPTS * GROUP_SIZE))


class HandlingWatch:
    """CPU seconds of all that handles rollouts."""

    def __init__(self, *, is_over_ray: bool) -> None:
        self._is_over_ray = is_over_ray
        self._last: dict[tuple[int, int], float] = {}
        """Seconds of each process, and of each thread of an actor."""
        self._own = 0.0
        """What reading took so far, which no run does."""

    def take(self) -> float:
        """Return what was taken since the last call."""
        began_at = time.process_time()
        taken = self._lately((os.getpid(), 0), began_at - self._own)
        for process in self._processes():
            with suppress(psutil.Error):  # it has ended
                if process.name().startswith(ACTOR):
                    times = [(one.id, one.user_time + one.system_time) for one in process.threads()]
                    lately = [self._lately((process.pid, name), so_far) for name, so_far in times]
                    taken += sum(lately) - max(lately)
                else:
                    taken += self._lately((process.pid, 0), _handling_time(process))
        self._own += time.process_time() - began_at
        return taken

    def _lately(self, name: tuple[int, int], so_far: float) -> float:
        """Return what was taken since this was last asked of a process or thread."""
        before, self._last[name] = self._last.get(name, 0.0), so_far
        return so_far - before

    def _processes(self) -> Iterable[psutil.Process]:
        known = {process.pid: process for process in psutil.Process().children(recursive=True)}
        if self._is_over_ray:
            rays = (p for p in psutil.process_iter(["name"]) if _is_of_ray(p.info["name"] or ""))
            known |= {process.pid: process for process in rays}
        return known.values()


def _handling_time(process: psutil.Process) -> float:
    """Return the CPU seconds of a process so far that are no role's computing."""
    command = process.cmdline()
    if worker.MODULE in command:
        return _first_thread_time(process) if REPLICA in command else 0.0
    own = process.cpu_times()[: 2 if process.name() in RAY_PROCESSES else 4]
    return float(sum(own))  # with ended children: graders live for an answer


def _first_thread_time(process: psutil.Process) -> float:
    """Return what the thread took on which a worker's calls come and go; all computing is on others."""
    first = (thread for thread in process.threads() if thread.id == process.pid)
    return float(sum(thread.user_time + thread.system_time for thread in first))


def _is_of_ray(name: str) -> bool:
    return name in RAY_PROCESSES or name.startswith(ACTOR)
