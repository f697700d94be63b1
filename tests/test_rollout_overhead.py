"""What rollouts take by coming and going: found in a stream whose passes are known, simulated, and measured for real."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import psutil
import pytest
import simpy
from msgspec.structs import replace

from streamrl.executor.environment.session import BOOT
from streamrl.executor.launchers.launcher import REPLICA, TRAINER
from streamrl.executor.launchers.placement import usable_cores
from streamrl.executor.launchers.worker import MODULE
from streamrl.executor.profiling import environment_times, profile_file, profiler
from streamrl.executor.profiling import rollout_overhead as handling
from streamrl.executor.profiling.environment_times import (
    EnvironmentTimes,
    MeasuredEnvironment,
    TimedEnvironments,
)
from streamrl.executor.profiling.measurements import (
    BESIDE_ENVIRONMENTS,
    BESIDE_REPLICA,
    Company,
    Limits,
    RayPlace,
    Readings,
    RefillStream,
    Setup,
)
from streamrl.executor.profiling.profile_file import (
    make_setup,
    sharing_row,
    to_profile,
    turnover_times,
)
from streamrl.executor.profiling.rollout_overhead import (
    HandlingWatch,
    Taken,
    has_tokenizer,
    measure_handling,
    measured_environment,
    read_handling,
)
from streamrl.executor.profiling.timed_roles import TimedReplicaRole, TimedTrainerRole
from streamrl.executor.roles import Request
from streamrl.executor.rollout.inference_engine import TimedPass
from streamrl.hardware.measured_profile import ModelOperation, read_measured, write_measured
from streamrl.record.metrics import measure
from streamrl.runfile.files import load_run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.cpu_contention import CoreSharing
from streamrl.sim.cpu_contention import Cores
from streamrl.sim.handling import EnvironmentProcesses
from streamrl.sim.world import simulate
from tests.measured_profile import (
    ALONE,
    base,
    make_profile,
    measured_run,
    model_directory,
    prefix_time,
    slope,
)
from tests.tiny_model import save_tiny_model

EXAMPLES = Path(__file__).parent.parent / "examples"
EXCESS = 7e-4
ACTION, START, SERVING = 2e-3, 5e-3, 1e-3
"""CPU seconds of an action and of a start of an environment, and of a turn in the server of a replica."""
SYMBOLS = ["<pad>", "<eos>", *"0123456789+= "]


def stream(excess: float) -> RefillStream:
    """Return a stream of which each pass takes what the formulas say, and each rollout `excess` in all."""
    passes = [
        TimedPass(
            running=0, context=0, longest=0, prefixes=[16] * 4, seconds=ALONE + prefix_time(4, 16)
        ),
        TimedPass(running=4, context=80, longest=30, prefixes=[], seconds=base(4) + slope(4) * 80),
        TimedPass(
            running=3,
            context=70,
            longest=40,
            prefixes=[16],
            seconds=base(3) + slope(3) * 70 + prefix_time(1, 16),
        ),
    ]
    *rest, last = passes
    return RefillStream(5, [*rest, replace(last, seconds=last.seconds + 5 * excess)])


def test_what_the_tables_do_not_know_of_a_stream_is_its_turnover(tmp_path: Path) -> None:
    profile = make_profile(model_directory(tmp_path / "model"))
    assert list(turnover_times(profile, [stream(EXCESS), stream(2 * EXCESS)])) == pytest.approx(
        [EXCESS, 2 * EXCESS], rel=1e-3
    )
    assert 0 < next(turnover_times(profile, [stream(0.0)])) < 1e-5
    usual = next(turnover_times(replace(profile, pace=1.2), [stream(EXCESS)]))
    assert usual == pytest.approx(EXCESS, rel=1e-3), "as the tables: at the usual pace"
    assert 0 < next(turnover_times(profile, [stream(-EXCESS)])) < 1e-5


def test_each_rollout_takes_its_turnover_of_its_replica(tmp_path: Path) -> None:
    model, path = model_directory(tmp_path / "model"), tmp_path / "profile.toml"
    profile = make_profile(model)
    write_measured(profile, path)
    run = measured_run(model, path, policies__system="disaggregated")
    assert profile.turnover is None and "turnover" not in path.read_text()
    plain, plain_time = Costs.load(run), measure(simulate(run)).step_time
    write_measured(
        replace(profile, turnover=ModelOperation(seconds=(EXCESS, EXCESS, EXCESS))), path
    )
    assert read_measured(path).turnover == ModelOperation(seconds=(EXCESS, EXCESS, EXCESS))
    costs = Costs.load(run)
    for running in (0, 3):
        added = costs.prefill_time(32, 256, running, 2) - plain.prefill_time(32, 256, running, 2)
        assert added == pytest.approx(2 * EXCESS)
    longer = measure(simulate(run)).step_time - plain_time
    assert longer >= 0.5 * EXCESS * run.algorithm.rollouts_per_step


def test_a_switch_of_sides_takes_what_its_profile_says(tmp_path: Path) -> None:
    model, path = model_directory(tmp_path / "model"), tmp_path / "profile.toml"
    profile = make_profile(model)
    write_measured(profile, path)
    run = measured_run(model, path, policies__system="disaggregated", lending={"replicas": 1})
    before = Costs.load(run).lending
    lend, back = (ModelOperation(seconds=(s, s, s)) for s in (2 * EXCESS, EXCESS))
    write_measured(replace(profile, lend=lend, take_back=back), path)
    after = Costs.load(run).lending
    assert before is not None and after is not None and before.return_time == 0
    assert after.lend_time == pytest.approx(before.lend_time + 2 * EXCESS)
    assert after.return_time == pytest.approx(EXCESS)


def test_handling_is_timed_by_executing_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handling, "STEPS", 4)
    monkeypatch.setattr(handling, "PROMPTS", 4)
    save_tiny_model(tmp_path / "model", SYMBOLS)
    assert has_tokenizer(tmp_path / "model")
    assert not has_tokenizer(model_directory(tmp_path / "bare"))
    limits = Limits(max_running=1, max_context=64, max_tokens_per_pass=64)
    setup = make_setup(
        tmp_path / "model", gpu="cpu", dtype="float32", threads=1, limits=limits, is_quick=True
    )
    taken = measure_handling(setup, turns=2)
    assert len(taken.handling) == 4 - 1 and all(0 < each < 1 for each in taken.handling)
    assert len(taken.pushes) == 4 - 2 and all(0 < each < 1 for each in taken.pushes)


def test_a_turn_takes_what_a_stream_of_calls_takes_and_a_rollout_what_that_of_a_queue_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_directory(tmp_path / "model")
    monkeypatch.setattr(profile_file, "_tables", lambda *_: make_profile(model))
    limits = Limits(max_running=4, max_context=64, max_tokens_per_pass=64)
    setup = make_setup(model, gpu="cpu", dtype="float32", threads=1, limits=limits, is_quick=True)
    found = to_profile(setup, "cpu", Readings(streams=[stream(EXCESS)], turns=[stream(SERVING)]))
    assert found.turnover is not None and found.serving is not None
    assert found.turnover.seconds == pytest.approx((EXCESS,) * 3, rel=1e-3)
    assert found.serving.seconds == pytest.approx((SERVING,) * 3, rel=1e-3)


def test_turns_are_called_one_by_one_while_a_batch_is_full(tmp_path: Path) -> None:
    most, seen = 4, set[int]()

    class Replica:
        running = ends = 0

        async def generate(self, request: Request) -> None:
            self.running += 1
            seen.add(self.running)
            for _ in range(request.max_tokens):
                await asyncio.sleep(0)
            self.running -= 1
            self.ends += 1

        async def passes(self) -> list[TimedPass]:
            return []

    replica, readings = Replica(), Readings()
    save_tiny_model(tmp_path / "whole", SYMBOLS)
    setup = make_setup(
        tmp_path / "whole",
        gpu="cpu",
        dtype="float32",
        threads=1,
        limits=Limits(max_running=most, max_context=64, max_tokens_per_pass=64),
        is_quick=True,
    )
    bench = profiler._bench(setup, readings, lambda _: None, tmp_path)
    asyncio.run(bench._time_turns(cast(TimedReplicaRole, replica)))
    assert readings.turns == [RefillStream(profiler.REFILLS * most, [])]
    assert replica.ends == profiler.REFILLS * most
    assert max(seen) == most, "no call waits in the queue"


def test_an_action_is_what_more_turns_add_and_an_episode_what_one_adds_to_a_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(setup: Setup, ray: RayPlace | None = None, turns: int | None = None) -> Taken:
        own = 0.0 if turns is None else START + (turns - 1) * ACTION
        return Taken([1.0 + own - ACTION, 1.0 + own, 1.0 + own + 4 * ACTION])

    monkeypatch.setattr(handling, "measure_handling", measured)
    setup = make_setup(
        model_directory(tmp_path / "model"),
        gpu="cpu",
        dtype="float32",
        threads=1,
        limits=Limits(max_running=1, max_context=64, max_tokens_per_pass=64),
        is_quick=True,
    )
    readings = Readings()
    read_handling(setup, readings, lambda _: None)
    assert readings.episode == pytest.approx([START - ACTION, START, START + 4 * ACTION])
    assert readings.action == pytest.approx([ACTION * 3 / 4, ACTION, 2 * ACTION])
    assert measured_environment(setup).config.implementation == handling.ENVIRONMENT
    monkeypatch.setattr(handling, "load_tokenizer", lambda _: None)
    run = load_run(EXAMPLES / "agentic-tools.toml", ["environment.tool_format=hermes"])
    assert run.environment is not None
    environment = MeasuredEnvironment(run.environment, [{"prompt": "1 + 1 ="}])
    own = measured_environment(replace(setup, environment=environment))
    assert own.config == run.environment and own.records == environment.records


ON_ITS_FIRST_THREAD = "while True: pass"
ON_ANOTHER = (
    "import threading\ndef compute():\n  while True: pass\nthreading.Thread(target=compute).start()"
)
IN_CHILDREN_THAT_END = """
import os, time
while True:
    if not os.fork():
        while time.process_time() < 0.1: pass
        os._exit(0)
    os.wait()
