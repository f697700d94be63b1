"""Whole runs on every engine: every system, and what breaks where an engine has processes of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from streamrl.engine.messages import (
    Generate,
    Lent,
    ReplicaLost,
    TakenBack,
    TrainerLost,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.record.run_directory import read_metrics
from streamrl.runfile.algorithms import ALGORITHMS
from streamrl.runfile.policies_config import SystemName
from tests.command_line import streamrl
from tests.engines import params
from tests.test_end_to_end import RUN_FILE, SYMBOLS
from tests.tiny_model import save_tiny_model
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

FAULTS = "".join(
    f'[[faults]]\nkind = "{kind}"\nstep = {step}\n'
    for step, kind in ((2, "replica-dies"), (3, "trainer-dies-pushing"), (4, "link-drops"))
)
EASY = {"prompt": "1+1="}
SCORER = """
def starts_low(completion, record):
    return float(completion[:1] in "01234")
"""
"""A third of a random model's completions, so that every step has groups to learn from."""


BATCH = ("rollout.replicas=1", "algorithm.prompts_per_step=8", "algorithm.group_size=8")
OPTIONS = [part for setting in BATCH for part in ("--set", setting)]


def execute(directory: Path, backend: str, *settings: str, faults: str = "") -> Trace:
    """Execute a run on an engine, and look at its books."""
    save_tiny_model(directory / "model", SYMBOLS)
    (directory / "prompts.jsonl").write_text(json.dumps(EASY) + "\n")
    (directory / "scorer.py").write_text(SCORER)
    scored = RUN_FILE.replace('scorer = "exact"', 'scorer = "python:scorer.py:starts_low"')
    (directory / "run.toml").write_text(scored + faults)
    own = (f"rollout.backend={backend}", *BATCH, *settings)
    options = [part for setting in own for part in ("--set", setting)]
    done = streamrl("execute", directory / "run.toml", "--json", *options)
    assert done.returncode == 0, done.stderr
    ledger = json.loads(done.stdout)["ledger"]
    assert ledger["is_balanced"] and ledger["checksummed"] >= 2
    trace = read_trace(directory / "run" / "trace.jsonl")
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    return trace


ALL, UNLIKE = get_args(SystemName), ("colocated", "fully-async")
"""Systems, and those that ask most of an engine: to sleep, and to load under what runs. On vLLM `stream-sync` and `stream-async` are
those of the tests below, and `disaggregated` that of `test_end_to_end`."""


@pytest.mark.parametrize(
    ("backend", "system"),
    [
        pytest.param(*engine.values, system, marks=engine.marks)
        for engine in params()
        for system in (ALL if engine.values == ("transformers",) else UNLIKE)
    ],
)
def test_every_system_executes(backend: str, system: str, tmp_path: Path) -> None:
    trace = execute(tmp_path, backend, f"policies.system={system}")
    loaded = [e.event.checksum for e in trace.entries if isinstance(e.event, WeightsLoaded)]
    assert len({*loaded}) >= 2


@pytest.mark.parametrize("backend", params(["vllm"]))
def test_a_trainer_lends_its_gpus_to_a_replica_of_this_engine(backend: str, tmp_path: Path) -> None:
    lending = "lending.until=1.0", "lending.share=1", "algorithm.prompts_per_step=8"
    trace = execute(tmp_path, backend, "policies.system=stream-sync", *lending)
    lent = [e.event for e in trace.entries if isinstance(e.event, Lent)]
    assert lent and any(event.checksum for event in lent)
    there = {e.event.replica for e in trace.entries if isinstance(e.event, TakenBack)}
    sent = [c for e in trace.entries for c in e.commands if isinstance(c, Generate)]
    assert there & {command.replica for command in sent}


TRAINERS = [
    pytest.param("torch", 2, 0, id="torch-2"),
    pytest.param("deepspeed", 1, 1, id="deepspeed-1", marks=pytest.mark.deepspeed),
    pytest.param("deepspeed", 2, 3, id="deepspeed-2", marks=pytest.mark.deepspeed),
    pytest.param("fsdp2", 2, 3, id="fsdp2-2", marks=pytest.mark.fsdp2),
]


def of_trainer(backend: str, num_ranks: int, zero: int) -> tuple[str, ...]:
    keys = (f"backend={backend}", f"data_parallel={num_ranks}", f"zero={zero}")
    return ("cluster.pools.local.gpus_per_node=4", *(f"trainer.{key}" for key in keys))


