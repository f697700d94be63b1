"""Resuming: from which checkpoint, with which settings, and that nothing is trained on twice."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from streamrl.engine.messages import Event, SaveCheckpoint, Step, Stepped
from streamrl.engine.state import State
from streamrl.engine.trace import Entry, LineFile, Trace, read_trace, replay
from streamrl.engine.trainer_side import LEADER
from streamrl.executor import record
from streamrl.executor.checkpoints import Checkpoint, Checkpoints, Position
from streamrl.executor.checksums import CHECKSUMS, find_damage, write_checksums
from streamrl.executor.checkup import run_paths
from streamrl.executor.directory_lock import readable_by
from streamrl.executor.execute import execute as execute_for_real
from streamrl.executor.execute import with_advice
from streamrl.executor.record import RunDirectory
from streamrl.record.metrics import measure
from streamrl.record.prompt_tokens import check_prompt_tokens, digest_of, write_prompt_tokens
from streamrl.record.restarts import ledger_of_run
from streamrl.record.run_directory import RUN, read_metrics, read_rollouts
from streamrl.record.samples import read_completions
from streamrl.report.run_tables import metrics_table
from streamrl.runfile import paths
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import encode_run, make_run
from tests.patients import bad, local_table
from tests.scripted import ScriptedVerifier, make_world
from tests.test_execute import execute, real_run


def digests(directory: Path) -> dict[str, str]:
    """Return a hash of every file by its path inside the directory."""
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize("written", [b"", b'{"format":'])
def test_a_leg_that_died_before_its_first_line_is_no_leg(written: bytes, tmp_path: Path) -> None:
    output = tmp_path / "run"
    execute(real_run(tmp_path, algorithm__steps=3))
    (output / "trace.jsonl").rename(output / "trace.1.jsonl")
    (output / "trace.jsonl").write_bytes(written)
    trace = execute(real_run(tmp_path, algorithm__steps=6), resume=True)
    assert trace.leg == 2 and not (output / "trace.2.jsonl").exists()
    assert ledger_of_run(read_trace(output / "trace.jsonl"), output).is_balanced


def test_what_a_user_names_like_a_trace_is_no_leg(tmp_path: Path) -> None:
    output = tmp_path / "run"
    execute(real_run(tmp_path, algorithm__steps=3))
    shutil.copy(output / "trace.jsonl", output / "trace.bak.jsonl")
    assert execute(real_run(tmp_path, algorithm__steps=6), resume=True).leg == 2
    assert ledger_of_run(read_trace(output / "trace.jsonl"), output).is_balanced


def test_files_of_others_are_neither_replaced_nor_added_to(tmp_path: Path) -> None:
    run = real_run(tmp_path)
    for name in ("metrics.jsonl", "run.json"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=r"has run\.json and metrics\.jsonl and no run"):
        RunDirectory(tmp_path).find_checkpoint(run, resume=False)
    for name in ("metrics.jsonl", "run.json"):
        (tmp_path / name).unlink()
    (tmp_path / "notes.txt").write_text("mine")
    assert RunDirectory(tmp_path).find_checkpoint(run, resume=False) is None


def test_checkpoints_without_a_trace_are_a_run_that_nobody_begins_anew(tmp_path: Path) -> None:
    execute(real_run(tmp_path, algorithm__steps=3))
    (tmp_path / "run" / "trace.jsonl").unlink()
    longer = real_run(tmp_path, algorithm__steps=6)
    before = digests(tmp_path)
    with pytest.raises(ValueError, match="holds a run"):
        execute(longer)
    assert digests(tmp_path) == before
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]
    steps = [e.event for e in execute(longer, resume=True).entries if isinstance(e.event, Stepped)]
    assert [step.version for step in steps] == [4, 5, 6]


@pytest.mark.parametrize("steps", [3, 2])
def test_resuming_a_run_that_has_all_its_steps_is_refused_and_changes_no_file(
    steps: int, tmp_path: Path
) -> None:
    execute(real_run(tmp_path, algorithm__steps=3))
    before = digests(tmp_path)
    with pytest.raises(ValueError, match=r"has all its steps.*step 3; --set algorithm\.steps=6"):
        execute(real_run(tmp_path, algorithm__steps=steps), resume=True)
    assert digests(tmp_path) == before
    assert len(execute(real_run(tmp_path, algorithm__steps=6), resume=True).entries) > 10


def test_a_finished_run_is_refused_before_its_prompts_are_read(tmp_path: Path) -> None:
    run = make_run(local_table(tmp_path, {"algorithm.steps": 7}))
    checkpoint = tmp_path / "run" / "checkpoints" / "v000007"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / "trace.jsonl").touch()
    (checkpoint / "position.json").write_text('{"version": 7, "groups_done": 14}')
    before = digests(tmp_path)
    with pytest.raises(ValueError, match="has all its steps"):
        execute_for_real(run, resume=True)
    assert digests(tmp_path) == before
    finding = bad(list(run_paths.find(run)))["output"]
    assert "leaves nothing to do" in finding.text and "algorithm.steps is above 7" in finding.fix


# What was trained on ------------------------------------------------------------------------------


class DeathError(Exception):
    """Ends a run at once, as a kill does: nothing winds down, nothing is saved."""


def die_after_step(run: Run, version: int, resume: bool = False) -> None:
    """Execute a run with scripted roles until it has made a version and begun the next one."""

    def watch(event: Event, state: State, now: float) -> None:
        if isinstance(event, Stepped) and (event.trainer, event.version) == (LEADER, version):
            raise DeathError

    async def go() -> None:
        world = make_world(run, {"slowest": 0.01}, resume, watch=watch)
        with contextlib.closing(world._directory), pytest.raises(DeathError):
            await world.run()

    asyncio.run(asyncio.wait_for(go(), timeout=60))


def steps_of(entries: list[Entry], most: int) -> dict[int, tuple[int, ...]]:
    """Return the groups of each step up to a version."""
    commands = [command for entry in entries for command in entry.commands]
    steps = {c.version: c.groups for c in commands if isinstance(c, Step)}
    made = [e.event.version for e in entries if isinstance(e.event, Stepped)]
    return {version: steps[version] for version in made if version <= most}


@pytest.mark.parametrize("consumption", ["greedy", "strict-fifo"])
@pytest.mark.parametrize("seed", range(2))
def test_no_group_is_trained_on_twice_in_a_run_that_dies_and_resumes(
    tmp_path: Path, consumption: str, seed: int
) -> None:
    keys: dict[str, Any] = {
        "seed": seed,
        "policies__system": "fully-async",
        "policies__consumption": consumption,
        "policies__max_staleness": 4,
        "algorithm__steps": 12,
        "execute__checkpoint_every": 2,
    }
    run = real_run(tmp_path, **keys)
    die_after_step(run, 5)
    die_after_step(run, 9, resume=True)
    last = execute(run, resume=True)
    assert replay(last) is None
    trained: dict[int, tuple[int, ...]] = {}
    for name in ("trace.1.jsonl", "trace.2.jsonl"):
        entries = read_trace(tmp_path / "run" / name).entries
        saved = [c.version for e in entries for c in e.commands if isinstance(c, SaveCheckpoint)]
        trained |= steps_of(entries, max(saved))
    trained |= steps_of(last.entries, 12)
    assert sorted(trained) == list(range(1, 13))
    groups = Counter(group for step in trained.values() for group in step)
    assert groups.most_common(1)[0][1] == 1
    assert sorted(groups) == list(range(36))  # none is left out either
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, 13))
    rollouts = [line["rollout"] for line in read_rollouts(tmp_path / "run")]
    assert sorted(rollouts) == list(range(36 * run.algorithm.group_size))


def test_what_a_resume_takes_back_is_marked_and_what_was_cut_short_is_gone(tmp_path: Path) -> None:
    run = real_run(tmp_path, algorithm__steps=6, execute__checkpoint_every=2)
    die_after_step(run, 3)
    for name in ("metrics.jsonl", "rollouts.jsonl", "samples.jsonl"):
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"step": 4, "rew')
    execute(run, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line.get("step") for line in lines] == [1, 2, 3, None, 3, 4, 5, 6]
    assert lines[3] == {"rolled_back_to": 2, "leg": 2, "run": lines[0]["run"]}
    mark = json.loads(
        next(line for line in (tmp_path / "run" / "rollouts.jsonl").open() if "leg" in line)
    )
    assert mark["rolled_back_to"] == 2 and mark["groups_done"] >= 4
    assert [group.step for group in read_completions(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_trace_says_which_leg_of_a_resumed_run_it_is(tmp_path: Path) -> None:
    run = real_run(tmp_path, algorithm__steps=6, execute__checkpoint_every=2)
    die_after_step(run, 3)
    die_after_step(run, 5, resume=True)
    metrics = measure(read_trace(tmp_path / "run" / "trace.jsonl"))
    assert metrics.note.startswith("leg 2 alone of a run that was resumed, after its step 2")
    first, last = (2 + step for step in metrics.counted_steps)
    with (console := Console(width=300)).capture() as shown:
        console.print(metrics_table(metrics))
    assert f"steps {first} to {last}" in shown.get() or f"step {last} alone" in shown.get()
    killed = measure(read_trace(tmp_path / "run" / "trace.1.jsonl"))
    assert "leg" not in killed.note and killed.num_steps == 3
    said = "the record has no end after step 3 of 6: the run goes on, or was killed; figures are"
    assert said in killed.note and "no end after step 5 of 6" in metrics.note
    assert "no end" not in measure(execute(run, resume=True)).note


# Which checkpoint ---------------------------------------------------------------------------------


def saved(directory: Path, *versions: int) -> Checkpoints:
    """Write checkpoints of a file each."""
    checkpoints = Checkpoints(directory)
    for version in versions:
        path = checkpoints.path_of(version)
        path.mkdir(parents=True)
        (path / "weights").write_bytes(bytes(range(256)))
        write_checksums(path)
        checkpoints.finish(Position(version=version, groups_done=3 * version))
    return Checkpoints(directory)


def cut(path: Path) -> None:
    """Leave half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "weights cut": lambda path: cut(path / "weights"),
    "weights gone": lambda path: (path / "weights").unlink(),
    "a bit of the weights": lambda path: flip(path / "weights"),
    "checksums cut": lambda path: cut(path / CHECKSUMS),
    "position cut": lambda path: cut(path / "position.json"),
    "position empty": lambda path: (path / "position.json").write_text(""),
    "position without keys": lambda path: (path / "position.json").write_text("{}"),
    "position of another": lambda path: (path / "position.json").write_text(
        '{"version": 2, "groups_done": 6}'
    ),
    "position negative": lambda path: (path / "position.json").write_text(
        '{"version": 4, "groups_done": -6}'
    ),
    "position beyond all steps": lambda path: (path / "position.json").write_text(
        f'{{"version": 4, "groups_done": {2**63}}}'
    ),
    "position beyond all rollouts": lambda path: (path / "position.json").write_text(
        f'{{"version": 4, "groups_done": {10**15}}}'
    ),
    "position ahead of all rollouts": lambda path: (path / "position.json").write_text(
        f'{{"version": 4, "groups_done": 12, "done_ahead": [{10**15}]}}'
    ),
    "position with an endless baseline": lambda path: (path / "position.json").write_text(
        '{"version": 4, "groups_done": 12, "baseline": 1e308}'
    ),
}


