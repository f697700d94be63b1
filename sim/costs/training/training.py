"""Compute the seconds of the trainer's commands, and how well they are known.

A stage's seconds for a micro-batch depend on its tokens and its pairs of tokens. They come from the
first of these that is available:

1. `trainer.efficiency` of the run file, a share of peak FLOP/s (tier roofline)
2. the terms of `streamrl.sim.costs.training.layer`, fitted to published training in
   profiles/measured/training.toml, if it has the GPU and the dtype
3. the same terms with the mean rates of a similar generation, as shares of the peak (tier scaled). It
   is the GPU's own generation, or one that the profile of a GPU without tables names
4. the GPU's own assumed `training_efficiency` (tier roofline)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, inf, prod
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from streamrl.engine.presets import choose_system
from streamrl.hardware.efficiency import scaled_errors
from streamrl.hardware.memory import ModelState, model_state
from streamrl.hardware.model_shape import BYTES
from streamrl.hardware.nvme import swap_time
from streamrl.hardware.profiles import load_gpu
from streamrl.hardware.resolved import ResolvedRun, TrainerHardware
from streamrl.hardware.tiers import Provenance
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.frameworks import SwitchSeconds, packing_of, slowdown
from streamrl.runfile.roles_config import TrainerConfig
from streamrl.sim.costs.corrections import (
    Corrections,
    offload_to_score,
    own_step_time,
    own_transfer,
)
from streamrl.sim.costs.router_replay import replay_time
from streamrl.sim.costs.training.layer import Layer, loss_passes
from streamrl.sim.costs.training.pipeline import PipelinedSchedule, TrainerSchedule
from streamrl.sim.costs.training.profile import (
    Constants,
    ExpertRate,
    GemmRate,
    TrainingProfile,
    load_training_profile,
)
from streamrl.sim.costs.training.ranks import Ranks
from streamrl.sim.costs.training.stage_times import StageTimes

MEASURED_BYTES = 2
"""Bytes of a value in the training that was measured."""


class Switches(Struct, frozen=True, kw_only=True):
    """Seconds to load one model from host memory, and to move its changes back."""

    score_time: float = 0.0
    """Weights in; they do not change."""
    train_time: float = 0.0
    """Weights and gradients in, gradients out."""
    reference_time: float = 0.0
    """The actor's weights out, the reference's in, the actor's in; if the reference alone is in host memory."""
    optimizer_time: float = 0.0
    """Optimizer out and in, if it is in host memory while a batch is scored."""
    step_time: float = 0.0
    """Gradients in, optimizer in and out, weights out. On NVMe: reads and writes of the drives."""

    @classmethod
    def of(
        cls,
        state: ModelState,
        host_link: float,
        *,
        is_alone: bool = False,
        swap_time: float | None = None,
    ) -> Switches:
        """Return the seconds of a model's bytes at `host_link` bytes per second, one direction at a time.

        A single model keeps its weights and gradients on the GPUs; only its optimizer states move
        for the step. If the optimizer is on NVMe, its step takes `swap_time`.
        """
        weights, gradients, optimizer = state.weights, state.gradients, state.optimizer
        moved = 2 * optimizer if is_alone else gradients + 2 * optimizer + weights
        step_time = moved / host_link if swap_time is None else swap_time
        if is_alone:
            return cls(step_time=step_time)
        return cls(
            score_time=weights / host_link,
            train_time=(weights + 2 * gradients) / host_link,
            step_time=step_time,
        )


