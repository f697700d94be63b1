"""What a rollout takes of the process that decides, and of the verifier: CPU seconds, of a few steps that are executed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from executor.execute import execute
from executor.profiling.measurements import RayPlace
from executor.prompts import load_tokenizer
from streamrl.engine.messages import Event, Stepped
from streamrl.engine.state import State
from streamrl.runfile.reading import make_run

STEPS = 8
"""Of which the first is left out: it loads what all need."""
PROMPTS, GROUP_SIZE = 12, 8
WORKER = "executor.carriers.worker"
"""What the command of a replica or a trainer has in it: they are timed by what they compute."""
RAY_PROCESSES = ("raylet", "gcs_server")
"""What brings calls and answers of actors, and knows where they are."""
SCORER = "reasoning-gym"
"""Grades what may be code in a process of its own, as most scorers do."""
RECORD = {
    "prompt": "1 + 1 =",
    "task": "chain_sum",
    "entry": {"question": "1 + 1 =", "answer": "2", "metadata": {}},
}


def has_tokenizer(model: Path) -> bool:
    """Whether runs of a model can be executed: a profile needs its weights alone."""
    try:
        return len(load_tokenizer(str(model)).encode(RECORD["prompt"])) > 0
    except (OSError, ValueError):
        return False


def time_handling(
    model: Path, tokens: int, dtype: str, threads: int, scratch: Path, ray: RayPlace | None = None
) -> list[float]:
    """Execute a short run and return the CPU seconds of a rollout, a mean for each step.

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
    clock = _Clock(counts_ray=ray is not None)
    run = make_run(
        {
            "model": {"path": str(model), "dtype": dtype},
            "cluster": {"pools": {pool: {"gpu": "cpu", "gpus_per_node": 2}}},
            "rollout": {
                "pool": pool,
                "replicas": 1,
                "max_running": PROMPTS * GROUP_SIZE,
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
    execute(run, watch=clock)
    return clock.seconds[1:]


class _Clock:
    """Reads the CPU time of this process, of those below it that are no role, and of Ray's own where they work for it, once a step."""

    def __init__(self, *, counts_ray: bool) -> None:
        self._counts_ray = counts_ray
        self.seconds: list[float] = []
        """Of a rollout, in each step."""
        self._last = 0.0

    def __call__(self, event: Event, state: State, now: float) -> None:
        if isinstance(event, Stepped):
            so_far = sum(_cpu_times(counts_ray=self._counts_ray))
            self.seconds.append((so_far - self._last) / (PROMPTS * GROUP_SIZE))
            self._last = so_far


def _cpu_times(*, counts_ray: bool) -> Iterator[float]:
    yield time.process_time()
    below = {process.pid: process for process in psutil.Process().children(recursive=True)}
    if counts_ray:
        rays = (p for p in psutil.process_iter(["name"]) if p.info["name"] in RAY_PROCESSES)
        below |= {process.pid: process for process in rays}
    for process in below.values():
        try:
            if WORKER not in process.cmdline():
                used = process.cpu_times()
                yield used.user + used.system
        except psutil.Error:
            pass  # it has ended
