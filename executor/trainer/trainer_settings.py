"""Settings of a trainer worker, as plain data."""

from __future__ import annotations

from typing import get_args

import msgspec
import torch

from streamrl.executor.sampling import WHOLE, Truncation
from streamrl.executor.trainer import losses
from streamrl.runfile.algorithm_config import (
    CorrectionName,
    KlEstimator,
    KlPlace,
    LossMean,
    OptimizerName,
    ScheduleName,
)
from streamrl.runfile.algorithms import AlgorithmName, algorithm_named
from streamrl.runfile.backend_choice import TrainerBackend, training_backend_named
from streamrl.runfile.roles_config import Packing, Recompute

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHOICES = {
    "correction": (*losses.CORRECTIONS, None),
    "kl_estimator": get_args(KlEstimator),
    "kl_in": get_args(KlPlace),
    "loss_mean": get_args(LossMean),
    "optimizer": get_args(OptimizerName),
    "schedule": get_args(ScheduleName),
    "packing": get_args(Packing),
    "recompute": get_args(Recompute),
    "dtype": tuple(DTYPES),
    "zero": (0, 1, 2, 3),
}


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a trainer worker. An invalid value raises `ValueError` with the field and the value."""

    model: str
    """Hugging Face directory of the initial weights."""
    learning_rate: float
    temperature: float
    """Temperature of rollout sampling; log-probabilities are computed at the same temperature."""
    truncation: Truncation = WHOLE
    """Tokens that rollouts may sample; log-probabilities are over the same tokens."""
    algorithm: AlgorithmName = "grpo"
    """See the table of `streamrl.executor.trainer.objectives`."""
    correction: CorrectionName | None
    """See the table of `streamrl.executor.trainer.losses`."""
    correction_cap: float = 2.0
    """Largest importance weight; icepop masks outside [1/correction_cap, correction_cap]."""
    second_moment: float = 0.04
    """For m2po: largest mean of squared log-ratios over a rollout."""
    clip: float = 0.2
    """PPO's clip range of the ratio, below 1; also above 1 if `clip_high` is None."""
    clip_high: float | None = None
    clip_dual: float | None = None
    """Bound of ratio times advantage, relative to the advantage, where that is negative; None: no bound."""
    kl_coefficient: float = 0.0
    """Weight of the KL term against the initial weights; above 0 the trainer needs a reference model.

    With adapters, the model without them is the reference. Otherwise it is a second model.
    """
    kl_estimator: KlEstimator = "k3"
    kl_in: KlPlace = "loss"
    """reward: subtract the KL term from the reward of each token; only for reinforce++ and ppo."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy of the next token, which is subtracted from the loss."""
    rollouts_per_update: int | None = None
    """Rollouts, over all ranks, between two optimizer steps; None: one optimizer step for each batch."""
    loss_mean: LossMean = "token"
    """See `algorithm.loss_mean`."""
    max_tokens: int = 1
    """Maximum output tokens of a rollout: the divisor of `loss_mean` constant."""
    max_grad_norm: float = 1.0
    beta: float = 0.1
    """For dpo: factor of the log-ratios of a pair."""
    critic_learning_rate: float | None = None
    """For ppo: learning rate of the critic; None for other algorithms."""
    gae_lambda: float = 1.0
    max_tokens_per_pass: int = 16384
    """Tokens in one forward and backward pass, including padding; a longer rollout gets its own pass."""
    packing: Packing = "packed"
    """See the table of `streamrl.executor.trainer.passes`."""
    router_replay: bool = False
    """Whether the policy's routers take the experts that were recorded with the tokens."""
    recompute: Recompute = "none"
    """See the table of `streamrl.executor.trainer.model_loading`."""
    logits_chunk: int | None = None
    """Number of tokens whose logits exist at once; None: all tokens of a pass."""
    optimizer: OptimizerName = "adamw"
    """See the table of `streamrl.executor.trainer.optimizers`."""
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.95
    """Of Muon."""
    schedule: ScheduleName = "constant"
    warmup_steps: int = 0
    final_rate_share: float = 0.0
    """Share of the learning rate that is left after `num_steps`."""
    num_steps: int = 1
    """Steps of the whole training, for the schedule."""
    seed: int = 0
    """Seed for weights that the directory lacks; training itself uses no random numbers."""
    device: str = "cpu"
    dtype: str = "float32"
    """Dtype of passes and of pushed weights; the weights that AdamW updates are float32."""
    num_threads: int = 1
    deterministic: bool = False
    """Whether a batch is computed as a whole at its step, so that sums do not depend on the order of arrival."""
    backend: TrainerBackend = "torch"
    zero: int = 0
    """ZeRO stage of deepspeed; torch supports only 0, and fsdp2 always splits everything."""
    tensor_parallel: int = 1
    """Ranks that share each layer, and the same rollouts; only for fsdp2."""
    context_parallel: int = 1
    """Ranks that share the tokens of each pass, and so the same rollouts; only for fsdp2 and packed passes."""
    reshard_after_forward: bool = True
    """For fsdp2: whether layers are freed after the forward pass, and gathered again for the backward pass."""
    shard_ranks: int | None = None
    """For fsdp2: adjacent data-parallel and context ranks that shard one copy of the weights; None: all."""
    offload: bool = False
    """For fsdp2: whether moments of the optimizer wait in host memory between steps."""
    adapter_rank: int | None = None
    """Rank of the LoRA adapters that are trained and pushed; None: all weights are trained."""
    adapter_alpha: float = 1.0
    """LoRA's alpha: the product of the adapters is multiplied by alpha / rank."""
    rank: int = 0
    num_ranks: int = 1
    """Number of processes that train one model together, each on its share of a batch."""
    rendezvous: str | None = None
    """Address where ranks connect, new for each start: "file://" on a shared disk, or "tcp://" at rank 0."""

    @property
    def weight_bound(self) -> float:
        """Return the `cap` for `streamrl.executor.trainer.losses`."""
        match self.correction:
            case "cispo":
                return 1 + (self.clip if self.clip_high is None else self.clip_high)
            case "m2po":
                return self.second_moment
            case _:
                return self.correction_cap

    @property
    def num_alike(self) -> int:
        """Return the number of ranks, next to each other, that get the same rollouts."""
        return self.tensor_parallel * self.context_parallel

    @property
    def splits_weights(self) -> bool:
        """Return whether each rank has only a share of the weights."""
        backend = training_backend_named(self.backend)
        return bool(backend.split) and (self.zero == 3 or backend.always_splits)

    @property
    def has_reference(self) -> bool:
        """Return whether a reference model with the initial weights is needed."""
        return self.kl_coefficient > 0 or algorithm_named(self.algorithm).needs_reference

    @property
    def has_kl_loss(self) -> bool:
        """Return whether the loss has a KL term."""
        return self.kl_coefficient > 0 and self.kl_in == "loss"

    @property
    def has_kl_reward(self) -> bool:
        """Return whether the rewards of tokens have a KL term."""
        return self.kl_coefficient > 0 and self.kl_in == "reward"

    def __post_init__(self) -> None:
        algorithm_named(self.algorithm)
        training_backend_named(self.backend)
        for field, names in CHOICES.items():
            if getattr(self, field) not in names:
                raise ValueError(f"{field} must be one of {names}, got {getattr(self, field)!r}")
        for field in ("temperature", "max_grad_norm", "max_tokens_per_pass", "num_threads"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be above 0, got {getattr(self, field)}")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank must be below num_ranks={self.num_ranks}, got {self.rank}")
        if self.num_ranks % self.num_alike:
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} x context_parallel={self.context_parallel} must divide "
                f"num_ranks={self.num_ranks}"
            )
        if not self.correction_cap >= 1:
            raise ValueError(f"correction_cap must be at least 1, got {self.correction_cap}")
