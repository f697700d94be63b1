"""Ranks of the trainer that are added or removed between steps: when, what that takes, and that nothing changes for the weights."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.engine.messages import (
    CheckpointSaved,
    Event,
    Failed,
    RanksRequested,
    ResizeTrainer,
    RunStarted,
    StartTrainer,
    Step,
    Stepped,
    Train,
    Trained,
    TrainerLost,
    TrainerResized,
    TrainerStarted,
)
from streamrl.engine.state import State
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.executor.launchers.local_launcher import LocalLauncher
from streamrl.executor.launchers.placement import NoGpusLeftError, PlacedRoles, Placement
from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.record import RunDirectory
from streamrl.executor.subscribers.attach_requests import Notice, RanksRequest, ask
from streamrl.executor.world import RealWorld
from streamrl.export.planned_values import planned_values
from streamrl.hardware.profiles import load_model
from streamrl.hardware.resolved import resolve
from streamrl.record.attribution import attribute_sides
from streamrl.record.charges import read_paid
from streamrl.record.metrics import measure
from streamrl.record.recorded_inputs import with_ranks_of_steps
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.resizing import ResizingCosts
from streamrl.targets.execute_limits import check_back_end_of
from tests.runs import SINGLE, Script, checked_world, done, lose_trainer_at, of, small_run
from tests.scripted import MOST_RANKS, ScriptedLauncher, make_world
from tests.test_execute import real_run
from tests.traces import (
    check_whole,
)

ALONE = {"trainer.tensor_parallel": 1, "trainer.zero": 0}
"""Every data-parallel rank is one GPU with all of the state."""


def changes_at(*sizes: tuple[int, int]) -> list[dict[str, int]]:
    """Return the value of `trainer.resize` for pairs of a step and its ranks."""
    return [{"step": step, "data_parallel": ranks} for step, ranks in sizes]


def resized(*sizes: tuple[int, int], **changes: Any) -> Run:
    """Return the small run, of six steps, with changes of ranks."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return small_run(
        {
            "algorithm.steps": 6,
            "cluster.pools.near.nodes": 2,
            "trainer.zero": 0,
            "trainer.resize": changes_at(*sizes),
            **keys,
        }
    )


def told(trace: Trace, kind: type) -> list[Any]:
    return [entry.event for entry in trace.entries if isinstance(entry.event, kind)]


def commanded(trace: Trace, kind: type) -> list[Any]:
    return [command for entry in trace.entries for command in of(kind, list(entry.commands))]


# When ranks change --------------------------------------------------------------------------------


def begun(*sizes: tuple[int, int], **changes: Any) -> Script:
    """Return a script whose trainer has the rollouts of its first step."""
    s = Script(resized(*sizes, **changes))
    commands = s.draw(s.begin())
    assert not of(ResizeTrainer, commands)
    s.finish(*range(4))
    return s


def test_ranks_change_between_two_steps_and_no_earlier() -> None:
    s = begun((2, 3))
    assert isinstance(s.state.leader.command, Train)
    commands = s.step(1)
    assert of(ResizeTrainer, commands) == [ResizeTrainer(0, 3)]
    assert not of(Train, s.finish(*range(4, 8))), "the trainer works while its ranks change"
    assert of(Train, s.tell(TrainerResized(0, 3)))
    assert s.state.leader.data_parallel == 3
    assert not of(ResizeTrainer, s.step(2))


def test_a_command_fills_the_ranks_that_are_there() -> None:
    one_by_one = {key.replace(".", "__"): value for key, value in SINGLE.items()}
    s = Script(resized((2, 2), algorithm__prompts_per_step=4, trainer__micro_batch=1, **one_by_one))
    s.draw(s.begin())
    assert of(Train, s.finish(0)) == [Train((0,), 0)]
    s.finish(*range(1, 4))
    s.step(1)
    s.tell(TrainerResized(0, 2))
    assert not of(Train, s.finish(4)), "one rollout fills one of two ranks"
    assert of(Train, s.finish(5)) == [Train((4, 5), 0)]


def test_a_request_waits_for_the_end_of_the_step() -> None:
    s = begun()
    assert not of(ResizeTrainer, s.tell(RanksRequested(2)))
    assert of(ResizeTrainer, s.step(1)) == [ResizeTrainer(0, 2)]


def test_a_request_is_met_at_once_while_the_trainer_has_computed_nothing() -> None:
    s = Script(resized())
    s.draw(s.begin())
    assert of(ResizeTrainer, s.tell(RanksRequested(2))) == [ResizeTrainer(0, 2)]


