"""`streamrl execute` against TRL's GRPOTrainer on one machine: seconds of a training step, and reward.

    make bench-trl

Both train the quickstart's model on its prompts: 24 prompts a step with 8 rollouts each, at most 128 tokens, AdamW, the
PPO clip, a mean over tokens, rewards of one scorer, float32, the same number of CPU threads in all. Both run under the
interpreter of this script, so on the same torch and transformers. Every setting of `TRL` is tried first, a round each;
the fastest is what streamrl is compared with. TRL computes rollouts whose advantage is 0, as their gradient is; streamrl
leaves them out. `SkippingTrainer` lets TRL leave them out too, which is the comparison like for like.

Rounds are interleaved. A round is a process of its own: `--steps` steps at a learning rate at which lengths stay what
they are, the first two left out. The last comparison is of rewards, at the quickstart's learning rate. Prints a table
and one JSON object per figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
MODEL = HERE / "build/quickstart/model"
PROMPTS = HERE / "build/quickstart/prompts.jsonl"
PROMPTS_PER_STEP, GROUP_SIZE, MAX_TOKENS, THREADS = 24, 8, 128, 2
ROLLOUTS = PROMPTS_PER_STEP * GROUP_SIZE
STILL, LEARNING = 1e-6, 4e-4
"""Learning rates: lengths stay as they are; the quickstart's."""
LAST = 5
"""Steps that a reward is the mean of."""
WARM_UP = 2
"""Steps that are not counted."""
TRL: dict[str, dict[str, Any]] = {
    "generate, one pass": {"per_device_train_batch_size": ROLLOUTS},
    "generate, passes of 48": {"per_device_train_batch_size": 48},
    "continuous batching, one pass": {
        "per_device_train_batch_size": ROLLOUTS,
        "use_transformers_continuous_batching": True,
    },
    "continuous batching, passes of 48": {
        "per_device_train_batch_size": 48,
        "use_transformers_continuous_batching": True,
    },
}
"""Settings of TRL that are tried."""
SYSTEMS = {"sync": "stream-sync", "async": "stream-async"}
Figures = list[dict[str, float]]
"""Of each step: when it ended, mean reward, mean output tokens."""


def main() -> None:
    """Find TRL's fastest setting, then compare."""
    options = _read_arguments()
    if options.child:
        setting, steps, rate, skips, seed = options.child
        figures = train_with_trl(
            setting, int(steps), float(rate), skips=skips == "skip", seed=int(seed)
        )
        print(json.dumps(figures))
        return
    if not MODEL.exists():
        command = [sys.executable, "examples/make_quickstart.py", "--out", "build/quickstart"]
        subprocess.run(command, cwd=HERE, check=True)
    found = {name: seconds_of(run_trl(name, options.steps, STILL, True)) for name in TRL}
    fastest = min(found, key=lambda name: found[name])
    for name, seconds in found.items():
        report(f"TRL, {name}: seconds of a step", [seconds])
    print(f"TRL at its fastest: {fastest}", flush=True)
    entrants: dict[str, Callable[[], Figures]] = {
        "TRL": lambda: run_trl(fastest, options.steps, STILL, False),
        "TRL that skips": lambda: run_trl(fastest, options.steps, STILL, True),
        **{
            name: partial(run_streamrl, system, options.steps, STILL)
            for name, system in SYSTEMS.items()
        },
    }
    rounds = [{name: run() for name, run in entrants.items()} for _ in range(options.rounds)]
    seconds = {name: [seconds_of(each[name]) for each in rounds] for name in entrants}
    for name in entrants:
        tokens = statistics.mean(line["tokens"] for each in rounds for line in each[name])
        report(f"{name}: seconds of a step", seconds[name], tokens=round(tokens, 1))
    for system in SYSTEMS:
        for rival in ("TRL", "TRL that skips"):
            ratios = [
                theirs / ours for theirs, ours in zip(seconds[rival], seconds[system], strict=True)
            ]
            report(f"{system}, times as fast as {rival}", ratios)
    learners: dict[str, Callable[[int], Figures]] = {
        "TRL": lambda seed: run_trl(fastest, options.learning_steps, LEARNING, False, seed),
        **{name: partial(_learn, system, options) for name, system in SYSTEMS.items()},
    }
    seeds = range(options.seeds)
    rewards = [{name: last_reward(run(seed)) for name, run in learners.items()} for seed in seeds]
    for name in learners:
        what = f"{name}: reward of the last {LAST} of {options.learning_steps} steps"
        report(what, [each[name] for each in rewards])


