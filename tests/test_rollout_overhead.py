"""What rollouts take by coming and going: found in a stream whose passes are known, simulated, and measured for real."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from streamrl.executor.launchers.launcher import REPLICA, TRAINER
from streamrl.executor.launchers.worker import MODULE
from streamrl.executor.profiling import environment_start
from streamrl.executor.profiling import rollout_overhead as handling
from streamrl.executor.profiling.environment_start import MeasuredEnvironment
from streamrl.executor.profiling.measurements import Limits, RayPlace, Readings, RefillStream, Setup
from streamrl.executor.profiling.profile_file import make_setup, turnover_times
from streamrl.executor.profiling.rollout_overhead import (
    HandlingWatch,
    Taken,
    has_tokenizer,
    measure_handling,
    read_handling,
)
from streamrl.executor.rollout.inference_engine import TimedPass
from streamrl.hardware.measured_profile import ModelOperation, read_measured, write_measured
from streamrl.record.metrics import measure
from streamrl.runfile.files import load_run
from streamrl.sim.costs.costs import Costs
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
ACTION, START = 2e-3, 5e-3
"""CPU seconds of an action and of a start of an environment."""
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


def test_an_action_and_a_start_are_what_more_turns_and_the_first_one_add(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(setup: Setup, ray: RayPlace | None = None, turns: int | None = None) -> Taken:
        own = 0.0 if turns is None else START + turns * ACTION
        return Taken([1.0 + own] * 3)

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
    assert readings.handling == [1.0] * 3
    assert readings.action == [pytest.approx(ACTION)]
    assert readings.environment_start == [pytest.approx(START)]


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


SLOW_START = """
import time

class SlowStart:
    def reset(self, task):
        assert task["prompt"] == "1 + 1 ="
        while time.process_time() < 0.1: pass

    def step(self, action):
        return None, 0.0, True
"""


def test_a_start_takes_what_its_environment_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_start, "ROUNDS", 1)
    monkeypatch.setattr(environment_start, "STARTS", 2)
    file, prompts = tmp_path / "slow.py", tmp_path / "prompts.jsonl"
    file.write_text(SLOW_START)
    prompts.write_text('{"prompt": "1 + 1 ="}\n')
    changes = [
        f"environment.implementation=python:{file}:SlowStart",
        f"workload.prompts={prompts}",
    ]
    run = load_run(EXAMPLES / "agentic-tools.toml", [*changes, "environment.tools=[]"])
    taken = environment_start.start_time_of(MeasuredEnvironment.of(run.environment, run.workload))
    assert 0.05 < taken < 1.0
    with pytest.raises(ValueError, match=r"--environment needs a run file with environment.impl"):
        MeasuredEnvironment.of(None, run.workload)