def test_a_request_holds_until_the_next_change_of_the_run_file() -> None:
    s = begun((3, 4))
    s.tell(RanksRequested(2))
    s.step(1)
    s.tell(TrainerResized(0, 2))
    s.finish(*range(4, 8))
    assert of(ResizeTrainer, s.step(2)) == [ResizeTrainer(0, 4)]


def test_a_trainer_that_is_lost_while_its_ranks_change_restarts_with_the_new_ones() -> None:
    s = begun((2, 3), execute__checkpoint_every=1)
    saves = s.step(1)
    assert not of(ResizeTrainer, saves), "the checkpoint comes first"
    command = s.state.leader.command
    assert command is not None
    assert of(ResizeTrainer, s.tell(done(command))) == [ResizeTrainer(0, 3)]
    lost = s.tell(TrainerLost(0, "a new rank died"), Failed(ResizeTrainer(0, 3), "gone"))
    assert of(StartTrainer, lost) == [StartTrainer(0, 1, 3)]
    s.tell(TrainerStarted(0, 1))
    assert s.state.leader.data_parallel == 3 and s.state.failure is None


def test_a_resumed_run_starts_with_the_ranks_of_its_step() -> None:
    s = Script(resized((2, 3), (4, 2)))
    assert of(StartTrainer, s.tell(RunStarted(2, 4))) == [StartTrainer(0, 2, 3)]


# Simulated ----------------------------------------------------------------------------------------


def simulate(run: Run) -> Trace:
    trace = checked_world(run).run()
    check_whole(trace)
    return trace


def test_a_change_takes_its_costs_and_is_named_in_the_attribution() -> None:
    run = resized((3, 2), (5, 1), trainer__rank_start_time="30 s")
    trace, costs = simulate(run), Costs.load(run)
    assert costs.resizing is not None
    begins = [e.time for e in trace.entries if of(ResizeTrainer, list(e.commands))]
    ends = [e.time for e in trace.entries if isinstance(e.event, TrainerResized)]
    grown, shrunk = costs.resizing.time(1, 2), costs.resizing.time(2, 1)
    took = [end - begin for begin, end in zip(begins, ends, strict=True)]
    assert took == pytest.approx([grown, shrunk]) and grown > 30 > shrunk
    stepped = [e.time for e in trace.entries if isinstance(e.event, Stepped)]
    assert begins == pytest.approx([stepped[1], stepped[3]])
    side = attribute_sides(trace).sides["trainer"]
    gpus = run.trainer.num_gpus
    assert side.idle["resize"] * side.gpu_seconds == pytest.approx(2 * gpus * (grown + shrunk))


def test_added_ranks_are_paid_for_from_their_start_to_their_end() -> None:
    trace = simulate(resized((3, 2), (5, 1), trainer__rank_start_time="30 s"))
    begin = next(e.time for e in trace.entries if of(ResizeTrainer, list(e.commands)))
    end = next(e.time for e in trace.entries if e.event == TrainerResized(0, 1))
    last = trace.entries[-1].time
    gpus = trace.run.trainer.num_gpus
    mean = gpus * (1 + (end - begin) / last)
    assert read_paid(trace, 0.0, last).used["near"] == pytest.approx(mean)
    assert attribute_sides(trace).sides["trainer"].gpu_seconds == pytest.approx(mean * last)


def training_times(trace: Trace) -> list[float]:
    """Return the seconds of passes and the optimizer step of each step."""
    seconds, found, begun_at = 0.0, [], 0.0
    for entry in trace.entries:
        if isinstance(entry.event, Trained | Stepped):
            seconds += entry.time - begun_at
        if isinstance(entry.event, Stepped):
            found.append(seconds)
            seconds = 0.0
        if of(Train, list(entry.commands)) or of(Step, list(entry.commands)):
            begun_at = entry.time
    return found


def test_more_ranks_train_faster_from_their_step_on() -> None:
    long = {"workload__lengths__scale": 0.5, "rollout__max_tokens": 8192}
    times = training_times(simulate(resized((4, 2), algorithm__prompts_per_step=16, **long)))
    assert sum(times[3:]) < 0.8 * sum(times[:3])