def test_what_a_user_keeps_beside_checkpoints_is_left_alone(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    names = ["v000002.bak", "validation", "v1", "va"]
    for name in names:
        (tmp_path / name).mkdir()
    checkpoints = saved(tmp_path, 4, 6)
    checkpoints.resume_from(checkpoints.newest())
    assert checkpoints.versions() == [4, 6]
    assert all((tmp_path / name).is_dir() for name in names)


def test_of_a_checkpoint_that_was_moved_elsewhere_only_the_link_is_removed(tmp_path: Path) -> None:
    saved(tmp_path / "all", 2)
    (tmp_path / "all" / "v000002").rename(tmp_path / "moved")
    (tmp_path / "all" / "v000002").symlink_to(tmp_path / "moved")
    assert saved(tmp_path / "all", 4, 6).versions() == [4, 6]
    assert (tmp_path / "moved" / "weights").exists()


def test_the_newest_of_a_million_checkpoints_is_kept(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 999_998, 999_999, 1_000_000, 1_000_001)
    assert checkpoints.versions() == [1_000_000, 1_000_001]
    newest = checkpoints.newest()
    assert newest is not None and newest.version == 1_000_001
    checkpoints.resume_from(checkpoints.read(1_000_000))
    assert checkpoints.versions() == [1_000_000]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_older_one(tmp_path: Path, damage: str) -> None:
    checkpoints = saved(tmp_path, 2, 4)
    DAMAGES[damage](checkpoints.path_of(4))
    found = checkpoints.newest_whole()
    assert found == Checkpoint(checkpoints.path_of(2), Position(version=2, groups_done=6))
    assert [text.partition(":")[0] for text in checkpoints.resume_from(found)] == ["v000004"]
    assert not checkpoints.path_of(4).exists() and (tmp_path / "damaged-v000004").exists()
    if damage != "a bit of the weights":  # which sizes do not tell
        assert saved(tmp_path / "more", 2).newest() is not None


def test_a_run_of_which_every_checkpoint_is_damaged_is_left_to_a_person(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2, 4)
    for version in (2, 4):
        cut(checkpoints.path_of(version) / "weights")
    assert checkpoints.newest() is None
    with pytest.raises(ValueError, match=r"every checkpoint is damaged: v000004: weights has 128"):
        checkpoints.newest_whole()


def test_a_checkpoint_of_an_earlier_version_has_no_checksums_and_is_taken_as_it_is(
    tmp_path: Path,
) -> None:
    checkpoints = saved(tmp_path, 2)
    (checkpoints.path_of(2) / CHECKSUMS).unlink()
    assert find_damage(checkpoints.path_of(2), reads_all=True) == ""
    assert checkpoints.newest_whole() is not None


def test_what_a_run_resumed_from_stays_as_replicas_that_start_later_load_it(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2)
    checkpoints.resume_from(checkpoints.newest_whole())
    for version in (4, 6, 8):
        checkpoints.path_of(version).mkdir()
        checkpoints.finish(Position(version=version, groups_done=0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000002", "v000006", "v000008"]


def test_replicas_start_though_the_checkpoint_that_was_resumed_from_is_removed(
    tmp_path: Path,
) -> None:
    run = real_run(tmp_path, algorithm__steps=7, execute__checkpoint_every=2)
    die_after_step(run, 3)
    checkpoint = tmp_path / "run" / "checkpoints" / "v000002"

    async def go() -> list[str]:
        def watch(event: Event, state: State, now: float) -> None:
            if isinstance(event, Stepped) and event.version == 5:
                shutil.rmtree(checkpoint)
                launcher.replicas[min(launcher.replicas)].kill("was killed by a test")

        world = make_world(run, {"slowest": 0.01}, resume=True, watch=watch)
        launcher: Any = world._launcher
        with contextlib.closing(world._directory):
            await world.run()
            with pytest.raises(RuntimeError, match=r"v000002, from which .* restore it"):
                world._initial_model(2)
        return list(launcher.models)

    models = asyncio.run(asyncio.wait_for(go(), timeout=60))
    assert {*models[:-1]} == {str(checkpoint)} and models[-1] == run.model.path


def test_a_run_whose_newest_checkpoint_is_cut_goes_on_from_the_older_one(tmp_path: Path) -> None:
    run = real_run(tmp_path, algorithm__steps=7, execute__checkpoint_every=2)
    die_after_step(run, 5)
    cut(tmp_path / "run" / "checkpoints" / "v000004" / "position.json")
    execute(run, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    (mark,) = (line for line in lines if "leg" in line)
    assert mark["rolled_back_to"] == 2 and mark["damaged"][0].startswith("v000004: position.json: ")
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, 8))


def test_a_run_whose_trace_ends_before_its_checkpoint_is_refused_with_a_remedy(
    tmp_path: Path,
) -> None:
    run = real_run(tmp_path, algorithm__steps=7, execute__checkpoint_every=2)
    die_after_step(run, 5)
    trace = tmp_path / "run" / "trace.jsonl"
    lines = trace.read_bytes().splitlines(keepends=True)
    is_save = [b'"SaveCheckpoint","version":4,' in line for line in lines]
    trace.write_bytes(b"".join(lines[: is_save.index(True)]))
    before = digests(tmp_path)
    with pytest.raises(ValueError, match=r"trace\.jsonl: ends before step 4 was saved.* or move"):
        execute(run, resume=True)
    assert digests(tmp_path) == before
    trace.rename(tmp_path / "trace.jsonl")
    execute(run, resume=True)
    assert not ledger_of_run(read_trace(trace), tmp_path / "run").faults


def test_a_crash_after_a_checkpoint_and_before_its_event_is_resumed(tmp_path: Path) -> None:
    run = real_run(tmp_path, algorithm__steps=7, execute__checkpoint_every=2)
    die_after_step(run, 5)
    trace = tmp_path / "run" / "trace.jsonl"
    lines = trace.read_bytes().splitlines(keepends=True)
    is_saved = [b'"CheckpointSaved","version":4,' in line for line in lines]
    trace.write_bytes(b"".join(lines[: is_saved.index(True)]))
    execute(run, resume=True)
    assert not ledger_of_run(read_trace(trace), tmp_path / "run").faults


# Who may resume, and with what --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 1), ("algorithm__group_size", 4), ("algorithm__prompts_per_step", 2)],
)
def test_a_run_is_resumed_with_the_settings_that_say_which_prompts_are_done(
    tmp_path: Path, key: str, value: int
) -> None:
    keys: dict[str, Any] = {"algorithm__steps": 6, "execute__checkpoint_every": 2}
    die_after_step(real_run(tmp_path, **keys), 3)
    before = digests(tmp_path)
    other = real_run(tmp_path, **keys, **{key: value})
    with pytest.raises(RunError, match=f"{key.replace('__', '.')} is {value}, but .* begun with"):
        RunDirectory(tmp_path / "run").find_checkpoint(other, resume=True)
    assert digests(tmp_path) == before


def test_a_run_is_resumed_with_what_learned(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"algorithm__steps": 6, "execute__checkpoint_every": 2}
    die_after_step(real_run(tmp_path, **keys), 3)
    adapters = real_run(tmp_path, **keys, sync__mode="lora")
    with pytest.raises(RunError, match=r"sync\.mode is 'lora', but .* begun with 'full'"):
        RunDirectory(tmp_path / "run").find_checkpoint(adapters, resume=True)
    recorded = tmp_path / "run" / RUN
    recorded.write_bytes(encode_run(adapters))
    wider = real_run(tmp_path, **keys, sync__mode="lora", sync__lora_rank=8)
    with pytest.raises(RunError, match=r"sync\.lora_rank is 8, but .* begun with 32"):
        RunDirectory(tmp_path / "run").find_checkpoint(wider, resume=True)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (
            "algorithm__optimizer__name",
            "muon",
            "'adamw': its checkpoints have the state of no other",
        ),
        ("algorithm__name", "ppo", "'grpo': its checkpoints have no critic"),
    ],
)
def test_a_run_is_resumed_with_the_states_that_its_checkpoints_have(
    tmp_path: Path, key: str, value: str, why: str
) -> None:
    directory = RunDirectory(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trace.jsonl").touch()
    (tmp_path / "run" / RUN).write_bytes(encode_run(real_run(tmp_path)))
    dotted, before = re.escape(key.replace("__", ".")), digests(tmp_path)
    with pytest.raises(RunError, match=f"^{dotted} is '{value}', but .* begun with {why}"):
        directory.find_checkpoint(real_run(tmp_path, **{key: value}), resume=True)
    assert digests(tmp_path) == before
    assert directory.find_checkpoint(real_run(tmp_path, algorithm__learning_rate=0.1), True) is None


def test_a_run_is_resumed_with_the_prompts_that_it_began_with(tmp_path: Path) -> None:
    import numpy as np

    prompts = [np.array(ids, np.int32) for ids in ([1, 2], [3])]
    check_prompt_tokens(tmp_path, prompts)  # a run that died before it wrote any
    write_prompt_tokens(tmp_path, prompts)
    check_prompt_tokens(tmp_path, prompts, digest_of(prompts))
    with pytest.raises(ValueError, match=r"3 lines, but the run in .* was begun with 2"):
        check_prompt_tokens(tmp_path, [*prompts, prompts[0]])
    with pytest.raises(ValueError, match="line 2 differs"):
        check_prompt_tokens(tmp_path, [prompts[0], prompts[0]])
    (tmp_path / "prompts.npz").unlink()
    for others in ([prompts[0], prompts[0]], prompts[::-1], prompts[:1]):
        with pytest.raises(ValueError, match=r"not the prompts with which the run in .* was begun"):
            check_prompt_tokens(tmp_path, others, digest_of(prompts))


def test_a_resume_with_other_prompts_is_refused_though_their_tokens_were_lost(
    tmp_path: Path,
) -> None:
    import numpy as np

    run = make_run(local_table(tmp_path))
    with contextlib.closing(RunDirectory(tmp_path / "run")) as directory:
        directory.open(run, resume=False)
        begun_with = digest_of([np.array([1, 2], np.int32)])
        Trace(run, "real", file=directory.trace_file, run_id=directory.run_id, prompts=begun_with)
        directory.begin()
    before = digests(tmp_path / "run")
    with pytest.raises(ValueError, match="as its trace says: --resume needs the same prompts"):
        execute_for_real(run, resume=True)
    assert digests(tmp_path / "run") == before


def fill_disk(*_: object) -> None:
    """Fail as a write on a full disk does."""
    raise OSError(28, "No space left on device")


class NoVerifier(ScriptedVerifier):
    """A verifier that cannot start."""

    async def start(self) -> None:
        raise RuntimeError("no process can be started")


@pytest.mark.parametrize("name", ["", "metrics.jsonl", "lock"])
def test_a_resume_in_a_read_only_directory_is_refused_with_a_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = real_run(tmp_path, algorithm__steps=6, execute__checkpoint_every=2)
    die_after_step(run, 3)
    before, is_writable = digests(tmp_path), os.access

    def access(path: Path, mode: int, **others: Any) -> bool:  # root may write to any file
        return path.name != name and is_writable(path, mode, **others)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "access", access)
    if not name:
        monkeypatch.setattr(paths, "TemporaryDirectory", refuse)
    said = (
        r"^execute\.output .*: cannot be written: .*; copy the directory to a place .* to the copy$"
    )
    with pytest.raises(ValueError, match=said):
        RunDirectory(tmp_path / "run").find_checkpoint(run, resume=True)
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="cannot be changed to"):
        patched.setattr(Path, "chmod", refuse)
        with readable_by("group", tmp_path / "run"):
            pass
    assert digests(tmp_path) == before


