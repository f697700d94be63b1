"""Tokens between processes: what is written is read, and files are gone once nobody needs them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.bench_handover import STEPS, measure_handover
from streamrl.engine.messages import Event, Generate, Generated, ReplicaLost, Stepped, Train
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.state import State
from streamrl.engine.trace import Trace
from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.roles import Completion
from streamrl.executor.tokens import (
    TokenBlock,
    TokenSegment,
    decode_ids,
    merge_segments,
    read_blocks,
    write_block,
)
from streamrl.executor.world import RealWorld
from streamrl.runfile.config import Run
from tests.scripted import ScriptedTokenizer, make_world
from tests.test_execute import real_run
from tests.traces import check_every_rollout_is_accounted_for

Watch = Callable[[RealWorld, Event], None]


def policy(num_tokens: int) -> TokenSegment:
    return TokenSegment(num_tokens, is_policy=True)


def tool(num_tokens: int) -> TokenSegment:
    return TokenSegment(num_tokens, is_policy=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.mkdir()
    return path


@pytest.mark.parametrize("name", ["a", None])
def test_blocks_come_back_as_they_were_written(directory: Path, name: str | None) -> None:
    path = None if name is None else str(directory / name)
    first = write_block([1, 2, 2**31 - 1], [-0.5, -1.0, -2.0], path)
    assert (first.path, len(first.data)) == (path, 24 if path is None else 0)
    ids, logprobs = read_blocks([first, write_block([7], [-3.0], None), TokenBlock(0, None)])
    assert ids.tolist() == [1, 2, 2**31 - 1, 7] and ids.dtype == np.int32
    assert logprobs.tolist() == [-0.5, -1.0, -2.0, -3.0] and logprobs.dtype == np.float32


def test_a_file_of_tokens_can_be_read_by_this_user_alone(directory: Path) -> None:
    write_block([1], [-1.0], str(directory / "a"))
    assert (directory / "a").stat().st_mode & 0o777 == 0o600


def test_no_tokens_make_no_file(directory: Path) -> None:
    assert write_block([], [], str(directory / "a")) == TokenBlock(0, None)
    assert not list(directory.iterdir())


def test_a_file_that_is_written_again_holds_nothing_of_before(directory: Path) -> None:
    path = str(directory / "a")
    write_block([1] * 9, [-1.0] * 9, path)
    assert read_blocks([write_block([5], [-2.0], path)])[0].tolist() == [5]


def test_tokens_that_are_not_all_there_are_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 log-prob"):
        write_block([1, 2], [-1.0], None)
    block = write_block([1, 2], [-1.0, -1.0], str(directory / "a"))
    (directory / "a").write_bytes(b"12345678")
    with pytest.raises(ValueError, match=r"tokens/a: 8 bytes are not those of 2 tokens"):
        read_blocks([block])


def test_neighbours_of_one_origin_become_one_segment() -> None:
    assert merge_segments((), [policy(2)]) == (policy(2),)
    assert merge_segments((policy(2),), [policy(3), tool(1)]) == (policy(5), tool(1))
    assert merge_segments((tool(2),), [policy(3)]) == (tool(2), policy(3))


# The buffer ---------------------------------------------------------------------------------------


def open_buffer(tmp_path: Path, directory: Path | None) -> RolloutBuffer:
    """Return a buffer that holds the two rollouts of group 0."""
    run = real_run(tmp_path)
    buffer = RolloutBuffer(
        PromptWorkload(run, ScriptedTokenizer()), run.num_trainers, directory=directory
    )
    buffer.draw(1)
    return buffer


def attempt(buffer: RolloutBuffer, rollout: int, num_tokens: int, is_last: bool) -> None:
    """Let a worker make tokens of a rollout."""
    asked = buffer.request(Generate(rollout, 0, 0, prefix=buffer.rollouts[rollout].num_tokens))
    completion = Completion(
        rollout=rollout,
        output=write_block(range(num_tokens), [-1.0] * num_tokens, asked.output_path),
        segments=(policy(num_tokens),),
        text="t" if is_last else None,
        versions=[(3, 0)],
        finish="stop" if is_last else "aborted",
        run_time=1.0,
        prefill_time=0.0,
    )
    buffer.rollouts[rollout].add(completion)


def test_a_rollout_that_was_aborted_goes_on_after_the_blocks_it_has(
    tmp_path: Path, directory: Path
) -> None:
    buffer = open_buffer(tmp_path, directory)
    attempt(buffer, 0, 3, is_last=False)
    attempt(buffer, 0, 2, is_last=False)
    asked = buffer.request(Generate(0, 1, 0, prefix=5))
    assert read_blocks(asked.prefix)[0].tolist() == [0, 1, 2, 0, 1]
    assert asked.output_path not in {block.path for block in asked.prefix}
    assert decode_ids(asked.prompt).tolist() == ScriptedTokenizer().encode(
        buffer.record(0)["prompt"]
    )
    sample = buffer.sample(0, 1.5)
    assert (sample.output, sample.segments) == (asked.prefix, (policy(5),))
    assert buffer.rollouts[0].versions == [(3, 0), (3, 3)]


def test_a_closed_rollouts_files_are_removed(tmp_path: Path, directory: Path) -> None:
    buffer = open_buffer(tmp_path, directory)
    for group in range(5):
        for rollout in (2 * group, 2 * group + 1):
            attempt(buffer, rollout, 3, is_last=False)
            buffer.request(Generate(rollout, 0, 0, prefix=3))  # fails: nothing comes of it
            attempt(buffer, rollout, 2, is_last=True)
        assert len(list(directory.iterdir())) == 4
        buffer.close_group(group)
        assert not list(directory.iterdir())
        buffer.draw(1)


def test_files_that_a_call_needs_are_not_removed_before_it_ends(
    tmp_path: Path, directory: Path
) -> None:
    buffer = open_buffer(tmp_path, directory)
    attempt(buffer, 0, 3, is_last=True)
    with buffer.hold([0]), buffer.hold([0, 1]):
        (block,) = buffer.sample(0, 1.0).output
        buffer.close_group(0)
        assert read_blocks([block])[0].tolist() == [0, 1, 2]
    assert not list(directory.iterdir())


def test_a_run_that_ends_before_its_last_step_leaves_its_files(
    tmp_path: Path, directory: Path
) -> None:
    buffer = open_buffer(tmp_path, directory)
    attempt(buffer, 0, 3, is_last=False)
    buffer.keep_files()
    buffer.close_group(0)
    assert [each.name for each in directory.iterdir()] == ["0.0"]


def test_what_the_controller_passes_on_does_not_grow_with_the_tokens(
    tmp_path: Path, directory: Path
) -> None:
    buffer = open_buffer(tmp_path, directory)
    sizes = []
    for rollout, num_tokens in ((0, 10), (1, 20_000)):
        attempt(buffer, rollout, num_tokens, is_last=True)
        asked = buffer.request(Generate(rollout, 0, 0, prefix=num_tokens))
        sizes += [len(msgspec.msgpack.encode(m)) for m in (asked, buffer.sample(rollout, 0.5))]
    assert max(sizes) < 400


# Whole runs, whose scripted trainer checks that it reads what replicas wrote ----------------------


def execute(run: Run, directory: Path, watch: Watch, **options: Any) -> Trace:
    async def go() -> Trace:
        def tell(event: Event, state: State, now: float) -> None:
            watch(world, event)

        world = make_world(run, options, tokens=directory, watch=tell)
        return await world.run()

    return asyncio.run(asyncio.wait_for(go(), timeout=60))


@pytest.mark.parametrize(
    ("system", "changes"),
    [
        *((system, {}) for system in sorted(SYSTEMS)),
        ("fully-async", {"policies__weight_sync": "abort-and-resume"}),
    ],
)
def test_the_trainer_reads_what_replicas_wrote_whoever_dies_on_the_way(
    tmp_path: Path, directory: Path, system: str, changes: dict[str, str]
) -> None:
    killed = 0
    rng = random.Random(system)

    def watch(world: RealWorld, event: Event) -> None:
        nonlocal killed
        if isinstance(event, Generated) and killed < 3 and rng.random() < 0.1:
            killed += 1
            launcher = world._launcher
            launcher.replicas[min(launcher.replicas)].kill("was killed by a test")  # type: ignore[attr-defined]

    run = real_run(tmp_path, policies__system=system, algorithm__steps=16, **changes)
    trace = execute(run, directory, watch, slowest=0.01)
    check_every_rollout_is_accounted_for(trace)
    events = [entry.event for entry in trace.entries]
    assert sum(isinstance(event, Stepped) for event in events) == 16
    assert any(isinstance(event, ReplicaLost) for event in events)
    assert not list(directory.iterdir())


def test_what_replicas_finished_before_they_died_is_trained_on_and_not_made_again(
    tmp_path: Path, directory: Path
) -> None:
    first: list[int] = []

    def watch(world: RealWorld, event: Event) -> None:
        if isinstance(event, Generated) and not first:
            first.append(event.rollout)
            (block,) = world._buffer.rollouts[event.rollout].output
            assert (block.data, Path(str(block.path)).parent) == (b"", directory)
            for handle in world._launcher.replicas.values():  # type: ignore[attr-defined]
                os.kill(handle.pid, signal.SIGKILL)

    run = real_run(tmp_path, policies__system="disaggregated", algorithm__steps=1)
    trace = execute(run, directory, watch, is_local=True, slowest=0.1, max_running=1)
    entries = trace.entries
    assert any(isinstance(entry.event, ReplicaLost) for entry in entries)
    made = [entry.event.rollout for entry in entries if isinstance(entry.event, Generated)]
    trained = [c for entry in entries for c in entry.commands if isinstance(c, Train)]
    assert made.count(first[0]) == 1 and first[0] in trained[0].rollouts


def test_the_benchmark_of_the_handover_runs_and_measures_every_step() -> None:
    steps = measure_handover(10)
    assert len(steps) == STEPS and min(steps) > 0