class TrainingCosts(Struct, frozen=True, kw_only=True):
    """Seconds of the trainer's commands."""

    stages: StageTimes
    num_scored: int
    """Forward passes that a rollout needs before its gradient."""
    num_trained: int
    """Models that a step updates."""
    informative_share: float
    """Share of rollouts that have a gradient; the trainer neither scores nor trains the others."""
    switches: Switches
    optimizer_time: float
    """Seconds of gradient reduction and one optimizer step, for all trained models."""
    overhead_time: float
    """Seconds of a step for data, rewards and logging."""
    mini_batch: float
    """Rollouts between two optimizer steps; inf if a batch has one step."""
    epochs: int
    """Times that a batch is trained on."""
    transfer_times: tuple[float, float]
    """Seconds in which a rollout, padded to the longest, is sent for a scoring pass, and for training: by the
    controller, and the experts that it replays.
    """
    fills_micro_batches: bool
    """Whether the rollouts of a whole batch go into as few micro-batches as possible."""
    pads_training: bool
    """Whether training pads these micro-batches to the most tokens of a pass."""
    gathers_scores: bool
    """Whether the scores of a whole batch are gathered after each scoring pass."""
    provenance: Provenance
    trainer: TrainerConfig

    @classmethod
    def load(cls, resolved: ResolvedRun) -> TrainingCosts:
        """Compute the costs of a run's primary trainer from operators, without a machine profile.

        Raises:
            ValueError: a profile is missing, or the model cannot be split as the run file says.
        """
        run, trainer, corrections = resolved.run, resolved.trainer, Corrections.of(resolved)
        profile = run.costs.profile
        overhead = own_step_time(run.framework, corrections, profile)
        ranks, stages, step_time, provenance = _choose_stages(trainer)
        score, train = corrections.training_factors
        times = slowdown(run.framework.name, trainer.config)
        fills, pads = packing_of(run.framework.name, trainer.config)
        is_whole = choose_system(run.policies).streaming == "whole-batch"
        switches = _switches_of(trainer, ranks)
        if not run.policies.shares_gpus:
            moves = _optimizer_moves(trainer, ranks, offload_to_score(run.framework))
            switches = replace(switches, optimizer_time=moves)
        num_trained = trainer.num_trained_models
        updated = (ranks.reduce_time() + ranks.update_time()) * (1 + ranks.draft_share)
        updated += switches.step_time
        sent, longest = own_transfer(run.framework, trainer), trainer.longest_sequence
        own_time = (
            stages.rollout_time(longest) / trainer.config.num_gpus * trainer.config.ranks_alike
        )
        sent_share = sent.trained * longest / (sent.trained * longest + own_time)
        replayed = replay_time(resolved)
        stages = stages.at(score / times.middle, train / times.middle)
        return cls(
            stages=stages.with_loss(loss_passes(ranks), score, train),
            num_scored=trainer.algorithm.num_scored,
            num_trained=num_trained,
            informative_share=run.computed_share,
            switches=switches,
            optimizer_time=(num_trained * updated + step_time) / train,
            overhead_time=overhead.seconds,
            mini_batch=_mini_batch(run.framework.optimizer_steps, trainer.algorithm),
            epochs=run.framework.epochs,
            transfer_times=(
                (sent.scored + replayed) * longest,
                (sent.trained + replayed) * longest,
            ),
            fills_micro_batches=fills and is_whole,
            pads_training=pads and is_whole,
            gathers_scores=is_whole,
            provenance=provenance.with_spread(times.spread).with_spread(sent.spread * sent_share),
            trainer=trainer.config,
        )

    def line(self) -> TrainerSchedule:
        """Return an empty schedule of the trainer's passes."""
        return PipelinedSchedule(
            self.stages,
            self.trainer,
            scores=self._score_switches(),
            trains=[self.switches.train_time] * self.num_trained,
            share=self.informative_share,
            epochs=self.epochs,
            mini_batch=self.mini_batch,
            update_time=self.optimizer_time,
            transfer_times=self.transfer_times,
            fills_micro_batches=self.fills_micro_batches,
            pads_training=self.pads_training,
            gathers_scores=self.gathers_scores,
        )

    def _score_switches(self) -> list[float]:
        """Return the seconds to load each scoring model; the reference is the last of them."""
        switches = self.switches
        seconds = [switches.score_time] * self.num_scored
        if switches.reference_time:
            seconds[-1] += switches.reference_time
        if switches.optimizer_time and seconds:
            seconds[0] += switches.optimizer_time
        return seconds

    def train_time(self, lengths: Sequence[int]) -> float:
        """Return the seconds of forward and backward passes over rollouts (prompt + output tokens), alone."""
        line = self.line()
        line.train(lengths, 0.0)
        return line.finish(0.0)

    def score_time(self, lengths: Sequence[int]) -> float:
        """Return the seconds of the scoring passes over rollouts (prompt + output tokens), alone."""
        line = self.line()
        line.score(lengths, 0.0)
        return line.finish(0.0)


def _switches_of(trainer: TrainerHardware, ranks: Ranks) -> Switches:
    """Return the seconds of moving models to host memory and back; 0 if all models stay on the GPUs."""
    if not (trainer.config.offload or trainer.swaps_reference):
        return Switches()
    state = model_state(ranks.model, trainer.config, ranks.dtype)
    if trainer.swaps_reference:
        return Switches(reference_time=3 * state.weights / ranks.gpu.host_link)
    state = replace(
        state,
        gradients=state.gradients * ranks.trained,
        optimizer=state.optimizer * ranks.trained,
    )
    swaps = None
    if trainer.config.steps_on_nvme:
        swaps = swap_time(trainer) / trainer.num_trained_models
    link, is_alone = ranks.gpu.host_link, trainer.num_models == 1
    return Switches.of(state, link, is_alone=is_alone, swap_time=swaps)


