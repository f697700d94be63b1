"""What a dead replica, or a dead driver, leaves of rollouts is gone on with: no token is made twice, and none is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.engine.messages import (
    Event,
    Failed,
    Generate,
    Generated,
    PromptsDrawn,
    ReplicaLost,
    Stepped,
    Verified,
)
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.state import State
from streamrl.engine.trace import Trace, replay
from streamrl.executor.execute import token_directory
from streamrl.executor.launchers.handles import Handle
from streamrl.executor.roles import FinishReason, Request
from streamrl.executor.token_files import (
    Head,
    KeptTokens,
    TokenRecord,
    add_record,
    merge,
    part_of,
    read_records,
    remove_files,
    take_over,
    write_record,
)
from streamrl.executor.tokens import (
    ID,
    LOGPROB,
    TokenSegment,
    encode_ids,
    read_block,
)
from streamrl.executor.world import RealWorld
from streamrl.record.restarts import ledger_of_run
from streamrl.runfile.config import Run
from tests.scripted import ScriptedLauncher, make_world
from tests.scripted_roles import ScriptedConfig, ScriptedReplica, tokens_of
from tests.test_execute import real_run
from tests.test_resume import DeathError
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

SAVE_TIME = 0.02
SLOW: dict[str, Any] = {"fastest": 0.1, "slowest": 0.2, "save_time": SAVE_TIME}
"""Of rollouts that are on disk several times before they end."""


def record(
    start: int,
    ids: list[int],
    versions: list[tuple[int, int]] | None = None,
    finish: FinishReason = "aborted",
    rollout: int = 7,
) -> TokenRecord:
    spans = [(3, 0)] if versions is None else versions
    head = Head(rollout, start, len(ids), (TokenSegment(len(ids), True),), spans, finish, 1.5, 0.5)
    return TokenRecord(head, np.array(ids, ID), np.full(len(ids), -1.0, LOGPROB))


def write(path: Path, each: TokenRecord) -> None:
    """Write what an attempt of the rollout that a file is named after made, and that has ended."""
    head = replace(each.head, rollout=int(path.name.split(".")[0]))
    write_record(each._replace(head=head), str(path))


# Files --------------------------------------------------------------------------------------------


def test_records_of_an_attempt_that_runs_become_one_that_has_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "7.0")
    add_record(path, record(2, [5, 6], [(3, 0), (4, 1)]))
    add_record(path, record(4, [7], [(4, 0)]))
    assert Path(part_of(path)).stat().st_mode & 0o777 == 0o600
    left = take_over(7, path, 2)
    assert left is not None and left.rollout == 7 and left.finish == "aborted"
    assert left.versions == [(3, 0), (4, 1), (4, 2)]
    assert left.segments == (TokenSegment(3, True),)
    assert (left.run_time, left.prefill_time) == (1.5, 0.5)
    ids, logprobs = read_block(left.output)
    assert ids.tolist() == [5, 6, 7] and logprobs.tolist() == [-1.0] * 3
    assert [each.name for each in tmp_path.iterdir()] == ["7.0"]
    assert take_over(7, path, 2) == left  # and again, as the next leg does


@pytest.mark.parametrize("missing", range(1, 60))
def test_a_record_that_was_cut_short_is_left_out(tmp_path: Path, missing: int) -> None:
    path = str(tmp_path / "7.0")
    add_record(path, record(0, [5, 6]))
    whole = Path(part_of(path)).stat().st_size
    add_record(path, record(2, [7, 8]))
    data = Path(part_of(path)).read_bytes()
    Path(part_of(path)).write_bytes(data[:-missing])
    found = [each.ids.tolist() for each in read_records(path)]
    assert found == ([[5, 6]] if len(data) - missing >= whole else [])


@pytest.mark.parametrize(
    ("start", "newest", "ids", "finish"),
    [
        (0, 5, [1, 2, 3, 4], "stop"),
        (0, 3, [1, 2], "aborted"),
        (0, 2, None, None),
        (1, 5, None, None),
    ],
)
def test_what_a_version_sampled_that_is_made_again_is_left_out(
    start: int, newest: int, ids: list[int] | None, finish: str | None
) -> None:
    each = record(0, [1, 2, 3, 4], [(3, 0), (4, 2)], "stop")
    found = merge([each], 7, start, newest)
    assert (None if found is None else found.ids.tolist()) == ids
    if found is not None:
        assert found.head.finish == finish
        assert found.head.versions == [(3, 0), (4, 2)][: len(found.ids) // 2]
        assert found.head.segments == (TokenSegment(len(found.ids), True),)


def test_what_no_attempt_follows_is_removed(tmp_path: Path) -> None:
    write(tmp_path / "0.0", record(0, [1, 2]))
    write(tmp_path / "0.2", record(2, [3], finish="stop"))  # attempt 1 made nothing
    write(tmp_path / "1.0", record(0, [1, 2]))
    write(tmp_path / "1.1", record(3, [4]))  # a token is missing
    write(tmp_path / "2.0", record(0, [1], [(9, 0)]))
    write(tmp_path / "3.0", record(0, [1]))
    write(tmp_path / "4.0", record(0, [1], [(1, 0)]))
    write(tmp_path / "5.0", record(0, [1] * 6))  # longer than a rollout may be
    (tmp_path / "6.0").mkdir()
    (tmp_path / "8.0.part").symlink_to("8.0.part")
    (tmp_path / "7.0").write_bytes(b"")
    (tmp_path / "9.0").write_bytes((tmp_path / "1.0").read_bytes())  # of another rollout
    (tmp_path / "notes.txt").write_text("of somebody else")
    kept = KeptTokens(tmp_path, 4, 5, is_open=lambda rollout: rollout != 3)
    assert (kept.num_rollouts, kept.num_tokens) == (3, 6)
    left = ["0.0", "0.2", "1.0", "4.0", "6.0", "8.0.part", "notes.txt"]
    assert sorted(each.name for each in tmp_path.iterdir()) == left
    assert [each.finish for each in kept.take(0, 2)] == ["aborted", "stop"]
    assert kept.take(0, 2) == [] == kept.take(4, 2)
    assert not (tmp_path / "4.0").exists()  # began under a version that is too old
    remove_files(str(tmp_path / "5.0"))  # of none that is there


@pytest.mark.parametrize("place", range(0, 200, 3))
def test_a_damaged_record_is_left_out(tmp_path: Path, place: int) -> None:
    path = tmp_path / "7.0"
    write(path, record(0, [1, 2, 3] * 9))
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 0x10
    path.write_bytes(data)
    assert take_over(7, str(path), 0) is None and not path.exists()


def test_a_save_that_finds_no_room_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "7.0")
    add_record(path, record(0, [1, 2]))
    size = Path(part_of(path)).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, hard))
    try:
        with pytest.raises(OSError, match=r"No space left|too large"):
            add_record(path, record(2, [3, 4]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert Path(part_of(path)).stat().st_size == size
    add_record(path, record(2, [3, 4]))
    assert [each.ids.tolist() for each in read_records(path)] == [[1, 2], [3, 4]]

    def fail(self: Path, target: str) -> Path:
        raise OSError("no room")

    monkeypatch.setattr(Path, "replace", fail)
    assert take_over(7, path, 0) is None and not list(tmp_path.iterdir())


def test_a_directory_of_tokens_loses_nothing_that_is_somebody_elses(tmp_path: Path) -> None:
    run = real_run(tmp_path, execute__launcher="local")
    tokens = tmp_path / "run" / "tokens"
    tokens.mkdir(parents=True)
    (tokens / "notes.txt").write_text("mine")
    write(tokens / "0.0", record(0, [1, 2]))
    with token_directory(run.execute) as path:
        assert path == tokens and [each.name for each in tokens.iterdir()] == ["notes.txt"]
        write(tokens / "1.0", record(0, [1, 2]))
    assert [each.name for each in tokens.iterdir()] == ["notes.txt"]
    (tokens / "notes.txt").unlink()
    with pytest.raises(DeathError), token_directory(run.execute):
        write(tokens / "1.0", record(0, [1, 2]))
        raise DeathError
    assert [each.name for each in tokens.iterdir()] == ["1.0"]
    with token_directory(run.execute, is_resumed=True):
        assert [each.name for each in tokens.iterdir()] == ["1.0"]
    assert not tokens.exists()


# A replica ----------------------------------------------------------------------------------------


def test_a_replica_puts_on_disk_what_runs_and_takes_it_away_once_that_has_ended(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "9.0")

    async def go() -> None:
        replica = ScriptedReplica(ScriptedConfig(seed=0, save_time=SAVE_TIME, generation_time=1.5))
        await replica.start(None, 0)
        work = asyncio.create_task(
            replica.generate(
                Request(
                    rollout=9,
                    prompt=encode_ids([1]),
                    priority=0,
                    max_tokens=10**6,
                    output_path=path,
                )
            )
        )
        while not (saved := read_records(path)):
            await asyncio.sleep(SAVE_TIME)
        so_far = [token for each in saved for token in each.ids.tolist()]
        assert so_far == tokens_of(9)[: len(so_far)] and not work.done()
        done = await work
        assert read_block(done.output)[0].tolist() == tokens_of(9)
        (whole,) = read_records(path)
        assert (whole.head.finish, whole.head.num_tokens) == ("stop", len(tokens_of(9)))
        assert not Path(part_of(path)).exists()
        await replica.stop()

    asyncio.run(asyncio.wait_for(go(), timeout=30))


# Whole runs, whose scripted trainer checks every token that it reads ------------------------------


def execute(
    run: Run,
    tokens: Path,
    watch: Any,
    *,
    resume: bool = False,
    launcher: type[ScriptedLauncher] = ScriptedLauncher,
    **options: Any,
) -> Trace:
    async def go() -> Trace:
        def tell(event: Event, state: State, now: float) -> None:
            watch(world, event, now)

        world = make_world(run, options, resume, launcher, tokens=tokens, watch=tell)
        with contextlib.closing(world._directory):
            return await world.run()

    tokens.mkdir(exist_ok=True)
    trace = asyncio.run(asyncio.wait_for(go(), timeout=60))
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    return trace


class SlowAtFirst(ScriptedLauncher):
    """Starts first replicas whose rollouts still run when they are killed, however busy this machine is."""

    async def replica(self, replica_id: int, kind: int, model: str) -> Handle:
        self._options["generation_time"] = 3.0 if replica_id < 2 else None
        return await super().replica(replica_id, kind, model)


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_a_rollout_goes_on_at_its_token_when_its_replica_dies(tmp_path: Path, system: str) -> None:
    tokens = tmp_path / "tokens"
    begun: list[float] = []

    def watch(world: RealWorld, event: Event, now: float) -> None:
        if isinstance(event, PromptsDrawn) and not begun:
            begun.append(now)
            asyncio.get_running_loop().call_soon(kill_once_tokens_are_there, world)

    def kill_once_tokens_are_there(world: RealWorld) -> None:
        if not any(read_records(str(each.with_suffix(""))) for each in tokens.glob("*.part")):
            again = kill_once_tokens_are_there
            asyncio.get_running_loop().call_later(SAVE_TIME, again, world)
            return
        for handle in world._launcher.replicas.values():  # type: ignore[attr-defined]
            os.kill(handle.pid, signal.SIGKILL)

    run = real_run(tmp_path, policies__system=system, algorithm__steps=1)
    quick = {"is_local": True, "slowest": 0.02, "save_time": SAVE_TIME}
    trace = execute(run, tokens, watch, launcher=SlowAtFirst, **quick)
    events = [entry.event for entry in trace.entries]
    lost = next(n for n, event in enumerate(events) if isinstance(event, ReplicaLost))
    left = {
        e.rollout: e.tokens
        for e in events[lost:]
        if isinstance(e, Generated) and e.finish == "aborted"
    }
    again = [c for e in trace.entries[lost:] for c in e.commands if isinstance(c, Generate)]
    went_on = {c.rollout: c.prefix for c in again if c.prefix}
    assert went_on and went_on.items() <= left.items()
    assert not list(tokens.iterdir())


def test_tokens_of_an_answer_that_is_none_are_not_gone_on_with(tmp_path: Path) -> None:
    run = real_run(tmp_path, algorithm__steps=1)
    trace = execute(run, tmp_path / "tokens", lambda *_: None, failure_rate=0.3, **SLOW)
    events = [entry.event for entry in trace.entries]
    assert any(isinstance(event, Failed) for event in events)
    assert all(e.finish != "aborted" for e in events if isinstance(e, Generated))


def die_with_tokens(run: Run, tokens: Path, is_time: Any, *, resume: bool = False) -> None:
    """Execute a run with scripted roles until it is time to die, a few looks at the tokens after that."""

    def watch(world: RealWorld, event: Event, now: float) -> None:
        if is_time(event):
            raise DeathError

    with pytest.raises(DeathError):
        execute(run, tokens, watch, resume=resume, **SLOW)


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_a_resumed_run_goes_on_with_finished_rollouts_and_begun_ones(
    tmp_path: Path, system: str
) -> None:
    tokens = tmp_path / "tokens"
    keys: dict[str, Any] = {"policies__system": system, "execute__checkpoint_every": 1}
    run = real_run(tmp_path, algorithm__steps=3, **keys)
    seen = [0]

    def is_time(event: Event) -> bool:
        seen[0] += isinstance(event, Verified)
        return seen[0] == 2 + run.algorithm.rollouts_per_step

    die_with_tokens(run, tokens, is_time)
    on_disk = {int(each.name.split(".")[0]) for each in tokens.iterdir()}
    assert on_disk
    trace = execute(run, tokens, lambda *_: None, resume=True, **SLOW)
    events = [entry.event for entry in trace.entries]
    drawn = [group for e in events if isinstance(e, PromptsDrawn) for group in e.groups]
    kept = {r: k for g in drawn for r, k in zip(g.rollouts, g.kept, strict=False) if k[0]}
    assert kept and {*kept} <= on_disk
    made = {e.rollout: e for e in events if isinstance(e, Generated) and e.finish != "aborted"}
    assert any(
        made[rollout].tokens == have for rollout, (have, _) in kept.items()
    )  # finished before
    assert all(made[rollout].tokens == len(tokens_of(rollout)) for rollout in made)
    sent = [c for e in trace.entries for c in e.commands if isinstance(c, Generate)]
    first = {c.rollout: c.prefix for c in reversed(sent)}
    assert all(first[rollout] == have for rollout, (have, _) in kept.items())
    balance = ledger_of_run(trace, tmp_path / "run")
    assert balance.is_balanced, balance.faults
    assert sum(isinstance(event, Stepped) for event in events) == 3 - trace.entries[0].event.version  # type: ignore[union-attr]
    assert not list(tokens.iterdir())


def test_what_a_lost_version_sampled_is_made_again(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    keys: dict[str, Any] = {"policies__system": "stream-async", "execute__checkpoint_every": 50}
    run = real_run(tmp_path, algorithm__steps=4, **keys)
    versions: list[int] = []

    def is_time(event: Event) -> bool:
        if isinstance(event, Generated):
            versions.append(event.version)
        return isinstance(event, Generated) and event.version == 2

    die_with_tokens(run, tokens, is_time)
    assert max(versions) == 2
    trace = execute(run, tokens, lambda *_: None, resume=True, **SLOW)  # no checkpoint is there
    drawn = [
        group
        for e in trace.entries
        if isinstance(e.event, PromptsDrawn)
        for group in e.event.groups
    ]
    assert all(version == 0 for group in drawn for have, version in group.kept if have)
    assert ledger_of_run(trace, tmp_path / "run").is_balanced
