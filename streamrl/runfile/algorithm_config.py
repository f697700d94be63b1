"""The section `[algorithm]` of a run file: what is optimised, and in which portions."""

from __future__ import annotations

from typing import Literal

from streamrl.runfile.algorithms import Algorithm, AlgorithmName, algorithm_named
from streamrl.runfile.section import Section

CorrectionName = Literal[
    "none", "token-tis", "seq-tis", "icepop", "decoupled", "gspo", "topr", "cispo", "m2po"
]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
Credit = Literal["episode", "turn"]
LossMean = Literal["token", "rollout", "rollout-sum", "constant"]
OptimizerName = Literal["adamw", "adamw-8bit", "adamw-paged", "adamw-8bit-paged", "muon"]
ScheduleName = Literal["constant", "linear", "cosine"]
DEFAULT_CORRECTION: CorrectionName = "token-tis"
CLIP = 0.2
CRITIC_RATE = 10.0
"""Critic learning rate divided by the actor's; the defaults of verl and OpenRLHF give 10 and 18."""


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """How a gradient changes the weights; simulated as AdamW in 32 bits."""

    name: OptimizerName = "adamw"
    """Executed. adamw. adamw-8bit: moments in 8 bits (bitsandbytes). adamw-paged, adamw-8bit-paged:
    moments in memory that moves to the host when the GPU's is full (bitsandbytes). muon: Muon for
    matrices in layers, AdamW for other weights. Back end torch has all, deepspeed has adamw.
    """
    betas: tuple[float, float] = (0.9, 0.999)
    """Executed: decay of AdamW's first and second moment."""
    epsilon: float = 1e-8
    """Executed: AdamW's term that keeps a division finite."""
    weight_decay: float = 0.0
    """Executed: decoupled weight decay of all trained weights, times the learning rate."""
    momentum: float = 0.95
    """Executed: decay of Muon's momentum."""
    schedule: ScheduleName = "constant"
    """Executed: how the learning rate falls after the warm-up until the last step. linear and cosine
    end at `final_rate_share`. All trained weights have the same schedule, also a critic's.
    """
    warmup_steps: int = 0
    """Executed: steps in which the learning rate rises to its full value."""
    final_rate_share: float = 0.0
    """Executed: share of the learning rate at the end of schedule linear or cosine."""

    @property
    def is_from_bitsandbytes(self) -> bool:
        """Whether the library bitsandbytes must be installed."""
        return self.name in ("adamw-8bit", "adamw-paged", "adamw-8bit-paged")


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """What is optimised, and in which portions."""

    name: AlgorithmName = "grpo"
    """Algorithm: its advantages, its loss, and whether a critic or a reference model runs."""
    steps: int
    """Optimizer steps of the whole training. A simulation stops when its figures are precise enough
    (`simulate`).
    """
    prompts_per_step: int
    """Prompts whose rollouts one step trains on."""
    group_size: int = 1
    """Rollouts of each prompt."""
    dynamic_sampling: bool = False
    """Whether groups of equal rewards are skipped and replaced, so that a step has
    `prompts_per_step` informative groups (DAPO's dynamic sampling). Simulated with
    `workload.informative_share`.
    """
    max_gen_batches: int = 10
    """Maximum batches generated for a step with `dynamic_sampling`. After them the step trains on
    the groups that it has.
    """
    learning_rate: float = 1e-6
    """Learning rate of the optimizer, without its schedule."""
    optimizer: OptimizerConfig = OptimizerConfig()
    correction: CorrectionName | None = None
    """Correction for rollouts of an older policy; token-tis where absent. raft and dpo take none.
    """
    old_log_probs: Literal["engine", "trainer"] = "engine"
    """Log-probabilities that the loss compares with. engine: those of the inference engine. trainer
    (simulated): those of a forward pass before the weights change, as in most frameworks.
    """
    correction_cap: float = 2.0
    """Maximum importance weight of token-tis, seq-tis and decoupled. icepop drops tokens with a
    ratio above it or below its inverse.
    """
    second_moment: float = 0.04
    """m2po: maximum mean squared log-ratio to the sampling policy over a rollout. Beyond it, the
    tokens with the largest ratios are dropped (tau of arXiv 2510.01161).
    """
    clip: float = CLIP
    """Clip range of the policy ratio below 1; also above 1 where `clip_high` is absent. Used by
    none, gspo, cispo and decoupled.
    """
    clip_high: float | None = None
    """Clip range of the ratio above 1 (DAPO's clip-higher, 0.28 there)."""
    clip_dual: float | None = None
    """Dual clip: bound of the ratio where the advantage is negative (arXiv 1912.09729; 3 in verl).
    Used by none, gspo and decoupled.
    """
    kl_coefficient: float = 0.0
    """Weight of the KL term against the initial policy. Above 0, a reference model runs."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of the KL term at each token: k1 (its gradient is 0 on average for fresh rollouts),
    k2 or k3 (GRPO).
    """
    kl_in: KlPlace = "loss"
    """Where the KL term is applied. loss: as a part of the loss. reward (reinforce++, ppo):
    subtracted from the reward of each token.
    """
    entropy_coefficient: float = 0.0
    """Weight of the mean next-token entropy, which is subtracted from the loss. Above 0 it keeps
    the policy exploring.
    """
    loss_mean: LossMean = "token"
    """token: the loss is a mean over all tokens of a step. rollout: a mean over rollouts of the
    mean over their tokens. rollout-sum: a mean over rollouts of the sum over their tokens.
    constant: that sum divided by `rollout.max_tokens` (Dr. GRPO's constant divisor).
    """
    mask_truncated: bool = False
    """Executed: whether rollouts that `rollout.max_tokens` cut off are left out of the loss and of
    its mean (DAPO's overlong filtering). Their rewards still count in the baseline of their group.
    """
    credit: Credit = "episode"
    """Executed: what the advantage of a turn of an episode is computed from. episode: the reward of the
    episode, for all its turns. turn: the rewards from this turn on, compared with the same turn of
    the group's other episodes.
    """
    router_replay: bool = False
    """Mixtures of experts: whether the trainer takes the experts that the routers of the inference engine
    chose for each token (arXiv 2510.11370). It narrows the gap between the log-probabilities of both.
    """
    max_grad_norm: float = 1.0
    """Norm to which longer gradients are scaled down."""
    beta: float = 0.1
    """dpo: strength of the penalty for leaving the initial policy."""
    critic_learning_rate: float | None = None
    """ppo: learning rate of the critic; ten times `learning_rate` where absent."""
    gae_lambda: float = 1.0
    """ppo: decay per token of the critic's errors in the advantage (GAE's lambda)."""

    @property
    def chosen(self) -> Algorithm:
        """The algorithm that `name` chooses."""
        return algorithm_named(self.name)

    @property
    def corrected_by(self) -> CorrectionName | None:
        """Correction for rollouts of an older policy; None if the algorithm does not depend on it."""
        return None if self.imitates else self.correction or DEFAULT_CORRECTION

    @property
    def critic_rate(self) -> float:
        """Learning rate of the critic."""
        return self.critic_learning_rate or CRITIC_RATE * self.learning_rate

    @property
    def imitates(self) -> bool:
        """Whether the likelihood of chosen rollouts is raised, whichever policy sampled them."""
        return self.chosen.imitates

    @property
    def computed_of_group(self) -> float:
        """Share of the rollouts of an informative group that are computed."""
        return self.chosen.computed_of_group(self.group_size)

    @property
    def trains_whole_groups(self) -> bool:
        """Whether an advantage needs every rollout of its group."""
        return self.chosen.trains_whole_groups

    @property
    def leaves_out_uniform(self) -> bool:
        """Whether a trainer passes over groups whose rewards are all equal."""
        return self.dynamic_sampling and self.trains_whole_groups

    @property
    def has_critic(self) -> bool:
        """Whether a critic of the actor's size is trained beside it."""
        return self.chosen.has_critic

    @property
    def has_rewards_of_tokens(self) -> bool:
        """Whether tokens may have rewards of their own, beside that of their rollout."""
        return self.chosen.has_rewards_of_tokens

    @property
    def unknown(self) -> dict[str, str | bool | None]:
        """Keys that this algorithm does not read, with the values that disable them. A secondary trainer does not inherit them."""
        found: dict[str, str | bool | None] = {}
        if self.imitates:
            found["correction"] = None
        if not self.trains_whole_groups:
            found["dynamic_sampling"] = False
        if not self.has_rewards_of_tokens:
            found["kl_in"] = "loss"
        return found

    @property
    def computes_all(self) -> bool:
        """Whether rollouts of advantage 0 have a gradient too."""
        terms = self.kl_coefficient > 0 or self.entropy_coefficient > 0
        return self.has_critic or (terms and not self.imitates)

    @property
    def has_reference(self) -> bool:
        """Whether the initial policy runs beside the actor."""
        return self.kl_coefficient > 0 or self.chosen.needs_reference

    @property
    def needs_score(self) -> bool:
        """Whether rollouts need forward passes before their gradient."""
        return self.num_scored > 0

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether the actor scores rollouts before their gradient."""
        stated = self.corrected_by == "decoupled" or self.old_log_probs == "trainer"
        return stated or self.chosen.recomputes_log_probs

    @property
    def takes_engine_log_probs(self) -> bool:
        """Whether the loss reads the log-probabilities that the inference engine returns."""
        is_corrected = self.corrected_by not in (None, "none")
        return not self.imitates and (self.old_log_probs == "engine" or is_corrected)

    @property
    def num_scored(self) -> int:
        """Forward passes that a rollout needs before its gradient."""
        return self.has_critic + self.has_reference + self.recomputes_log_probs

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts of one optimizer step."""
        return self.prompts_per_step * self.group_size
