"""The sections `[simulate]`, `[framework]`, `[failures]` and `[[faults]]` of a run file: what is simulated, and which failures are injected."""

from __future__ import annotations

from typing import Literal

from streamrl.runfile.section import Section
from streamrl.runfile.units import Duration


class SimulateConfig(Section, frozen=True, kw_only=True):
    """When enough steps are simulated: once their mean time is known well enough, or there are too many."""

    interval: float = 0.01
    """Half the 95 % interval of the mean step time that is wanted, as a share of the mean."""
    max_steps: int = 400
    """Most steps that are simulated; where the interval is still wider then, every output says so."""


FrameworkName = Literal["streamrl", "verl", "nemo-rl", "slime", "openrlhf", "trl"]


class FrameworkConfig(Section, frozen=True, kw_only=True):
    """What a simulated step consists of beside generation, passes and weight sync."""

    name: FrameworkName | None = None
    """Whose training is planned and simulated: it fills in the keys that this run file leaves out as profiles/frameworks/NAME.toml
    says (passes, optimizer steps, weight sync, engine, seconds), and `plan` keeps to what that framework can do."""
    optimizer_steps: int = 1
    """Optimizer steps that a batch is split into; each lets pipelines run dry, and waits for the slowest rank. Executed,
    with the torch backend: each on so many rollouts as they come, at one policy version for all of a batch."""
    epochs: int = 1
    """Times that a batch is trained on."""
    step_time: Duration | None = None
    """Seconds of a step for data, rewards, metrics and logging, in which the trainer does nothing else. Absent: what
    profiles/frameworks/NAME.toml has, or where that has none profiles/frameworks/usual.toml; none on CPUs, nor where
    `costs.profile` measured the framework that runs."""
    switch_time: Duration | None = None
    """Seconds that a colocated system takes to put engines to sleep, wake them and hand weights over, beside the bytes
    that cross wires: allocation and calls for every tensor. Absent: what profiles/frameworks/NAME.toml has, or where that has
    none profiles/frameworks/usual.toml."""
    checkpoint_time: Duration = Duration(0.0)
    """Seconds that a checkpoint (`execute.checkpoint_every`) holds the run up: counted in the whole run, not in a step.
    None where it is written beside training, as most frameworks can."""


class FailuresConfig(Section, frozen=True, kw_only=True):
    """Simulated failures of GPUs that generate, and that train.

    Each takes its replica with it: what ran there starts again elsewhere, and a new replica is up after
    `rollout.start_time`. `policies.max_restarts` bounds how many may go before the run stops, and
    `policies.max_attempts` how often one rollout may be lost.
    """

    per_gpu_day: float = 0.0
    """Failures of one GPU in 24 hours of serving, on average; instants are exponential and seeded. Llama 3
    saw 0.0005: 419 in 54 days on 16,384 H100 (arXiv 2407.21783, section 3.3.4)."""
    trainers: bool = False
    """Whether GPUs that train fail too: their trainer comes up again at its last checkpoint
    (`execute.checkpoint_every`), and the steps after that are made once more."""


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