@pytest.mark.parametrize("failure", ["before", "start", "inputs", "list", "trace"])
def test_a_resume_that_fails_before_its_first_event_leaves_the_files_as_they_were(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"algorithm__steps": 6, "execute__checkpoint_every": 2}
    die_after_step(real_run(tmp_path, **keys), 3)
    before = digests(tmp_path / "run")
    run = real_run(tmp_path, **keys, rollout__temperature=0.5)
    kind = NoVerifier if failure == "start" else ScriptedVerifier

    async def go() -> None:
        world = make_world(run, {}, resume=True, verifier_class=kind)
        with contextlib.closing(world._directory):
            if failure != "before":
                await world.run()

    with monkeypatch.context() as patched:
        for name in {"inputs": ["write_files"], "list": ["write_results"]}.get(failure, []):
            patched.setattr(record, name, fill_disk)
        if failure == "trace":
            patched.setattr(LineFile, "rename", fill_disk)
        with contextlib.suppress(OSError, RuntimeError):
            asyncio.run(asyncio.wait_for(go(), timeout=60))
    after = digests(tmp_path / "run")
    if failure == "trace":  # it had its number already
        before["trace.1.jsonl"] = before.pop("trace.jsonl")
        before[RUN] = after[RUN]
    assert after == before
    trace = execute(run, resume=True)
    assert trace.leg == 2 and not ledger_of_run(trace, tmp_path / "run").faults
    assert read_trace(tmp_path / "run" / "trace.1.jsonl").leg == 1


