"""Several trainers on one stream, executed: what each leaves, and what a loss, a resume or a damaged disk does to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamrl.engine.messages import Event, RunStarted, Step, Stepped, TrainerLost
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.state import State
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.engine.trainer_side import DONE_BEFORE, LEADER, ROLLED_BACK
from streamrl.executor.checkpoints import Checkpoints
from streamrl.executor.pretrained import load_pretrained
from streamrl.executor.record import RunDirectory
from streamrl.executor.subscribers.secondary_records import SecondaryRecords
from streamrl.executor.world import RealWorld
from streamrl.record.ledger import MISSED
from streamrl.record.restarts import ledger_of_run
from streamrl.record.rollout_flow import read_flow
from streamrl.record.run_directory import read_metrics, secondary_trainer_directory
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from tests.command_line import streamrl
from tests.scripted import make_world
from tests.test_deterministic import IN_PROCESS, project, what_it_made
from tests.test_deterministic import execute as execute_alone
from tests.test_execute import execute, real_run
from tests.test_resume import die_after_step, digests

QUICK = {
    "name": "quick one",
    "pool": "aside",
    "algorithm": {"name": "rloo", "prompts_per_step": 1},
}
SLOW = {
    "name": "slow",
    "pool": "aside",
    "algorithm": {"name": "reinforce++", "prompts_per_step": 4},
}
THREE: dict[str, Any] = {
    "cluster.pools.aside": {"gpu": "h20"},
    "followers": [QUICK, SLOW],
    "execute.checkpoint_every": 2,
}
__all__ = ["project"]  # a fixture
DIRECTORIES = "1-quick-one", "2-slow"


def run_of(directory: Path, **changes: Any) -> Run:
    return real_run(directory, **{**THREE, "algorithm__steps": 8, **changes})


def groups_of(trace: Trace, trainer: int) -> list[int]:
    """Return the groups of a trainer's steps, in order."""
    commands = (command for entry in trace.entries for command in entry.commands)
    steps = (c for c in commands if isinstance(c, Step) and c.trainer == trainer)
    return [group for step in steps for group in step.groups]


# What each leaves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_every_trainer_learns_from_one_stream_and_leaves_its_own_record(
    tmp_path: Path, system: str
) -> None:
    run = run_of(tmp_path, policies__system=system)
    worlds: list[RealWorld] = []

    async def go() -> Trace:
        worlds.append(make_world(run, {"slowest": 0.01}))
        return await worlds[0].run()

    trace = asyncio.run(asyncio.wait_for(go(), timeout=60))
    assert replay(trace) is None
    balance = ledger_of_run(trace, tmp_path / "run")
    assert balance.is_balanced, balance.faults
    leader, quick, slow = balance.trainers
    assert leader.trained == 8 * 3 * run.algorithm.group_size
    assert quick.trained > 0 and slow.trained > 0
    assert not worlds[0]._buffer.rollouts.keys() - worlds[0].engine.state.rollouts.keys()
    for number, name in enumerate(DIRECTORIES, start=1):
        directory = tmp_path / "run" / "followers" / name
        made = [e.event.version for e in trace.entries if is_step_of(e.event, number)]
        assert made and [line["step"] for line in read_metrics(directory)] == made
        newest = Checkpoints(directory / "checkpoints").newest_whole()
        assert newest is not None and newest.version == made[-1]
    sizes = {trainer: Counter(groups_of(trace, trainer)) for trainer in range(3)}
    assert all(count == 1 for found in sizes.values() for count in found.values())
    assert set(sizes[1]) & set(sizes[LEADER])


def is_step_of(event: Event, trainer: int) -> bool:
    return isinstance(event, Stepped) and event.trainer == trainer


