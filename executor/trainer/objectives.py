"""What a trainer's gradient is made of, by algorithm: which rollouts count, for how much, with what advantages.

| algorithm                      | computed                     | advantage of a token                  | mean over              |
|--------------------------------|------------------------------|---------------------------------------|------------------------|
| grpo, dr-grpo, rloo, reinforce++ | those of an advantage, all with a KL term | its rollout's            | tokens, or rollouts    |
| raft                           | the best of its group        | 1                                     | tokens of the best     |
| dpo                            | best and worst of a group    | +-beta * sigmoid(-margin)             | pairs                  |
| ppo                            | all                          | GAE of a critic's values              | tokens, or rollouts    |

DPO (arXiv 2305.18290, online as in arXiv 2402.04792) minimises -log sigmoid(margin) of a pair, with margin = beta *
(log-ratio of the better - log-ratio of the worse), log-ratios to the initial policy summed over a rollout. All of a
batch is trained on at the weights that it was scored at, so margins are known before the backward pass, and the
gradient is that of likelihoods weighed by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch.nn.functional import softplus

from streamrl.executor.trainer.losses import kl_losses
from streamrl.executor.trainer.sequences import TokenSequence
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.runfile.algorithms import algorithm_named
from streamrl.runfile.choices import import_object

Scores: TypeAlias = Mapping[int, Mapping[str, torch.Tensor]]
"""By rollout: what the score pass gave of the tokens that the policy sampled."""
Sums: TypeAlias = Mapping[str, float]


class PolicyGradient:
    """Rollouts count by the advantages that they come with."""

    sums: tuple[str, ...] = ()
    """What `summed` returns of a rollout."""

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings

    def computes(self, sequence: TokenSequence) -> bool:
        """Return whether a rollout has a gradient."""
        settings = self.settings
        has_terms = settings.kl_coefficient > 0 or settings.entropy_coefficient > 0
        return sequence.advantage != 0 or has_terms

    def share(self, sequence: TokenSequence) -> float:
        """Return what the loss of each token of a rollout is multiplied by."""
        return 1.0 if self.settings.loss_mean == "token" else 1 / sequence.num_trained

    def count(self, sequence: TokenSequence) -> float:
        """Return what a rollout adds to what the gradient is divided by."""
        return sequence.num_trained if self.settings.loss_mean == "token" else 1

    def advantages(self, sequence: TokenSequence, scores: Scores) -> torch.Tensor:
        """Return the advantage of a rollout, [1], or of each of its tokens, [n]."""
        advantage = torch.tensor([sequence.advantage], dtype=torch.float32)
        if not self.settings.has_kl_reward:
            return advantage
        penalties = self._penalties(sequence, scores)  # what is still to come of them counts
        return advantage.to(penalties.device) - penalties.flip(0).cumsum(0).flip(0)

    def _penalties(self, sequence: TokenSequence, scores: Scores) -> torch.Tensor:
        """Return what is taken off the reward of each token, [n], where anything is."""
        reference = scores[sequence.rollout]["reference"]
        sampled = torch.from_numpy(sequence.logprobs[sequence.is_policy]).to(reference.device)
        estimates = kl_losses(sampled, reference, self.settings.kl_estimator)
        return self.settings.kl_coefficient * estimates

    def summed(self, sequence: TokenSequence, scores: Scores) -> Sums:
        """Return figures of a rollout that add up over a batch."""
        return {}

    def figures(self, sums: Sums) -> dict[str, float]:
        """Return the figures of a batch from their sums."""
        return {}


class Likelihood(PolicyGradient):
    """Of each group the likelihood of one rollout is raised; the others are only counted."""

    def computes(self, sequence: TokenSequence) -> bool:
        """Return whether a rollout was chosen."""
        return sequence.advantage != 0

    def count(self, sequence: TokenSequence) -> float:
        """Return what a rollout adds to what the gradient is divided by."""
        return super().count(sequence) if self.computes(sequence) else 0.0


class Preference(Likelihood):
    """Of each group the best is made likelier than the worst."""

    sums = ("pairs", "preference_loss", "preferred", "margin")

    def share(self, sequence: TokenSequence) -> float:
        """Return 1: likelihoods are of whole rollouts."""
        return 1.0

    def count(self, sequence: TokenSequence) -> float:
        """Return half a pair."""
        return 0.5 if self.computes(sequence) else 0.0

    def advantages(self, sequence: TokenSequence, scores: Scores) -> torch.Tensor:
        """Return the weight of a rollout's log-likelihood, [1]."""
        pull = self.settings.beta * torch.sigmoid(-self._margin(sequence, scores))
        return (sequence.advantage * pull).reshape(1).float()

    def summed(self, sequence: TokenSequence, scores: Scores) -> Sums:
        """Return the loss and the margin of a pair, at its better rollout."""
        if sequence.advantage <= 0:
            return {}
        margin = self._margin(sequence, scores)
        values = (1.0, float(softplus(-margin)), float(margin > 0), float(margin))
        return dict(zip(self.sums, values, strict=True))

    def figures(self, sums: Sums) -> dict[str, float]:
        """Return means over pairs: loss, margin, and the share in which the better one is the likelier one by it."""
        pairs = sums.get("pairs", 0.0)
        if not pairs:
            return {}
        return {
            "loss": sums["preference_loss"] / pairs,
            "preference_accuracy": sums["preferred"] / pairs,
            "preference_margin": sums["margin"] / pairs,
        }

    def _margin(self, sequence: TokenSequence, scores: Scores) -> torch.Tensor:
        assert sequence.partner is not None, "rollouts that are compared come with the other one"
        own, other = (
            (scores[rollout]["proximal"] - scores[rollout]["reference"]).double().sum()
            for rollout in (sequence.rollout, sequence.partner)
        )
        return self.settings.beta * sequence.advantage * (own - other)


