"""The section `[framework]` of a run file: what a simulated step consists of beside its passes, as frameworks differ."""

from __future__ import annotations

from typing import Literal

from streamrl.runfile.section import Section
from streamrl.runfile.units import Duration

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