"""


AS_AN_ACTOR = "import ctypes\nctypes.CDLL(None).prctl(15, b'ray::RayRole')\n"
ON_TWO_THREADS = f"{ON_ANOTHER}\ncompute()"


def test_what_workers_compute_is_no_handling_and_what_they_and_others_do_beside_is() -> None:
    def taken_beside(program: str, *arguments: str) -> float:
        """Return what handling took while a process with this in its command computed for half a second."""
        watch = HandlingWatch(is_over_ray=False)
        watch.take()
        endless = [sys.executable, "-c", program, *arguments]
        with subprocess.Popen(endless) as busy:
            while sum(psutil.Process(busy.pid).cpu_times()[:4]) < 0.5:
                time.sleep(0.02)
            taken = watch.take()
            busy.kill()
        return taken

    assert taken_beside(ON_ANOTHER, MODULE, REPLICA) < 0.2
    assert taken_beside(ON_ITS_FIRST_THREAD, MODULE, REPLICA) >= 0.3
    beside = taken_beside(ON_ITS_FIRST_THREAD, MODULE, TRAINER)
    assert beside < 0.2, "a trainer's calls hold what serves them"
    assert taken_beside(ON_ITS_FIRST_THREAD, BOOT) < 0.2, "an environment is measured apart"
    assert taken_beside(ON_ITS_FIRST_THREAD, "anything") >= 0.3
    assert taken_beside(IN_CHILDREN_THAT_END, "a fork server") >= 0.3
    assert taken_beside(AS_AN_ACTOR + ON_ANOTHER) < 0.2
    assert 0.15 < taken_beside(AS_AN_ACTOR + ON_TWO_THREADS) < 0.45, "all but what takes most"


@pytest.mark.parametrize("table", ["handling", "turnover"])
def test_seconds_that_cannot_be_are_refused(table: str, tmp_path: Path) -> None:
    model, path = model_directory(tmp_path / "model"), tmp_path / "profile.toml"
    write_measured(make_profile(model, **{table: ModelOperation(seconds=(1e-3, 5e-4, 2e-3))}), path)
    with pytest.raises(ValueError, match=f"{table}: seconds must be quartiles"):
        read_measured(path)


SLOW = """
import time

