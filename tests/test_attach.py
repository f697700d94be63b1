"""Trainers that join a run while it goes on, and leave it: the run is none the worse, and nothing is lost sight of."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.cli.attach import attach
from streamrl.cli.attach import detach as detach_by_name
from streamrl.engine.messages import (
    Event,
    RunStarted,
    Stepped,
    TrainerJoined,
    TrainerLeaving,
    TrainerLost,
    TrainerStarted,
    TrainerStopped,
)
from streamrl.engine.policies.staleness import AWAY
from streamrl.engine.state import State
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.engine.trainer_side import ABSENT, LEADER
from streamrl.executor.directory_lock import LOCK, DirectoryLock, is_abandoned
from streamrl.executor.execute import execute as execute_for_real
from streamrl.executor.subscribers.attach_requests import (
    Attach,
    ControlFiles,
    Detach,
    ask,
    read_attached,
    with_attached,
)
from streamrl.executor.world import RealWorld
from streamrl.record.chrome_trace import chrome_trace
from streamrl.record.metrics import measure
from streamrl.record.restarts import ledger_of_run
from streamrl.record.run_directory import read_metrics, secondary_trainer_directory
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run, make_run, secondary_trainer_section
from streamrl.runfile.result_files import replacing
from tests.command_line import streamrl
from tests.runs import checked_world, make_table, small_run
from tests.scripted import make_world
from tests.test_deterministic import project, what_it_made
from tests.test_execute import real_run
from tests.test_resume import DeathError
from tests.test_secondary_trainers import QUICK, THREE
from tests.test_secondary_trainers_executed import groups_of

__all__ = ["project"]  # a fixture
NEWCOMER = {"name": "newcomer", "pool": "aside", "algorithm": {"name": "rloo"}}
Act = Callable[[RealWorld, Event, State], None]


def section(**changes: Any) -> dict[str, Any]:
    """Return the section of a trainer as `attach` would send it."""
    table = make_table({"cluster.pools.aside": {"gpu": "h20"}, "followers": [NEWCOMER | changes]})
    return secondary_trainer_section(make_run(table).followers[0])


def run_of(directory: Path, **changes: Any) -> Run:
    pools = {"cluster.pools.aside": {"gpu": "h20"}, "execute.checkpoint_every": 2}
    return real_run(directory, **{**pools, "algorithm__steps": 8, **changes})


def execute(run: Run, act: Act, resume: bool = False) -> Trace:
    """Run scripted roles to the end; `act` is told every event and may let trainers come and go."""

    async def go() -> Trace:
        def watch(event: Event, state: State, now: float) -> None:
            loop = asyncio.get_running_loop()
            loop.call_soon(act, world, event, state)

        if resume:
            full = with_attached(run, Path(run.execute.output))
        world = make_world(full if resume else run, {"slowest": 0.01}, resume, watch=watch)
        with contextlib.closing(world._directory), contextlib.closing(world.members._records):
            return await world.run()

    return asyncio.run(asyncio.wait_for(go(), timeout=60))


DAMAGED = {
    "cut": '{"followers": [{"name": "newco',
    "deep": "[" * 100_000,
    "without a name": '{"followers": [{}]}',
    "of another key": '{"followers": [{"name": "newcomer", "pool": "aside", "prefix": 1}]}',
    "of another pool": '{"followers": [{"name": "newcomer", "pool": "nowhere"}]}',
    "of a number": '{"followers": [{"name": "newcomer", "pool": "aside", "micro_batch": -1}]}',
    "at no version": '{"followers": [], "leads_from": -1}',
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_list_of_attached_trainers_is_named_with_what_to_do(
    damage: str, tmp_path: Path
) -> None:
    path = tmp_path / "attached.json"
    path.write_text(DAMAGED[damage])
    with pytest.raises(
        ValueError, match=f"^{re.escape(str(path))}: cannot be read, .* or remove it"
    ):
        with_attached(run_of(tmp_path), tmp_path)


def is_step(event: Event, version: int, trainer: int = LEADER) -> bool:
    return isinstance(event, Stepped) and (event.version, event.trainer) == (version, trainer)


def is_step_of(event: Event, trainer: int) -> bool:
    return isinstance(event, Stepped) and event.trainer == trainer


class Moments:
    """Counts how often something was asked about."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def first(self, what: str) -> bool:
        return self.nth(what, 1)

    def nth(self, what: str, number: int) -> bool:
        self.counts[what] += 1
        return self.counts[what] == number


