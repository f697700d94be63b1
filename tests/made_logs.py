"""Logs made for the tests as the logging source of each framework (named in profiles/logs) writes them; none was recorded.

The one line of verl is published (verl-project/verl issue 7412).
"""

from __future__ import annotations

from streamrl.logs.measured_steps import MeasuredStep

VERL_LINE = (
    "(TaskRunner pid=1) step:12 - timing_s/gen:541.19 - timing_s/reward:5e-05 - timing_s/old_log_prob:72.41 - timing_s/ref:72.03 - "
    "timing_s/adv:0.037 - timing_s/update_actor:472.1 - timing_s/update_weights:5.83 - timing_s/step:1163.96"
)
VERL = """INFO: training begins - step by step
(TaskRunner pid=1) step:1 - actor/pg_loss:-0.01 - response_length/mean:np.float64(812.5) - response_length/max:2048 - prompt_length/mean:150.0 - perf/total_num_tokens:61600 - timing_s/gen:20.5 - timing_s/old_log_prob:3.0 - timing_s/update_actor:9.0 - timing_s/update_weights:1.5 - timing_s/step:35.0 - perf/throughput:220.0
(TaskRunner pid=1) step:2 - response_length/mean:900.0 - timing_s/gen:22.0 - timing_s/old_log_prob:3.5 - timing_s/update_actor:9.5 - timing_s/update_weights:1.5 - timing_s/step:37.5
"""
NEMO = """
========================= Step 1/10 =========================
▶ Generating responses for batch of size 64...
📊 Training Results:
  • Loss: 0.0123
  • Avg Reward: 0.2500
  • Mean Generation Length: 795.2500

⏱️  Timing:
  • Total step time: 112.00s
  • generation: 58.00s (51.8%)
  • policy_training: 28.00s (25.0%)
  • policy_and_reference_logprobs: 18.00s (16.1%)
  • policy_logprobs: 9.00s (8.0%)
  • prepare_for_generation/total: 6.00s (5.4%)
  • prepare_for_generation/transfer_and_update_weights: 5.00s (4.5%)
  • reward_calculation: 0.50s (0.4%)

========================= Step 2/10 =========================
  • Mean Generation Length: 811.0000
  • Total step time: 116.00s
  • generation: 56.00s (48.3%)
  • policy_training: 27.00s (23.3%)
  • policy_and_reference_logprobs: 18.00s (15.5%)
  • weight_sync: 8.00s (6.9%)
"""
SLIME = """[2026-08-21 10:00:00] rollout_metrics.py:80 - perf 0: {'perf/rollout_time': 58.0, 'perf/tokens_per_gpu_per_sec': 448.0}
[2026-08-21 10:01:00] rollout_metrics.py:91 - rollout 0: {'rollout/response_len/mean': 812.0, 'rollout/response_len/max': 2048, 'rollout/truncated_ratio': np.float64(0.02)}
[2026-08-21 10:02:00] train_metric_utils.py:210 - perf 0: {'perf/train_wait_time': 60.0, 'perf/log_probs_time': 5.0, 'perf/ref_log_probs_time': 4.0, 'perf/actor_train_time': 30.5, 'perf/update_weights_time': 2.0, 'perf/train_time': 40.0, 'perf/step_time': 100.0}
[2026-08-21 10:02:01] model.py:500 - step 0: {'train/loss': nan, 'train/step': 0}
Timer actor_train end (elapsed: 30.5s)
"""
OPENRLHF = """2026-08-13 INFO ppo_trainer.py:330] Global step 7: {'policy_loss': -0.01, 'response_length': 500.0, 'total_length': 640.0, 'timing/make_experience': 5.0, 'timing/ppo_train': 12.0, 'timing/broadcast': 1.0, 'timing/generation': 30.0, 'timing/step_total': 48.0}
"""
TRL = """{'loss': 0.0, 'grad_norm': 0.1, 'num_tokens': 61600.0, 'completions/mean_length': 230.0, 'completions/max_length': 256.0, 'step_time': 12.5, 'epoch': 0.01}
{'loss': '0.0', 'num_tokens': '123200.0', 'completions/mean_length': '231.0', 'completions/max_length': '256.0', 'step_time': '13.5', 'epoch': '0.02'}
{'train_runtime': 26.2, 'train_loss': 0.0}
"""
PRIME = """12:00:00    INFO Starting orchestrator step 28
Generating rollouts (train): 100%|██████████| 64/64 [00:40<00:00,  1.60it/s]
12:00:40 SUCCESS Step 28 | Time: 41.50s | Reward: 0.3887 | Throughput: 1,040.5 tokens/s | Seq. Length: 650.2 tokens/sample | Async Level: 1 | Max. Off-Policy Level: 0
12:01:20 SUCCESS Step 29 | Time: 39.00s | Reward: 0.4018 | Val. Reward: 0.5 | Throughput: 990.0 tokens/s | Seq. Length: 603.0 tokens/sample | Async Level: 1 | Max. Off-Policy Level: 2
"""
MADE: dict[str, tuple[str, str, list[MeasuredStep]]] = {
    "prime-rl": (
        "prime.log",
        PRIME,
        [
            MeasuredStep(
                step=28, step_time=41.5, tokens_per_second=1040.5, tokens_per_rollout=650.2
            ),
            MeasuredStep(
                step=29, step_time=39.0, tokens_per_second=990.0, tokens_per_rollout=603.0
            ),
        ],
    ),
    "verl": (
        "verl.log",
        VERL,
        [
            MeasuredStep(
                step=1,
                step_time=35.0,
                generation=20.5,
                score=3.0,
                train=9.0,
                sync=1.5,
                output_tokens=812.5,
                longest_output=2048.0,
                prompt_tokens=150.0,
                total_tokens=61600.0,
                tokens_per_gpu_second=220.0,
            ),
            MeasuredStep(
                step=2,
                step_time=37.5,
                generation=22.0,
                score=3.5,
                train=9.5,
                sync=1.5,
                output_tokens=900.0,
            ),
        ],
    ),
    "nemo-rl": (
        "console.log",
        NEMO,
        [
            MeasuredStep(
                step=1,
                step_time=112.0,
                generation=58.0,
                score=18.0,
                train=28.0,
                sync=5.0,
                other=0.5,
                output_tokens=795.25,
            ),
            MeasuredStep(
                step=2,
                step_time=116.0,
                generation=56.0,
                score=18.0,
                train=27.0,
                sync=8.0,
                output_tokens=811.0,
            ),
        ],
    ),
    "slime": (
        "slime.log",
        SLIME,
        [
            MeasuredStep(
                step=0,
                step_time=100.0,
                generation=58.0,
                score=9.0,
                reference=4.0,
                train=30.5,
                sync=2.0,
                output_tokens=812.0,
                longest_output=2048.0,
                outputs_per_gpu_second=448.0,
            )
        ],
    ),
    "openrlhf": (
        "openrlhf.log",
        OPENRLHF,
        [
            MeasuredStep(
                step=7, generation=30.0, score=5.0, train=12.0, sync=1.0, output_tokens=500.0
            )
        ],
    ),
    "trl": (
        "trl.log",
        TRL,
        [
            MeasuredStep(step=1, step_time=12.5, output_tokens=230.0, longest_output=256.0),
            MeasuredStep(step=2, step_time=13.5, output_tokens=231.0, longest_output=256.0),
        ],
    ),
}
"""By format: a file name, its text, and the steps that it says."""
