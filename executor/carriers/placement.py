"""Which device each role of a run computes on, and which GPU of this machine that is.

Every role has one GPU, by its slot: the first replicas from 0 on, then the trainer, then replicas that are added.
A trainer that shares GPUs has the first replica's; roles on the CPU have none.
"""

from __future__ import annotations

import os
import re
from itertools import takewhile

from streamrl.runfile.config import DEVICE, Run
from streamrl.runfile.pools import most_replicas

VARIABLE = "CUDA_VISIBLE_DEVICES"
NAME = re.compile(r"\d+|GPU-.+|MIG-.+")
"""An entry of CUDA_VISIBLE_DEVICES; whatever else hides itself and all that follow (CUDA C++ Programming Guide,
section CUDA Environment Variables)."""


def device_of(run: Run, pool: str) -> str:
    """Return the device, as torch names it, of the roles in `pool`."""
    if run.execute.device != "auto":
        return run.execute.device
    return "cpu" if run.cluster.pools[pool].gpu == "cpu" else "cuda"


def trainer_slot(run: Run) -> int:
    """Return the slot of the trainer."""
    takes_turns = run.shares_gpus or device_of(run, run.rollout.pool) == "cpu"
    return 0 if takes_turns else run.rollout.replicas


def gpus_needed(run: Run) -> int:
    """Return the GPUs of this machine that a run needs, for as many replicas as there may be."""
    rollout, trainer = (device_of(run, pool) for pool in (run.rollout.pool, run.trainer.pool))
    if rollout == trainer == "cpu":
        return 0
    match = DEVICE.fullmatch(run.execute.device)
    if match is not None and match["index"] is not None:
        return int(match["index"]) + 1
    if run.execute.launcher == "in-process":
        return 1
    replicas = _most_replicas(run) if rollout == "cuda" else 0
    return replicas + (trainer == "cuda" and not run.shares_gpus)


def usable_gpus(inherited: str | None, num_seen: int) -> list[str]:
    """Return the GPUs that this process may use, each as `VARIABLE` names it to a worker of its own.

    Args:
        inherited: the variable as this process has it, None where it is not set: indices, UUIDs of GPUs or of
            MIG instances; one that is empty or begins with -1 hides all.
        num_seen: GPUs that torch counts under it.
    """
    if inherited is None:
        return [str(index) for index in range(num_seen)]
    names = list(takewhile(NAME.fullmatch, map(str.strip, inherited.split(","))))
    instances = list(takewhile(lambda name: name.startswith("MIG-"), names))
    if num_seen and instances:
        return (
            instances  # a process sees one of its MIG instances, but each worker can have another
        )
    return names[:num_seen]


def find_gpus() -> list[str]:
    """Return `usable_gpus` of this process; none where torch, or CUDA, is missing."""
    try:
        import torch
    except ImportError:
        return []
    num_seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return usable_gpus(os.environ.get(VARIABLE), num_seen)


def claim_gpus(run: Run) -> list[str]:
    """Return the GPUs that the slots of a run stand for; torch is asked only where it needs any.

    Raises:
        ValueError: there are fewer than it needs.
    """
    needed = gpus_needed(run)
    found = find_gpus() if needed else []
    if len(found) < needed:
        raise ValueError(
            f"execute.device {run.execute.device!r} needs {needed} GPUs of this machine, {say_seen(len(found))}: "
            "--set execute.device=cpu executes the run without"
        )
    return found


def say_seen(num_gpus: int) -> str:
    """Say how many GPUs there are, and under which variable."""
    inherited = os.environ.get(VARIABLE)
    return f"torch sees {num_gpus}" + ("" if inherited is None else f" ({VARIABLE}={inherited!r})")


def _most_replicas(run: Run) -> int:
    if run.policies.resize == "keep":
        return run.rollout.replicas
    return run.policies.max_replicas or most_replicas(run)
