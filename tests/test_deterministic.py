"""Deterministic runs: the same tokens and the same weights bit by bit, straight on or resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamrl.engine.messages import Event, Stepped
from streamrl.engine.state import State
from streamrl.engine.trace import read_trace
from streamrl.executor.execute import execute as execute_for_real
from streamrl.executor.pretrained import load_pretrained
from streamrl.record.restarts import ledger_of_run
from streamrl.record.run_directory import read_metrics, read_rollouts
from streamrl.runfile.files import load_run
from streamrl.targets.execute_limits import check_back_ends
from tests.command_line import streamrl
from tests.test_resume import DeathError
from tests.tiny_model import save_tiny_model

SYMBOLS = ["<pad>", "<eos>", *"123="]
"""So few that a random model often finds an answer, and has something to learn from."""
RUN_FILE = """
[model]
path = "model"
dtype = "float32"
[cluster.pools.local]
gpu = "cpu"
gpus_per_node = 3
[rollout]
pool = "local"
replicas = 2
backend = "static"
max_running = 1
max_tokens = 8
[trainer]
pool = "local"
micro_batch = 3
[algorithm]
steps = 5
prompts_per_step = 4
group_size = 8
learning_rate = 1e-3
[workload]
prompts = "prompts.jsonl"
max_prompt_tokens = 16
[verifier]
scorer = "exact"
[policies]
system = "stream-sync"
[execute]
deterministic = true
checkpoint_every = 2
"""
TORCH_ALIGNMENT = 64  # bytes, of what torch allocates on a CPU
BROADCAST = "sync.wire=broadcast"
"""Weights go from process to process instead of through shared memory."""
IN_PROCESS = ("--set", "execute.launcher=in-process")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random model, its tokenizer, prompts and a run file."""
    path = tmp_path_factory.mktemp("project")
    save_tiny_model(path / "model", SYMBOLS)
    prompts = [
        {"prompt": f"{n}" * length + "=", "answer": str(n)} for n in (1, 2, 3) for length in (1, 4)
    ]
    (path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    (path / "run.toml").write_text(RUN_FILE)
    return path


def execute(project: Path, name: str, *words: str) -> Path:
    """Execute the run to its end in a directory of its own, and return that."""
    output = project / name
    arguments = ("--set", f"execute.output={output}", *words)
    done = streamrl("execute", project / "run.toml", *arguments)
    assert done.returncode == 0, done.stderr
    return output


def die_in_third_step(project: Path, name: str) -> Path:
    """Execute the run in processes until it has made three versions, and end it at once, as a kill does."""
    output = project / name

    def watch(event: Event, state: State, now: float) -> None:
        if isinstance(event, Stepped) and event.version == 3:
            raise DeathError

    with pytest.raises(DeathError):
        run = load_run(project / "run.toml", (f"execute.output={output}", BROADCAST))
        execute_for_real(run, watch=watch)
    return output


def what_it_made(output: Path) -> dict[str, Any]:
    """Return the tokens that a run trained on, with all figures of its steps, and the bits of its last weights."""
    figures = [
        {key: value for key, value in step.items() if not key.endswith("time")}
        for step in read_metrics(output)
    ]
    rollouts = {
        line["rollout"]: (line["text"], line["num_tokens"], line["versions"], line["reward"])
        for line in read_rollouts(output)
    }
    (weights,) = sorted((output / "checkpoints").glob("v*"))[-1].glob("*.safetensors")
    tensors = {name: tensor.numpy().tobytes() for name, tensor in load_file(weights).items()}
    return {"steps": figures, "rollouts": rollouts, "weights": tensors}


@pytest.fixture(scope="module")
def straight(project: Path) -> dict[str, Any]:
    """What a run made that nobody disturbed."""
    return what_it_made(execute(project, "straight", *IN_PROCESS))


def test_two_runs_make_the_same_tokens_and_weights(project: Path, straight: dict[str, Any]) -> None:
    others = ("--set", "rollout.replicas=1", "--set", "trainer.micro_batch=5")
    others = (*others, "--set", "policies.system=disaggregated", "--set", BROADCAST)
    again = what_it_made(execute(project, "again", *IN_PROCESS, *others))
    assert len(straight["rollouts"]) == 5 * 32 and len(straight["steps"]) == 5
    assert sum(step["grad_norm"] > 0 for step in straight["steps"]) >= 3
    assert again == straight
    another = ("--set", "seed=1", "--set", "algorithm.steps=1")
    other = what_it_made(execute(project, "other", *IN_PROCESS, *another))["rollouts"]
    assert len(other) == 32 and other != {each: straight["rollouts"][each] for each in other}


def test_a_run_that_died_and_was_resumed_makes_what_a_straight_one_makes(
    project: Path, straight: dict[str, Any]
) -> None:
    output = die_in_third_step(project, "died")
    execute(project, "died", *IN_PROCESS, "--set", BROADCAST, "--resume")
    assert what_it_made(output) == straight
    balance = ledger_of_run(read_trace(output / "trace.jsonl"), output)
    assert balance.is_balanced and balance.legs == 2 and balance.trainers[0].trained == 5 * 32


def test_passes_that_come_before_training_are_the_same_too(project: Path) -> None:
    changes = ("algorithm.kl_coefficient=0.1", "algorithm.correction=decoupled")
    words = [word for change in (*changes, "algorithm.steps=3") for word in ("--set", change)]
    one, other = (
        what_it_made(
            execute(
                project,
                f"scored-{size}",
                *IN_PROCESS,
                *words,
                "--set",
                f"trainer.micro_batch={size}",
            )
        )
        for size in (3, 5)
    )
    assert one == other


def test_weights_lie_in_memory_as_torch_puts_them_not_as_in_their_file(project: Path) -> None:
    model = load_pretrained(str(project / "model"), is_aligned=True, dtype=torch.float32)
    assert {parameter.data_ptr() % TORCH_ALIGNMENT for parameter in model.parameters()} == {0}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("policies.system=stream-async", "policies.system must be one that .*, got 'stream-async'"),
        ("policies.max_staleness=1", "policies.max_staleness must be one that .*, got 1"),
        ("policies.sync_every=2", "policies.sync_every must be 1 .*, got 2"),
        ("policies.consumption=greedy", "policies.consumption must be 'strict-fifo' .* 'greedy'"),
        ("rollout.backend=transformers", "rollout.backend must be 'static' .*'transformers'"),
        ("rollout.max_running=4", "rollout.max_running must be 1 .*, got 4"),
        ("execute.device=cuda", "execute.device must be 'cpu' .*, got 'cuda'"),
        ("execute.threads=2", "execute.threads must be 1 .*, got 2"),
    ],
)
def test_what_cannot_be_deterministic_is_refused_in_a_line(
    project: Path, change: str, told: str
) -> None:
    output = project / "refused"
    done = streamrl(
        "execute", project / "run.toml", "--set", f"execute.output={output}", "--set", change
    )
    assert done.returncode == 2 and re.search(told, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1 and not output.exists()
    run = load_run(project / "run.toml", ("execute.deterministic=false", change))
    if "cuda" not in change:
        check_back_ends(run)