def joins(version: int = 2, **changes: Any) -> Act:
    def act(world: RealWorld, event: Event, state: State) -> None:
        if is_step(event, version):
            world.members.attach(section(**changes))

    return act


def detach(world: RealWorld, name: str = "newcomer") -> None:
    world._tasks.add(asyncio.ensure_future(world.members.detach(name)))  # type: ignore[arg-type]


# Joining ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["stream-sync", "fully-async", "colocated"])
def test_a_trainer_that_joins_learns_from_what_is_drawn_after_it_and_the_rest_is_counted(
    tmp_path: Path, system: str
) -> None:
    run = run_of(tmp_path, policies__system=system)
    trace = execute(run, joins())
    assert replay(trace, checks_invariants=True) is None
    directory = tmp_path / "run"
    written = read_trace(directory / "trace.jsonl")
    assert (
        written.run.secondary_trainer_names == ("newcomer",)
        and written.begun.secondary_trainer_names == ()
    )
    balance = ledger_of_run(written, directory)
    assert balance.is_balanced, balance.faults
    leader, newcomer = balance.trainers
    (joined,) = (n for n, e in enumerate(trace.entries) if isinstance(e.event, TrainerJoined))
    before = sum(
        len(drawn.rollouts)
        for entry in trace.entries[:joined]
        for drawn in getattr(entry.event, "groups", ())
    )
    assert newcomer.dropped[ABSENT] == before > 0
    assert newcomer.trained > 0 and leader.trained == 8 * 3 * run.algorithm.group_size
    steps = [
        line["step"] for line in read_metrics(secondary_trainer_directory(directory, 1, "newcomer"))
    ]
    assert steps == list(range(1, len(steps) + 1)) and steps
    figures = measure(written)
    assert sum(figures.idle.values()) + sum(figures.busy.values()) == pytest.approx(1)
    assert set(figures.sides) >= {"newcomer"}
    assert b"newcomer joined" in chrome_trace(written)


def test_nothing_of_a_rollout_is_kept_once_those_who_were_there_are_done_with_it(
    tmp_path: Path,
) -> None:
    worlds: list[RealWorld] = []

    def act(world: RealWorld, event: Event, state: State) -> None:
        worlds.append(world)
        joins(3)(world, event, state)

    execute(run_of(tmp_path, policies__system="stream-async"), act)
    world = worlds[0]
    assert not world._buffer.rollouts.keys() - world.engine.state.rollouts.keys()


def test_a_trainer_is_refused_whose_name_is_taken_or_that_has_no_room(tmp_path: Path) -> None:
    refused: list[str] = []

    def act(world: RealWorld, event: Event, state: State) -> None:
        if not is_step(event, 2):
            return
        for changes in ({"name": "quick one"}, {"name": "big", "data_parallel": 512}):
            try:
                world.members.attach(section() | changes)
            except ValueError as error:
                refused.append(str(error))

    quick = {**QUICK, "name": "quick one", "pool": "aside", "tensor_parallel": 1}
    trace = execute(run_of(tmp_path, followers=[quick]), act)
    taken, room = refused
    assert "'quick one': a trainer of that name is attached already" in taken
    assert "aside" in room
    assert trace.run.secondary_trainer_names == ("quick one",)
    assert not (tmp_path / "run" / "attached.json").exists()


# Leaving, and coming back -------------------------------------------------------------------------