@pytest.mark.parametrize(
    ("backend", "num_ranks", "zero", "system"),
    [  # what trains several ranks with DeepSpeed as rollouts arrive is below, in every mode
        pytest.param(*trainer.values, system, id=f"{trainer.id}-{system}", marks=trainer.marks)
        for trainer in TRAINERS
        for system in ("stream-async", "colocated")
        if (trainer.id, system)
        not in (("deepspeed-1", "colocated"), ("deepspeed-2", "stream-async"))
    ],
)
def test_every_trainer_trains(
    backend: str, num_ranks: int, zero: int, system: str, tmp_path: Path
) -> None:
    settings = (f"policies.system={system}", *of_trainer(backend, num_ranks, zero))
    trace = execute(tmp_path, "transformers", *settings)
    loaded = [e.event.checksum for e in trace.entries if isinstance(e.event, WeightsLoaded)]
    assert len({*loaded}) >= 2


@pytest.mark.parametrize(
    ("name", "backend", "num_ranks", "zero"),
    [
        *(
            pytest.param(name, "torch", 1, 0, id=f"{name}-torch-1")
            for name in ("raft", "dpo", "ppo")
        ),
        # A critic is a model of its own; of the others DeepSpeed sees a loss, whose gradient `test_ranks` looks at.
        *(
            pytest.param("ppo", *each.values, id=f"ppo-{each.id}", marks=each.marks)
            for each in TRAINERS[2:]
        ),
    ],
)
def test_every_algorithm_trains(
    name: str, backend: str, num_ranks: int, zero: int, tmp_path: Path
) -> None:
    """What is chosen of a group, compared with another, or valued by a critic; streamed, and gone on with."""
    own = ("policies.system=stream-async", f"algorithm.name={name}", "execute.checkpoint_every=1")
    settings = (*own, *of_trainer(backend, num_ranks, zero))
    trace = execute(tmp_path, "transformers", *settings)
    loaded = [e.event.checksum for e in trace.entries if isinstance(e.event, WeightsLoaded)]
    assert len({*loaded}) >= 2
    steps = [line for line in read_metrics(tmp_path / "run") if "step" in line]
    own_figures = [OWN_FIGURES[name] & line.keys() for line in steps]
    if name == "dpo":  # a step without a pair has none
        own_figures = [some for some in own_figures if some]
    assert own_figures and all(some == OWN_FIGURES[name] for some in own_figures)
    more = ("--resume", "--set", f"algorithm.steps={len(steps) + 2}", "--json")
    options = [part for setting in settings for part in ("--set", setting)]
    done = streamrl("execute", tmp_path / "run.toml", *OPTIONS, *options, *more)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ledger"]["is_balanced"]