def _optimizer_moves(trainer: TrainerHardware, ranks: Ranks, own: SwitchSeconds | None) -> float:
    """Return the seconds in which the optimizer leaves for host memory and returns; 0 if it stays.

    Args:
        trainer: the trainer.
        ranks: its ranks.
        own: how the framework moves it; None if it stays, or is in host memory for good.
    """
    if own is None or own.offload_bandwidth is None or trainer.config.offload:
        return 0.0
    moved = model_state(ranks.model, trainer.config, ranks.dtype).optimizer * trainer.trained_models
    return moved / own.offload_bandwidth + own.onload_time(moved, ranks.gpu.host_link)


def _mini_batch(steps: int, algorithm: AlgorithmConfig) -> float:
    return inf if steps == 1 else ceil(algorithm.rollouts_per_step / steps)


def _choose_stages(trainer: TrainerHardware) -> tuple[Ranks, StageTimes, float, Provenance]:
    """Return the ranks, their best known stages, the further seconds of a step, and the sources."""
    ranks = Ranks.of(trainer)
    alike = replace(trainer.config, data_parallel=1, zero=1, micro_batch=1, offload=False)
    known = _known_stages(replace(trainer, config=alike))
    if known.constants is None:
        return replace(ranks, loss=None), known.stages, 0.0, known.provenance
    ranks = replace(ranks, collective=known.constants.collective)
    stages = known.stages.with_transfers(ranks)
    return ranks, stages, known.constants.step_time, known.provenance


class _KnownStages(NamedTuple):
    """The best known stages of one data-parallel rank."""

    stages: StageTimes
    constants: Constants | None
    """None if the stages include everything."""
    provenance: Provenance


@lru_cache(maxsize=1024)
def _known_stages(trainer: TrainerHardware) -> _KnownStages:
    """Choose the stages and their sources. Trainers that differ in their data-parallel ranks share them."""
    ranks = Ranks.of(trainer)
    efficiency, name = trainer.config.efficiency, trainer.pool.gpu
    if efficiency is not None:
        source = f"run file: trainer.efficiency={efficiency} of peak FLOP/s"
        stages = StageTimes.assumed(ranks, efficiency)
        return _KnownStages(stages, None, Provenance.of("roofline", [source]))
    profile = load_training_profile()
    wide, rates = rates_of(profile, "bfloat16"), rates_of(profile, ranks.computes_in)
    if name not in wide.gemm:
        wide = with_typical(wide, name, "bfloat16")
        rates = with_typical(rates, name, ranks.computes_in)
    rate = wide.gemm.get(name)
    if rate is None or name not in rates.gemm or BYTES[ranks.dtype] != MEASURED_BYTES:
        assumed = ranks.gpu.roofline.training_efficiency
        source = f"profiles/gpus/{name}.toml: assumed training_efficiency={assumed}, unmeasured"
        stages = StageTimes.assumed(ranks, assumed)
        return _KnownStages(stages, None, Provenance.of("roofline", [source]))
    constants = profile.constants
    ranks = replace(ranks, collective=constants.collective)
    layer = Layer(
        ranks=ranks,
        gemm=rate,
        experts=rates.experts[name],
        constants=constants,
        narrow=rates.gemm[name] if rates.wide else None,
    )
    is_mixture = ranks.model.experts is not None
    own = rates.gemm[name].tier
    tier = rates.experts[name].tier if is_mixture and own == "composed" else own
    sources, *errors = _checked(profile, rates, name, is_mixture=is_mixture)
    if (unseen := _unseen(trainer)) is not None:
        tier, sources, errors = "roofline", [*sources, unseen], [None, None]
    provenance = Provenance.of(tier, sources, *errors).with_spread(_host_spread(layer, trainer))
    return _KnownStages(StageTimes.of_layers(ranks, layer), constants, provenance)


def _host_spread(layer: Layer, trainer: TrainerHardware) -> float:
    """Return the spread of passes from the unknown slowdown of the host, which takes part of their seconds."""
    ranks, factor = layer.ranks, trainer.gpu.host_slowdown
    if factor.spread == 0 or ranks.model.experts is None:
        return 0.0
    tokens = trainer.config.max_tokens_per_pass or trainer.longest_sequence
    quick = replace(layer, ranks=replace(ranks, host_slowdown=0.0))
    total, without = (
        sum(one.fixed + one.per_token * tokens for one in (each.forward(), each.backward()))
        for each in (layer, quick)
    )
    return factor.spread * (1 - without / total)


