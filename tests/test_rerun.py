"""What would have happened: a recorded run simulated as it was and with changes, from what it generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.engine.messages import Drop, Generated, PromptsDrawn, Trained
from streamrl.engine.trace import Entry, Trace, read_trace
from streamrl.record.metrics import measure
from streamrl.record.recorded_workload import recorded_workload
from streamrl.record.run_comparison import Known, Rerun
from streamrl.report.rerun_report import error_line, verdict
from streamrl.runfile.config import Run
from streamrl.runfile.files import change_run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import empty_policies, fill_policies
from streamrl.sim.steady_state import simulate_steady
from streamrl.sim.studies.rerun import rerun
from streamrl.sim.world import simulate
from streamrl.workload.workload import RecordedGroups, SimulatedWorkload
from tests.command_line import streamrl
from tests.runs import small_run

SOME: dict[str, Any] = {
    "algorithm.prompts_per_step": 8,
    "algorithm.steps": 30,
    "rollout.max_running": 4,
    "workload.informative_share": 0.7,
}
KNOWN = {"workload.lengths.ranker": "recall"}


def write(trace: Trace, directory: Path) -> tuple[Trace, Path]:
    """Write a trace as a run directory has it, and return it as it is read from there."""
    directory.mkdir(exist_ok=True)
    file = directory / "trace.jsonl"
    file.write_bytes(trace.encode())
    return read_trace(file), file


def recorded_run(directory: Path, changes: dict[str, Any] | None = None) -> tuple[Trace, Path]:
    """Record a small run from its first step to its last."""
    return write(simulate(small_run({**SOME, **(changes or {})})), directory)


def as_real(trace: Trace) -> Trace:
    """Return a simulation as if it had been executed."""
    trace.world = "real"
    return trace


# The same again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [[], ["policies.system=stream-async", "rollout.replicas=2"]])
@pytest.mark.parametrize("is_endless", [False, True])
def test_a_run_with_the_settings_it_had_takes_exactly_as_long(
    changes: list[str], is_endless: bool, tmp_path: Path
) -> None:
    run = small_run({**SOME, **KNOWN, "simulate.max_steps": 40})
    trace = simulate_steady(run) if is_endless else simulate(run)
    found = rerun(*write(trace, tmp_path), changes)
    assert found.step_time_ratio == Known(value=1.0, interval=(1.0, 1.0))
    assert found.prediction_error == pytest.approx(0, abs=1e-9)
    assert "no difference" in verdict(found)


def test_a_run_that_was_cut_is_set_beside_as_many_steps_that_do_not_wind_down(
    tmp_path: Path,
) -> None:
    trace = simulate(small_run({**SOME, **KNOWN}))
    whole = measure(trace)
    cut_at = sum(whole.step_times[:24])
    trace.entries = [entry for entry in trace.entries if entry.time <= cut_at + 1e-9]
    found = rerun(*write(trace, tmp_path), [])
    assert found.recorded.num_steps == found.as_it_was.num_steps == 24
    assert found.prediction_error == pytest.approx(0, abs=0.01)


def test_what_a_record_expected_is_expected_again(tmp_path: Path) -> None:
    trace, file = recorded_run(tmp_path, KNOWN)
    again = simulate(replace(trace.run, workload=recorded_workload(trace, file)))
    drawn, expected = (
        [e.event.groups for e in each.entries if isinstance(e.event, PromptsDrawn)]
        for each in (again, trace)
    )
    assert drawn == expected
    assert len({group.expected_tokens for groups in drawn for group in groups}) > 10


# Another policy -----------------------------------------------------------------------------------


def test_the_ratio_is_that_of_two_direct_simulations_on_the_recorded_lengths(
    tmp_path: Path,
) -> None:
    trace, file = recorded_run(tmp_path, KNOWN)
    found = rerun(trace, file, ["policies.order=longest-first", "policies.dispatch=round-robin"])
    base = replace(trace.run, workload=recorded_workload(trace, file))
    other = replace(
        base, policies=replace(base.policies, order="longest-first", dispatch="round-robin")
    )
    counted = found.changed.counted_steps
    one, two = (measure(simulate(run), counted).step_time for run in (other, base))
    assert found.step_time_ratio.value == one / two != 1
    assert found.as_it_was.counted_steps == found.recorded.counted_steps == counted


def test_lengths_may_be_known_better_than_they_were(tmp_path: Path) -> None:
    many = {"policies.system": "disaggregated", "algorithm.prompts_per_step": 16}
    trace, file = recorded_run(tmp_path, many)
    blind = rerun(trace, file, ["policies.order=longest-first"])
    oracle = rerun(trace, file, ["policies.order=longest-first", "workload.lengths.ranker=oracle"])
    assert blind.step_time_ratio.value == 1
    assert oracle.step_time_ratio.interval is not None
    assert oracle.step_time_ratio.interval[1] < 1
    assert "would have saved" in verdict(oracle)


def test_seconds_that_policies_were_given_follow_what_changes() -> None:
    run = small_run({**SOME, **KNOWN, "policies.dispatch": "skewness-aware"})
    costs = Costs.load(run)
    filled = fill_policies(run, costs)
    assert filled != run and empty_policies(filled, costs) == run
    stated = small_run({**SOME, **KNOWN, "policies.latency": [[1, 0.5]]})
    assert empty_policies(stated, costs) == stated


def test_a_run_reads_again_as_it_was() -> None:
    follower = {"name": "slow", "pool": "near", "tensor_parallel": 2}
    run = small_run({**SOME, "followers": [follower]})
    assert change_run(run, ()) == run


# What a record tells ------------------------------------------------------------------------------


def test_a_group_that_was_lost_is_not_generated_again(tmp_path: Path) -> None:
    trace, _ = recorded_run(tmp_path)
    lost = 3 * trace.run.algorithm.group_size
    entries = [
        entry
        for entry in trace.entries
        if not (isinstance(entry.event, Generated) and entry.event.rollout == lost)
    ]
    trace.entries = [*entries, Entry(entries[-1].time, entries[-1].event, [Drop(3, "lost")])]
    _, file = write(trace, tmp_path)
    (whole, _), (without, _) = (
        RecordedGroups(each).block(0, 6, 2) for each in (recorded_run(tmp_path / "whole")[1], file)
    )
    assert without[:5].tolist() == [*whole[:3].tolist(), *whole[4:6].tolist()]


def test_a_simulated_record_says_which_share_was_trained(tmp_path: Path) -> None:
    trace, file = recorded_run(tmp_path)
    assert recorded_workload(trace, file).informative_share == 0.7
    assert recorded_workload(as_real(trace), file).informative_share == 0.0  # its rewards are equal


def test_what_is_off_between_record_and_simulation_is_said(tmp_path: Path) -> None:
    trace, _ = recorded_run(tmp_path)
    trace.entries = [entry._replace(time=2 * entry.time) for entry in trace.entries]
    found = rerun(*write(trace, tmp_path), ["policies.system=stream-sync"])
    assert found.prediction_error == pytest.approx(-0.5)
    assert "50.0 % shorter" in error_line(found)
    assert found.step_time_ratio.value > 1 and "more of a step's time" in verdict(found)


def test_of_few_steps_no_interval_is_given(tmp_path: Path) -> None:
    found = rerun(*recorded_run(tmp_path, {"algorithm.steps": 4}), ["policies.system=stream-sync"])
    assert found.step_time_ratio.interval is None
    assert "too few steps say how sure" in verdict(found)


# The command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run."""
    return recorded_run(tmp_path_factory.mktemp("run"))[1].parent