def test_the_costs_of_a_change_are_start_setup_and_bytes_over_the_wire() -> None:
    run = resized((2, 2))
    costs = ResizingCosts.load(resolve(run))
    parameters = load_model(run.model).num_parameters / run.trainer.tensor_parallel
    assert costs.num_bytes == pytest.approx(12 * parameters, rel=0.02)
    assert costs.sends_on and costs.setup_time == 2.0
    assert costs.time(1, 2) == pytest.approx(2 * 2.0 + costs.num_bytes / costs.near), "two groups"
    assert costs.time(1, 4) > costs.time(1, 2), "beyond a node bytes cross the network"
    assert costs.time(4, 1) == costs.time(2, 1) == costs.setup_time


def test_a_prediction_of_a_run_has_the_ranks_of_each_step_also_those_that_a_user_asked_for() -> (
    None
):
    run = resized((3, 2), (5, 1))
    trace = simulate(run)
    asked = replace(run, trainer=replace(run.trainer, resize=()))
    assert with_ranks_of_steps(asked, trace) == run
    assert with_ranks_of_steps(asked, simulate(asked)) == asked


@pytest.mark.parametrize("seed", range(3))
def test_a_trainer_that_dies_at_any_time_loses_and_doubles_nothing(seed: int) -> None:
    run = resized(
        (2, 2),
        (3, 4),
        (5, 1),
        seed=seed,
        trainer__rank_start_time="20 s",
        trainer__start_time="5 s",
    )
    length, source = simulate(run).entries[-1].time, random.Random(seed)
    for _ in range(4):
        world = checked_world(run)
        lose_trainer_at(world, source.uniform(0, length), 0)
        trace = world.run()
        check_whole(trace)
        assert world.engine.version == 6 and world.engine.state.leader.data_parallel == 1