@pytest.mark.parametrize("name", ALGORITHMS.own)
@pytest.mark.parametrize(
    ("backend", "trainer"),
    [
        pytest.param("vllm", ("torch", 1, 0), id="vllm-torch", marks=pytest.mark.vllm),
        *(
            pytest.param(
                "transformers", each.values, id=f"transformers-{each.id}", marks=each.marks
            )
            for each in TRAINERS[2:]
        ),
    ],
)
def test_every_algorithm_makes_five_steps_on_every_back_end(
    backend: str, trainer: tuple[str, int, int], name: str, tmp_path: Path
) -> None:
    """Such runs on transformers and torch are in the suite, among others in `test_learning`."""
    own = ("policies.system=stream-sync", f"algorithm.name={name}", "algorithm.steps=5")
    execute(tmp_path, backend, *own, *of_trainer(*trainer))
    steps = [line for line in read_metrics(tmp_path / "run") if "step" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert any(line.get("grad_norm", 0.0) > 0 for line in steps)
    assert all(line["staleness_max"] == 0 for line in steps)
    assert all(line.get("logprob_gap", 0.0) < 1e-3 for line in steps)


@pytest.mark.fsdp2
def test_ranks_that_share_the_tokens_of_a_pass_train(tmp_path: Path) -> None:
    own = ("context_parallel=2", "context_exchange=all-gather")
    settings = (*of_trainer("fsdp2", 1, 3), *(f"trainer.{key}" for key in own))
    execute(tmp_path, "transformers", "policies.system=stream-sync", "algorithm.steps=4", *settings)
    steps = [line for line in read_metrics(tmp_path / "run") if "step" in line]
    assert [line["rollouts"] for line in steps] == [64] * 4
    assert all(line["tokens"] == line["output_tokens"] for line in steps)
    assert all(line["logprob_gap"] < 1e-3 for line in steps)


OWN_FIGURES = {
    "raft": {"loss"},
    "dpo": {"preference_accuracy", "preference_margin"},
    "ppo": {"critic_grad_norm", "explained_variance", "value_loss", "value_mean"},
}

MODES = {
    "delta": ("sync.mode=delta", "model.dtype=bfloat16", "sync.anchor_every=3"),
    "lora": ("sync.mode=lora", "sync.lora_rank=4", "algorithm.learning_rate=0.05"),
}


@pytest.mark.parametrize(
    ("mode", "backend", "num_ranks", "zero"),
    [
        ("delta", "torch", 1, 0),
        ("lora", "torch", 2, 0),
        pytest.param("delta", "deepspeed", 2, 3, marks=pytest.mark.deepspeed),
        pytest.param("lora", "deepspeed", 2, 3, marks=pytest.mark.deepspeed),
        pytest.param("delta", "fsdp2", 2, 3, marks=pytest.mark.fsdp2),
        pytest.param("lora", "fsdp2", 2, 3, marks=pytest.mark.fsdp2),
    ],
)
def test_weights_go_every_way(
    mode: str, backend: str, num_ranks: int, zero: int, tmp_path: Path
) -> None:
    settings = ("algorithm.steps=4", "policies.system=stream-async", *MODES[mode])
    own = of_trainer(backend, num_ranks, zero)
    trace = execute(tmp_path, "transformers", *settings, *own)
    pushed = {e.event.version: e.event for e in trace.entries if isinstance(e.event, WeightsPushed)}
    loaded = [e.event for e in trace.entries if isinstance(e.event, WeightsLoaded)]
    assert len({event.checksum for event in loaded}) >= 2
    assert all(event.checksum == pushed[event.version].checksum for event in loaded)
    assert any(event.decode_time > 0 for event in pushed.values())
    if mode == "lora":
        whole = (tmp_path / "model" / "model.safetensors").stat().st_size
        assert all(event.num_bytes < whole for event in pushed.values())


@pytest.mark.parametrize(("backend", "num_ranks", "zero"), [TRAINERS[0], *TRAINERS[2:]])
def test_a_rank_that_dies_costs_no_rollout(
    backend: str, num_ranks: int, zero: int, tmp_path: Path
) -> None:
    settings = ("policies.system=stream-async", "algorithm.steps=5", "execute.checkpoint_every=1")
    own = of_trainer(backend, num_ranks, zero)
    trace = execute(tmp_path, "transformers", *settings, *own, faults=FAULTS)
    assert TrainerLost in [type(entry.event) for entry in trace.entries]


@pytest.mark.vllm
def test_adapters_reach_vllm_beside_the_weights_and_a_resumed_run_goes_on_with_them(
    tmp_path: Path,
) -> None:
    settings = (
        *MODES["lora"],
        "policies.system=stream-sync",
        "execute.checkpoint_every=2",
        "algorithm.steps=4",
    )
    trace = execute(tmp_path, "vllm", *settings)
    pushed = {e.event.version: e.event for e in trace.entries if isinstance(e.event, WeightsPushed)}
    loaded = [e.event for e in trace.entries if isinstance(e.event, WeightsLoaded)]
    assert len({event.checksum for event in loaded}) >= 2
    assert all(event.checksum == pushed[event.version].checksum for event in loaded)
    options = [
        part for each in (*BATCH, *settings, "rollout.backend=vllm") for part in ("--set", each)
    ]
    more = ("--set", "algorithm.steps=6", "--resume", "--json")
    done = streamrl("execute", tmp_path / "run.toml", *options, *more)
    assert done.returncode == 0, done.stderr
    steps = [line for line in read_metrics(tmp_path / "run") if "step" in line]
    assert len(steps) == 6
    gaps = {line["step"]: line["logprob_gap"] for line in steps if "logprob_gap" in line}
    assert all(gap < 1e-3 for gap in gaps.values())
    assert max(gaps) >= 5, "no step after the restart had a group to learn from"


@pytest.mark.vllm
def test_a_replica_and_a_trainer_that_die_and_a_lost_push_cost_no_rollout(tmp_path: Path) -> None:
    settings = ("policies.system=stream-async", "algorithm.steps=6", "execute.checkpoint_every=1")
    trace = execute(tmp_path, "vllm", *settings, faults=FAULTS)
    lost = [type(entry.event) for entry in trace.entries]
    assert ReplicaLost in lost and TrainerLost in lost
