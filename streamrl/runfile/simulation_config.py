"""The sections `[simulate]`, `[framework]`, `[failures]` and `[[faults]]` of a run file: what is simulated, and which failures are injected."""

from __future__ import annotations

from typing import Literal

from streamrl.runfile.section import Section
from streamrl.runfile.units import Duration


class SimulateConfig(Section, frozen=True, kw_only=True):
    """When to stop a simulation: the mean step time is precise enough, or the step limit is reached."""

    interval: float = 0.02
    """Half the 95 % interval of the mean step time, as a share of that mean, at which the
    simulation stops.
    """
    max_steps: int = 400
    """Maximum number of simulated steps. If the interval is still wider then, every output says so.
    """


FrameworkName = Literal[
    "streamrl", "verl", "nemo-rl", "slime", "miles", "openrlhf", "trl", "prime-rl", "skyrl"
]


class FrameworkConfig(Section, frozen=True, kw_only=True):
    """Parts of a simulated step other than generation, training passes and weight sync."""

    name: FrameworkName | None = None
    """Framework to plan and simulate. It fills in the keys that this run file leaves out, from
    profiles/frameworks/NAME.toml: passes, optimizer steps, weight sync, engine and seconds.
    `plan` then searches only what that framework supports.
    """
    version: str | None = None
    """Release of the framework, such as "0.7". Its own values of keys then replace those of the
    commit that was read (docs/frameworks.md lists the releases). Absent: that commit.
    """
    optimizer_steps: int = 1
    """Optimizer steps per batch. Each one drains the pipeline and waits for the slowest rank.
    Executed, with the torch backend: each step takes an equal number of rollouts as they arrive,
    and the whole batch makes one policy version.
    """
    epochs: int = 1
    """Times that a batch is trained on."""
    step_time: Duration | None = None
    """Seconds of a step for data, rewards, metrics and logging, while the trainer does nothing
    else. Absent: from profiles/frameworks/NAME.toml, else from profiles/frameworks/usual.toml.
    On CPUs, and where `costs.profile` measured the running framework, it is 0.
    """
    switch_time: Duration | None = None
    """Seconds that a colocated system needs to put engines to sleep, wake them and hand weights
    over, without the bytes on wires. If it is stated, GPUs receive only the weights that they do
    not train. Absent: calls from profiles/frameworks/NAME.toml, else from
    profiles/frameworks/usual.toml; every GPU gathers whole tensors (profiles/sync/cuda-ipc.toml).
    """
    transfer_time: Duration | None = None
    """Seconds in which one controller sends a token of the padded batch to the trainer, for each
    scoring pass and for training. Padded rollouts have `workload.max_prompt_tokens` and
    `rollout.max_tokens`. verl before 0.9 did so, and workers of newer versions fetch their own
    rollouts. On 4 to 16 nodes it took 140 ns, which is 35 s for 8,192 rollouts of 30,720 tokens:
    more GPUs do not shorten this part of a log-prob pass (docs/advance/fully_async.md). On one
    node it took 37 to 44 ns (verl issue 2847). Absent: `sending` of profiles/frameworks/NAME.toml,
    else 0.
    """
    checkpoint_time: Duration = Duration(0.0)
    """Seconds that a checkpoint (`execute.checkpoint_every`) delays the run. They count in the
    whole run, not in a step. The default 0 assumes that checkpoints are written in the
    background, as most frameworks can.
    """


class FailuresConfig(Section, frozen=True, kw_only=True):
    """Simulated failures of GPUs that generate, and optionally of GPUs that train.

    A failure takes its replica with it: the rollouts there restart elsewhere, and a new replica is
    up after `rollout.start_time`. `policies.max_restarts` limits how many replicas may fail before
    the run stops. `policies.max_attempts` limits how often one rollout may fail.
    """

    per_gpu_day: float = 0.0
    """Mean failures of one GPU in 24 hours of serving. Times between failures are exponential and
    seeded. Llama 3 saw 0.0005: 419 in 54 days on 16,384 H100 (arXiv 2407.21783, section 3.3.4).
    """
    trainers: bool = False
    """Whether GPUs that train fail too. Their trainer then restarts from its last checkpoint
    (`execute.checkpoint_every`) and repeats the steps after it.
    """


FaultKind = Literal[
    "replica-dies",
    "replica-hangs",
    "replica-garbles",
    "replica-dies-returning",
    "trainer-dies-lending",
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

OF_LENDING: tuple[FaultKind, ...] = ("replica-dies-returning", "trainer-dies-lending")
OF_REWARD_MODEL: tuple[FaultKind, ...] = ("reward-model-dies", "reward-model-hangs")
AT_A_PUSH: tuple[FaultKind, ...] = ("trainer-dies-pushing", "link-slows", "link-drops")


class FaultConfig(Section, frozen=True, kw_only=True):
    """A fault at one moment (`step` or `time`), or at `count` random moments.

    A fault strikes with a command of the engine. Replicas of the policy or the reward model, and
    verifiers, are hit with a rollout. The trainer is hit with a micro-batch, push or checkpoint;
    the link with a push. The disk is hit with a checkpoint, and the driver with a micro-batch.
    """

    kind: FaultKind
    """- replica-hangs: the process stops and does not report it.
    - replica-garbles: its answer is invalid.
    - replica-dies-returning: it dies while the trainer gets its GPUs (`[lending]`, `trainer.borrows`).
    - trainer-dies-lending: it dies while a replica gets GPUs from it (`[lending]`, `trainer.borrows`).
    - link-slows: a push takes `factor` times as long.
    - link-drops: a push is lost on its way.
    - verifier-stalls: no reward arrives.
    - reward-model-dies, reward-model-hangs: as for replicas of the policy.
    - disk-full: a checkpoint has no disk space.
    - driver-dies: the controller process is killed, to test `--resume` (executed only).
    """
    step: int | None = None
    """Strike with the first command of this step, or with the next push or checkpoint from this
    version on.
    """
    time: Duration | None = None
    """Strike with the first command after this time since the run began."""
    count: int | None = None
    """Strike this many times, in random steps and with random commands of them."""
    seed: int | None = None
    """Seed of the random moments; the run's own where absent."""
    duration: Duration | None = None
    """Time for which the link is slow, or the verifier stalls."""
    factor: float | None = None
    """Factor by which a push over a slow link takes longer."""

    def last_step(self, steps: int) -> int:
        """Return the last of `steps` steps in which the fault can strike. The last version is never pushed."""
        return max(1, steps - 1) if self.kind in AT_A_PUSH else steps