def test_metrics_say_how_far_each_trainers_rollouts_are_behind_the_leader(tmp_path: Path) -> None:
    ahead = {"policies__consumption": "greedy", "policies__max_staleness": 4}
    run = run_of(tmp_path, policies__system="fully-async", algorithm__steps=12, **ahead)
    trace = execute(run, slowest=0.01)
    directories = [tmp_path / "run", *(tmp_path / "run/followers" / name for name in DIRECTORIES)]
    for directory, flow in zip(directories, read_flow(trace).trainers, strict=True):
        of_steps = [flow.made.staleness(n, n + 1) for n in range(len(flow.made))]
        found = [(sum(n * k for n, k in s.items()) / s.total(), max(s)) for s in of_steps]
        lines = read_metrics(directory)
        assert [(line["staleness_mean"], line["staleness_max"]) for line in lines] == found
        assert any(most for _, most in found)


def test_rollouts_stay_until_the_last_trainer_is_done_with_them(tmp_path: Path) -> None:
    """The leader's step closes no group that a follower has still to train on: its `Train` would find nothing."""
    follower = {**SLOW, "algorithm": {"name": "reinforce++", "prompts_per_step": 6}, "backlog": 4}
    run = run_of(tmp_path, followers=[follower], policies__system="stream-sync")
    trace = execute(run, slowest=0.01)
    behind = set(groups_of(trace, 1))
    stepped: dict[int, float] = {}
    for entry in trace.entries:
        for command in entry.commands:
            if isinstance(command, Step) and command.trainer == LEADER:
                stepped.update(dict.fromkeys(command.groups, entry.time))
    later = [
        entry.time
        for entry in trace.entries
        for command in entry.commands
        if isinstance(command, Step) and command.trainer == 1
        if any(stepped.get(group, entry.time) < entry.time for group in command.groups)
    ]
    assert behind and later
    assert ledger_of_run(trace, tmp_path / "run").is_balanced


# Losses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("system", ["stream-async", "colocated"])
def test_a_follower_that_dies_costs_itself_alone(tmp_path: Path, system: str, seed: int) -> None:
    run = run_of(tmp_path, seed=seed, policies__system=system)
    moments = sorted(random.Random(seed).sample(range(20, 150), 2))

    async def go() -> Trace:
        seen = 0

        def watch(event: Event, state: State, now: float) -> None:
            nonlocal seen
            seen += 1
            quick = state.trainers[1]
            if moments and seen >= moments[0] and quick.is_ready and quick.command is not None:
                moments.pop(0)
                world._trainers.kill(1, "was killed by a test")

        world: RealWorld = make_world(run, {"slowest": 0.01}, watch=watch)
        return await world.run()

    trace = asyncio.run(asyncio.wait_for(go(), timeout=60))
    lost = [entry.event for entry in trace.entries if isinstance(entry.event, TrainerLost)]
    assert {event.trainer for event in lost} == {1}
    balance = ledger_of_run(trace, tmp_path / "run")
    assert balance.is_balanced, balance.faults
    leader, _, slow = balance.trainers
    assert leader.trained == 8 * 3 * run.algorithm.group_size
    assert not leader.dropped.get(ROLLED_BACK) and not slow.dropped.get(ROLLED_BACK)
    assert replay(trace) is None
    metrics = tmp_path / "run" / "followers" / DIRECTORIES[0] / "metrics.jsonl"
    marks = [line for line in map(json.loads, metrics.open()) if "rolled_back_to" in line]
    assert len(marks) == len(lost)
    assert not any("rolled_back_to" in line for line in (tmp_path / "run/metrics.jsonl").open())


