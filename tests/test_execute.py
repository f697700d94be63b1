"""The real world's control, with scripted roles: the same claims as for simulated runs, in real time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

import pytest

from streamrl.engine.messages import (
    CheckpointSaved,
    Event,
    Failed,
    Generate,
    Generated,
    Postpone,
    ReplicaLost,
    ReplicaStarted,
    Stepped,
    TrainerLost,
    WeightsLoaded,
)
from streamrl.engine.policies.oversampling import LEFT_OVER
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.state import State
from streamrl.engine.trace import Entry, Trace, read_trace, replay
from streamrl.engine.trainer_side import ROLLED_BACK
from streamrl.executor.execute import check_output
from streamrl.executor.launchers.handles import LocalProcess
from streamrl.executor.roles import Manifest, Scoring
from streamrl.executor.world import RealWorld
from streamrl.record.metrics import measure
from streamrl.record.run_directory import read_metrics
from streamrl.runfile.config import Run
from streamrl.runfile.policies_config import WeightSyncName
from streamrl.workload.prompt_records import Record
from tests.runs import make_table, of
from tests.scripted import ScriptedLauncher, ScriptedTransfer, ScriptedVerifier, make_world
from tests.scripted_roles import tokens_of
from tests.traces import (
    check_every_command_ends_once,
    check_every_rollout_is_accounted_for,
    staleness_of,
)

BOUNDS = {
    "colocated": 0,
    "disaggregated": 0,
    "stream-sync": 0,
    "one-step-async": 1,
    "stream-async": 1,
}


def real_run(directory: Path, **changes: Any) -> Run:
    """Return a small run file with a prompts file beside it; `__` stands for the dot of a key."""
    from streamrl.runfile.files import make_run

    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "p{n}", "answer": "odd"}}\n' for n in range(7)))
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    table = make_table(
        {
            "model": {"path": str(directory), "dtype": "float32"},
            "workload.prompts": str(prompts),
            "verifier.scorer": "exact",
            "execute.output": str(directory / "run"),
            "algorithm.steps": 4,
            "algorithm.prompts_per_step": 3,
            **keys,
        }
    )
    return make_run(table)


def execute(run: Run, resume: bool = False, **options: Any) -> Trace:
    """Run scripted roles in this process to the end."""

    async def go() -> Trace:
        world = make_world(run, options, resume)
        with contextlib.closing(world._directory):
            return await world.run()

    return asyncio.run(asyncio.wait_for(go(), timeout=60))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_real_runs_keep_the_staleness_bound_and_the_books(
    tmp_path: Path, system: str, seed: int
) -> None:
    bound = BOUNDS.get(system, seed % 4)
    changes = {} if system in BOUNDS else {"policies__max_staleness": bound}
    run = real_run(tmp_path, policies__system=system, seed=seed, **changes)
    trace = execute(run)
    assert max(staleness_of(trace).values()) <= bound
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert sum(1 for entry in trace.entries if isinstance(entry.event, Stepped)) == 4


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_a_recorded_real_run_is_decided_identically(tmp_path: Path, system: str) -> None:
    run = real_run(tmp_path, policies__system=system)
    execute(run)
    recorded = read_trace(tmp_path / "run" / "trace.jsonl")
    assert recorded.world == "real" and len(recorded.entries) > 50
    assert replay(recorded) is None


LATE: dict[str, dict[str, Any]] = {
    "half a step ahead": {"policies__max_staleness": 0.5, "algorithm__prompts_per_step": 4},
    "a push every two steps": {"policies__sync_every": 2},
    "stale ones dropped": {"policies__over_staleness": "drop", "policies__consumption": "greedy"},
    "left over, dropped": {"policies__oversampling": 1.7, "policies__consumption": "greedy"},
    "left over, kept": {
        "policies__oversampling": 1.7,
        "policies__consumption": "greedy",
        "policies__left_over": "keep",
        "policies__system": "disaggregated",
    },
}


@pytest.mark.parametrize("option", LATE)
def test_late_groups_of_a_real_run_are_in_its_books_its_figures_and_its_replay(
    tmp_path: Path, option: str
) -> None:
    run = real_run(tmp_path, **LATE[option], algorithm__steps=6)
    trace = execute(run, slowest=0.01)
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    metrics = measure(trace)
    assert metrics.ledger.is_balanced, metrics.ledger.faults
    assert replay(read_trace(tmp_path / "run" / "trace.jsonl")) is None
    lines = read_metrics(tmp_path / "run")
    if option == "left over, dropped":
        lost = sum(line.get(f"tokens dropped for {LEFT_OVER}", 0) for line in lines)
        rollouts = sum(line.get(f"dropped for {LEFT_OVER}", 0) for line in lines)
        assert lost > 0 and rollouts == metrics.dropped[LEFT_OVER]
    if option == "left over, kept":
        assert any(of(Postpone, entry.commands) for entry in trace.entries)


@pytest.mark.parametrize("weight_sync", sorted(get_args(WeightSyncName)))
def test_shares_of_a_real_run_sum_to_one(tmp_path: Path, weight_sync: str) -> None:
    run = real_run(tmp_path, policies__weight_sync=weight_sync)
    metrics = measure(execute(run, slowest=0.02))
    total = sum(metrics.busy.values()) + sum(metrics.idle.values())
    assert total == pytest.approx(1.0, abs=1e-9)


def test_aborted_rollouts_resume_from_their_prefix(tmp_path: Path) -> None:
    run = real_run(
        tmp_path,
        policies__system="fully-async",
        policies__weight_sync="abort-and-resume",
        algorithm__steps=12,
    )
    trace = execute(run, slowest=0.02)
    ended = [entry.event for entry in trace.entries if isinstance(entry.event, Generated)]
    assert any(event.finish == "aborted" and event.tokens for event in ended)
    for event in ended:
        if event.finish != "aborted":
            assert event.tokens == len(tokens_of(event.rollout))
    for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines():
        starts = [start for _, start in json.loads(line)["versions"]]
        assert starts[0] == 0 and starts == sorted(set(starts))


@pytest.mark.parametrize(("max_attempts", "are_dropped"), [(1, True), (50, False)])
def test_failed_rollouts_are_tried_again_or_dropped_with_a_reason(
    tmp_path: Path, max_attempts: int, are_dropped: bool
) -> None:
    run = real_run(tmp_path, policies__max_attempts=max_attempts)
    trace = execute(run, failure_rate=0.3)
    assert any(isinstance(entry.event, Failed) for entry in trace.entries)
    check_every_rollout_is_accounted_for(trace)
    assert measure(trace).num_steps == 4
    assert set(measure(trace).dropped) == ({"failed 1 times"} if are_dropped else set())


def test_a_wall_clock_that_jumps_by_hours_changes_no_time_and_loses_no_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps, now = cycle((3600.0, -3600.0, 1e9)), time.time
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    began_at = time.monotonic()
    trace = execute(real_run(tmp_path, execute__patience="5 s"), slowest=0.02)
    times = [entry.time for entry in trace.entries]
    assert times == sorted(times) and times[-1] < time.monotonic() - began_at
    assert not any(isinstance(e.event, Failed | ReplicaLost | TrainerLost) for e in trace.entries)


@pytest.mark.parametrize("seed", range(8))
def test_a_replica_killed_at_any_moment_is_replaced_and_nothing_is_lost(
    tmp_path: Path, seed: int
) -> None:
    run = real_run(tmp_path, seed=seed, algorithm__steps=6)
    moment = random.Random(seed).randrange(5, 120)

    async def go() -> Trace:
        seen = 0

        def watch(event: Event, state: State, now: float) -> None:
            nonlocal seen
            seen += 1
            if seen == moment and launcher().replicas:
                handle = launcher().replicas[min(launcher().replicas)]
                handle.kill("was killed by a test")

        world = make_world(run, {"slowest": 0.01}, watch=watch)

        def launcher() -> ScriptedLauncher:
            return world._launcher  # type: ignore[return-value]

        return await world.run()

    trace = asyncio.run(asyncio.wait_for(go(), timeout=60))
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    assert measure(trace).num_steps == 6


def test_a_replica_that_weights_cannot_reach_takes_what_was_sent_after_them_with_it(
    tmp_path: Path,
) -> None:
    class Broken(ScriptedTransfer):
        is_broken = True

        async def fetch(self, version: int, replica: int) -> Manifest | None:
            if version and self.is_broken:
                self.is_broken = False
                raise ConnectionError("the link is down")
            return await super().fetch(version, replica)

    run = real_run(tmp_path, policies__system="stream-sync")
    trace = asyncio.run(make_world(run, {}, make_transfer=Broken).run())
    failed = [entry.event for entry in trace.entries if isinstance(entry.event, Failed)]
    assert {event.reason.split(":")[0] for event in failed} == {"WorkerLostError"}
    assert any(isinstance(event.command, Generate) for event in failed)
    assert measure(trace).num_steps == 4


@pytest.mark.parametrize("seed", range(8))
def test_a_trainer_killed_at_any_moment_begins_again_at_its_checkpoint(
    tmp_path: Path, seed: int
) -> None:
    system = sorted(SYSTEMS)[seed % len(SYSTEMS)]
    run = real_run(
        tmp_path,
        seed=seed,
        algorithm__steps=8,
        execute__checkpoint_every=2,
        policies__system=system,
    )
    moment = random.Random(seed).randrange(30, 130)

    async def go() -> Trace:
        seen = 0

        def watch(event: Event, state: State, now: float) -> None:
            nonlocal seen
            seen += 1
            if seen == moment:
                handle = world._launcher.trainers[-1]  # type: ignore[attr-defined]
                handle.kill("was killed by a test")

        world: RealWorld = make_world(run, {"slowest": 0.01}, watch=watch)
        return await world.run()

    trace = asyncio.run(asyncio.wait_for(go(), timeout=60))
    events = [entry.event for entry in trace.entries]
    (lost,) = [event for event in events if isinstance(event, TrainerLost)]
    made = [e.version for e in events[: events.index(lost)] if isinstance(e, Stepped)]
    again = [e.version for e in events[events.index(lost) :] if isinstance(e, Stepped)]
    saved = [e.version for e in events[: events.index(lost)] if isinstance(e, CheckpointSaved)]
    assert made == list(range(1, len(made) + 1))
    assert again == list(range(max(saved, default=0) + 1, 9))
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    metrics = measure(trace)
    assert metrics.num_steps == 8
    assert metrics.dropped.get(ROLLED_BACK, 0) >= 6 * (len(made) - max(saved, default=0))
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["rolled_back_to"] for line in lines if "rolled_back_to" in line] == [again[0] - 1]


def test_a_killed_worker_process_is_replaced(tmp_path: Path) -> None:
    run = real_run(tmp_path, algorithm__steps=8)

    async def go() -> Trace:
        def watch(event: Event, state: State, now: float) -> None:
            if isinstance(event, WeightsLoaded) and event.version == 2:
                handle = world._launcher.replicas[min(world._launcher.replicas)]  # type: ignore[attr-defined]
                assert isinstance(handle, LocalProcess)
                os.kill(handle.pid, signal.SIGKILL)

        world: RealWorld = make_world(run, {"is_local": True, "slowest": 0.05}, watch=watch)
        return await world.run()

    trace = asyncio.run(asyncio.wait_for(go(), timeout=120))
    events = [entry.event for entry in trace.entries]
    assert any(isinstance(event, ReplicaLost) for event in events)
    assert {event.replica for event in events if isinstance(event, ReplicaStarted)} >= {0, 1, 2}
    check_every_rollout_is_accounted_for(trace)
    assert measure(trace).num_steps == 8


def test_a_run_resumes_from_its_checkpoint_and_trains_on_the_next_prompts(tmp_path: Path) -> None:
    first = real_run(tmp_path, algorithm__steps=3, execute__checkpoint_every=2)
    execute(first)
    longer = real_run(tmp_path, algorithm__steps=6, execute__checkpoint_every=2)
    with pytest.raises(ValueError, match="holds a run"):
        execute(longer)
    trace = execute(longer, resume=True)
    drawn = [group for entry in trace.entries for group in getattr(entry.event, "groups", ())]
    assert min(group.group for group in drawn) == 9
    assert [e.event.version for e in trace.entries if isinstance(e.event, Stepped)] == [4, 5, 6]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "trace.1.jsonl").exists()


def test_an_interrupted_run_leaves_a_readable_trace_and_drops_the_rest_with_a_reason(
    tmp_path: Path,
) -> None:
    run = real_run(tmp_path, algorithm__steps=1000)

    async def go() -> None:
        world = make_world(run, {"slowest": 0.02})
        asyncio.get_running_loop().call_later(0.5, world.interrupt, "Ctrl-C")
        with pytest.raises(RuntimeError, match="Ctrl-C"):
            await world.run()
        assert world.engine.state.is_finished

    asyncio.run(asyncio.wait_for(go(), timeout=30))
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    check_every_rollout_is_accounted_for(trace)
    assert set(measure(trace).dropped) <= {"Ctrl-C"}
    assert replay(trace) is None


class StumblingVerifier(ScriptedVerifier):
    """Finds every other completion too hard."""

    def __init__(self) -> None:
        self._num_seen = 0

    async def verify(self, completion: str, num_tokens: int, record: Record) -> Scoring:
        self._num_seen += 1
        return Scoring(0.0, "time limit") if self._num_seen % 2 else Scoring(1.0, None)


def test_a_completion_that_cannot_be_scored_is_trained_on_with_reward_0_and_counted(
    tmp_path: Path,
) -> None:
    run = real_run(tmp_path)

    async def go() -> Trace:
        return await make_world(run, {}, verifier_class=StumblingVerifier).run()

    trace = asyncio.run(asyncio.wait_for(go(), timeout=60))
    assert not any(isinstance(entry.event, Failed) for entry in trace.entries)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").open()]
    found = {(line["reward"], line.get("verifier")) for line in lines}
    assert found == {(0.0, "time limit"), (1.0, None)}
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    shares = [step["unscored"] / run.algorithm.rollouts_per_step for step in steps]
    assert shares == pytest.approx([1 - step["reward"] for step in steps])


def test_an_error_outside_of_commands_ends_the_run_and_reaches_the_caller(tmp_path: Path) -> None:
    def watch(event: Event, state: State, now: float) -> None:
        if isinstance(event, Generated):
            raise LookupError("the watcher broke")

    async def go() -> None:
        world = make_world(real_run(tmp_path), {}, watch=watch)
        with pytest.raises(LookupError, match="the watcher broke"):
            await world.run()

    asyncio.run(asyncio.wait_for(go(), timeout=30))


def test_a_run_that_writes_its_trace_keeps_none_of_it_in_memory(tmp_path: Path) -> None:
    run = real_run(tmp_path, algorithm__steps=2)
    sizes = []

    async def go() -> None:
        world = make_world(run, {}, watch=lambda event, state, now: sizes.append(len(kept())))
        world.trace = Trace(run, "real", {}, world._directory.trace_file, keeps_entries=False)

        def kept() -> list[Entry]:
            return world.trace.entries

        await world.run()

    asyncio.run(asyncio.wait_for(go(), timeout=60))
    assert len(sizes) > 30 and set(sizes) == {0}
    lines = (tmp_path / "run" / "trace.jsonl").read_bytes().splitlines()
    assert len(lines) == len(sizes) + 2  # the header of the world's first trace, and the second's


def test_each_line_of_rollouts_names_its_prompt_its_place_in_the_data_its_step_and_its_tokens(
    tmp_path: Path,
) -> None:
    execute(real_run(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").open()]
    assert len(lines) == 4 * 3 * 2
    for line in lines:
        file, _, number = line["place"].rpartition(":")
        record = json.loads(Path(file).read_text().splitlines()[int(number) - 1])
        assert line["prompt"] == record["prompt"] and int(number) == line["line"] + 1
        assert line["prompt_tokens"] == len(record["prompt"]) and line["num_tokens"] > 0
        assert line["step"] == line["group"] // 3 + 1


def test_a_run_directory_that_is_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("nowhere/run")
    with pytest.raises(
        ValueError, match=r"execute\.output: .*/run is a link to nowhere/run, which"
    ):
        check_output(tmp_path / "run")
    (tmp_path / "nowhere" / "run").mkdir(parents=True)
    check_output(tmp_path / "run")