def _unseen(trainer: TrainerHardware) -> str | None:
    """Name the feature of the model or trainer that no published step had; None if there is none."""
    model = trainer.longest_model
    if trainer.adapter_rank is not None:
        return "adapters: products for gradients of weights left out, theirs added; no training with them was measured"
    if model.compressed is not None:
        return "attention to compressed tokens: pairs with entries and scores counted, no training was measured"
    if model.indexer is not None:
        return "sparse attention: attention kernels for chosen pairs and scores, no training was measured"
    if model.num_unmixed_layers or not model.has_gated_mlp:
        return "layers of one block, or MLPs without gates: products and traffic counted, no training was measured"
    if model.linear is not None:
        return "linear attention: measured kernels where the trainer's GPU has these, else roofline; no training was measured"
    if model.num_windowed_layers:
        return "sliding windows: pairs of tokens counted, no training was measured"
    return None


class Rates(NamedTuple):
    """Rates of products and of experts in one format, by GPU."""

    gemm: dict[str, GemmRate]
    experts: dict[str, ExpertRate]
    kinds: Mapping[bool, str] = MappingProxyType({})
    """Keys of `TrainingProfile.held_out` by whether the model is a mixture; empty if errors were
    not checked.
    """
    wide: Mapping[str, GemmRate] | None = None
    """Rates of products that stay in 16 bits, if those of linear layers do not."""


def rates_of(profile: TrainingProfile, dtype: str) -> Rates:
    """Return the rates of linear layers in a format; empty if nothing was measured in it."""
    match dtype:
        case "bfloat16" | "float16":
            return Rates(profile.gemm, profile.experts, {False: "dense", True: "mixture"})
        case "fp8":
            return Rates(profile.gemm_fp8, profile.experts_fp8, {False: "fp8"}, profile.gemm)
        case _:
            return Rates({}, {})


def with_typical(rates: Rates, gpu: str, dtype: str) -> Rates:
    """Return rates with an entry for a GPU without tables, from the first similar generation that has rates."""
    own = load_gpu(gpu)
    for generation in own.alike:
        donors = donors_of(rates, (generation,))
        if donors and dtype in own.flops:
            return rates_from(rates, donors, gpu, dtype)
    return rates


def donors_of(rates: Rates, generations: Sequence[str], left_out: str = "") -> list[str]:
    """Return the GPUs of some generations whose products and training were measured, without one GPU."""
    return [
        name
        for name, rate in rates.gemm.items()
        if rate.tier == "composed" and load_gpu(name).generation in generations
        if name != left_out and load_gpu(name).tables["gemm"].startswith(f"{name}/")
    ]


def rates_from(rates: Rates, donors: Sequence[str], gpu: str, dtype: str) -> Rates:
    """Return rates whose entry for a GPU is the geometric mean of the donors' rates, scaled to its peak."""
    shares = [load_gpu(gpu).flops[dtype] / load_gpu(name).flops[dtype] for name in donors]
    source = f"rates of {', '.join(donors)}, in proportion to datasheets; no training was measured on {gpu}"
    gemm = [rates.gemm[name] for name in donors]
    experts = [rates.experts[name] for name in donors]
    product = GemmRate(
        flops=_mean([rate.flops * share for rate, share in zip(gemm, shares, strict=True)]),
        tokens=_mean([rate.tokens for rate in gemm]),
        columns=_mean([rate.columns for rate in gemm]),
        rows=_mean([rate.rows for rate in gemm]),
        tier="scaled",
        source=source,
    )
    expert = ExpertRate(
        flops=_mean([rate.flops * share for rate, share in zip(experts, shares, strict=True)]),
        tokens=_mean([rate.tokens for rate in experts]),
        width=_mean([rate.width for rate in experts]),
        tier="scaled",
        source=source,
    )
    return rates._replace(gemm={**rates.gemm, gpu: product}, experts={**rates.experts, gpu: expert})


def _mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return prod(values) ** (1 / len(values))


def _checked(
    profile: TrainingProfile, rates: Rates, gpu: str, *, is_mixture: bool
) -> tuple[list[str], float | None, float | None]:
    """Return the sources, and the held-out errors if training was measured on this GPU."""
    kind = rates.kinds.get(is_mixture)
    if kind is None:
        text = f"training fitted on steps in 16 bits ({profile.source}); mixtures in fp8 unmeasured"
        parts = (text, rates.gemm[gpu].source, rates.experts[gpu].source)
        return ["; ".join(parts)], None, None
    found = profile.held_out[kind]
    fitted = (
        f"training fitted on {profile.rows} published steps ({profile.source}, {profile.licence}); "
        f"{kind} models left out: {found.median:.1%} in median, {found.p90:.1%} at p90"
    )
    own = [rates.gemm[gpu].source, *([rates.experts[gpu].source] if is_mixture else [])]
    sources = [f"{fitted}; {'; '.join(own)}"]
    if rates.gemm[gpu].tier == "scaled":
        return sources, scaled_errors().training.median, None
    is_known = rates.gemm[gpu].tier == "composed"
    return sources, *((found.median, found.p90) if is_known else (None, None))
