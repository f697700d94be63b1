"""Build the configuration of each role from the run file, for every kind of launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from msgspec import convert, to_builtins
from msgspec.structs import asdict, replace
from numpy.random import SeedSequence

from streamrl.executor.adapter_layers import ADAPTERS
from streamrl.executor.launchers.handles import Config
from streamrl.executor.sampling import Sampling, sampling_of
from streamrl.hardware.model_shape import BYTES
from streamrl.hardware.profiles import load_model
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.bases import secret_of
from streamrl.runfile.cluster_config import ModelConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.gpu_pools import replicas_per_node
from streamrl.runfile.policies_config import SyncConfig
from streamrl.runfile.roles_config import RolloutConfig, SecondaryTrainerConfig

LOGITS_CHUNK = 1024
"""Tokens for which logits are computed at once. Liger and prime-rl use the same chunk."""


class RoleConfigs:
    """Returns the settings of each role of a run, without those of the device that it is placed on."""

    def __init__(self, run: Run, num_starts: Callable[[], int] = lambda: 1) -> None:
        """Take the run file, and a function that returns how often the run was started or resumed."""
        self._run = run
        self._num_starts = num_starts
        self._end_tokens: list[int] = []

    def end_rollouts_at(self, tokens: Iterable[int]) -> None:
        """End rollouts at these tokens too; their files may be read after a launcher was made."""
        self._end_tokens = sorted(tokens)

    def join(self, follower: SecondaryTrainerConfig) -> None:
        """Add a trainer to the run."""
        self._run = replace(self._run, followers=(*self._run.followers, follower))

    def replica(self, replica_id: int, kind: int, model: str) -> Config:
        """Return the settings of a replica of a kind, which loads a model directory first."""
        run = self._run.of_kind(kind)
        most = None if run.environment is None else run.environment.max_context
        evaluation = run.evaluation
        config: Config = {
            "model": model,
            "tokenizer": model,
            "max_running": run.rollout.max_running,
            "max_tokens": _most_tokens(run.rollout, most, evaluation),
            "evaluation": _own_sampling(evaluation, run.rollout),
            "max_prompt_tokens": run.workload.max_prompt_tokens,
            "max_context": most,
            **_sampling(run.rollout),
            "stop": run.rollout.stop,
            "seed": sampling_seed(run.seed, replica_id, self._num_starts()),
            "end_tokens": sorted({*self._end_tokens, *run.rollout.stop_token_ids}),
            "backend": run.rollout.backend,
            "tensor_parallel": run.rollout.tensor_parallel,
            "expert_parallel": run.rollout.expert_parallel,
            "memory_utilization": run.rollout.memory_utilization,
            "takes_turns": run.policies.shares_gpus
            or run.trainer.borrows
            or kind == self._run.rollout.num_kinds,
            "shares_prefixes": run.shares_prefixes,
            "router_replay": run.algorithm.router_replay,
            "save_time": float(run.execute.save_tokens_every),
            **self._common(),
        }
        if self._run.serves_adapters:  # a checkpoint has merged weights and separate adapters
            is_first = model == run.model.path
            config["model"] = run.model.path
            config["adapters"] = None if is_first else str(Path(model) / ADAPTERS)
            config["adapter_rank"] = run.sync.adapter_rank
        return config

    def server(self, url: str) -> Config:
        """Return how the client of an external server reaches it."""
        external = self._run.rollout.external
        assert external is not None, "check_executable wants the section"
        return {
            "url": url,
            "api": external.api,
            "key": secret_of(external.key),
            "certificate": external.certificate,
            "timeout": float(external.timeout),
            "directory": external.directory,
            "weights": external.weights,
            "num_ranks": self._run.rollout.gpus_per_replica,
        }

    def trainer(self, number: int, device: str) -> Config:
        """Return the settings of a trainer on a device, without those of its ranks."""
        run = self._run.as_seen_by(number)
        algorithm = run.algorithm
        return {
            "model": run.model.path,
            "learning_rate": algorithm.learning_rate,
            **_sampling(run.rollout),
            "algorithm": algorithm.name,
            "correction": algorithm.corrected_by,
            "correction_cap": algorithm.correction_cap,
            "second_moment": algorithm.second_moment,
            "clip": algorithm.clip,
            "clip_high": algorithm.clip_high,
            "clip_dual": algorithm.clip_dual,
            "kl_coefficient": algorithm.kl_coefficient,
            "kl_estimator": algorithm.kl_estimator,
            "kl_in": algorithm.kl_in,
            "entropy_coefficient": algorithm.entropy_coefficient,
            "rollouts_per_update": run.rollouts_per_update,
            "loss_mean": algorithm.loss_mean,
            "max_tokens": run.rollout.max_tokens,
            **_optimizer(algorithm),
            "max_grad_norm": algorithm.max_grad_norm,
            "beta": algorithm.beta,
            "critic_learning_rate": algorithm.critic_rate if algorithm.has_critic else None,
            "gae_lambda": algorithm.gae_lambda,
            "max_tokens_per_pass": run.trainer.max_tokens_per_pass,
            "packing": run.trainer.packing,
            "router_replay": algorithm.router_replay,
            "recompute": "none" if device == "cpu" else run.trainer.recompute,
            "logits_chunk": LOGITS_CHUNK if run.trainer.logits in ("chunked", "fused") else None,
            "seed": run.seed,
            "backend": run.trainer.backend,
            "reshard_after_forward": run.trainer.reshard_after_forward,
            "shard_ranks": run.trainer.shard_ranks,
            "offload": run.trainer.offload and not (run.policies.shares_gpus or run.lending),
            "adapter_rank": run.sync.adapter_rank,
            "adapter_alpha": run.sync.adapter_alpha,
            **self._common(),
        }

    def reward_model(self) -> Config:
        """Return the settings of a replica of the reward model."""
        verifier = self._run.verifier
        reward = verifier.reward_model
        assert reward is not None, "check_rewards wants one"
        return {
            "model": reward.model,
            "step_end": reward.step_end,
            "over_steps": reward.over_steps,
            "max_tokens_per_pass": verifier.max_tokens_per_pass,
            **self._common(),
        }

    def relay(self) -> Config:
        """Return the settings of a weight relay."""
        return {
            "model": self._run.model.path,
            "dtype": self._run.model.dtype,
            "merges_adapters": not self._run.serves_adapters,
            "room": weights_room(self._run.model, serves_adapters=self._run.serves_adapters),
        }

    def _common(self) -> Config:
        return {
            "dtype": self._run.model.dtype,
            "deterministic": self._run.execute.deterministic,
        }


KEPT_VERSIONS = 2
"""Weight versions that a machine has at once as a rule: the newest one, and the one being pushed."""


def weights_room(model: ModelConfig, *, serves_adapters: bool, copies: int = 1) -> int:
    """Return the bytes that pushed weights take on each machine; 0 for adapters alone, which are small."""
    if serves_adapters:
        return 0
    return copies * KEPT_VERSIONS * load_model(model).num_parameters * BYTES[model.dtype]


def received_copies(
    sync: SyncConfig, launcher: str, rollout: RolloutConfig, pools: dict[str, PoolConfig]
) -> int:
    """Return the replicas of one machine that each receive weights of their own; 1 if they share files."""
    if not sync.is_direct:
        return 1
    every = sum(kind.replicas for kind in rollout.kinds)
    return every if launcher != "ray" else min(every, replicas_per_node(rollout, pools))


def _optimizer(algorithm: AlgorithmConfig) -> Config:
    """Return the settings of the optimizer, and of the schedule of its learning rate."""
    options = asdict(algorithm.optimizer)
    return {"optimizer": options.pop("name"), "num_steps": algorithm.steps, **options}


def _sampling(rollout: RolloutConfig) -> Config:
    """Return the distribution that replicas sample from, and whose log-probabilities the trainer computes."""
    truncation = {"top_k": rollout.top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}
    return {"temperature": rollout.temperature, "truncation": truncation}


def _most_tokens(
    rollout: RolloutConfig, max_context: int | None, evaluation: EvaluationConfig | None
) -> int:
    """Return the maximum output tokens of a rollout, of training or on a held-out prompt."""
    if max_context is not None:
        return max_context - 1
    return max(rollout.max_tokens, 0 if evaluation is None else evaluation.max_tokens or 0)


def _own_sampling(
    evaluation: EvaluationConfig | None, rollout: RolloutConfig
) -> dict[str, object] | None:
    """Return the sampling of evaluations where it differs from that of training."""
    if evaluation is None:
        return None
    own = to_builtins(sampling_of(evaluation, rollout))
    return None if own == to_builtins(convert(_sampling(rollout), Sampling)) else own


def sampling_seed(seed: int, replica_id: int, num_starts: int) -> int:
    """Return the seed of a replica's sampling; a resumed run must not draw the noise of its first steps again."""
    if num_starts == 1:
        return seed + replica_id
    (state,) = SeedSequence([seed, replica_id, num_starts]).generate_state(1, np.uint32)
    return int(state)