def test_the_command_says_what_would_have_been_saved(directory: Path) -> None:
    change = "policies.system=disaggregated"
    shown = streamrl("simulate", "--from", directory, "--set", change)
    assert shown.returncode == 0, shown.stderr
    assert f"{change} would have taken" in " ".join(shown.stdout.split())
    done = streamrl("simulate", "--from", directory, "--set", change, "--json")
    found = json.loads(done.stdout)
    assert found["step_time_ratio"]["value"] > 1
    assert set(Rerun.__struct_fields__) | {"verdict"} == set(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "algorithm.group_size=4"], "algorithm.group_size is 4 with --set and 2 in"),
        (["--set", "algorithm.prompts_per_step=4"], "algorithm.prompts_per_step is 4 with --set"),
        (["--set", "model.name=qwen2.5-32b"], "model.name is 'qwen2.5-32b' with --set"),
        (["--set", "rollout.max_tokens=99"], "rollout.max_tokens is 99 with --set and 256 in"),
        (["--set", "policies.tail_batching=defer"], "policies.tail_batching is 'defer' with --set"),
        (["--set", "workload.lengths.ranker=history"], "'history' needs kind 'groups'"),
        (["--set", "policies.order=shortest"], "policies.order must be"),
        (["--set", "policies.order"], "must read key=value"),
        (["--sweep", "rollout.replicas=1,2"], "--sweep does not go with --from"),
        (["-o", "somewhere"], "--output does not go with --from"),
        (["examples/quickstart.toml"], "RUN.toml does not go with --from"),
    ],
)
def test_what_is_no_other_way_of_doing_the_same_is_refused_in_a_line(
    arguments: list[str], message: str, directory: Path
) -> None:
    done = streamrl("simulate", "--from", directory, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_a_record_without_lengths_is_refused(tmp_path: Path) -> None:
    trace = simulate(small_run())
    trace.entries = trace.entries[:5]
    _, file = write(trace, tmp_path)
    for path in (file, tmp_path / "absent"):
        done = streamrl("simulate", "--from", path)
        assert done.returncode == 2 and str(path) in done.stderr


def test_a_change_with_which_the_run_would_have_stopped_is_told(tmp_path: Path) -> None:
    trace = simulate_steady(small_run({**SOME, "simulate.max_steps": 40}))
    record = write(trace, tmp_path)
    with pytest.raises(RuntimeError, match=r"changed stopped after step \d+ of \d+: "):
        rerun(*record, ["failures.per_gpu_day=3000", "policies.max_restarts=0"])


def test_a_record_whose_ledger_does_not_balance_is_refused(tmp_path: Path) -> None:
    trace, _ = recorded_run(tmp_path)
    (place, *_) = (n for n, e in enumerate(trace.entries) if isinstance(e.event, Trained))
    del trace.entries[place]
    with pytest.raises(ValueError, match=r"the ledger of .* does not balance"):
        rerun(*write(trace, tmp_path), [])


def test_which_prompts_were_deferred_is_not_decided_anew(tmp_path: Path) -> None:
    trace, file = recorded_run(tmp_path, {**KNOWN, "policies.tail_batching": "defer"})
    for change in ("policies.tail_batching=none", "workload.lengths.ranker=oracle"):
        with pytest.raises(ValueError, match=r"each step keeps its recorded prompts"):
            rerun(trace, file, [change])
    found = rerun(trace, file, ["policies.system=stream-sync"])
    assert found.prediction_error == pytest.approx(0, abs=1e-9)


def lengths_of(run: Run) -> list[tuple[int, ...]]:
    """Return the lengths of a few groups."""
    return [draw.lengths for draw in SimulatedWorkload(run).draw(0, 4)]


def test_a_ranker_that_was_recorded_needs_a_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ranker 'recorded' needs kind 'trace'.* got 'histogram'"):
        small_run({"workload.lengths.ranker": "recorded"})
    trace, file = recorded_run(tmp_path)
    again = replace(trace.run, workload=recorded_workload(trace, file))
    assert lengths_of(again) == lengths_of(trace.run)