def _learn(system: str, options: argparse.Namespace, seed: int) -> Figures:
    return run_streamrl(system, options.learning_steps, LEARNING, seed)


def last_reward(figures: Figures) -> float:
    """Return the mean reward of the last steps."""
    return statistics.mean(line["reward"] for line in figures[-LAST:])


def seconds_of(figures: Figures) -> float:
    """Return the seconds of a step, beyond the first ones."""
    times = [line["time"] for line in figures]
    return (times[-1] - times[WARM_UP - 1]) / (len(times) - WARM_UP)


def run_trl(setting: str, steps: int, rate: float, skips: bool, seed: int = 0) -> Figures:
    """Train in a process of its own."""
    child = [setting, str(steps), str(rate), "skip" if skips else "all", str(seed)]
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *child]
    done = subprocess.run(
        command, cwd=HERE, env=environment(), check=True, capture_output=True, text=True
    )
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def run_streamrl(system: str, steps: int, rate: float, seed: int = 0) -> Figures:
    """Execute the quickstart's run file under a system."""
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "seed": seed,
            "policies.system": system,
            "algorithm.steps": steps,
            "algorithm.learning_rate": rate,
            "execute.output": f"{folder}/run",
            "execute.checkpoint_every": steps,
        }
        words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        run_file = str(HERE / "examples/quickstart.toml")
        command = ["-c", "from streamrl.cli import main; main()", "execute", run_file, *words]
        subprocess.run([sys.executable, *command], cwd=HERE, check=True, capture_output=True)
        text = Path(folder, "run/metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
    return [
        {"time": line["time"], "reward": line["reward"], "tokens": line["length_mean"]}
        for line in lines
    ]


def environment() -> Mapping[str, str]:
    """Return that of a process of TRL's, which uses every thread that streamrl's roles share."""
    return {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": str(THREADS)}


def train_with_trl(setting: str, steps: int, rate: float, *, skips: bool, seed: int) -> Figures:
    """Train with TRL's GRPOTrainer in this process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from executor.verifier.scorers import SCORERS

    torch.set_num_threads(THREADS)
    scorer = SCORERS["reasoning-gym"]
    grade = scorer.load()
    records = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    figures: Figures = []

    def reward(completions: list[str], line: list[int], **_: Any) -> list[float]:
        each = zip(completions, line, strict=True)
        return [grade(records[number])(scorer.read(text)) for text, number in each]

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
                    }
                )

    class SkippingTrainer(GRPOTrainer):  # type: ignore[misc, valid-type]
        """Leaves out rollouts of advantage 0, as streamrl does: their gradient is 0, and sums are divided as before."""

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            advantages = inputs["advantages"]
            kept = (advantages != 0).nonzero()[:, 0]
            if not len(kept):
                kept = torch.zeros(1, dtype=torch.long)
            few = {
                key: value[kept]
                if isinstance(value, torch.Tensor) and value.dim() and len(value) == len(advantages)
                else value
                for key, value in inputs.items()
            }
            return super()._compute_loss(model, few)

    size = TRL[setting]["per_device_train_batch_size"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            learning_rate=rate,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            gradient_accumulation_steps=ROLLOUTS // size,
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_TOKENS,
            temperature=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="dapo",  # the mean over the tokens of the batch
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
            **TRL[setting],
        )
        models: Any = AutoModelForCausalLM
        tokenizers: Any = AutoTokenizer
        trainer = (SkippingTrainer if skips else GRPOTrainer)(
            model=models.from_pretrained(MODEL, dtype=torch.float32),
            processing_class=tokenizers.from_pretrained(MODEL),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": each["prompt"], "line": line} for line, each in enumerate(records)]
            ),
            callbacks=[Watch()],
        )
        trainer.train()
    return figures


def report(name: str, values: list[float], **facts: float) -> None:
    """Print a figure: the median of the rounds, and its least and most."""
    found = {"value": round(statistics.median(values), 3)}
    if len(values) > 1:
        found |= {"least": round(min(values), 3), "most": round(max(values), 3)}
    print(json.dumps({"name": name, **found, **facts}), flush=True)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of every entrant")
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--learning-steps", type=int, default=20, help="of the last comparison")
    parser.add_argument("--seeds", type=int, default=3, help="of the last comparison")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