def test_metrics_say_what_a_change_took() -> None:
    run = resized((3, 2), trainer__rank_start_time="30 s")
    costs, metrics = Costs.load(run), measure(simulate(run))
    assert costs.resizing is not None
    (change,) = metrics.resizes
    assert (change.step, change.data_parallel) == (3, 2)
    assert change.seconds == pytest.approx(costs.resizing.time(1, 2))
    assert sum(metrics.busy.values()) + sum(metrics.idle.values()) == pytest.approx(1)


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer.zero": 1}, "trainer.zero must be 0"),
        ({"trainer.resize": changes_at((1, 2))}, "trainer.resize.0.step must be at least 2"),
        ({"trainer.resize": changes_at((3, 2), (3, 4))}, "trainer.resize.1.step must be"),
        ({"trainer.resize": changes_at((9, 2))}, "trainer.resize.0.step must be"),
        ({"trainer.resize": changes_at((2, 1))}, "as before; change it, or remove the entry"),
        (
            {"trainer.resize": changes_at((2, 3))},
            "must be at most 2, because pool 'near' has 8 GPUs",
        ),
        ({"lending": {}}, "does not work with [lending]"),
        ({"trainer.expert_tensor_parallel": 2}, "trainer.expert_tensor_parallel must be absent"),
        (
            {"followers": [{"name": "b", "pool": "far", "resize": changes_at((2, 2))}]},
            "trainer.1.resize must be absent",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_changes_of_ranks_are_refused_with_a_remedy(changes: dict[str, Any], words: str) -> None:
    keys = {
        "algorithm.steps": 6,
        "trainer.zero": 0,
        "trainer.resize": changes_at((3, 2)),
        "cluster.pools.near.nodes": 1,
        "cluster.pools.near.gpus_per_node": 8,
    }
    with pytest.raises(RunError, match=words.replace("[", r"\[").replace("]", r"\]")):
        small_run({**keys, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer__backend": "deepspeed"}, "trainer.backend must be 'torch'"),
        ({"trainer__backend": "fsdp2"}, "trainer.backend must be 'torch'"),
        ({"trainer__tensor_parallel": 4}, "trainer.tensor_parallel must be 1"),
        ({"trainer__context_parallel": 2}, "trainer.context_parallel must be 1"),
        ({"execute__launcher": "ray"}, "execute.launcher must be 'local'"),
        ({"execute__launcher": "in-process"}, "execute.launcher must be 'local'"),
    ],
)
def test_a_back_end_that_cannot_change_ranks_is_refused_before_anything_starts(
    changes: dict[str, Any], words: str
) -> None:
    run = resized((2, 2), **{"trainer__tensor_parallel": 1, **changes})
    with pytest.raises(RunError, match=words) as refused:
        check_back_end_of(run, 0)
    assert "--set" in str(refused.value) and "remove trainer.resize" in str(refused.value)


def test_an_exported_script_says_that_no_framework_changes_the_ranks() -> None:
    planned = planned_values(resized((3, 2), (5, 1)))["resize"]
    assert planned.value == "data_parallel 2 from step 3, 1 from step 5"


# Executed, with roles that compute nothing --------------------------------------------------------


def elastic_run(directory: Path, *sizes: tuple[int, int], **changes: Any) -> Run:
    alone = {key.replace(".", "__"): value for key, value in ALONE.items()}
    return real_run(directory, trainer__resize=changes_at(*sizes), **{**alone, **changes})


def execute(run: Run, act: Any = None, **options: Any) -> tuple[Trace, RealWorld]:
    """Run scripted roles to the end; `act` is told every event."""

    async def go() -> tuple[Trace, RealWorld]:
        def watch(event: Event, state: State, now: float) -> None:
            if act is not None:
                asyncio.get_running_loop().call_soon(act, world, event, state)

        world = make_world(run, options, watch=watch)
        with contextlib.closing(world._directory):
            return await world.run(), world

    trace, world = asyncio.run(asyncio.wait_for(go(), timeout=60))
    check_whole(trace)
    recorded = read_trace(Path(run.execute.output) / "trace.jsonl")
    assert replay(recorded, checks_invariants=True) is None
    return trace, world


def sizes_of(world: RealWorld) -> list[int | None]:
    launcher: Any = world._launcher
    found: list[int | None] = launcher.sizes
    return found


def test_an_executed_run_changes_its_ranks_and_is_replayed(tmp_path: Path) -> None:
    trace, world = execute(elastic_run(tmp_path, (2, 3), (4, 1)))
    assert sizes_of(world) == [None, 3, 1]
    assert [each.data_parallel for each in told(trace, TrainerResized)] == [3, 1]


def test_ranks_beyond_the_run_file_take_free_places_and_no_others(tmp_path: Path) -> None:
    run = elastic_run(tmp_path, (2, 3), cluster__pools__near__gpu="cpu")
    placement = Placement(PlacedRoles.of(run))
    assert len(placement.trainers[0]) == 3, "the largest size of the run file is reserved"
    with pytest.raises(RuntimeError, match="at most 8, because pool 'near' has no more free GPUs"):
        placement.resize_trainer(9, [])
    placement.resize_trainer(8, [])
    assert len({place.gpus for place in placement.trainers[0]}) == 8


def test_ranks_leave_the_gpus_of_replicas_that_are_awaited(tmp_path: Path) -> None:
    run = elastic_run(tmp_path, cluster__pools__near__gpu="cpu", rollout__pool="near")
    placement = Placement(PlacedRoles.of(run))
    wanted = [run.rollout.num_replicas]
    for replica in range(wanted[0]):
        placement.replica(replica)
    most = 8 - wanted[0]
    placement.free(0)  # its machine is taken away
    with pytest.raises(RuntimeError, match=f"at most {most}, because pool 'near' has no more free"):
        placement.resize_trainer(most + 1, wanted)
    placement.resize_trainer(most, wanted)
    placement.replica(wanted[0])
    with pytest.raises(NoGpusLeftError):
        placement.replica(wanted[0] + 1)


class NotesWanted(ScriptedLauncher):
    """A launcher that notes which replicas ranks must leave GPUs for."""

    def reserve_ranks(self, data_parallel: int, wanted_replicas: Sequence[int]) -> None:
        raise RuntimeError(f"wanted {list(wanted_replicas)}")


def test_a_request_for_ranks_counts_replicas_whose_machines_are_away(tmp_path: Path) -> None:
    run = elastic_run(tmp_path, policies__system="stream-async")

    async def go() -> str:
        def watch(event: Event, state: State, now: float) -> None:
            if isinstance(event, RunStarted):
                return
            if not state.fleet.away:
                with contextlib.suppress(ValueError):  # it does not run yet
                    world.give_notices(Notice((0,), 0.0, 60.0))
            elif 0 not in state.fleet.replicas and not said:
                with pytest.raises(RuntimeError) as error:
                    world.members.request_ranks(2)
                said.append(str(error.value))
                asyncio.get_running_loop().call_soon(world.interrupt, "asked enough")

        said: list[str] = []
        world = make_world(run, {}, launcher_class=NotesWanted, watch=watch)
        with contextlib.closing(world._directory), contextlib.suppress(RuntimeError):
            await world.run()
        return said[0]

    said = asyncio.run(asyncio.wait_for(go(), timeout=60))
    assert said == f"wanted [{run.rollout.num_replicas}]"


def test_a_replica_without_free_gpus_waits_for_them_before_it_fails(tmp_path: Path) -> None:
    run = elastic_run(
        tmp_path,
        cluster__pools__near__gpu="cpu",
        rollout__pool="near",
        execute__patience="1 s",
    )
    launcher = LocalLauncher(RoleConfigs(run), PlacedRoles.of(run), RunDirectory(tmp_path / "run"))
    launcher.reserve_ranks(8, [])

    async def go() -> float:
        began_at = time.monotonic()
        with pytest.raises(NoGpusLeftError):
            await launcher._free_place(0, 0)
        return time.monotonic() - began_at

    assert asyncio.run(go()) >= run.execute.patience


class RandomRequests:
    """Asks for random ranks after random events, and kills the trainer now and then."""

    def __init__(self, seed: int, most_losses: int) -> None:
        self._random = random.Random(seed)
        self._num_left = most_losses
        self.num_asked = 0

    def __call__(self, world: RealWorld, event: Event, state: State) -> None:
        source = self._random
        if state.is_stopping or source.random() > 0.05:
            return
        if self._num_left and source.random() < 0.2:
            self._num_left -= 1
            world._trainers.kill(0, "a test killed it")
            return
        with contextlib.suppress(ValueError):  # it has so many
            world.members.request_ranks(source.randint(1, MOST_RANKS))
            self.num_asked += 1


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_trained_twice_whenever_ranks_change(tmp_path: Path, seed: int) -> None:
    requests = RandomRequests(seed, most_losses=2)
    run = elastic_run(
        tmp_path, (4, 3), algorithm__steps=8, execute__checkpoint_every=2, policies__max_restarts=5
    )
    trace, world = execute(run, requests, slowest=0.002)
    assert requests.num_asked and world.engine.version == 8
    assert told(trace, RanksRequested)


class FailsOnce(ScriptedLauncher):
    """A launcher with which one change of ranks loses the trainer."""

    async def resize_trainer(self, handle: Any, data_parallel: int) -> Any:
        if self.sizes[-1] is None:
            self.sizes.append(0)
            handle.kill("a new rank died")
        return await super().resize_trainer(handle, data_parallel)


def test_a_rank_that_dies_during_a_change_is_a_lost_trainer(tmp_path: Path) -> None:
    run = elastic_run(tmp_path, (3, 2), execute__checkpoint_every=1)

    async def go() -> tuple[Trace, RealWorld]:
        world = make_world(run, {}, launcher_class=FailsOnce)
        with contextlib.closing(world._directory):
            return await world.run(), world

    trace, world = asyncio.run(asyncio.wait_for(go(), timeout=60))
    check_whole(trace)
    assert sizes_of(world) == [None, 0, 2], "it restarts with the ranks that it was to have"
    assert len(told(trace, TrainerLost)) == 1 and world.engine.version == 4
    assert told(trace, CheckpointSaved)


def test_a_request_in_the_run_directory_changes_ranks_or_is_refused(tmp_path: Path) -> None:
    answers: list[str] = []

    def refused(world: RealWorld) -> None:
        for ranks in (2, MOST_RANKS + 1, 0, 99):
            with pytest.raises((ValueError, RuntimeError)) as error:
                world.members.request_ranks(ranks)
            answers.append(str(error.value))

    async def go() -> Trace:
        world = make_world(elastic_run(tmp_path, algorithm__steps=40), {"slowest": 0.05})
        with contextlib.closing(world._directory):
            running = asyncio.create_task(world.run())
            while not (tmp_path / "run" / "control").is_dir():
                await asyncio.sleep(0.01)
            answers.append(await asyncio.to_thread(ask, tmp_path / "run", RanksRequest(2)))
            refused(world)
            world.interrupt("asked enough")
            with contextlib.suppress(RuntimeError):
                await running
        return world.trace

    trace = asyncio.run(asyncio.wait_for(go(), timeout=60))
    accepted, again, full, none, many = answers
    assert "2 data-parallel ranks from step" in accepted
    assert told(trace, RanksRequested) == [RanksRequested(2)]
    assert again == "the trainer has 2 data-parallel ranks already"
    assert full == f"there is room for {MOST_RANKS} ranks"
    assert none.startswith("--data-parallel must be 1 to") and "got 99" in many


def test_a_job_whose_ranks_cannot_change_refuses_the_request(tmp_path: Path) -> None:
    run = elastic_run(tmp_path, trainer__zero=1)

    async def go() -> None:
        world = make_world(run, {})
        with contextlib.closing(world._directory):
            world.members.request_ranks(2)

    with pytest.raises(RunError, match=r"trainer\.zero must be 0"):
        asyncio.run(go())
