"""A whole run that a reward model scores, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.engine.trace import read_trace
from streamrl.record.run_directory import read_metrics, read_rollouts
from tests.command_line import streamrl
from tests.tiny_model import save_tiny_model, save_tiny_reward_model
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

SYMBOLS = ["<pad>", "<eos>", *"0123456789+= "]
RUN_FILE = """
[model]
path = "model"
dtype = "float32"
[cluster.pools.local]
gpu = "cpu"
gpus_per_node = 2
[cluster.pools.rewards]
gpu = "cpu"
[rollout]
pool = "local"
replicas = 1
max_running = 8
max_tokens = 8
[trainer]
pool = "local"
[algorithm]
steps = 2
prompts_per_step = 2
group_size = 4
[workload]
prompts = "prompts.jsonl"
max_prompt_tokens = 16
[verifier]
pool = "rewards"
gpus_per_worker = 1
max_rollouts_per_call = 4
[[verifier.reward]]
scorer = "exact"
[[verifier.reward]]
scorer = "reward-model"
model = "judge"
weight = 0.5
[policies]
system = "stream-sync"  # so that the last step's rollouts are verified in it
[execute]
launcher = "in-process"
output = "run"
"""


def test_a_reward_model_scores_beside_other_scorers_and_its_seconds_show(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", SYMBOLS)
    save_tiny_reward_model(tmp_path / "judge", SYMBOLS)
    prompts = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    (tmp_path / "run.toml").write_text(RUN_FILE)
    done = streamrl("execute", tmp_path / "run.toml", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["ledger"]["is_balanced"] and figures["sides"]["verifier"]["busy"]["verify"] > 0
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    for line in read_rollouts(tmp_path / "run"):
        scores = line["rewards"]
        assert line["reward"] == pytest.approx(scores["exact"] + 0.5 * scores["reward-model"])
    steps = read_metrics(tmp_path / "run")
    assert all(step["verify_time"] > 0 and "reward/reward-model" in step for step in steps)
    assert streamrl("compare", tmp_path / "run", "--json").returncode == 0
    (tmp_path / "judge" / "config.json").write_text("{}")
    refused = streamrl("execute", tmp_path / "run.toml", "--set", "execute.output=other")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert (
        "verifier.reward.0.model" in refused.stderr or "verifier.reward.1.model" in refused.stderr
    )
    assert not (tmp_path / "other").exists()
