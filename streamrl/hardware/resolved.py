"""Resolve a run file once: the model, GPUs, number formats and sizes that the functions of each role need.

`resolve` itself reads no file. Each part is resolved at its first use and then cached.

| part                | one for each                     | from the run file as |
|---------------------|----------------------------------|----------------------|
| `kinds`             | kind of replica, the whole run   | `Run.of_kind`        |
| `replicas`          | kind of replica                  | `Run.of_kind`        |
| `seen_by_followers` | secondary trainer, the whole run | `Run.as_seen_by`     |
| `trainers`          | trainer                          | `Run.as_seen_by`     |
| `reward`            | run, if it has a reward model    | `Run.verifier`       |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from streamrl.hardware.hugging_face import read_config_json
from streamrl.hardware.model_shape import ModelShape, lora_parameters
from streamrl.hardware.precision import (
    Precision,
    check_computed_in,
    check_units,
    rollout_precision,
    trained_dtype,
    training_dtype,
)
from streamrl.hardware.profiles import Gpu, gpu_of, load_model
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.cluster_config import LinkConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.frameworks import Loss, loss_of
from streamrl.runfile.gpu_pools import find_link
from streamrl.runfile.keys import trainer_key
from streamrl.runfile.roles_config import (
    RolloutConfig,
    TrainerConfig,
    VerifierConfig,
)
from streamrl.runfile.workload_config import HUB, WorkloadConfig


class ReplicaHardware(Struct, frozen=True, kw_only=True, dict=True):
    """One kind of replica: its model, pool, number formats and section of the run file."""

    config: RolloutConfig
    pool: PoolConfig
    model: ModelShape
    """The model of its profile."""
    precision: Precision
    longest_sequence: int
    """Tokens of the longest prompt with the longest output."""
    prompt_tokens: int
    """Tokens of a prompt; 0 if lengths come from a recorded run."""
    rollouts_per_prompt: int
    """Rollouts that share the KV cache of one prompt."""
    adapter_rank: int | None
    """Rank of the LoRA adapters that it serves unmerged; None if it serves none."""
    adapter_dtype: str
    engine: str
    """The inference engine, by its file name in profiles/engines."""

    @property
    def gpu(self) -> Gpu:
        """The GPU of its pool, with its share of the node's network bandwidth."""
        return gpu_of(self.pool)

    @cached_property
    def longest_model(self) -> ModelShape:
        """The model for the longest rollouts: without a sliding window that they never fill."""
        return self.model.seen_by(self.longest_sequence)


class TrainerHardware(Struct, frozen=True, kw_only=True, dict=True):
    """One trainer: its model, pool, number formats and section of the run file."""

    key: str
    """Key of its section: "trainer", "trainer.1"."""
    config: TrainerConfig
    pool: PoolConfig
    model: ModelShape
    """The model of its profile."""
    dtype: str
    """Format of weights, activations and communication."""
    computes_in: str
    """Format of the products of linear layers."""
    longest_sequence: int
    """Tokens of the longest prompt with the longest output."""
    algorithm: AlgorithmConfig
    adapter_rank: int | None
    """Rank of the adapters that it trains; None if it trains all weights."""
    trains_drafts: bool = False
    """Whether it also trains the model's draft layer."""
    loss: Loss | None = None
    """How its framework's log-probs and loss move logits; None if nobody counted it."""

    @property
    def gpu(self) -> Gpu:
        """The GPU of its pool, with its share of the node's network bandwidth."""
        return gpu_of(self.pool)

    @cached_property
    def longest_model(self) -> ModelShape:
        """The model for the longest rollouts: without a sliding window that they never fill."""
        return self.model.seen_by(self.longest_sequence)

    @property
    def num_trained_models(self) -> int:
        """Number of models that it updates: the actor, and the critic if there is one."""
        return 1 + self.algorithm.has_critic

    @property
    def trained_share(self) -> float:
        """Share of the actor's parameters that are trained: all, or the adapters."""
        if self.adapter_rank is None:
            return 1.0
        return lora_parameters(self.model, self.adapter_rank) / self.model.num_parameters

    @property
    def trained_models(self) -> float:
        """Updated parameters, as a multiple of one model's parameters; a critic trains all of its parameters."""
        return self.trained_share + self.algorithm.has_critic

    @property
    def num_models(self) -> int:
        """Number of models in memory. With adapters, the base weights serve as the reference."""
        return self.num_trained_models + self.has_reference_weights

    @property
    def has_reference_weights(self) -> bool:
        """Whether the reference model has weights of its own."""
        return self.algorithm.has_reference and self.adapter_rank is None

    @property
    def swaps_reference(self) -> bool:
        """Whether the reference model alone is in host memory while it does not run."""
        own = self.config
        return self.has_reference_weights and own.offload_reference and not own.offload

    @property
    def num_resident_models(self) -> int:
        """Number of models on the GPUs at a time, without `trainer.offload`."""
        return self.num_models - self.swaps_reference


class RewardHardware(Struct, frozen=True, kw_only=True):
    """The reward model of a run, and its pool."""

    config: VerifierConfig
    pool: PoolConfig | None
    shape: ModelShape | None
    """None if the model is on the hub, because its shape is then unknown."""
    dtype: str
    longest_sequence: int
    """Tokens of the longest prompt with the longest output."""

    @property
    def key(self) -> str:
        """Key of the model in the run file."""
        return reward_model_key(self.config)

    @property
    def name(self) -> str | None:
        """The model name in the run file."""
        reward = self.config.reward_model
        return None if reward is None else reward.model


