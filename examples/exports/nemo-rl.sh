#!/usr/bin/env bash
# What was planned, as nemo-rl 0.6.0 is started with it. Its options were read at
# github.com/NVIDIA-NeMo/RL 7ea279abfbeb698b092856d0dab61e7cf39bc909 (2026-08-22), or at the commit
# in parentheses after a file. After each option: the key of the run file it comes from; the file that has it.
set -euo pipefail
: "${MODEL:?directory or name of the model}"

args=(
  "policy.model_name=${MODEL}"  # examples/configs/grpo_math_1B.yaml (00294d9)
  "ppo.max_num_steps=6"  # algorithm.steps; examples/configs/ppo_math_1B.yaml (0352cb7)
  "ppo.num_prompts_per_step=1024"  # algorithm.prompts_per_step; examples/configs/ppo_math_1B.yaml (0352cb7)
  "ppo.num_generations_per_prompt=1"  # algorithm.group_size; examples/configs/ppo_math_1B.yaml (0352cb7)
  "policy.train_global_batch_size=1024"  # algorithm.prompts_per_step=1024 / framework.optimizer_steps=1 x algorithm.group_size=1; examples/configs/grpo_math_1B.yaml
  "ppo.ppo_epochs=1"  # framework.epochs; examples/configs/ppo_math_1B.yaml (0352cb7)
  "policy.train_micro_batch_size=4"  # trainer.micro_batch; examples/configs/grpo_math_1B.yaml
  "policy.max_total_sequence_length=22048"  # rollout.max_tokens + workload.max_prompt_tokens; examples/configs/grpo_math_1B.yaml
  "policy.make_sequence_length_divisible_by=4"  # trainer.tensor_parallel, x 2 x trainer.context_parallel above 1; nemo_rl/models/megatron/data.py
  "value.make_sequence_length_divisible_by=4"  # trainer.tensor_parallel, x 2 x trainer.context_parallel above 1; nemo_rl/models/megatron/data.py
  "policy.generation.max_new_tokens=20000"  # rollout.max_tokens; examples/configs/grpo_math_1B.yaml
  "policy.sequence_packing.enabled=true"  # trainer.packing; examples/configs/grpo_math_1B.yaml
  "policy.sequence_packing.train_mb_tokens=22048"  # trainer.max_tokens_per_pass=16384, and the longest rollout must fit; examples/configs/grpo_math_1B.yaml
  "policy.sequence_packing.logprob_mb_tokens=22048"  # trainer.max_tokens_per_pass=16384, and the longest rollout must fit; examples/configs/grpo_math_1B.yaml
  "cluster.num_nodes=6"  # nodes of both sides; examples/configs/grpo_math_1B.yaml
  "cluster.gpus_per_node=8"  # GPUs on each node, alike on both sides; examples/configs/grpo_math_1B.yaml; nemo_rl/algorithms/grpo.py: the sides share a node only if it is the only one
  "policy.generation.colocated.enabled=false"  # policies.system; examples/configs/grpo_math_1B.yaml
  "policy.generation.colocated.resources.num_nodes=4"  # nodes of the replicas; examples/configs/grpo_math_1B.yaml
  "policy.generation.colocated.resources.gpus_per_node=8"  # GPUs of the replicas on each node; examples/configs/grpo_math_1B.yaml
  "ppo.async_ppo.enabled=true"  # examples/configs/ppo_math_1B.yaml (0352cb7)
  "ppo.async_ppo.max_trajectory_age_steps=1"  # policies.max_staleness; examples/configs/ppo_math_1B.yaml (0352cb7)
  "ppo.async_ppo.in_flight_weight_updates=false"  # policies.weight_sync; examples/configs/ppo_math_1B.yaml (0352cb7)
  "policy.generation.vllm_cfg.async_engine=true"  # examples/configs/grpo_math_1B.yaml: async training asks for it
  "loss_fn.use_importance_sampling_correction=true"  # examples/configs/grpo_math_1B.yaml: async training asks for it
  "policy.generation.backend=vllm"  # costs.engine; examples/configs/grpo_math_1B.yaml
  "policy.generation.vllm_cfg.tensor_parallel_size=1"  # rollout.tensor_parallel; examples/configs/grpo_math_1B.yaml
  "policy.generation.vllm_cfg.expert_parallel_size=1"  # rollout.expert_parallel; examples/configs/grpo_math_1B.yaml: a multiple of tensor_parallel_size where above 1
  "policy.generation.vllm_cfg.gpu_memory_utilization=0.9"  # rollout.memory_utilization; examples/configs/grpo_math_1B.yaml
  "policy.generation.vllm_cfg.max_model_len=22048"  # rollout.max_tokens + workload.max_prompt_tokens; examples/configs/grpo_math_1B.yaml
  "policy.generation.temperature=1"  # rollout.temperature; examples/configs/grpo_math_1B.yaml (00294d9)
  "policy.megatron_cfg.enabled=true"  # examples/configs/grpo_math_1B.yaml
  "policy.dtensor_cfg.enabled=false"  # examples/configs/grpo_math_1B.yaml
  "policy.megatron_cfg.tensor_model_parallel_size=4"  # trainer.tensor_parallel; examples/configs/grpo_math_1B.yaml
  "policy.megatron_cfg.sequence_parallel=true"  # trainer.sequence_parallel; examples/configs/grpo_math_1B.yaml: Megatron's experts need it beside tensor ranks
  "policy.megatron_cfg.pipeline_model_parallel_size=1"  # trainer.pipeline_parallel; examples/configs/grpo_math_1B.yaml
  "policy.megatron_cfg.expert_model_parallel_size=1"  # trainer.expert_parallel; examples/configs/grpo_math_1B.yaml
  "policy.megatron_cfg.activation_checkpointing=true"  # trainer.recompute; examples/configs/grpo_math_1B.yaml
  "value.megatron_cfg.enabled=true"  # examples/configs/ppo_math_1B.yaml (0352cb7)
  "value.dtensor_cfg.enabled=false"  # examples/configs/ppo_math_1B.yaml (0352cb7)
  "value.megatron_cfg.tensor_model_parallel_size=4"  # trainer.tensor_parallel; examples/configs/ppo_math_1B.yaml (0352cb7)
  "value.megatron_cfg.sequence_parallel=true"  # trainer.sequence_parallel; examples/configs/ppo_math_1B.yaml (0352cb7)
  "value.megatron_cfg.pipeline_model_parallel_size=1"  # trainer.pipeline_parallel; examples/configs/ppo_math_1B.yaml (0352cb7)
  "ppo.adv_estimator.gae_lambda=1"  # algorithm.gae_lambda; examples/configs/ppo_math_1B.yaml (0352cb7)
  "policy.megatron_cfg.optimizer.lr=1e-06"  # algorithm.learning_rate; examples/configs/grpo_math_1B.yaml (00294d9)
  "value.megatron_cfg.optimizer.lr=1e-05"  # algorithm.critic_learning_rate; examples/configs/ppo_math_1B.yaml (0352cb7)
  "loss_fn.ratio_clip_min=0.2"  # algorithm.clip; examples/configs/grpo_math_1B.yaml
  "loss_fn.ratio_clip_max=0.2"  # algorithm.clip_high, or clip; examples/configs/grpo_math_1B.yaml
  "loss_fn.reference_policy_kl_penalty=0.001"  # algorithm.kl_coefficient; examples/configs/grpo_math_1B.yaml
  "ppo.skip_reference_policy_logprobs_calculation=false"  # examples/configs/ppo_math_1B.yaml (0352cb7)
  "loss_fn.token_level_loss=true"  # algorithm.loss_mean; examples/configs/grpo_math_1B.yaml (00294d9)
  "policy.max_grad_norm=1"  # algorithm.max_grad_norm; examples/configs/grpo_math_1B.yaml (00294d9)
)
uv run examples/run_ppo.py --config examples/configs/ppo_math_1B.yaml "${args[@]}" "$@"

# What the plan has and no option of nemo-rl says here:
#   rollout.max_running = 256
#   algorithm.old_log_probs = engine
#   algorithm.kl_estimator = k3
#   policies.order = longest-first
# What nemo-rl does otherwise, or wants besides:
#   a step trains on a whole batch: rollouts that arrive earlier wait, whatever policies.system streams
#   data sets and rewards are those of the base file (data.*, env.*)
#   the log-probs pass over old weights runs in any case, unless loss_fn.force_on_policy_ratio=true