class Slow:
    num_steps = 0

    def compute(self, seconds):
        began_at = time.process_time()
        while time.process_time() < began_at + seconds: pass

    def reset(self, task):
        assert task["prompt"] == "1 + 1 ="
        self.compute(0.1)

    def step(self, action):
        self.compute(0.2)
        self.num_steps += 1
        return None, 0.0, self.num_steps == 2
"""


async def one_round(measured: MeasuredEnvironment) -> EnvironmentTimes:
    environments = TimedEnvironments(measured)
    await environments.start()
    try:
        return await environments.round()
    finally:
        environments.close()


def test_a_start_and_an_action_take_what_the_environment_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_times, "STARTS", 2)
    file, prompts = tmp_path / "slow.py", tmp_path / "prompts.jsonl"
    file.write_text(SLOW)
    prompts.write_text('{"prompt": "1 + 1 ="}\n')
    changes = [
        f"environment.implementation=python:{file}:Slow",
        f"workload.prompts={prompts}",
    ]
    run = load_run(EXAMPLES / "agentic-tools.toml", [*changes, "environment.tools=[]"])
    taken = asyncio.run(one_round(MeasuredEnvironment.of(run.environment, run.workload)))
    assert 0.09 < taken.start < 0.18
    assert 0.15 < taken.action < 0.25
    assert 0 < taken.share < usable_cores() + 0.1
    with pytest.raises(ValueError, match=r"--environment needs a run file with environment.impl"):
        MeasuredEnvironment.of(None, run.workload)


def test_environments_are_timed_while_a_replica_and_a_trainer_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_times, "STARTS", 2)
    limits = Limits(max_running=4, max_context=64, max_tokens_per_pass=64)
    working: set[str] = set()
    seen: list[set[str]] = []

    class Replica:
        async def generate(self, request: Request) -> None:
            working.add("generating")
            await asyncio.sleep(0)

        async def passes(self) -> list[TimedPass]:
            return [TimedPass(running=2, context=20, longest=10, prefixes=[], seconds=1.0)]

    class Trainer:
        async def train(self, samples: object) -> None:
            working.add("training")
            await asyncio.sleep(0)

        async def seconds(self) -> list[float]:
            return [2.0]

    class Environments(TimedEnvironments):
        async def round(self) -> EnvironmentTimes:
            working.clear()
            found = await super().round()
            seen.append(set(working))
            return found

    save_tiny_model(tmp_path / "whole", SYMBOLS)
    setup = make_setup(
        tmp_path / "whole", gpu="cpu", dtype="float32", threads=1, limits=limits, is_quick=True
    )
    monkeypatch.setattr(profiler, "TimedEnvironments", Environments)
    readings = Readings()
    bench = profiler._bench(setup, readings, lambda _: None, tmp_path)
    roles = cast(TimedReplicaRole, Replica()), cast(TimedTrainerRole, Trainer())
    asyncio.run(bench.time_environments(*roles, measured_environment(setup)))
    repeats = setup.plan.repeats
    assert seen == [{"generating"}, {"generating", "training"}] * repeats
    for key in BESIDE_ENVIRONMENTS:
        assert readings.generation[key] == [1.0] * repeats
        assert len(readings.environment_start[key]) == len(readings.acting[key]) == repeats
    assert readings.training == {BESIDE_ENVIRONMENTS[1]: [1.0] * repeats}


def test_environments_are_slower_by_the_cpu_seconds_that_they_take_beside_two_roles() -> None:
    both = Company(1, 1, acts=True)
    readings = Readings()
    for key, taken, acting in ((BESIDE_REPLICA, 1.0, 0.9), (both, 1.25, 0.6)):
        readings.environment_start[key] += [taken * START] * 3
        readings.environment_action[key] += [taken * ACTION] * 3
        readings.acting[key] += [acting / 2, acting, 2 * acting]
        readings.generation[key] += [0.8, 0.7, 0.6]
    readings.training[both] += [0.5]
    rows = [sharing_row(readings, key) for key in (BESIDE_REPLICA, both)]
    assert [(row.generating, row.training, row.acting) for row in rows] == [
        (1, 0, 0.9),
        (1, 1, 0.6),
    ]
    assert rows[0].action == (1.0, 1.0, 1.0) and rows[0].train is None
    assert rows[1].action == pytest.approx((0.8, 0.8, 0.8)) and rows[1].train == (0.5, 0.5, 0.5)
    readings.generation[Company(2, 0)] += [0.9]
    apart = sharing_row(readings, Company(2, 0))
    assert (apart.acting, apart.action) == (0.0, None), "no environment acted"


@pytest.mark.parametrize(("num_cores", "seconds"), [(1, 8 * ACTION), (4, 2 * ACTION)])
def test_as_many_environments_compute_at_a_time_as_there_are_cores(
    num_cores: int, seconds: float
) -> None:
    env = simpy.Environment()
    processes = EnvironmentProcesses(env, Cores(env, CoreSharing(num_cores)))
    ends: list[float] = []
    for _ in range(8):
        processes.then(lambda: ends.append(env.now), ACTION)
    processes.then(lambda: ends.append(env.now), 0.0)
    env.run()
    assert ends[0] == 0.0, "no CPU time takes no turn"
    assert ends[-1] == pytest.approx(seconds)


def test_the_time_by_which_a_turn_delays_passes_is_no_time_beside_them(tmp_path: Path) -> None:
    model, path = model_directory(tmp_path / "model"), tmp_path / "profile.toml"
    taken = {
        name: ModelOperation(seconds=(seconds,) * 3)
        for name, seconds in (("action", ACTION), ("serving", SERVING), ("episode", START))
    }
    run = measured_run(model, path, policies__system="disaggregated")

    def loaded(*names: str) -> tuple[float, float]:
        write_measured(replace(make_profile(model), **{n: taken[n] for n in names}), path)
        costs = Costs.load(run)
        return costs.episode_time, costs.action_time

    assert loaded("action", "serving", "episode") == (START, pytest.approx(ACTION - SERVING))
    assert loaded("action", "serving") == (ACTION, ACTION), "an earlier version's action is both"


def test_turns_take_the_time_of_their_server_from_the_replica(tmp_path: Path) -> None:
    model, path = model_directory(tmp_path / "model"), tmp_path / "profile.toml"
    episodes = {
        "max_turns": 3,
        "turns": "3",
        "max_context": 128,
        "observation_tokens": "4",
        "action_time": "0 s",
        "start_time": "0 s",
    }
    run = measured_run(model, path, policies__system="disaggregated", environment=episodes)

    def step_time(serving: float) -> float:
        seconds = (EXCESS + serving,) * 3
        turnover = ModelOperation(seconds=(EXCESS, EXCESS, EXCESS))
        profile = replace(make_profile(model), turnover=turnover)
        write_measured(replace(profile, serving=ModelOperation(seconds=seconds)), path)
        assert Costs.load(run).serving_time == pytest.approx(serving)
        return measure(simulate(run)).step_time

    added = step_time(SERVING) - step_time(0.0)
    assert added == pytest.approx(3 * SERVING * run.algorithm.rollouts_per_step, rel=0.3)
