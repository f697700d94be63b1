"""Define the gradient of each algorithm: which rollouts count, with what weight, and with what advantages.

| algorithm                        | rollouts with a gradient                | advantage of a token      | mean over           |
|----------------------------------|-----------------------------------------|---------------------------|---------------------|
| grpo, dr-grpo, rloo, reinforce++ | advantage not 0; all with a KL term     | that of its rollout       | tokens, or rollouts |
| raft                             | the best of its group                   | 1                         | tokens of the best  |
| dpo                              | best and worst of a group               | +-beta * sigmoid(-margin) | pairs               |
| ppo                              | all                                     | GAE of a critic's values  | tokens, or rollouts |

DPO (arXiv 2305.18290; online as in arXiv 2402.04792) minimises -log sigmoid(margin) of a pair. The margin is beta *
(log-ratio of the better rollout - log-ratio of the worse one). A log-ratio is relative to the initial policy and summed
over a rollout. A batch is scored and trained on with the same weights. So margins are known before the backward pass,
and the gradient is that of log-likelihoods weighted by them.
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
"""By rollout and name: results of the score pass for the sampled tokens."""
Sums: TypeAlias = Mapping[str, float]


class PolicyGradient:
    """Weights rollouts by the advantages of their samples."""

    sums: tuple[str, ...] = ()
    """Keys that `summed` returns."""

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings

    def computes(self, sequence: TokenSequence) -> bool:
        """Return whether a rollout has a gradient."""
        settings = self.settings
        has_terms = settings.kl_coefficient > 0 or settings.entropy_coefficient > 0
        return not sequence.is_masked and (sequence.has_advantage or has_terms)

    def share(self, sequence: TokenSequence) -> float:
        """Return the factor for the loss of each token of a rollout."""
        match self.settings.loss_mean:
            case "token" | "rollout-sum":
                return 1.0
            case "rollout":
                return 1 / sequence.num_trained
            case "constant":
                return 1 / self.settings.max_tokens

    def count(self, sequence: TokenSequence) -> float:
        """Return how much a rollout adds to the divisor of the gradient."""
        if sequence.is_masked:
            return 0.0
        return sequence.num_trained if self.settings.loss_mean == "token" else 1

    def advantages(self, sequence: TokenSequence, scores: Scores) -> torch.Tensor:
        """Compute the advantage of a rollout, [1], or of each of its tokens, [n]."""
        of_tokens = sequence.token_advantages
        advantage = torch.tensor(
            [sequence.advantage] if of_tokens is None else of_tokens, dtype=torch.float32
        )
        if not self.settings.has_kl_reward:
            return advantage
        penalties = self._penalties(sequence, scores)  # a token's advantage has those from it on
        return advantage.to(penalties.device) - penalties.flip(0).cumsum(0).flip(0)

    def _penalties(self, sequence: TokenSequence, scores: Scores) -> torch.Tensor:
        """Compute the KL penalty to subtract from the reward of each token, [n]."""
        reference = scores[sequence.rollout]["reference"]
        sampled = torch.from_numpy(sequence.logprobs[sequence.is_policy]).to(reference.device)
        estimates = kl_losses(sampled, reference, self.settings.kl_estimator)
        return self.settings.kl_coefficient * estimates

    def summed(self, sequence: TokenSequence, scores: Scores) -> Sums:
        """Return figures of a rollout, to be summed over a batch."""
        return {}

    def figures(self, sums: Sums) -> dict[str, float]:
        """Compute the figures of a batch from their sums."""
        return {}


class Likelihood(PolicyGradient):
    """Raises the likelihood of one chosen rollout in each group; the others are only counted."""

    def computes(self, sequence: TokenSequence) -> bool:
        """Return whether a rollout was chosen."""
        return not sequence.is_masked and sequence.advantage != 0

    def count(self, sequence: TokenSequence) -> float:
        """Return how much a rollout adds to the divisor of the gradient."""
        return super().count(sequence) if self.computes(sequence) else 0.0


class Preference(Likelihood):
    """Makes the best rollout of each group more likely than the worst one."""

    sums = ("pairs", "preference_loss", "preferred", "margin")

    def share(self, sequence: TokenSequence) -> float:
        """Return 1: the likelihood is that of the whole rollout."""
        return 1.0

    def count(self, sequence: TokenSequence) -> float:
        """Return half a pair."""
        return 0.5 if self.computes(sequence) else 0.0

    def advantages(self, sequence: TokenSequence, scores: Scores) -> torch.Tensor:
        """Compute the weight of a rollout's log-likelihood, [1]."""
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
        """Compute means over pairs: loss, margin, and the share of pairs with a positive margin."""
        pairs = sums.get("pairs", 0.0)
        if not pairs:
            return {}
        return {
            "loss": sums["preference_loss"] / pairs,
            "preference_accuracy": sums["preferred"] / pairs,
            "preference_margin": sums["margin"] / pairs,
        }

    def _margin(self, sequence: TokenSequence, scores: Scores) -> torch.Tensor:
        assert sequence.partner is not None, "a compared rollout needs its partner"
        own, other = (
            (scores[rollout]["proximal"] - scores[rollout]["reference"]).double().sum()
            for rollout in (sequence.rollout, sequence.partner)
        )
        return self.settings.beta * sequence.advantage * (own - other)


class ActorCritic(PolicyGradient):
    """Computes the advantage of each token from a critic's values; samples have rewards as advantages."""

    sums = ("values", "returns", "returns_squared", "errors", "errors_squared")

    def computes(self, sequence: TokenSequence) -> bool:
        """Return whether a rollout is not masked: the critic learns from all others."""
        return not sequence.is_masked

    def advantages(self, sequence: TokenSequence, scores: Scores) -> torch.Tensor:
        """Compute generalised advantage estimates, [n]."""
        values = scores[sequence.rollout]["values"]
        rewards = torch.zeros_like(values)
        if self.settings.has_kl_reward:
            rewards -= self._penalties(sequence, scores)
        rewards[-1] += sequence.advantage
        return gae(values, rewards, self.settings.gae_lambda)

    def summed(self, sequence: TokenSequence, scores: Scores) -> Sums:
        """Return moments of the critic's values and of the returns."""
        values = scores[sequence.rollout]["values"].double()
        errors = self.advantages(sequence, scores).double()  # target minus value
        returns = values + errors
        moments = (values, returns, returns.square(), errors, errors.square())
        return {name: float(each.sum()) for name, each in zip(self.sums, moments, strict=True)}

    def figures(self, sums: Sums) -> dict[str, float]:
        """Compute the critic's mean value, its loss, and the share of the returns' variance that it explains."""
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
    """Compute the advantage of each token, [n], of a rollout from values and rewards of its tokens, [n].

    Without discount (gamma is 1): `sum of lambda^l * delta[t + l]`, where delta[t] = reward[t] + V[t + 1] - V[t]. V is 0
    after the last token (arXiv 1506.02438).
    """
    following = torch.cat([values[1:], values.new_zeros(1)])
    advantages: list[float] = []
    later = 0.0
    for delta in reversed((rewards + following - values).tolist()):
        later = delta + gae_lambda * later
        advantages.append(later)
    return values.new_tensor(advantages[::-1])


def objective_of(settings: TrainerSettings) -> PolicyGradient:
    """Return the objective of the settings' algorithm."""
    objective = import_object(algorithm_named(settings.algorithm).objective)
    assert isinstance(objective, type) and issubclass(objective, PolicyGradient), objective
    return objective(settings)