def test_a_first_start_that_fails_leaves_no_run(tmp_path: Path) -> None:
    run = real_run(tmp_path)
    with contextlib.closing(RunDirectory(tmp_path / "run")) as directory:
        directory.open(run, resume=False)
    execute(run)
    assert not list((tmp_path / "run").glob(".trace*"))


def test_a_resumed_run_keeps_its_id_if_the_list_of_results_is_lost(tmp_path: Path) -> None:
    run = real_run(tmp_path)
    ids: list[str] = []
    for is_resumed in (False, True):
        with contextlib.closing(RunDirectory(tmp_path / "run")) as directory:
            directory.open(run, is_resumed)
            leg, own = directory.leg, directory.run_id
            Trace(run, "real", file=directory.trace_file, leg=leg, run_id=own)
            directory.begin()
            ids.append(own)
        (tmp_path / "run" / "results.json").unlink()
    assert ids[0] and ids[1] == ids[0]


def damage_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] = 0xFF
    path.write_bytes(data)


def keep_lines(path: Path, most: int) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:most]))


DAMAGED_TRACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "lost": (lambda run: (run / "trace.1.jsonl").unlink(), r"/trace\.jsonl: .* says start 2 of a run, but trace\.1\.jsonl is missing"),
    "damaged": (lambda run: damage_middle(run / "trace.1.jsonl"), r"trace\.1\.jsonl:\d+: not a trace entry"),
    "newest damaged": (lambda run: damage_middle(run / "trace.jsonl"), r"/trace\.jsonl:\d+: not a trace entry"),
    "cut": (lambda run: keep_lines(run / "trace.1.jsonl", 3), r"/trace\.jsonl: resumes from step 2, which no earlier trace saved"),
    "of another run": (
        lambda run: (run / "trace.1.jsonl").write_bytes((run / "trace.1.jsonl").read_bytes().replace(b'"seed":0', b'"seed":7')),
        r"trace\.1\.jsonl: belongs to another run: seed is 7 there, and 0 in trace\.jsonl",
    ),
}  # fmt: skip