# Resuming -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("system", ["stream-sync", "fully-async", "colocated"])
def test_every_trainer_goes_on_from_its_own_checkpoint_and_the_books_balance(
    tmp_path: Path, system: str, seed: int
) -> None:
    greedy = {"policies__consumption": "greedy", "policies__max_staleness": 4}
    changes = greedy if system == "fully-async" else {}
    run = run_of(tmp_path, policies__system=system, seed=seed, algorithm__steps=12, **changes)
    die_after_step(run, 3 + seed % 2)
    die_after_step(run, 7 + seed % 3, resume=True)
    trace = execute(run, resume=True, slowest=0.01)
    balance = ledger_of_run(trace, tmp_path / "run")
    assert balance.is_balanced, balance.faults
    assert balance.trainers[LEADER].trained == 12 * 3 * run.algorithm.group_size
    begun = trace.entries[0].event
    assert isinstance(begun, RunStarted) and 1 in {saved.trainer for saved in begun.followers}
    for number, name in enumerate(DIRECTORIES, start=1):
        steps = [line["step"] for line in read_metrics(tmp_path / "run" / "followers" / name)]
        assert steps == list(range(1, len(steps) + 1))
        book = balance.trainers[number]
        per_step = run.as_seen_by(number).algorithm.prompts_per_step * run.algorithm.group_size
        assert book.trained == len(steps) * per_step
        assert DONE_BEFORE not in book.dropped


def test_what_a_followers_checkpoint_lacks_of_the_leaders_is_missed_and_counted(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path, policies__system="stream-sync")
    die_after_step(run, 5)
    for checkpoint in (tmp_path / "run/followers" / DIRECTORIES[0] / "checkpoints").iterdir():
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    trace = execute(run, resume=True, slowest=0.01)
    balance = ledger_of_run(trace, tmp_path / "run")
    assert balance.is_balanced, balance.faults
    begun = trace.entries[0].event
    assert isinstance(begun, RunStarted) and begun.version >= 2
    missed = begun.version * 3 * run.algorithm.group_size
    assert balance.trainers[1].dropped[MISSED] == missed
    steps = [line["step"] for line in read_metrics(tmp_path / "run" / "followers" / DIRECTORIES[0])]
    assert steps == list(range(1, len(steps) + 1))


def test_a_run_is_not_gone_on_with_by_other_trainers(tmp_path: Path) -> None:
    die_after_step(run_of(tmp_path), 3)
    renamed, third = {**SLOW, "name": "slower"}, {**SLOW, "name": "third"}
    for followers, said in (
        ([QUICK], r"^trainer\.2\.name is none, but the run in .* was begun with 'slow'"),
        ([QUICK, renamed], r"^trainer\.2\.name is 'slower', but the run in .* with 'slow'"),
        ([QUICK, SLOW, third], r"^trainer\.3\.name is 'third', but the run in .* with none"),
    ):
        with pytest.raises(RunError, match=said):
            other = run_of(tmp_path, followers=followers)
            RunDirectory(tmp_path / "run").find_checkpoint(other, resume=True)


@pytest.mark.parametrize("resume", [True, False])
def test_a_directory_is_refused_to_a_run_with_followers_in_its_own_words(
    tmp_path: Path, resume: bool
) -> None:
    run = run_of(tmp_path)
    if not resume:
        die_after_step(run, 3)
    directory = RunDirectory(tmp_path / "run")
    with contextlib.closing(directory), pytest.raises(ValueError, match=r"holds (a|no) run"):
        directory.find_checkpoint(run, resume)


def test_a_follower_whose_every_checkpoint_is_damaged_is_for_a_person_to_decide_about(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path, policies__system="stream-sync")
    die_after_step(run, 5)
    checkpoints = tmp_path / "run/followers" / DIRECTORIES[0] / "checkpoints"
    for position in checkpoints.glob("*/position.json"):
        position.write_text("{")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"1-quick-one/checkpoints: every checkpoint is damaged"):
        SecondaryRecords(run.secondary_trainer_names, tmp_path / "run").check()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("of", ["", "followers/1-quick-one/"])
def test_a_checkpoint_at_another_group_than_the_trace_says_is_refused(
    of: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path, policies__system="stream-sync")
    die_after_step(run, 5)
    newest = max((tmp_path / "run" / of / "checkpoints").glob("v*"))
    position = json.loads((newest / "position.json").read_text())
    (newest / "position.json").write_text(json.dumps({**position, "groups_done": 10**6}))
    before = digests(tmp_path)
    directory = RunDirectory(tmp_path / "run")
    with (
        contextlib.closing(directory),
        pytest.raises(ValueError, match=r"groups_done is 1000000, but the trace .* at group \d+;"),
    ):
        directory.find_checkpoint(run, resume=True)
        SecondaryRecords(run.secondary_trainer_names, tmp_path / "run").check(directory.recorded)
    assert digests(tmp_path) == before


