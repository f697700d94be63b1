"""The roles of a run whose passes or calls are timed; `timed_workers.py` has their workers."""

from __future__ import annotations

from typing import Protocol

from streamrl.executor.roles import ReplicaRole, TrainerRole
from streamrl.executor.rollout.inference_engine import TimedPass


class TimedReplicaRole(ReplicaRole, Protocol):
    """A replica that returns the seconds of its forward passes."""

    async def pads_context(self) -> bool:
        """Return whether decode steps pad every rollout to the longest one."""

    async def prefill_tokens(self) -> int:
        """Return the maximum number of new prefix tokens in a pass that also decodes."""

    async def passes(self) -> list[TimedPass]:
        """Return the passes since the last call."""


class TimedTrainerRole(TrainerRole, Protocol):
    """A trainer that returns the seconds of each call."""

    async def seconds(self) -> list[float]:
        """Return the seconds of each call since the last request, in order."""