@dataclass(frozen=True)
class ResolvedRun:
    """A run file with the model and hardware of each role."""

    run: Run

    @cached_property
    def model(self) -> ModelShape:
        """The trained model from its profile."""
        return load_model(self.run.model)

    @cached_property
    def kinds(self) -> tuple[ResolvedRun, ...]:
        """The run with each kind of replica alone; the run itself if it has one kind."""
        if not self.run.rollout.others:
            return (self,)
        return tuple(resolve(self.run.of_kind(n)) for n in range(self.run.rollout.num_kinds))

    @cached_property
    def seen_by_followers(self) -> tuple[ResolvedRun, ...]:
        """The run as each secondary trainer sees it."""
        numbers = range(1, self.run.num_trainers)
        return tuple(resolve(self.run.as_seen_by(number)) for number in numbers)

    @cached_property
    def replica(self) -> ReplicaHardware:
        """The first kind of replica in the run file."""
        run, lengths = self.run, self.run.workload.lengths
        is_stated = lengths is not None and lengths.kind != "trace"
        return ReplicaHardware(
            config=run.rollout,
            pool=run.cluster.pools[run.rollout.pool],
            model=self.model,
            precision=rollout_precision(run.rollout, run.model),
            longest_sequence=longest_sequence(run.rollout, run.workload, run.environment),
            prompt_tokens=lengths.prompt_tokens if lengths is not None and is_stated else 0,
            rollouts_per_prompt=run.rollouts_per_prompt,
            adapter_rank=run.sync.lora_rank if run.serves_adapters else None,
            adapter_dtype=run.model.dtype,
            engine=run.costs.engine,
        )

    @cached_property
    def replicas(self) -> tuple[ReplicaHardware, ...]:
        """Every kind of replica, each as if the run had replicas of this kind alone."""
        return tuple(kind.replica for kind in self.kinds)

    @cached_property
    def trainer(self) -> TrainerHardware:
        """The primary trainer."""
        run = self.run
        return TrainerHardware(
            key=trainer_key(0),
            config=run.trainer,
            pool=run.cluster.pools[run.trainer.pool],
            model=self.model,
            dtype=trained_dtype(run.trainer, run.model),
            computes_in=training_dtype(run.trainer, run.model),
            longest_sequence=longest_sequence(run.rollout, run.workload, run.environment),
            algorithm=run.algorithm,
            adapter_rank=run.sync.adapter_rank,
            trains_drafts=run.rollout.drafts is not None and run.rollout.drafts.trained,
            loss=loss_of(run.framework, run.trainer),
        )

    @cached_property
    def trainers(self) -> tuple[TrainerHardware, ...]:
        """Every trainer, the primary one first."""
        followers = (
            replace(seen.trainer, key=trainer_key(number), trains_drafts=False)
            for number, seen in enumerate(self.seen_by_followers, start=1)
        )
        return (self.trainer, *followers)

    @property
    def link(self) -> LinkConfig | None:
        """The link between the replicas named first and the trainer; None within one pool."""
        links = self.run.cluster.links
        index = find_link(links, self.run.rollout.pool, self.run.trainer.pool)
        return None if index is None else links[index]

    @cached_property
    def reward(self) -> RewardHardware | None:
        """The reward model; None if the run has none.

        Raises:
            RunError: its directory has no config.json of a known type.
        """
        verifier = self.run.verifier
        if verifier.reward_model is None:
            return None
        return RewardHardware(
            config=verifier,
            pool=None if verifier.pool is None else self.run.cluster.pools[verifier.pool],
            shape=_reward_shape(verifier),
            dtype=self.run.model.dtype,
            longest_sequence=longest_sequence(
                self.run.rollout, self.run.workload, self.run.environment
            ),
        )


def resolve(run: Run) -> ResolvedRun:
    """Return the model and hardware of a run. Each part is read at its first use."""
    return ResolvedRun(run)


def longest_sequence(
    rollout: RolloutConfig, workload: WorkloadConfig, environment: EnvironmentConfig | None = None
) -> int:
    """Return the tokens of the longest rollout that a run file allows: its prompt, output and observations."""
    if environment is not None:
        return environment.max_context
    return rollout.max_tokens + workload.max_prompt_tokens


def reward_model_key(verifier: VerifierConfig) -> str:
    """Return the key of a run's reward model."""
    indices = (index for index, each in enumerate(verifier.reward) if each.has_model)
    return f"verifier.reward.{next(indices)}.model"


def _reward_shape(verifier: VerifierConfig) -> ModelShape | None:
    reward = verifier.reward_model
    if reward is None or reward.model is None or reward.model.startswith(HUB):
        return None
    try:
        return read_config_json(Path(reward.model) / "config.json")
    except RunError as error:
        key = reward_model_key(verifier)
        text = str(error).replace("model.path", key, 1)
        raise RunError(key, reward.model, text=text) from None


def check_precision(resolved: ResolvedRun) -> None:
    """Raise `RunError` if a GPU cannot compute in the number format of its role."""
    for replica in resolved.replicas:
        gpu, remedy = replica.gpu, "rollout.weight_only = true"
        check_units(replica.precision, gpu.name, gpu.flops, "rollout.", remedy)
    for trainer in resolved.trainers:
        check_computed_in(trainer.computes_in, trainer.gpu, trainer.key)
