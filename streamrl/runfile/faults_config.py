"""A `[[faults]]` of a run file: one thing that goes wrong on purpose, and when."""

from __future__ import annotations

from typing import Literal

from streamrl.runfile.section import Section
from streamrl.runfile.units import Duration

FaultKind = Literal[
    "replica-dies",
    "replica-hangs",
    "replica-garbles",
    "trainer-dies-training",
    "trainer-dies-pushing",
    "trainer-dies-saving",
    "link-slows",
    "link-drops",
    "verifier-stalls",
    "reward-model-dies",
    "reward-model-hangs",
    "disk-full",
    "driver-dies",
]

OF_REWARD_MODEL: tuple[FaultKind, ...] = ("reward-model-dies", "reward-model-hangs")
AT_A_PUSH: tuple[FaultKind, ...] = ("trainer-dies-pushing", "link-slows", "link-drops")


class FaultConfig(Section, frozen=True, kw_only=True):
    """A fault, at one moment (`step` or `time`) or at `count` random ones.

    It strikes with work that the engine gives out: what happens to a replica with a rollout that it is sent, to the
    trainer with a micro-batch, a push or a checkpoint, to the link with a push, to the verifier or a replica of the
    reward model with a rollout, to the disk with a checkpoint, to the driver with a micro-batch.
    """

    kind: FaultKind
    """replica-hangs: it is stopped, and says so to nobody; replica-garbles: its answer is none; link-slows: a push takes
    `factor` times as long; link-drops: a push is lost on its way; verifier-stalls: no reward comes; reward-model-dies,
    reward-model-hangs: as replicas of the policy; disk-full: a checkpoint finds no room; driver-dies: whoever decides is
    killed, for `--resume` to go on (executed only)."""
    step: int | None = None
    """Strike with the first work of this step, or with the push or checkpoint of its version, or the next after it."""
    time: Duration | None = None
    """Strike with the first work after this time since the run began."""
    count: int | None = None
    """Strike so often, in random steps and with any work of theirs."""
    seed: int | None = None
    """Of those random moments; the run's own where absent."""
    duration: Duration | None = None
    """How long the link is slow, or the verifier stalls."""
    factor: float | None = None
    """How many times as long a push takes over a slow link."""

    def last_step(self, steps: int) -> int:
        """Return the last of so many steps in which it can strike: the last version is not pushed."""
        return max(1, steps - 1) if self.kind in AT_A_PUSH else steps