def test_a_resume_is_refused_if_a_trace_of_an_earlier_start_is_lost_or_damaged(
    tmp_path: Path,
) -> None:
    run = real_run(tmp_path, algorithm__steps=7, execute__checkpoint_every=2)
    die_after_step(run, 3)
    die_after_step(run, 5, resume=True)
    for name, (damage, told) in DAMAGED_TRACES.items():
        copy = shutil.copytree(tmp_path / "run", tmp_path / name)
        damage(copy)
        before = digests(copy)
        with pytest.raises(ValueError, match=f"{told}.*; restore the whole file, or move trace"):
            RunDirectory(copy).find_checkpoint(run, resume=True)
        assert digests(copy) == before
    whole = RunDirectory(tmp_path / "run").find_checkpoint(run, resume=True)
    assert whole is not None and whole.version == 4


def test_a_run_without_its_first_traces_is_resumed_twice_from_one_checkpoint(
    tmp_path: Path,
) -> None:
    run = real_run(tmp_path, algorithm__steps=7, execute__checkpoint_every=2)
    output = tmp_path / "run"
    die_after_step(run, 3)
    (output / "trace.jsonl").rename(tmp_path / "moved.jsonl")
    die_after_step(run, 3, resume=True)
    trace = execute(run, resume=True)
    assert trace.leg == 2 and trace.entries[0].event.version == 2
    assert ledger_of_run(read_trace(output / "trace.jsonl"), output).is_balanced


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_cut_tokens_of_prompts_are_named_with_what_to_do(tmp_path: Path, share: float) -> None:
    import numpy as np

    prompts = [np.array(ids, np.int32) for ids in ([1, 2], [3])]
    write_prompt_tokens(tmp_path, prompts)
    file = tmp_path / "prompts.npz"
    os.truncate(file, int(share * file.stat().st_size))
    with pytest.raises(ValueError, match=r"prompts\.npz: .* remove this file: --resume writes it"):
        check_prompt_tokens(tmp_path, prompts)
    file.unlink()
    check_prompt_tokens(tmp_path, prompts)


