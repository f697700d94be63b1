"""Recorded files and imports: whatever is in one, it is read, or refused in a line. See also `test_fuzz.py`."""

from __future__ import annotations

import json
import tomllib
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from streamrl.executor.environment.http_environments import read_answer
from streamrl.executor.environment.mcp_client import read_message
from streamrl.executor.environment.tool_calls import FORMATS, find_tool_calls
from streamrl.executor.token_files import KeptTokens, read_records, write_record
from streamrl.hardware.calibration_file import named_calibration
from streamrl.logs.agent_logs import assumed_tokens, read_agent_log, write_episodes
from streamrl.logs.framework_logs import read_measured_file
from streamrl.logs.recorded_rollouts import read_rollouts
from streamrl.ranker.text_ranker import read_ranker
from streamrl.report.against_report import read_comparison
from streamrl.report.jobs_report import jobs_report
from streamrl.report.study_report import read_study
from streamrl.runfile.jobs_file import load_jobs
from streamrl.runfile.list_prices import PRICES, read_sheets
from streamrl.runfile.result_files import check_results, write_results
from streamrl.sim.jobs.plan import plan_data, read_cluster_plan
from streamrl.sim.planner.plan import read_plan, write_plan
from streamrl.sim.studies.finished_jobs import FINISHED, FinishedJobs
from streamrl.workload.workload import SimulatedWorkload
from tests import made_logs
from tests.fuzzing import EXAMPLES, altered, cpu_limit, fuzzed, mangled
from tests.report_directories import STUDY, write_study
from tests.runs import small_run
from tests.test_agent_logs import EVENTS, MESSAGES, STEPS, TIMED
from tests.test_calibration_file import FACTORS
from tests.test_fuzz import as_json, as_table, fresh, refusing
from tests.test_job_schedule import made_plan
from tests.test_kept_tokens import record
from tests.test_plan import few, planned
from tests.test_sweep import ROW
from tests.test_tools import CALLS, SCHEMAS

