"""What training costs: seconds of the trainer's commands, and how well they are known.

A pass takes seconds in proportion to tokens and to pairs of tokens. How many comes from, in this order:
1. `trainer.efficiency` of the run file, a share of peak FLOP/s (tier roofline);
2. the fit of measured training in profiles/measured/training.toml, where it knows the GPU and the dtype;
3. the GPU's own assumed `training_efficiency` (tier roofline).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.costs.passes import Pass, Ranks
from sim.costs.training_profile import load_training_profile
from streamrl.hardware.memory import ModelState, model_state, num_models, num_trained_models
from streamrl.hardware.model_shape import BYTES
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.tiers import Tier
from streamrl.runfile.config import Run
from streamrl.runfile.sides_config import TrainerConfig

MEASURED_BYTES = 2
"""Bytes of a value in the training that was measured."""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Seconds in which one model comes from host memory, and what it changed goes back there."""

    score_time: float = 0.0
    """Weights in; they do not change."""
    train_time: float = 0.0
    """Weights and gradients in, gradients out."""
    step_time: float = 0.0
    """Gradients in, optimizer in and out, weights out."""

    @classmethod
    def of(cls, state: ModelState, host_link: float) -> Switches:
        """Move a model's bytes over `host_link` bytes a second, one direction at a time."""
        weights, gradients, optimizer = state.weights, state.gradients, state.optimizer
        return cls(
            score_time=weights / host_link,
            train_time=(weights + 2 * gradients) / host_link,
            step_time=(gradients + 2 * optimizer + weights) / host_link,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingCosts:
    """Seconds of the trainer's commands."""

    forward: Pass
    train: Pass
    """Forward and backward."""
    num_scored: int
    """Forward passes that a rollout needs before its gradient."""
    num_trained: int
    """Models that a step updates."""
    informative_share: float
    """Share of rollouts that have a gradient; the trainer skips the others."""
    switches: Switches
    optimizer_time: float
    """Seconds of gradient reduction and optimizer step, of all trained models."""
    tier: Tier
    sources: list[str]
    _trainer: TrainerConfig

    @classmethod
    def load(cls, run: Run) -> TrainingCosts:
        """Put the costs of a run's trainer together.

        Raises:
            ValueError: a profile is missing, or the model cannot be split as the run file says.
        """
        algorithm, ranks = run.algorithm, ranks_of(run)
        ranks, (forward, train), tier, source = _choose_passes(run, ranks)
        switches = Switches()
        if run.trainer.offload and num_models(run) > 1:
            state = model_state(ranks.model, run.trainer, run.model.dtype)
            switches = Switches.of(state, ranks.gpu.host_link)
        num_trained = num_trained_models(run)
        step_time = ranks.reduce_time() + ranks.update_time() + switches.step_time
        return cls(
            forward=forward,
            train=train,
            num_scored=algorithm.has_reference
            + algorithm.has_critic
            + (algorithm.correction == "decoupled"),
            num_trained=num_trained,
            informative_share=1.0 if algorithm.has_reference else run.workload.informative_share,
            switches=switches,
            optimizer_time=num_trained * step_time,
            tier=tier,
            sources=[source],
            _trainer=run.trainer,
        )

    def train_time(self, lengths: Sequence[int], *, is_continued: bool = False) -> float:
        """Return the seconds of forward and backward passes over rollouts (prompt + output tokens)."""
        passes = self.pass_time(self.train, lengths, is_continued=is_continued)
        computed = self.informative_share * passes
        return self.num_trained * (self.switches.train_time + computed)

    def score_time(self, lengths: Sequence[int], *, is_continued: bool = False) -> float:
        """Return the seconds of the forward passes that rollouts (prompt + output tokens) need first."""
        passes = self.pass_time(self.forward, lengths, is_continued=is_continued)
        return self.num_scored * (self.switches.score_time + passes)

    def pass_time(self, one: Pass, lengths: Sequence[int], *, is_continued: bool = False) -> float:
        """Return the seconds of one pass: the fullest data-parallel rank, and the pipeline's bubble.

        p stages and m micro-batches idle for (p-1)/(m+p-1) of the time (Huang et al. 2019, GPipe). A pass
        that continues the one before finds the pipeline full, and ranks that need not wait for each other:
        micro-batches that stream in cost no more than one large batch.
        """
        trainer = self._trainer
        times = [one.rollout_time(length) for length in lengths]
        num_micro = self.num_micro_batches(lengths)
        gathered = num_micro * one.per_micro_batch
        even = sum(times) / trainer.data_parallel
        if is_continued:
            return even + gathered
        bubble = (trainer.pipeline_parallel - 1) / num_micro
        return (max(even, *times) + gathered) * (1 + bubble)

    def num_micro_batches(self, lengths: Sequence[int]) -> int:
        """Return a rank's micro-batches, each of `micro_batch` rollouts and `max_tokens_per_pass` at most."""
        trainer = self._trainer
        room = max(trainer.max_tokens_per_pass, max(lengths))
        by_count = -(-len(lengths) // (trainer.data_parallel * trainer.micro_batch))
        by_tokens = -(-sum(lengths) // (trainer.data_parallel * room))
        return max(by_count, by_tokens)


def ranks_of(run: Run) -> Ranks:
    """Return the trainer's GPUs and how they share the model."""
    pool = run.cluster.pools[run.trainer.pool]
    return Ranks(
        model=load_model(run.model),
        gpu=load_gpu(pool.gpu),
        trainer=run.trainer,
        gpus_per_node=pool.gpus_per_node,
        dtype=run.model.dtype,
    )


def _choose_passes(run: Run, ranks: Ranks) -> tuple[Ranks, tuple[Pass, Pass], Tier, str]:
    """Return the best known passes, and their tier and source; collectives cost what that source says."""
    efficiency, name = run.trainer.efficiency, run.cluster.pools[run.trainer.pool].gpu
    if efficiency is not None:
        source = f"run file: trainer.efficiency={efficiency} of peak FLOP/s"
        return ranks, ranks.assumed_passes(efficiency), "roofline", source
    profile = load_training_profile()
    rate = profile.gemm.get(name)
    if rate is None or BYTES[run.model.dtype] != MEASURED_BYTES:
        assumed = ranks.gpu.roofline.training_efficiency
        source = f"profiles/gpus/{name}.toml: assumed training_efficiency={assumed}, unmeasured"
        return ranks, ranks.assumed_passes(assumed), "roofline", source
    ranks = replace(ranks, collective=profile.constants.collective)
    source = (
        f"training fitted on {profile.rows} measured rows ({profile.source}, {profile.licence}), "
        f"held-out error {profile.held_out.median:.1%}; {rate.source}"
    )
    return ranks, ranks.fitted_passes(rate.flops, profile.constants), rate.tier, source