def test_a_trainer_is_killed_detached_and_attached_again_and_goes_on_from_its_own_checkpoint(
    tmp_path: Path,
) -> None:
    saved: list[int] = []
    moments = Moments()

    def act(world: RealWorld, event: Event, state: State) -> None:
        joins(1)(world, event, state)
        newcomer = state.trainers[1] if len(state.trainers) > 1 else None
        if newcomer is None:
            return
        if newcomer.version and newcomer.command is not None and moments.first("kill"):
            world._trainers.kill(1, "was killed by a test")
        elif (
            newcomer.num_lost
            and newcomer.version  # a step may be told of after it is taken back
            and is_step_of(event, 1)
            and moments.first("detach")
        ):
            detach(world)
        elif isinstance(event, TrainerStopped):
            saved.append(newcomer.version)
        elif saved and is_step_of(event, LEADER) and moments.nth("step", 2):
            world.members.attach(section())

    run = run_of(tmp_path, algorithm__steps=40, policies__system="stream-async")
    trace = execute(run, act)
    events = [entry.event for entry in trace.entries]
    kinds = (TrainerJoined, TrainerLost, TrainerLeaving, TrainerStopped)
    told = [type(event) for event in events if isinstance(event, kinds)]
    assert told == [TrainerJoined, TrainerLost, TrainerLeaving, TrainerStopped, TrainerJoined]
    started = [e.version for e in events if isinstance(e, TrainerStarted) and e.trainer == 1]
    assert started[-1] == saved[0] > 0
    assert replay(trace, checks_invariants=True) is None
    balance = ledger_of_run(trace, tmp_path / "run")
    assert balance.is_balanced, balance.faults
    leader, newcomer = balance.trainers
    assert leader.trained == 40 * 3 * run.algorithm.group_size and not leader.dropped
    assert newcomer.dropped[AWAY] > 0 and newcomer.trained > 0
    assert not set(groups_of(trace, 1)) & groups_between(trace, TrainerStopped, TrainerJoined)


def groups_between(trace: Trace, first: type, second: type) -> set[int]:
    """Return the groups that were trained on by the leader between two events."""
    found: set[int] = set()
    is_between = False
    for entry in trace.entries:
        is_between = (is_between or isinstance(entry.event, first)) and not isinstance(
            entry.event, second
        )
        if is_between:
            found.update(
                group
                for command in entry.commands
                if getattr(command, "trainer", None) == LEADER
                for group in getattr(command, "groups", ())
            )
    return found


def test_a_detached_trainer_comes_back_as_it_was_and_no_other_way(tmp_path: Path) -> None:
    refused: list[str] = []

    def act(world: RealWorld, event: Event, state: State) -> None:
        joins(1)(world, event, state)
        if isinstance(event, TrainerStarted) and event.trainer == 1:
            detach(world)
        elif isinstance(event, TrainerStopped):
            with pytest.raises(ValueError, match="had other settings") as error:
                world.members.attach(section(micro_batch=2))
            refused.append(str(error.value))

    trace = execute(run_of(tmp_path), act)
    assert refused
    assert ledger_of_run(trace, tmp_path / "run").is_balanced


@pytest.mark.parametrize("was_there", [False, True])
def test_nobody_joins_or_comes_back_once_the_last_prompts_are_drawn(
    tmp_path: Path, was_there: bool
) -> None:
    refused: list[str] = []

    def act(world: RealWorld, event: Event, state: State) -> None:
        if was_there:
            joins(1)(world, event, state)
            if is_step(event, 2):
                detach(world)
        has_left = not was_there or (len(state.trainers) > 1 and state.trainers[1].is_away)
        if is_step(event, 7) and has_left:
            with pytest.raises(
                ValueError, match=r"all prompts of algorithm\.steps=8 are drawn"
            ) as e:
                world.members.attach(section())
            refused.append(str(e.value))

    trace = execute(run_of(tmp_path, policies__system="stream-async"), act)
    assert len(refused) == 1 and "\n" not in refused[0]
    assert sum(isinstance(entry.event, TrainerJoined) for entry in trace.entries) == was_there
    assert ledger_of_run(trace, tmp_path / "run").is_balanced


