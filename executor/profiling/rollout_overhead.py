"""Measure the CPU seconds of a rollout in processes and threads that do not run the model, in short runs.

They are the controller, the verifier, and the thread of a replica that serves calls while another thread generates. The
trainer's overhead is left out: its thread serves calls before it computes, so the seconds of its calls include it.

Episodes of several turns take more: their environment's process starts, and each turn is a call of it and one more call of
the replica. Runs with one turn and with several of an environment that computes nothing show their CPU seconds. The
processes of environments are left out: `environment_times` measures those of the environment that the setup names.

Over Ray, these count too: Ray's own processes, and all threads of each actor on this machine except the busiest one.
The busiest thread of an actor is the one that computes. Other threads also push and load weights once a step. The
profile has that time already, so it is subtracted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import psutil

from streamrl.engine.messages import Event, Stepped
from streamrl.engine.state import State
from streamrl.executor.directory_lock import OwnedDirectory
from streamrl.executor.environment.session import BOOT, with_tool_format
from streamrl.executor.execute import execute
from streamrl.executor.launchers import worker
from streamrl.executor.launchers.launcher import REPLICA
from streamrl.executor.profiling.environment_times import MeasuredEnvironment
from streamrl.executor.profiling.measurements import SHORT, RayPlace, Readings, Setup
from streamrl.executor.prompts import load_tokenizer
from streamrl.hardware.profiles import load_model
from streamrl.record.timeline import read_timeline
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.files import make_run
from streamrl.workload.prompt_records import Record

STEPS = 8
"""Steps of the run. The first step is not counted, because it loads libraries."""
PROMPTS, GROUP_SIZE = 12, 8
MANY_TURNS = 5
"""Turns of each episode in a run with an environment; in another run it has one."""
RUNNING = 16
"""Concurrent rollouts. They are few, so that rollouts end one by one as in longer runs, and each end wakes a thread."""
RAY_PROCESSES = ("raylet", "gcs_server")
"""Ray's own processes, which deliver calls and answers and locate actors."""
ACTOR = "ray::RayRole"
"""Prefix of the process names of our actors."""
ENVIRONMENT = "streamrl.executor.profiling.repeated_turns:RepeatedTurns"
SCORER = "exact"
"""Runs in a separate process, as most scorers do, and takes as long for any answer. A grader that fails at an unreadable
answer costs another process.
"""
LEAST = 1e-6
"""Minimum CPU seconds, because times in a profile must be positive."""
RECORD: Record = {"prompt": "1 + 1 =", "answer": "2"}


class Taken(NamedTuple):
    """The overhead of rollouts, and the seconds of pushes."""

    handling: Sequence[float] = ()
    """CPU seconds per rollout, as a mean for each step."""
    pushes: Sequence[float] = ()
    """Seconds of each push of whole weights, or of adapters if those are measured."""


def has_tokenizer(model: Path) -> bool:
    """Return whether a model has a tokenizer, which a run needs; the rest of a profile needs only weights."""
    try:
        return len(load_tokenizer(str(model)).encode(RECORD["prompt"])) > 0
    except (OSError, ValueError):
        return False


def read_handling(setup: Setup, readings: Readings, watch: Callable[[str], None]) -> None:
    """Record the overhead of executed runs, and over Ray if `setup.ray` is set."""
    if setup.plan.companies:
        readings.handling += measure_handling(setup).handling
        watch("handling")
        if readings.handling:
            few, many = (measure_handling(setup, turns=turns) for turns in (1, MANY_TURNS))
            read_turns(readings, few.handling, many.handling)
        watch("handling of episodes")
    if setup.ray is not None:
        over_ray = measure_handling(setup, setup.ray)
        synced = (median(readings.push) + median(readings.load)) / (PROMPTS * GROUP_SIZE)
        readings.handling_over_ray += [max(0.0, each - synced) for each in over_ray.handling]
        readings.push_over_ray += over_ray.pushes if setup.device == "cpu" else []  # by a CPU
        watch("handling over Ray")


def read_turns(readings: Readings, one: Sequence[float], many: Sequence[float]) -> None:
    """Record the CPU seconds of an episode beyond a rollout, and of each turn after the first.

    Args:
        readings: has those of a rollout, and gets the others.
        one: CPU seconds of episodes of one turn.
        many: those of episodes of `MANY_TURNS`.
    """
    rollout, episode = median(readings.handling), median(one)
    readings.episode += [max(LEAST, each - rollout) for each in one]
    readings.action += [max(LEAST, (each - episode) / (MANY_TURNS - 1)) for each in many]


def measured_environment(setup: Setup) -> MeasuredEnvironment:
    """Return the environment of the setup, with the model's format of tool calls; without one, that which computes nothing."""
    if setup.environment is None:
        config = msgspec.convert(_environment(setup, MANY_TURNS), EnvironmentConfig)
        return MeasuredEnvironment(config, [RECORD])
    config = with_tool_format(setup.environment.config, load_tokenizer(setup.model))
    return setup.environment._replace(config=config)


