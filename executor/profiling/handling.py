"""What a rollout takes of those that compute nothing: CPU seconds, of a few steps that are executed.

They are the process that decides, the verifier, and of a replica the thread that reads calls and writes answers while
another one generates. A trainer's serves it before it computes: that is in the seconds of its calls.

Over Ray, what it takes beyond: Ray's own processes bring what roles say, and threads of each actor read and write it. So
they count too, and of the actors on this machine all threads but the one that computes, which takes most.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from executor.carriers import worker
from executor.carriers.launch import REPLICA
from executor.execute import execute
from executor.profiling.measurements import SHORT, RayPlace, Setup
from executor.profiling.readings import Readings
from executor.prompts import load_tokenizer
from streamrl.engine.messages import Event, Stepped
from streamrl.engine.state import State
from streamrl.record.timeline import read_timeline
from streamrl.runfile.reading import make_run

STEPS = 8
"""Of which the first is left out: it loads what all need."""
PROMPTS, GROUP_SIZE = 12, 8
RUNNING = 16
"""Rollouts at once, so that they end one by one, as those of longer runs do: each end wakes who serves it."""
RAY_PACKAGE = "/site-packages/ray/"
"""In the command of each of Ray's own processes: what brings calls and answers of actors, and what watches over them."""
ACTOR = "ray::"
"""How names of actors begin."""
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
    """Seconds of each push of whole weights, which stay on the machine."""


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
        readings.handling_over_ray += over_ray.handling
        readings.push_over_ray += over_ray.pushes if setup.device == "cpu" else []  # by a CPU
        watch("handling over Ray")


def measure_handling(setup: Setup, ray: RayPlace | None = None) -> Taken:
    """Return what rollouts of the model to be measured take; nothing where its runs cannot be executed."""
    model, tokens = Path(setup.model), min(2 * SHORT, setup.limits.max_context // 2)
    if not has_tokenizer(model):
        return Taken()
    with tempfile.TemporaryDirectory(prefix="streamrl-profile-") as scratch:
        return time_handling(model, tokens, setup.dtype, setup.threads, Path(scratch, "run"), ray)


def time_handling(
    model: Path, tokens: int, dtype: str, threads: int, scratch: Path, ray: RayPlace | None = None
) -> Taken:
    """Execute a short run and return what its rollouts take.

    Args:
        model: Hugging Face directory, with its tokenizer.
        tokens: output tokens of each rollout.
        dtype: of the model.
        threads: of the replica, and of the trainer.
        scratch: a directory that this makes.
        ray: a cluster whose actors the roles are, and whose own processes count; processes of this one where absent.
    """
    pool = "local" if ray is None else ray.pool
    scratch.mkdir()
    prompts = scratch / "prompts.jsonl"
    prompts.write_text(f"{json.dumps(RECORD)}\n" * PROMPTS, encoding="utf-8")
    clock = _Clock(is_over_ray=ray is not None)
    run = make_run(
        {
            "model": {"path": str(model), "dtype": dtype},
            "cluster": {"pools": {pool: {"gpu": "cpu", "gpus_per_node": 2}}},
            "rollout": {
                "pool": pool,
                "replicas": 1,
                "max_running": RUNNING,
                "max_tokens": tokens,
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
            "execute": {
                "output": str(scratch / "run"),
                "checkpoint_every": STEPS + 1,
                "threads": threads,
                **({} if ray is None else {"launcher": "ray", "ray_address": ray.address}),
            },
        }
    )
    pushes = read_timeline(execute(run, watch=clock)).link
    seconds = [span.end - span.start for span in pushes[1:]]
    return Taken(clock.handling[1:], seconds)


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
        self._last: dict[int, dict[int, float]] = {}
        """Of each process that counts, seconds by thread; of one that counts as a whole under its own number."""
        self._last_here = 0.0

    def take(self) -> float:
        """Return what was taken since the last call, without what this takes itself."""
        here, taken, read = time.process_time(), 0.0, {}
        for process in self._processes():
            with suppress(psutil.Error):  # it has ended
                threads = read[process.pid] = _counted_times(process)
                before = self._last.get(process.pid, {})
                lately = [seconds - before.get(name, 0.0) for name, seconds in threads.items()]
                computes = process.name().startswith(ACTOR)
                taken += sum(lately) - (max(lately) if computes else 0.0)
        taken += here - self._last_here
        self._last, self._last_here = read, time.process_time()
        return taken

    def _processes(self) -> Iterable[psutil.Process]:
        known = {process.pid: process for process in psutil.Process().children(recursive=True)}
        if self._is_over_ray:
            every = psutil.process_iter(["name", "cmdline"])
            known |= {process.pid: process for process in every if _is_of_ray(process)}
        return known.values()


def _counted_times(process: psutil.Process) -> dict[int, float]:
    """Return the CPU seconds of a process so far that may be handling, by thread."""
    command, name = process.cmdline(), process.name()
    if worker.MODULE in command:
        return {process.pid: _first_thread_time(process)} if REPLICA in command else {}
    if name.startswith(ACTOR):
        return {one.id: one.user_time + one.system_time for one in process.threads()}
    is_of_ray = RAY_PACKAGE in " ".join(command)
    own = process.cpu_times()[
        : 2 if is_of_ray else 4
    ]  # with ended children: graders live for an answer
    return {process.pid: float(sum(own))}


def _first_thread_time(process: psutil.Process) -> float:
    """Return what the thread took on which a worker's calls come and go; all computing is on others."""
    first = (thread for thread in process.threads() if thread.id == process.pid)
    return float(sum(thread.user_time + thread.system_time for thread in first))


def _is_of_ray(process: psutil.Process) -> bool:
    """Whether a process, of which psutil has read name and command, is one of Ray's or an actor."""
    found = process.info
    command = " ".join(found["cmdline"] or [])
    return (found["name"] or "").startswith(ACTOR) or RAY_PACKAGE in command