@pytest.mark.parametrize("leaves", [False, True])
def test_a_resume_brings_back_who_had_joined_and_leaves_out_who_had_left(
    tmp_path: Path, leaves: bool
) -> None:
    run = run_of(tmp_path, algorithm__steps=40, policies__system="stream-async")
    moments = Moments()

    def until_death(world: RealWorld, event: Event, state: State) -> None:
        joins(1)(world, event, state)
        is_saved = len(state.trainers) > 1 and state.trainers[1].checkpoint_version > 0
        has_left = isinstance(event, TrainerStopped) or bool(moments.counts["left"])
        moments.counts["left"] = has_left
        if is_saved and leaves and moments.first("detach"):
            detach(world)
        if is_saved and has_left == leaves and is_step_of(event, LEADER) and moments.nth("die", 3):
            world._error = DeathError()
            world._over.set()

    with pytest.raises(DeathError):
        execute(run, until_death)
    attached = read_attached(tmp_path / "run")
    assert attached.away == (("newcomer",) if leaves else ())

    def again(world: RealWorld, event: Event, state: State) -> None:
        if leaves and is_step_of(event, LEADER) and moments.nth("again", 3):
            world.members.attach(section())

    trace = execute(run, again, resume=True)
    begun = trace.entries[0].event
    assert isinstance(begun, RunStarted) and begun.away == ((1,) if leaves else ())
    assert begun.followers and begun.followers[0].trainer == 1
    assert replay(trace, checks_invariants=True) is None
    balance = ledger_of_run(trace, tmp_path / "run")
    assert balance.is_balanced, balance.faults
    newcomer = balance.trainers[1]
    steps = [
        e.event.version
        for e in trace.entries
        if isinstance(e.event, Stepped) and e.event.trainer == 1
    ]
    assert steps[0] == begun.followers[0].version + 1
    assert (AWAY in newcomer.dropped) == leaves and newcomer.dropped[ABSENT] > 0


# Simulated ----------------------------------------------------------------------------------------


def test_a_simulated_trainer_leaves_and_comes_back_and_delays_nobody() -> None:
    run = small_run(THREE)
    world, quick = checked_world(run), secondary_trainer_section(run.followers[0])

    def watch(version: int) -> None:
        if version == 4:
            world.emit(TrainerLeaving(1))
        elif version == 8:
            world.emit(TrainerJoined(1, quick))

    trace = world.run(watch)
    assert replay(trace) is None
    balance = ledger_of_run(trace, Path())
    assert balance.is_balanced, balance.faults
    leader, quick_one, _ = balance.trainers
    assert leader.trained == 12 * run.algorithm.rollouts_per_step
    assert quick_one.dropped[AWAY] > 0
    alone = checked_world(run).run()
    steps = [[e.time for e in t.entries if is_leaders(e.event)] for t in (trace, alone)]
    assert steps[0] == pytest.approx(steps[1])


def is_leaders(event: Event) -> bool:
    return isinstance(event, Stepped) and event.trainer == LEADER


# Asking a run -------------------------------------------------------------------------------------


def test_whoever_asks_where_no_run_goes_on_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "trainer.toml").write_text('name = "late"\npool = "local"\n')
    for words in (("attach", tmp_path, tmp_path / "trainer.toml"), ("detach", tmp_path, "late")):
        done = streamrl(*words)
        assert (
            done.returncode == 2 and done.stderr == f"streamrl: {tmp_path}: no run goes on there\n"
        )


def test_a_request_that_nobody_can_read_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    lock.take()
    files = ControlFiles(tmp_path)
    deep = msgspec.json.encode(Attach({})).replace(
        b"{}", b'{"a":' + b"[" * 100_000 + b"]" * 100_000
    )
    for content in (b"\x80\x04.", deep + b"}"):
        (tmp_path / "control" / "1.json").write_bytes(content)
        ((_, what),) = files.take()
        assert isinstance(what, ValueError) and not list((tmp_path / "control").iterdir())
    assert (tmp_path / "control").stat().st_mode & 0o077 == 0
    lock.release()
    with pytest.raises(ValueError, match="no run goes on there"):
        ask(tmp_path, Attach({}))


def test_a_request_is_not_taken_before_it_is_whole(tmp_path: Path) -> None:
    files = ControlFiles(tmp_path)
    path = tmp_path / "control" / "1.json"
    with replacing(path) as partial:
        assert not [*files.take()]
        partial.write_bytes(msgspec.json.encode(Detach("late")))
        assert not [*files.take()]
    assert [*files.take()] == [(path, Detach("late"))]


