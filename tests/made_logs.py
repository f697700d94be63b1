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
SKYRL = """2026-08-21 10:00:00.000 | INFO     | skyrl.train.utils.utils:__exit__:45 - Finished: 'step', time cost: 97.43s
(skyrl_entrypoint pid=812) 2026-08-21 10:00:00.001 | INFO     | skyrl.train.utils.tracking:log:204 - Step 4:
(skyrl_entrypoint pid=812) {'generate/avg_num_tokens': '812.5000',
(skyrl_entrypoint pid=812)  'generate/batch_num_seq': 64,
(skyrl_entrypoint pid=812)  'generate/max_num_tokens': 2048,
(skyrl_entrypoint pid=812)  'policy/final_loss': '-0.0100',
(skyrl_entrypoint pid=812)  'timing/convert_to_training_input': '0.5000',
(skyrl_entrypoint pid=812)  'timing/fwd_logprobs_values_reward': '11.0000',
(skyrl_entrypoint pid=812)  'timing/generate': '51.2500',
(skyrl_entrypoint pid=812)  'timing/policy_train': '30.0000',
(skyrl_entrypoint pid=812)  'timing/step': '97.4300',
(skyrl_entrypoint pid=812)  'timing/sync_weights': '4.0000',
(skyrl_entrypoint pid=812)  'timing/train_critic_and_policy': '30.2500',
(skyrl_entrypoint pid=812)  'trainer/global_step': 4,
(skyrl_entrypoint pid=812)  'trainer/tokens_per_second_per_gpu': '2100.0000'}
"""
AREAL = """(AReaL) 20260521-10:00:00.000 StatsLogger INFO: Epoch 1/10 Step 3/29 Train step 3/290 done.
(AReaL) 20260521-10:00:00.001 StatsLogger INFO: Stats (1/1):
(AReaL) 20260521-10:00:00.002 StatsLogger INFO:
╒══════════════════════════╤════════════╤═════════════════════════════╤════════════╕
│ ppo_actor/n_seqs         │ 6.4000e+01 │ timeperf/rollout            │ 4.1500e+01 │
├──────────────────────────┼────────────┼─────────────────────────────┼────────────┤
│ ppo_actor/seq_len/avg    │ 9.6250e+02 │ timeperf/recompute_logp     │ 6.0000e+00 │
├──────────────────────────┼────────────┼─────────────────────────────┼────────────┤
│ ppo_actor/prompt_len/avg │ 1.5000e+02 │ timeperf/compute_advantage  │ 5.0000e-01 │
├──────────────────────────┼────────────┼─────────────────────────────┼────────────┤
│ ppo_actor/grad_norm      │ 1.2000e-01 │ timeperf/train_step         │ 2.0000e+01 │
├──────────────────────────┼────────────┼─────────────────────────────┼────────────┤
│ timeperf/save            │ 3.0000e+01 │ timeperf/update_weights     │ 2.0000e+00 │
╘══════════════════════════╧════════════╧═════════════════════════════╧════════════╛
"""
ROLL_NEXT = (
    '{"time/step_total": 98.5, "time/step_stop_server": 0.0, "time/step_model_update": 4.5, "time/step_generate": 52.0, '
    '"time/ref_log_probs_values": 5.0, "time/old_log_probs": 6.5, "time/step_train": 31.0, "system/global_step": 6, '
    '"system/batch_size": 64, "token/prompt_length/mean": 150.0, "token/response_length/mean": 830.0}'
)
ROLL = f"""[2026-08-19 10:00:00] [rlvr_pipeline.py (489)] [INFO] [DRIVER 0 / 1][PID 77] pipeline step 5 start...
[2026-08-19 10:01:40] [tracking.py (158)] [INFO] [DRIVER 0 / 1][PID 77] metrics_tag: {{"step": 5, "metrics": {{"time/step_total": 0, "time/step_model_update": 4.0, "time/step_generate": 51.0, "time/ref_log_probs_values": 5.0, "time/old_log_probs": 6.0, "math_rule/time/compute_advantage": 0.25, "time/step_train": 30.0, "system/tps": 0.0, "system/global_step": 5, "system/batch_size": 64, "token/prompt_length/mean": 150.0, "token/response_length/mean": 812.5, "token/response_length/max": 2048.0, "token/total_length/mean": 962.5, "critic/kl@mean": NaN}}}}
[2026-08-19 10:01:41] [rlvr_pipeline.py (835)] [INFO] [DRIVER 0 / 1][PID 77] [{{"prompt": "{{ 1 + 1", "response": "2"}}]
[2026-08-19 10:01:42] [rlvr_pipeline.py (489)] [INFO] [DRIVER 0 / 1][PID 77] pipeline step 6 start...
[2026-08-19 10:03:20] [tracking.py (158)] [INFO] [DRIVER 0 / 1][PID 77] metrics_tag: {{"step": 6, "metrics": {ROLL_NEXT}}}
[2026-08-19 10:03:20] [rlvr_pipeline.py (836)] [INFO] [DRIVER 0 / 1][PID 77] {ROLL_NEXT}
"""
TORCHFORGE = """INFO 2025-11-15 10:00:00 === [global_reduce] - METRICS STEP 3 ===
  buffer/add/count_episodes_added: 786.0
  episode/avg_prompt_tokens: 144.5
  episode/avg_response_tokens: 947.0
  episode/max_response_tokens: 2048.0
  main_perf/continuous_rollouts/total_duration_avg_s: 154.25
  main_perf/continuous_training/drop_weights/duration_avg_s: 5.75
  main_perf/continuous_training/push_weights/duration_avg_s: 14.25
  main_perf/continuous_training/push_weights/duration_max_s: 14.25
  main_perf/continuous_training/total_duration_avg_s: 224.75
  main_perf/continuous_training/train_step/duration_avg_s: 7.75
  main_perf/continuous_training/update_weights/duration_avg_s: 60.0
  main_perf/continuous_training/waiting_for_buffer/duration_avg_s: 137.0
  rl_trainer_perf/step/forward_backward/duration_avg_s: 7.0
  rl_trainer_perf/step/optimizer_step/duration_avg_s: 0.5
==============================
"""
MADE: dict[str, tuple[str, str, list[MeasuredStep]]] = {
    "skyrl": (
        "skyrl.log",
        SKYRL,
        [
            MeasuredStep(
                step=4,
                step_time=97.43,
                generation=51.25,
                score=11.0,
                train=30.25,
                sync=4.0,
                other=0.5,
                rollouts=64.0,
                output_tokens=812.5,
                longest_output=2048.0,
            )
        ],
    ),
    "areal": (
        "areal.log",
        AREAL,
        [
            MeasuredStep(
                step=3,
                step_time=70.0,
                generation=41.5,
                score=6.0,
                train=20.0,
                sync=2.0,
                other=0.5,
                rollouts=64.0,
                output_tokens=812.5,
                prompt_tokens=150.0,
                tokens_per_rollout=962.5,
            )
        ],
    ),
    "roll": (
        "roll.log",
        ROLL,
        [
            MeasuredStep(
                step=5,
                step_time=98.5,
                generation=51.0,
                score=11.0,
                reference=5.0,
                train=30.0,
                sync=4.0,
                rollouts=64.0,
                output_tokens=812.5,
                longest_output=2048.0,
                prompt_tokens=150.0,
                tokens_per_rollout=962.5,
            ),
            MeasuredStep(
                step=6,
                generation=52.0,
                score=11.5,
                reference=5.0,
                train=31.0,
                sync=4.5,
                rollouts=64.0,
                output_tokens=830.0,
                prompt_tokens=150.0,
            ),
        ],
    ),
    "torchforge": (
        "forge.log",
        TORCHFORGE,
        [
            MeasuredStep(
                step=3,
                step_time=224.75,
                wait=137.0,
                train=7.5,
                sync=74.25,
                other=5.75,
                output_tokens=947.0,
                longest_output=2048.0,
                prompt_tokens=144.5,
            )
        ],
    ),
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