LOGS = sorted(
    text for name, text in vars(made_logs).items() if name.isupper() and isinstance(text, str)
)
SHARE = 0.4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for all that is written."""
    return tmp_path_factory.mktemp("fuzz")


@fuzzed()
@given(st.sampled_from(LOGS).flatmap(lambda text: mangled(text.encode())))
def test_a_log_is_measured_steps_or_refused(place: Path, data: bytes) -> None:
    path = fresh(place) / "run.log"
    path.write_bytes(data)

    def check() -> None:
        steps = read_measured_file(path).steps
        times = (value for step in steps for value in msgspec.to_builtins(step).values())
        assert all(isfinite(value) for value in times if isinstance(value, float))

    refusing(check)


@pytest.mark.parametrize("text", ["{", "=", "•", "╒", "│", " ", "a-1", "[", "Step 1: {", "100%|"])
def test_a_log_of_one_text_repeated_takes_no_time_that_grows_with_its_square(
    place: Path, text: str
) -> None:
    path = fresh(place) / "run.log"
    path.write_text(text * (100_000 // len(text)) + "\n")
    with cpu_limit():
        refusing(lambda: read_measured_file(path))


ROLLOUTS: list[dict[str, Any]] = [
    {"prompt_id": "a", "output_tokens": 5, "prompt_tokens": 3},
    {"prompt": [{"role": "user", "content": "b"}], "completion": "c", "completion_tokens": 9},
    {"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]},
]


@fuzzed(SHARE)
@given(st.lists(st.sampled_from(ROLLOUTS).flatmap(altered), min_size=1, max_size=4), st.data())
def test_recorded_rollouts_are_imported_or_refused(
    place: Path, rows: list[Any], data: st.DataObject
) -> None:
    path = fresh(place) / "rollouts.jsonl"
    text = b"\n".join(map(as_json, rows))
    path.write_bytes(data.draw(mangled(text)) if data.draw(st.booleans()) else text)
    refusing(lambda: read_rollouts(str(path)))


AGENT_LOGS = [
    MESSAGES,
    {"trajectory_format": "mini-swe-agent-1.1", "messages": TIMED},
    {"trajectory": STEPS},
    [{"task_id": 3, "traj": MESSAGES}],
    EVENTS,
]


@fuzzed(SHARE)
@given(
    st.sampled_from(AGENT_LOGS).flatmap(
        lambda log: altered(log).map(as_json) | mangled(as_json(log))
    )
)
def test_agent_logs_are_imported_or_refused(place: Path, data: bytes) -> None:
    path = fresh(place) / "log.json"
    path.write_bytes(data)

    def check() -> None:
        log = read_agent_log(str(path), assumed_tokens(2))
        episodes = path.with_name("episodes.csv")
        episodes.write_text(write_episodes(log, "log", "assumed"), encoding="utf-8")
        refusing(lambda: SimulatedWorkload(small_run(episodes_in(episodes))).draw(0, 3))

    refusing(check)


EPISODES = b"prompt_id,episode,turn,output_tokens,observation_tokens,action_time\na,0,0,5,7,1.5\na,0,1,9,0,0\n"


@fuzzed(SHARE)
@given(mangled(EPISODES))
def test_episodes_are_read_or_refused(place: Path, data: bytes) -> None:
    path = fresh(place) / "episodes.csv"
    path.write_bytes(data)
    refusing(lambda: SimulatedWorkload(small_run(episodes_in(path))).draw(0, 3))


def episodes_in(path: Path) -> dict[str, Any]:
    """Return the keys of a run whose episodes are recorded in a file."""
    return {
        "workload.lengths.kind": "episodes",
        "workload.lengths.source": str(path),
        "environment": {"max_turns": 4, "max_context": 4096},
    }


EPISODE = {
    "rollout": 1,
    "prompt_tokens": 3,
    "start_time": 0.5,
    "turns": [{"tokens": 5, "observation_tokens": 7, "action_time": 1.5}, {"tokens": 9}],
}


@fuzzed(SHARE)
@given(altered(EPISODE).map(as_json) | mangled(as_json(EPISODE)))
def test_episodes_of_a_run_are_read_or_refused(place: Path, data: bytes) -> None:
    path = fresh(place) / "rollouts.jsonl"
    path.write_bytes(data + b"\n")
    refusing(lambda: SimulatedWorkload(small_run(episodes_in(path))).draw(0, 3))


@pytest.mark.skipif(
    not EXAMPLES, reason="to plan takes seconds; test_recorded_numbers.py reads plans"
)
@fuzzed(SHARE)
@given(st.data())
def test_a_plan_reads_back_equal_or_is_refused(place: Path, data: st.DataObject) -> None:
    made, directory = planned(few()).plan, fresh(place)
    write_plan(made, directory)
    assert read_plan(directory / "plan.json") == made
    (directory / "results.json").unlink()
    path = directory / "plan.json"
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(mangled(path.read_bytes())))
    else:
        path.write_bytes(as_json(data.draw(altered(json.loads(path.read_bytes())))))
    refusing(lambda: read_plan(path))


ROOT = Path(__file__).parent.parent
CLUSTER = as_table(ROOT / "examples" / "clusters" / "two-jobs.toml")


@fuzzed(SHARE)
@given(altered(CLUSTER))
def test_a_cluster_file_is_read_or_refused(place: Path, table: dict[str, Any]) -> None:
    path = fresh(place) / "cluster.toml"
    for run in ("h20-h800.toml", "colocated.toml"):
        copied = place / run
        copied.exists() or copied.write_bytes((ROOT / "examples" / run).read_bytes())
    try:
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
    except (TypeError, ValueError):
        return
    refusing(lambda: load_jobs(path))


@fuzzed(SHARE)
@given(mangled(plan_data(made_plan())) | altered(json.loads(plan_data(made_plan()))).map(as_json))
def test_a_plan_of_several_jobs_is_read_or_refused(place: Path, data: bytes) -> None:
    path = fresh(place) / "cluster.json"
    path.write_bytes(data)
    refusing(lambda: jobs_report(read_cluster_plan(path)))


@fuzzed(SHARE)
@given(altered(STUDY))
def test_a_written_study_is_read_or_refused(place: Path, table: dict[str, Any]) -> None:
    directory = write_study(fresh(place) / "study")
    (directory / "study.json").write_bytes(as_json(table))
    refusing(lambda: read_study(directory / "study.csv", "study"))


@fuzzed(SHARE)
@given(st.binary(max_size=60) | mangled(b'{"names": ["a", "b"], "runs": [{"step_time": 1.0}]}'))
def test_other_recorded_files_are_read_or_refused(place: Path, data: bytes) -> None:
    directory = fresh(place)
    write_results(directory, {"a.json": b"a"})
    for name in ("against.json", "calibration.toml", "ranker.npz"):
        (directory / name).write_bytes(data)
    refusing(lambda: read_comparison(directory / "against.json"))
    refusing(lambda: named_calibration(str(directory / "calibration.toml"), small_run().model))
    refusing(lambda: read_ranker(directory / "ranker.npz"))
    (directory / "results.json").write_bytes(data)
    refusing(lambda: check_results(directory / "a.json"))


@fuzzed(SHARE)
@given(st.data())
def test_prices_and_calibrations_are_read_or_refused(place: Path, data: st.DataObject) -> None:
    path = fresh(place) / "file.toml"
    calibration = tomllib.loads(FACTORS)
    is_prices = data.draw(st.booleans())
    table = as_table(PRICES) if is_prices else calibration
    try:
        path.write_text(tomli_w.dumps(data.draw(altered(table))), encoding="utf-8")
    except (TypeError, ValueError):
        return
    if is_prices:
        refusing(lambda: read_sheets(path))
    else:
        refusing(lambda: named_calibration(str(path), small_run().model))


DEEP = "[" * 3000
TURNS = [*CALLS.values(), f'<tool_call>{{"name": "add", "arguments": {DEEP}}}</tool_call>']


@fuzzed(SHARE)
@given(
    st.sampled_from(TURNS).flatmap(lambda text: mangled(text.encode())), st.sampled_from([*FORMATS])
)
def test_a_turn_has_tool_calls_or_is_refused(data: bytes, name: str) -> None:
    text = data.decode(errors="replace")
    refusing(lambda: json.dumps(find_tool_calls(text, name, SCHEMAS), ensure_ascii=False).encode())
    read_answer(text)
    answer = read_message(data)
    assert answer is None or isinstance(answer, dict)


@fuzzed(SHARE)
@given(
    altered(["run", "inputs", msgspec.to_builtins(ROW)]).map(as_json)
    | mangled(as_json(["run", "inputs", msgspec.to_builtins(ROW)]))
)
def test_finished_jobs_of_a_study_are_read_or_refused(place: Path, data: bytes) -> None:
    path = fresh(place) / FINISHED
    path.write_bytes(b'["a", "b", "does not finish"]\n' + data + b"\n")
    refusing(lambda: FinishedJobs(path))


@fuzzed(SHARE)
@given(st.data())
def test_saved_tokens_are_taken_over_or_left_out(place: Path, data: st.DataObject) -> None:
    directory, made = fresh(place), record(0, [5, 6, 7])
    path = directory / "7.0"
    write_record(made, str(path))
    path.write_bytes(data.draw(mangled(path.read_bytes())))
    for each in read_records(str(path)):
        assert each.head == made.head
    kept = KeptTokens(directory, 4, 10, is_open=lambda _: True)
    assert kept.num_tokens in (0, 3)
