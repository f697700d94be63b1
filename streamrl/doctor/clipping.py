"""Can the clip that a run file sets ever act?"""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.doctor.finding import Finding
from streamrl.doctor.fix import Fix
from streamrl.engine.presets import choose_system
from streamrl.runfile.algorithm_config import CLIP, AlgorithmConfig
from streamrl.runfile.config import Run
from streamrl.runfile.sides_config import AlgorithmChanges
from streamrl.runfile.trainers import trainer_key


def find(run: Run) -> Iterator[Finding]:
    """Find clips that are set and cannot act."""
    for text in idle_clips(run):
        yield Finding(level="warning", topic="staleness", name="idle-clip", text=text)


def idle_clips(run: Run) -> Iterator[str]:
    """Yield a line for each trainer whose clip is set, other than as it comes, and cannot act."""
    for number in range(run.num_trainers):
        own = run.followers[number - 1].algorithm if number else run.algorithm
        if sets_clip(own) and (why := _idle_for(run.as_seen_by(number), number > 0)):
            key = f"{trainer_key(number)}.algorithm" if number else "algorithm"
            name, value = (
                ("clip", own.clip) if own.clip_high is None else ("clip_high", own.clip_high)
            )
            yield f"{key}.{name}={value:g} cannot act with framework.optimizer_steps=1: {why}"


def sets_clip(algorithm: AlgorithmConfig | AlgorithmChanges) -> bool:
    """Whether a clip is wanted other than it comes."""
    return algorithm.clip not in (None, CLIP) or algorithm.clip_high is not None


def _idle_for(run: Run, follows: bool) -> str | None:
    """Return what the policy is held against where that is the policy itself; None where it may be another.

    A trainer that follows learns from what another one's weights sampled.
    """
    if run.framework.optimizer_steps > 1 or run.framework.epochs > 1:
        return None
    correction, system = run.algorithm.corrected_by, choose_system(run.policies)
    if correction == "decoupled":
        return "correction 'decoupled' holds the policy near the one that the batch began with, and trains on it as that one"
    is_fresh = not follows and not system.staleness_bound and system.keeps_bound
    if correction in ("none", "gspo") and is_fresh:
        return f"correction {correction!r} holds the policy near the one that sampled, which it still is with policies.max_staleness=0"
    return None


FIXES = {
    "idle-clip": Fix(
        lambda run: iter(()),
        "set framework.optimizer_steps above 1, as DAPO has it, or leave the clip as it comes",
    )
}
