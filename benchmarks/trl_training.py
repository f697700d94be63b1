"""Run GRPO with TRL's GRPOTrainer on the quickstart's model, prompts and rewards; used by `bench_trl`.

    python benchmarks/trl_training.py --setting "two processes" --prompts trained.jsonl --out figures.json

As in `examples/quickstart.toml`: AdamW, the PPO clip, no KL, advantages by group, a mean over the
tokens of the batch, sampling at temperature 1, float32, one step per batch. `SETTINGS` are options of
TRL for this work on two cores. They change seconds, not results. Two options are left out: AsyncGRPO
needs a vLLM server, and torch.compile compiles for every new length and does not finish five steps
in two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent.parent
MODEL = HERE / "build/quickstart/model"
PROMPTS_PER_STEP, GROUP_SIZE, MAX_TOKENS = 24, 8, 128
ROLLOUTS = PROMPTS_PER_STEP * GROUP_SIZE
CORES = 2
CACHE = {"page_size": 32, "num_blocks": ROLLOUTS * 6, "max_batch_tokens": 512}
"""Settings of continuous batching in which every rollout fits. By default its cache takes 90 % of
the free memory.
"""
NO_ADVANTAGE = 1e-6
"""Absolute value below which an advantage counts as 0. The mean of equal rewards has rounding
errors.
"""


class Setting(NamedTuple):
    """Options of TRL for a step."""

    processes: int = 1
    """Processes. Each generates and trains its share on its share of the cores; gradients are
    summed.
    """
    passes: int = 1
    """Forward and backward passes of a step, in each process."""
    continuous: bool = False
    """Whether transformers' continuous batching generates."""
    static_cache: bool = False
    keeps_memory: bool = False
    """Whether freed memory is kept for the next tensors, as in streamrl's workers."""

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables of its processes."""
        kept = str(2**30)
        memory = {"MALLOC_TRIM_THRESHOLD_": kept, "MALLOC_MMAP_THRESHOLD_": kept}
        threads = {"OMP_NUM_THREADS": str(CORES // self.processes)}
        return threads | (memory if self.keeps_memory else {})

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `GRPOConfig`."""
        size = ROLLOUTS // self.processes // self.passes
        return {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": self.passes,
            "use_transformers_continuous_batching": self.continuous,
            "transformers_continuous_batching_config": CACHE if self.continuous else None,
            "cache_implementation": "static" if self.static_cache else None,
        }


SETTINGS = {
    "plain": Setting(),
    "memory kept": Setting(keeps_memory=True),
    "memory kept, static cache": Setting(static_cache=True, keeps_memory=True),
    "memory kept, passes of 48": Setting(passes=4, keeps_memory=True),
    "memory kept, continuous batching": Setting(continuous=True, keeps_memory=True),
    "two processes": Setting(2, passes=2, keeps_memory=True),
    "two processes, static cache": Setting(2, passes=2, static_cache=True, keeps_memory=True),
    "two processes, static cache, passes of 24": Setting(
        2, passes=4, static_cache=True, keeps_memory=True
    ),
}
"""Settings of TRL to try. By default a pass has all rollouts, or 48 with two processes."""


def train(
    setting: Setting,
    prompts: Path,
    steps: int,
    rate: float,
    seed: int,
    *,
    skips: bool,
    weights: Path | None,
) -> Any:
    """Train in this process, or as one of several processes, and return the figures of each step.

    The last weights and the tokenizer are written to `weights`.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(CORES // setting.processes)
    records = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    models: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer
    figures: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            learning_rate=rate,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_TOKENS,
            temperature=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="dapo",  # mean over the tokens of the batch
            scale_rewards="group",
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            disable_dropout=True,
            dataloader_pin_memory=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
            **setting.arguments,
        )
        trainer = (_skipping(GRPOTrainer) if skips else GRPOTrainer)(
            model=models.from_pretrained(MODEL, dtype=torch.float32),
            processing_class=tokenizers.from_pretrained(MODEL),
            reward_funcs=_reward(records),
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": each["prompt"], "line": line} for line, each in enumerate(records)]
            ),
            callbacks=[_watch(figures)],
        )
        trainer.train()
        if weights is not None:
            trainer.save_model(str(weights))
    return figures


def _reward(records: list[dict[str, Any]]) -> Any:
    """Return a reward function that uses the scorer of streamrl's run file."""
    from streamrl.executor.verifier.scorers import make_scorer
    from streamrl.runfile.roles_config import RewardConfig

    scorer = make_scorer(RewardConfig(scorer="reasoning-gym"))
    grade = scorer.load()

    def reward(completions: list[str], line: list[int], **_: Any) -> list[float]:
        each = zip(completions, line, strict=True)
        return [grade(records[number])(scorer.read(text, len(text))) for text, number in each]

    return reward


def _watch(figures: list[dict[str, float]]) -> Any:
    """Return a callback that appends the end, the mean reward and the mean output tokens of each step."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if "reward" in (logs or {}):
                figures.append(
                    {
                        "time": time.monotonic(),
                        "reward": float(logs["reward"]),
                        "tokens": float(logs["completions/mean_length"]),
                        "grad_norm": float(logs["grad_norm"]),
                    }
                )

    return Watch()


def _skipping(trainer: Any) -> Any:
    """Return a trainer class that skips rollouts of advantage 0, as streamrl does. Their gradient is 0.

    Sums are still divided by the tokens of the whole batch. With several processes, each computes as
    many rollouts as the process with the most, because TRL gathers figures of each rollout.
    """
    from torch import distributed

    class SkippingTrainer(trainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            advantages = inputs["advantages"]
            is_kept = advantages.abs() > NO_ADVANTAGE
            most = is_kept.sum().clamp(min=1)
            if distributed.is_initialized():
                distributed.all_reduce(most, distributed.ReduceOp.MAX)
            kept = is_kept.int().argsort(descending=True, stable=True)[:most]
            few = {
                name: value[kept] if getattr(value, "shape", ())[:1] == advantages.shape else value
                for name, value in inputs.items()
            }
            return super()._compute_loss(model, few)

    return SkippingTrainer


def main() -> None:
    """Write the figures of the steps to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--setting", choices=SETTINGS, default="plain")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rate", type=float, default=1e-6, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skips", action="store_true", help="skip rollouts of advantage 0")
    parser.add_argument("--prompts", type=Path, required=True, help="records to train on")
    parser.add_argument("--weights", type=Path, help="directory for the last weights")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    figures = train(
        SETTINGS[options.setting],
        options.prompts,
        options.steps,
        options.rate,
        options.seed,
        skips=options.skips,
        weights=options.weights,
    )
    if os.environ.get("RANK", "0") == "0":
        options.out.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