def test_odd_entries_among_requests_are_warned_of_once_and_harm_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("old.json", "old"):
        (tmp_path / "control" / name).mkdir(parents=True)
    files = ControlFiles(tmp_path)
    (tmp_path / "control" / "new.json").mkdir()
    os.mkfifo(tmp_path / "control" / "pipe.json")
    (tmp_path / "control" / "gone.json").symlink_to("nowhere")
    (tmp_path / "control" / "large.json").touch()
    os.truncate(tmp_path / "control" / "large.json", 1 << 40)
    (tmp_path / "control" / "1.json").write_bytes(msgspec.json.encode(Detach("late")))
    assert [request for _, request in (*files.take(), *files.take())] == [Detach("late")]
    warned = [record.getMessage() for record in caplog.records]
    odd = {"old.json", "old", "new.json", "pipe.json", "gone.json", "large.json"}
    assert sorted(Path(text.split()[0]).name for text in warned) == sorted(odd)
    shutil.rmtree(tmp_path / "control")
    assert not [*files.take(), *files.take()]
    assert len(caplog.records) == len(odd) + 1


def test_who_asks_a_run_is_told_that_it_cannot_answer(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    lock.take()
    with pytest.raises(ValueError, match=r"control is missing, .* mkdir -m 700"):
        ask(tmp_path, Attach({}))
    ControlFiles(tmp_path)
    with pytest.raises(RuntimeError, match=r"the run did not answer within 0\.1 s"):
        ask(tmp_path, Detach("late"), limit=0.1)
    assert not list((tmp_path / "control").iterdir()), "nobody waits for that answer"
    removal = threading.Timer(0.1, shutil.rmtree, [tmp_path / "control"])
    removal.start()
    with pytest.raises(RuntimeError, match="control is missing"):
        ask(tmp_path, Detach("late"))
    removal.join()
    lock.release()


# For real -----------------------------------------------------------------------------------------


@pytest.fixture
def roomy(project: Path) -> Iterator[Path]:
    """The deterministic run's file with room for one more trainer, and more steps."""
    text = (project / "run.toml").read_text().replace("gpus_per_node = 3", "gpus_per_node = 4")
    path = project / "roomy.toml"
    path.write_text(text.replace("steps = 5", "steps = 11"))
    yield path


def test_the_leaders_tokens_are_those_of_a_run_that_nobody_joined(roomy: Path) -> None:
    def output(name: str) -> tuple[str, ...]:
        return (f"execute.output={roomy.parent / name}", "execute.launcher=in-process")

    alone = load_run(roomy, output("unjoined"))
    execute_for_real(alone)
    run = load_run(roomy, output("joined"))
    directory = Path(run.execute.output)
    late = roomy.parent / "late.toml"
    late.write_text('name = "late"\npool = "local"\nalgorithm.name = "reinforce++"\n')
    asked: list[str] = []

    def ask_beside(what: Callable[[], None], name: str) -> None:
        asked.append(name)
        threading.Thread(target=what, daemon=True).start()

    def watch(event: Event, state: State, now: float) -> None:
        if isinstance(event, TrainerStarted | TrainerStopped) and len(asked) < 3:
            if event.trainer == asked.count("detach"):
                ask_beside(partial(attach, directory, late), "attach")
        elif is_step(event, 1, trainer=1):
            ask_beside(partial(detach_by_name, directory, "late"), "detach")

    trace = execute_for_real(run, watch=watch)
    assert asked == ["attach", "detach", "attach"]
    joined = [entry.event for entry in trace.entries if isinstance(entry.event, TrainerJoined)]
    assert len(joined) == 2
    assert what_it_made(directory) == what_it_made(Path(alone.execute.output))
    done = streamrl("replay", directory)
    assert done.returncode == 0 and "late" in done.stdout and ABSENT in done.stdout


def test_a_lock_that_is_a_link_or_no_file_is_refused_and_not_written_to(tmp_path: Path) -> None:
    other = tmp_path / "notes"
    other.write_text("keep")
    linked, special = tmp_path / "linked", tmp_path / "special"
    for directory in (linked, special):
        directory.mkdir()
    (linked / LOCK).symlink_to(other)
    os.mkfifo(special / LOCK)
    for directory in (linked, special):
        with pytest.raises(OSError, match="lock"):
            DirectoryLock(directory).take()
        assert not is_abandoned(directory)
    assert other.read_text() == "keep"
