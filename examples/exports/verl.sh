#!/usr/bin/env bash
# What was planned, as verl 0.10.0.dev is started with it. Its options were read at
# github.com/verl-project/verl 1dda039b9c6311889a9c9a26040677e1254814f9 (2026-08-22), or at the commit
# in parentheses after a file. After each option: the key of the run file it comes from; the file that has it.
set -euo pipefail
: "${MODEL:?directory or name of the model}"
: "${TRAIN_FILES:?parquet of the prompts}"
: "${VAL_FILES:?parquet of the evaluation}"

args=(
  "actor_rollout_ref.model.path=${MODEL}"  # verl/trainer/config/model/hf_model.yaml (0db1343)
  "data.train_files=${TRAIN_FILES}"  # verl/trainer/config/data/legacy_data.yaml, as in _generated_ppo_megatron_trainer.yaml (01a9eac)
  "data.val_files=${VAL_FILES}"  # verl/trainer/config/data/legacy_data.yaml, as in _generated_ppo_megatron_trainer.yaml (01a9eac)
  "trainer.total_training_steps=6"  # algorithm.steps; verl/trainer/config/ppo_trainer.yaml (05a1edd)
  "data.train_batch_size=1024"  # algorithm.prompts_per_step; verl/trainer/config/data/legacy_data.yaml
  "actor_rollout_ref.rollout.n=1"  # algorithm.group_size; verl/trainer/config/rollout/rollout.yaml
  "actor_rollout_ref.actor.ppo_mini_batch_size=1024"  # algorithm.prompts_per_step=1024 / framework.optimizer_steps=1; verl/trainer/config/actor/actor.yaml
  "actor_rollout_ref.actor.ppo_epochs=1"  # framework.epochs; verl/trainer/config/actor/actor.yaml
  "data.max_prompt_length=2048"  # workload.max_prompt_tokens; verl/trainer/config/data/legacy_data.yaml
  "data.max_response_length=20000"  # rollout.max_tokens; verl/trainer/config/data/legacy_data.yaml
  "actor_rollout_ref.actor.use_dynamic_bsz=true"  # verl/trainer/config/actor/actor.yaml
  "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22048"  # trainer.max_tokens_per_pass=16384, and the longest rollout must fit; verl/trainer/config/actor/actor.yaml
  "actor_rollout_ref.model.use_remove_padding=true"  # trainer.packing; verl/trainer/config/model/hf_model.yaml
  "trainer.nnodes=2"  # parts of nodes for the trainer; verl/trainer/config/ppo_trainer.yaml
  "trainer.n_gpus_per_node=8"  # GPUs of the trainer in each part of a node; verl/trainer/config/ppo_trainer.yaml; verl/single_controller/ray/base.py: each part is packed into one node, and a node may have several
  "trainer.v1.trainer_mode=separate_async"  # verl/trainer/config/ppo_trainer.yaml
  "actor_rollout_ref.hybrid_engine=false"  # verl/trainer/ppo/v1/trainer_separate_async.py of 0.9.1: no replicas on the trainer's GPUs; the commit above reads it nowhere in V1
  "actor_rollout_ref.rollout.nnodes=4"  # parts of nodes for the replicas; verl/trainer/config/rollout/rollout.yaml
  "actor_rollout_ref.rollout.n_gpus_per_node=8"  # GPUs of the replicas in each part of a node; verl/trainer/config/rollout/rollout.yaml; verl/workers/rollout/replica.py: the GPUs of a replica on one node are at most these
  "trainer.v1.separate_async.parameter_sync_step=1"  # framework.optimizer_steps; verl/trainer/config/ppo_trainer.yaml
  "trainer.v1.separate_async.num_warmup_batches=1"  # policies.max_staleness, at least 1; verl/trainer/ppo/v1/trainer_separate_async.py: batches that are generated before the first step
  "trainer.v1.sampler.max_off_policy_threshold=1"  # policies.max_staleness; verl/trainer/config/ppo_trainer.yaml
  "trainer.v1.sampler.max_off_policy_strategy=wait"  # verl/trainer/config/ppo_trainer.yaml: nothing is dropped, as in the plan
  "actor_rollout_ref.rollout.name=vllm"  # costs.engine; verl/trainer/config/rollout/rollout.yaml
  "actor_rollout_ref.rollout.tensor_model_parallel_size=1"  # rollout.tensor_parallel; verl/trainer/config/rollout/rollout.yaml: as many replicas as the GPUs hold
  "actor_rollout_ref.rollout.expert_parallel_size=1"  # rollout.expert_parallel; verl/trainer/config/rollout/rollout.yaml
  "actor_rollout_ref.rollout.max_num_seqs=256"  # rollout.max_running; verl/trainer/config/rollout/rollout.yaml
  "actor_rollout_ref.rollout.gpu_memory_utilization=0.9"  # rollout.memory_utilization; verl/trainer/config/rollout/rollout.yaml
  "actor_rollout_ref.rollout.temperature=1"  # rollout.temperature; verl/trainer/config/rollout/rollout.yaml
  "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"  # verl/trainer/ppo/v1/trainer_separate_async.py: anything but naive
  "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1000"  # sync.bucket_size; verl/trainer/config/rollout/rollout.yaml
  "model_engine=megatron"  # verl/trainer/config/ppo_trainer.yaml (05a1edd); use_distributed_optimizer is true in engine/megatron.yaml
  "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"  # trainer.tensor_parallel; verl/trainer/config/engine/megatron.yaml
  "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1"  # trainer.pipeline_parallel; verl/trainer/config/engine/megatron.yaml
  "actor_rollout_ref.actor.megatron.expert_model_parallel_size=1"  # trainer.expert_parallel; verl/trainer/config/engine/megatron.yaml
  "critic.megatron.tensor_model_parallel_size=4"  # trainer.tensor_parallel; verl/trainer/config/_generated_ppo_megatron_trainer.yaml (01a9eac)
  "critic.megatron.pipeline_model_parallel_size=1"  # trainer.pipeline_parallel; verl/trainer/config/_generated_ppo_megatron_trainer.yaml (01a9eac)
  "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full"  # verl/trainer/config/engine/megatron.yaml
  "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform"  # verl/trainer/config/engine/megatron.yaml
  "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1"  # verl/trainer/config/engine/megatron.yaml
  "algorithm.adv_estimator=gae"  # algorithm.name; verl/trainer/config/ppo_trainer.yaml, verl/trainer/ppo/core_algos.py
  "algorithm.lam=1"  # algorithm.gae_lambda; verl/trainer/config/ppo_trainer.yaml (05a1edd)
  "critic.model.path=${MODEL}"  # verl/trainer/config/critic/critic.yaml (07d02df)
  "critic.optim.lr=1e-05"  # algorithm.critic_learning_rate; verl/trainer/config/critic/critic.yaml (07d02df)
  "actor_rollout_ref.actor.optim.lr=1e-06"  # algorithm.learning_rate; verl/trainer/config/actor/actor.yaml (018f23b)
  "actor_rollout_ref.actor.clip_ratio_low=0.2"  # algorithm.clip; verl/trainer/config/actor/actor.yaml (018f23b)
  "actor_rollout_ref.actor.clip_ratio_high=0.2"  # algorithm.clip_high, or clip; verl/trainer/config/actor/actor.yaml (018f23b)
  "actor_rollout_ref.actor.use_kl_loss=true"  # algorithm.kl_coefficient; verl/trainer/config/actor/actor.yaml (018f23b)
  "actor_rollout_ref.actor.kl_loss_coef=0.001"  # algorithm.kl_coefficient; verl/trainer/config/actor/actor.yaml (018f23b)
  "actor_rollout_ref.actor.kl_loss_type=low_var_kl"  # algorithm.kl_estimator; verl/trainer/config/actor/actor.yaml (018f23b)
  "actor_rollout_ref.actor.loss_agg_mode=token-mean"  # algorithm.loss_mean; verl/trainer/config/actor/actor.yaml
  "algorithm.rollout_correction.bypass_mode=true"  # algorithm.old_log_probs; verl/trainer/config/algorithm/rollout_correction.yaml
  "actor_rollout_ref.rollout.calculate_log_probs=true"  # verl/trainer/config/rollout/rollout.yaml
  "algorithm.rollout_correction.rollout_is=token"  # algorithm.correction; verl/trainer/config/algorithm/rollout_correction.yaml (0482624)
  "algorithm.rollout_correction.rollout_is_threshold=2"  # algorithm.correction_cap; verl/trainer/config/algorithm/rollout_correction.yaml (0482624)
)
python3 -m verl.trainer.main_ppo "${args[@]}" "$@"

# What the plan has and no option of verl says here:
#   policies.order = longest-first
# What verl does otherwise, or wants besides:
#   separate GPUs are trained on asynchronously only: generation goes on while weights are updated, whatever policies.system says
#   both pools are one Ray cluster; that trainer.nnodes are of one kind of GPU and rollout.nnodes of another is for its resource pools to be told