def measure_handling(setup: Setup, ray: RayPlace | None = None, turns: int | None = None) -> Taken:
    """Execute a short run of the measured model, and return the overhead of its rollouts.

    With `turns`, each rollout is an episode in which an environment answers this number of turns of one token.

    The result is empty if the model has no tokenizer. Roles are child processes, or actors of a Ray cluster. Then
    Ray's own processes count too.
    """
    if not has_tokenizer(Path(setup.model)):
        return Taken()
    with OwnedDirectory("profile") as scratch:
        clock = _Clock(is_over_ray=ray is not None)
        trace = execute(handled_run(setup, ray, scratch, turns), watch=clock)
    pushes = read_timeline(trace).link
    times = [span.end - span.start for span in pushes[1:]]
    return Taken(clock.handling[1:], times)


def handled_run(setup: Setup, ray: RayPlace | None, scratch: Path, turns: int | None = None) -> Run:
    """Return the run to execute, and write its prompts to `scratch`."""
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
                **({} if turns is None else {"stop_token_ids": _all_tokens(setup.model)}),
            },
            "trainer": {"pool": pool},
            "algorithm": {
                "name": "grpo",
                "steps": STEPS,
                "prompts_per_step": PROMPTS,
                "group_size": GROUP_SIZE,
            },
            "workload": {
                "prompts": str(prompts),
                "max_prompt_tokens": setup.limits.max_context // 2,
            },
            "verifier": {"scorer": SCORER},
            **({} if turns is None else {"environment": _environment(setup, turns)}),
            "policies": {"system": "stream-sync"},
            "sync": {} if rank is None else {"mode": "lora", "lora_rank": rank},
            "execute": {
                "output": str(scratch / "run"),
                "checkpoint_every": STEPS + 1,
                "threads": setup.threads if ray is None else 1,  # one thread of an actor computes
                **({} if ray is None else {"launcher": "ray", "ray_address": ray.address}),
            },
        }
    )


def _all_tokens(model: str) -> list[int]:
    """Return all token ids of a model. If each of them ends a turn, a turn has one token."""
    return list(range(load_model(ModelConfig(path=model)).vocab_size))


def _environment(setup: Setup, turns: int) -> dict[str, Any]:
    return {
        "implementation": ENVIRONMENT,
        "arguments": {"turns": turns},
        "max_turns": turns + 1,  # the environment ends the episode
        "max_context": setup.limits.max_context,
    }


class _Clock:
    """Reads CPU times after each step."""

    def __init__(self, *, is_over_ray: bool) -> None:
        self._watch = HandlingWatch(is_over_ray=is_over_ray)
        self.handling: list[float] = []

    def __call__(self, event: Event, state: State, now: float) -> None:
        if isinstance(event, Stepped):
            self.handling.append(self._watch.take() / (PROMPTS * GROUP_SIZE))


class HandlingWatch:
    """Measures the CPU seconds of all processes and threads that handle rollouts."""

    def __init__(self, *, is_over_ray: bool) -> None:
        self._is_over_ray = is_over_ray
        self._last: dict[tuple[int, int], float] = {}
        """CPU seconds of each process, and of each thread of an actor, at the last call."""
        self._own = 0.0
        """CPU seconds that this measurement itself has taken; they are subtracted."""

    def take(self) -> float:
        """Return the CPU seconds since the last call."""
        began_at = time.process_time()
        taken = self._lately((os.getpid(), 0), began_at - self._own)
        for process in self._processes():
            with suppress(psutil.Error):  # the process has ended
                if process.name().startswith(ACTOR):
                    times = [(one.id, one.user_time + one.system_time) for one in process.threads()]
                    lately = [self._lately((process.pid, name), so_far) for name, so_far in times]
                    taken += sum(lately) - max(lately)
                else:
                    taken += self._lately((process.pid, 0), _handling_time(process))
        self._own += time.process_time() - began_at
        return taken

    def _lately(self, name: tuple[int, int], so_far: float) -> float:
        """Return the CPU seconds of a process or thread since the last call for it."""
        before, self._last[name] = self._last.get(name, 0.0), so_far
        return so_far - before

    def _processes(self) -> Iterable[psutil.Process]:
        known = {process.pid: process for process in psutil.Process().children(recursive=True)}
        if self._is_over_ray:
            rays = (p for p in psutil.process_iter(["name"]) if _is_of_ray(p.info["name"] or ""))
            known |= {process.pid: process for process in rays}
        return known.values()


def _handling_time(process: psutil.Process) -> float:
    """Return the CPU seconds of a process so far, without the time in which a role or an environment computes."""
    if BOOT in process.cmdline():
        return 0.0
    if worker.MODULE in process.cmdline():
        return _first_thread_time(process) if _is_replica(process) else 0.0
    own = process.cpu_times()[: 2 if process.name() in RAY_PROCESSES else 4]
    return float(sum(own))  # includes ended children, because a grader runs for one answer


def _is_replica(process: psutil.Process) -> bool:
    return {worker.MODULE, REPLICA} <= {*process.cmdline()}


def _first_thread_time(process: psutil.Process) -> float:
    """Return the CPU seconds of a worker's main thread, which serves calls; other threads compute."""
    first = (thread for thread in process.threads() if thread.id == process.pid)
    return float(sum(thread.user_time + thread.system_time for thread in first))


def _is_of_ray(name: str) -> bool:
    return name in RAY_PROCESSES or name.startswith(ACTOR)