def test_whatever_a_follower_is_called_its_directory_can_be_made(tmp_path: Path) -> None:
    for name in ("../../etc", "..", "a/b", "\N{SNOWMAN}" * 300, "x" * 5000):
        directory = secondary_trainer_directory(tmp_path, 1, name)
        directory.mkdir(parents=True)
        assert directory.parent == tmp_path / "followers" and directory.name.startswith("1-")


# For real -----------------------------------------------------------------------------------------

TWIN = """
[[trainer]]
name = "twin"
pool = "local"
micro_batch = 5
backlog = 4
[[trainer]]
name = "loo"
pool = "local"
micro_batch = 4
algorithm = { name = "rloo", prompts_per_step = 3, learning_rate = 2e-3 }
"""


@pytest.fixture(scope="module")
def three(project: Path) -> Path:
    """The deterministic run's directory with a run file of three trainers, the second as the first."""
    text = (project / "run.toml").read_text().replace("[trainer]", "[[trainer]]")
    text = text.replace("gpus_per_node = 3", "gpus_per_node = 8")
    (project / "three.toml").write_text(text.replace("[algorithm]", f"{TWIN}[algorithm]"))
    return project


def execute_three(project: Path, name: str, *words: str) -> Path:
    output = project / name
    done = streamrl("execute", project / "three.toml", "--set", f"execute.output={output}", *words)
    assert done.returncode == 0, done.stderr
    return output


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    (file,) = checkpoint.glob("*.safetensors")
    return dict(load_file(file))


def test_trainers_that_follow_learn_as_one_that_leads_and_the_leader_as_without_them(
    three: Path,
) -> None:
    """A follower with the leader's algorithm and batches is led to the leader's weights; others to their own."""
    few = (*IN_PROCESS, "--set", "algorithm.steps=3")
    alone = what_it_made(execute_alone(three, "alone", *few))
    output = execute_three(three, "led", *few)
    assert what_it_made(output) == alone
    twin, loo = (
        sorted((output / "followers" / name / "checkpoints").glob("v*"))[-1]
        for name in ("1-twin", "2-loo")
    )
    leaders = weights_of(output / "checkpoints" / twin.name)
    initial = weights_of(three / "model")
    found = weights_of(twin)
    for name, tensor in leaders.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
    moved = max(float((found[name] - initial[name]).abs().max()) for name in leaders)
    apart = max(float((weights_of(loo)[name] - leaders[name]).abs().max()) for name in leaders)
    assert moved > 1e-3 and apart > 1e-3
    assert load_pretrained(str(loo)).config.model_type
    steps = read_metrics(output / "followers" / "2-loo")
    assert {step["learning_rate"] for step in steps} == {2e-3}
    assert all(step["grad_norm"] >= 0 and "reward" in step for step in steps)


def test_a_run_of_three_trainers_resumes_and_its_report_names_each(three: Path) -> None:
    few = ("--set", "rollout.replicas=1")
    output = execute_three(three, "resumed", *few, *IN_PROCESS, "--set", "algorithm.steps=2")
    execute_three(three, "resumed", *few, "--set", "algorithm.steps=3", "--resume")
    balance = ledger_of_run(read_trace(output / "trace.jsonl"), output)
    assert balance.is_balanced and balance.legs == 2
    assert balance.trainers[LEADER].trained == 3 * 32
    assert (output / "logs" / "follower-1.log").exists()
    report = streamrl("report", output, "--json")
    assert report.returncode == 0, report.stderr
    assert '"twin"' in report.stdout and '"loo"' in report.stdout
    replayed = streamrl("replay", output)
    assert replayed.returncode == 0 and "loo" in replayed.stdout