class ActorCritic(PolicyGradient):
    """Every token has the advantage that a critic's values give it; rollouts come with their rewards."""

    sums = ("values", "returns", "returns_squared", "errors", "errors_squared")

    def computes(self, sequence: TokenSequence) -> bool:
        """Return that the critic learns from every rollout."""
        return True

    def advantages(self, sequence: TokenSequence, scores: Scores) -> torch.Tensor:
        """Return generalised advantage estimates, [n]."""
        values = scores[sequence.rollout]["values"]
        rewards = torch.zeros_like(values)
        if self.settings.has_kl_reward:
            rewards -= self._penalties(sequence, scores)
        rewards[-1] += sequence.advantage
        return gae(values, rewards, self.settings.gae_lambda)

    def summed(self, sequence: TokenSequence, scores: Scores) -> Sums:
        """Return moments of what the critic said and of what came."""
        values = scores[sequence.rollout]["values"].double()
        errors = self.advantages(
            sequence, scores
        ).double()  # what values are drawn to, less what they are
        returns = values + errors
        moments = (values, returns, returns.square(), errors, errors.square())
        return {name: float(each.sum()) for name, each in zip(self.sums, moments, strict=True)}

    def figures(self, sums: Sums) -> dict[str, float]:
        """Return the critic's mean value, its loss, and the share of the returns' variance that it explains."""
        evaluated = sums.get("evaluated", 0.0)
        if not evaluated:
            return {}
        mean = {name: sums.get(name, 0.0) / evaluated for name in self.sums}
        spread = mean["returns_squared"] - mean["returns"] ** 2
        missed = mean["errors_squared"] - mean["errors"] ** 2
        return {
            "value_mean": mean["values"],
            "value_loss": mean["errors_squared"] / 2,
            "explained_variance": 1 - missed / spread if spread > 0 else 0.0,
        }


def gae(values: torch.Tensor, rewards: torch.Tensor, gae_lambda: float) -> torch.Tensor:
    """Return the advantage of each token, [n], of a rollout whose tokens have rewards, [n].

    Nothing is discounted (gamma is 1): `sum of lambda^l * delta[t + l]`, delta[t] = reward[t] + V[t + 1] - V[t], V after
    the last token 0 (arXiv 1506.02438).
    """
    following = torch.cat([values[1:], values.new_zeros(1)])
    found: list[float] = []
    later = 0.0
    for delta in reversed((rewards + following - values).tolist()):
        later = delta + gae_lambda * later
        found.append(later)
    return values.new_tensor(found[::-1])


def objective_of(settings: TrainerSettings) -> PolicyGradient:
    """Return the objective of an algorithm."""
    objective = import_object(algorithm_named(settings.algorithm).objective)
    assert isinstance(objective, type) and issubclass(objective, PolicyGradient), objective
    return objective(settings)
