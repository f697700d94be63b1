"""What limits the batch that a replica decodes: its memory, `rollout.max_running`, or the rollouts there are."""

from __future__ import annotations

from math import inf
from typing import Literal, NamedTuple

from streamrl.doctor.lengths import mean_lengths
from streamrl.engine.presets import choose_system, window_of
from streamrl.hardware.memory import kv_capacity, most_running
from streamrl.runfile.config import Run

Limit = Literal["memory", "max_running", "share"]


class ReplicaBatch(NamedTuple):
    """How many rollouts a replica may decode at once, by what would limit it alone."""

    held: float
    """That its KV cache holds, each at the context that a running one has on average."""
    max_running: int
    share: float
    """Of the rollouts that admission lets be generated at once."""

    @property
    def limit(self) -> Limit:
        """The least of the three; of two alike what there are no more rollouts for."""
        least = min(self)
        if self.share == least:
            return "share"
        return "max_running" if self.max_running == least else "memory"


def replica_batch(run: Run) -> ReplicaBatch | None:
    """Return what limits a replica's batch; None where the run file names no lengths.

    Raises:
        ValueError: the model does not fit a replica.
    """
    lengths = mean_lengths(run)
    if lengths is None:
        return None
    held = kv_capacity(run) / lengths.context
    if run.rollout.admission == "reserve":
        running = most_running(run)
        held = running if running < run.rollout.max_running else inf
    share = rollouts_under_way(run) / run.rollout.num_replicas
    return ReplicaBatch(held, run.rollout.max_running, share)


def rollouts_under_way(run: Run) -> int:
    """Return the most rollouts that admission lets be generated at once: of whole batches one after the other one."""
    window, algorithm = window_of(run), run.algorithm
    if choose_system(run.policies).waits_for_whole_batches:
        groups = min(window.sync_every, algorithm.steps) * algorithm.prompts_per_step
    else:
        groups = window.num_allowed(0, algorithm.steps) + window.num_extra
    return groups * algorithm.group_size
