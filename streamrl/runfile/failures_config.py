"""The section `[failures]` of a run file: how often GPUs fail while a run is simulated."""

from __future__ import annotations

from streamrl.runfile.section import Section


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
