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
LossMean = Literal["token", "rollout"]
DEFAULT_CORRECTION: CorrectionName = "token-tis"
CLIP = 0.2
CRITIC_RATE = 10.0
"""Learning rate of a critic for that of its actor: verl and OpenRLHF have 10 and 18 as they come."""


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """What is optimised, and in which portions."""

    name: AlgorithmName = "grpo"
    steps: int
    """Optimizer steps of the whole training; a simulation takes as many as its figures need (`simulate`)."""
    prompts_per_step: int
    group_size: int = 1
    """Rollouts of each prompt."""
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are left out, and others drawn for them, so that a step has `prompts_per_step`
    groups that teach something (DAPO's dynamic sampling). Simulated: `workload.informative_share` of the groups do."""
    max_gen_batches: int = 10
    """Batches that are generated at most for a step with `dynamic_sampling`; past them it trains on what there is."""
    learning_rate: float = 1e-6
    correction: CorrectionName | None = None
    """How sampling from an older policy is corrected for; token-tis where absent. raft and dpo take none."""
    old_log_probs: Literal["engine", "trainer"] = "engine"
    """Log-probabilities that the loss compares with: the inference engine's, or (simulated) those of a forward pass
    of the trainer before it changes the weights, as most frameworks make."""
    correction_cap: float = 2.0
    """Largest importance weight of token-tis, seq-tis and decoupled; icepop leaves out tokens beyond it or its inverse."""
    second_moment: float = 0.04
    """m2po: the mean of squared log-ratios to the policy that sampled, over a rollout, beyond which its tokens of the
    largest are left out (tau of arXiv 2510.01161)."""
    clip: float = CLIP
    """How far below 1 the policy's ratio counts, and above 1 where `clip_high` is absent; none, gspo, cispo and decoupled clip."""
    clip_high: float | None = None
    """How far above 1 it counts (DAPO's clip-higher; 0.28 there)."""
    kl_coefficient: float = 0.0
    """Weight of the KL term against the initial policy; above 0 a reference model runs."""
    kl_estimator: KlEstimator = "k3"
    """What the KL term is at each token: k1 (whose gradient is 0 on average, on fresh rollouts), k2 or k3 (GRPO's)."""
    kl_in: KlPlace = "loss"
    """Where the KL term is: a part of the loss, or (reinforce++, ppo) taken off the reward, token by token."""
    entropy_coefficient: float = 0.0
    """Weight of the mean entropy of the next token, which is taken off the loss: above 0 it keeps the policy open."""
    loss_mean: LossMean = "token"
    max_grad_norm: float = 1.0
    beta: float = 0.1
    """dpo: how dear it is to leave the initial policy."""
    critic_learning_rate: float | None = None
    """ppo: the critic's; ten times `learning_rate` where absent."""
    gae_lambda: float = 1.0
    """ppo: what a later token's error of the critic counts for an advantage, of 1 for each token in between."""

    @property
    def chosen(self) -> Algorithm:
        """The algorithm that `name` chooses."""
        return algorithm_named(self.name)

    @property
    def corrected_by(self) -> CorrectionName | None:
        """How sampling from an older policy is corrected for; None where what is learnt does not depend on it."""
        return None if self.imitates else self.correction or DEFAULT_CORRECTION

    @property
    def critic_rate(self) -> float:
        """Learning rate of the critic."""
        return self.critic_learning_rate or CRITIC_RATE * self.learning_rate

    @property
    def imitates(self) -> bool:
        """Whether likelihoods of chosen rollouts are raised, whoever made them."""
        return self.chosen.imitates

    @property
    def computed_of_group(self) -> float:
        """Share of the rollouts of a group that has something to teach that are computed."""
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
    def num_scored(self) -> int:
        """Forward passes that a rollout needs before its gradient."""
        return self.has_critic + self.has_reference + self.recomputes_log_probs

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts of one optimizer step."""
        return self.prompts_per_step * self.group_size