def test_a_failed_write_of_the_tokens_of_prompts_leaves_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    prompts = [np.array([1, 2], np.int32)]
    write_prompt_tokens(tmp_path, prompts)

    def refuse(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OSError, match="No space"):
        write_prompt_tokens(tmp_path, [np.array([3], np.int32)])
    check_prompt_tokens(tmp_path, prompts)


def test_an_error_that_ends_a_run_says_how_to_go_on(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    (tmp_path / "run.json").touch()
    stopped, full = RuntimeError("too many failures"), OSError(28, "No space left on device")
    told = with_advice(stopped, directory, " after step 3: step 2 is saved", "again --resume")
    assert str(told) == "too many failures after step 3: step 2 is saved"
    assert with_advice(full, directory, ": step 2 is saved", "again --resume") is full
    (tmp_path / "run.json").unlink()
    for error in (stopped, full):
        told = with_advice(error, directory, "", "again --resume")
        assert re.fullmatch(
            r"execute\.output .* was removed or moved .* move it back and go on with: again --resume",
            str(told),
        )


HOLD = """
import sys, time
from pathlib import Path
from streamrl.executor.directory_lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print(repr(lock.take()), flush=True)
time.sleep(60)
"""


def test_a_directory_has_one_run_at_a_time_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    run = real_run(tmp_path, algorithm__steps=6, execute__checkpoint_every=2)
    die_after_step(run, 3)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "''\n"
        with pytest.raises(
            ValueError, match=f"is in use by process {holder.pid}: .* one run at a time"
        ):
            RunDirectory(tmp_path / "run").find_checkpoint(run, resume=True)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    execute(run, resume=True)


# Other settings -----------------------------------------------------------------------------------


def test_what_a_resume_changes_is_known_by_key_with_both_values(tmp_path: Path) -> None:
    die_after_step(real_run(tmp_path), 2)
    run = real_run(tmp_path, algorithm__steps=9, rollout__temperature=0.5)
    directory = RunDirectory(tmp_path / "run")
    with contextlib.closing(directory):
        directory.find_checkpoint(run, resume=True)
    assert sorted(directory.changes.values()) == [
        "algorithm.steps 4 -> 9",
        "rollout.temperature 1.0 -> 0.5",
    ]


def test_tokens_are_forgotten_before_the_run_file_names_another_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after_step(real_run(tmp_path), 2)
    (tmp_path / "run/tokens").mkdir(exist_ok=True)
    (tmp_path / "run/tokens/7.0").write_bytes(b"tokens")
    run = real_run(tmp_path, algorithm__steps=9, rollout__temperature=0.5)
    with contextlib.closing(RunDirectory(tmp_path / "run")) as directory:
        directory.open(run, resume=True)
        monkeypatch.setattr(record, "write_files", fill_disk)
        with pytest.raises(OSError, match="No space"):
            directory.begin()
    assert not list((tmp_path / "run").rglob("7.0"))


@pytest.mark.parametrize(
    ("key", "is_kept"), [("rollout.temperature", False), ("algorithm.steps", True)]
)
def test_tokens_of_another_distribution_are_not_gone_on_with(
    key: str, is_kept: bool, tmp_path: Path
) -> None:
    directory, tokens = RunDirectory(tmp_path / "run"), tmp_path / "run/tokens"
    tokens.mkdir(parents=True)
    (tokens / "7.0").write_bytes(b"tokens")
    with contextlib.closing(directory):
        directory.open(real_run(tmp_path), resume=False)
        directory.changes = {key: f"{key} 1 -> 2"}
        directory.begin()
    assert [path.name for path in tmp_path.rglob("7.*")] == (["7.0"] if is_kept else [])
