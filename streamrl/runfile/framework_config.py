"""The section `[framework]` of a run file: what a simulated step consists of beside its passes, as frameworks differ."""

from __future__ import annotations

from streamrl.runfile.section import Section
from streamrl.runfile.units import Duration


class FrameworkConfig(Section, frozen=True, kw_only=True):
    """What a simulated step consists of beside generation, passes and weight sync."""

    optimizer_steps: int = 1
    """Optimizer steps that a batch is split into; each lets pipelines run dry, and waits for the slowest rank. Executed,
    with the torch backend: each on so many rollouts as they come, at one policy version for all of a batch."""
    epochs: int = 1
    """Times that a batch is trained on."""
    step_time: Duration | None = None
    """Seconds of a step for data, rewards, metrics and logging, in which the trainer does nothing else. Absent: 2.5 s,
    the median of what eight published steps have beside their stages (NeMo-RL issue 959, RLinf docs, NeMo-Aligner
    arXiv 2405.01481 Table 2); none on CPUs, nor where `costs.profile` measured the framework that runs."""
    switch_time: Duration | None = None
    """Seconds that a colocated system takes to put engines to sleep, wake them and hand weights over, beside the bytes
    that cross wires: allocation and calls for every tensor. Absent: 4 s and 0.11 s for each billion parameters, between
    HybridFlow (arXiv 2409.19256 Figure 14) and NeMo-RL (issue 959)."""
    checkpoint_time: Duration = Duration(0.0)
    """Seconds that a checkpoint (`execute.checkpoint_every`) holds the run up: counted in the whole run, not in a step.
    None where it is written beside training, as most frameworks can."""
