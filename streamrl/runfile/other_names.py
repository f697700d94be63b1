"""Names that other frameworks have for keys of a run file, so that errors can name the key that a user means.

docs/options-compared.md has the same names in their sections, and the commits at which they were read.
"""

from __future__ import annotations

OTHER_NAMES: dict[str, str] = {
    # sampling
    "max_response_length": "rollout.max_tokens",
    "max_completion_length": "rollout.max_tokens",
    "max_completion_tokens": "rollout.max_tokens",
    "apply_chat_template_kwargs": "workload.template_arguments",
    "chat_template_kwargs": "workload.template_arguments",
    "filter_overlong_prompts": "workload.overlong_prompts",
    # optimization
    "n": "algorithm.group_size",
    "val_kwargs.n": "evaluation.samples",
    "max_steps": "algorithm.steps",
    "total_training_steps": "algorithm.steps",
    "total_epochs": "algorithm.steps",
    "num_train_epochs": "algorithm.steps",
    "data_seed": "seed",
    "gradient_accumulation_steps": "trainer.max_tokens_per_pass",
    "per_device_train_batch_size": "trainer.max_tokens_per_pass",
    "ppo_micro_batch_size_per_gpu": "trainer.max_tokens_per_pass",
    "ppo_max_token_len_per_gpu": "trainer.max_tokens_per_pass",
    "train_batch_size": "algorithm.prompts_per_step",
    "num_generations": "algorithm.group_size",
    "lr": "algorithm.learning_rate",
    "optim": "algorithm.optimizer.name",
    "adam_beta1": "algorithm.optimizer.betas",
    "adam_beta2": "algorithm.optimizer.betas",
    "adam_epsilon": "algorithm.optimizer.epsilon",
    "clip_grad": "algorithm.max_grad_norm",
    "max_norm": "algorithm.max_grad_norm",
    "lr_scheduler_type": "algorithm.optimizer.schedule",
    "lr_warmup_steps": "algorithm.optimizer.warmup_steps",
    "lr_warmup_steps_ratio": "algorithm.optimizer.warmup_steps",
    "warmup_ratio": "algorithm.optimizer.warmup_steps",
    "min_lr_ratio": "algorithm.optimizer.final_rate_share",
    "min_lr": "algorithm.optimizer.final_rate_share",
    "clip_ratio_low": "algorithm.clip",
    "clip_ratio_high": "algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.clip_dual",
    "loss_agg_mode": "algorithm.loss_mean",
    "loss_type": "algorithm.loss_mean",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "entropy_coeff": "algorithm.entropy_coefficient",
    "kl_loss_coef": "algorithm.kl_coefficient",
    "beta": "algorithm.kl_coefficient",
    "kl_tau": "algorithm.kl_coefficient",
    "kl_loss_type": "algorithm.kl_estimator",
    "use_kl_in_reward": "algorithm.kl_in",
    "ppo_mini_batch_size": "framework.optimizer_steps",
    "steps_per_generation": "framework.optimizer_steps",
    "ppo_epochs": "framework.epochs",
    "num_iterations": "framework.epochs",
    "lora_rank": "sync.lora_rank",
    "lora_alpha": "sync.lora_alpha",
    # evaluation
    "val_files": "evaluation.prompts",
    "eval_dataset": "evaluation.prompts",
    "test_freq": "evaluation.every",
    "eval_steps": "evaluation.every",
    "val_before_train": "evaluation.before",
    "eval_on_start": "evaluation.before",
    "num_generations_eval": "evaluation.samples",
    # checkpoints and trackers
    "save_freq": "execute.checkpoint_every",
    "save_steps": "execute.checkpoint_every",
    "max_actor_ckpt_to_keep": "execute.checkpoints.keep_last",
    "save_total_limit": "execute.checkpoints.keep_last",
    "load_best_model_at_end": "execute.checkpoints.keep_best",
    "push_to_hub": "execute.checkpoints.export",
    "report_to": "execute.trackers",
    "logger": "execute.trackers",
}
"""The key of a run file, by the last parts of another framework's name."""
NEAR_WORDS = {"trainer.changes": "trainer.resize"}
"""Other words for the topic of a key, in its section."""


def key_meant(key: str) -> str | None:
    """Return the key of a run file that another name means, in any case; None if no such name is known.

    In an inner section, such as `trainer.1.algorithm`, it is the key of that section.
    """
    lower = key.lower()
    section, parts = lower.rpartition(".")[0], lower.split(".")
    ends = (".".join(parts[begin:]) for begin in range(len(parts)))
    meant = NEAR_WORDS.get(lower) or next(filter(None, map(OTHER_NAMES.get, ends)), None)
    if meant is None:
        return None
    own, _, last = meant.rpartition(".")
    return f"{section}.{last}" if section.endswith(f".{own}") else meant
