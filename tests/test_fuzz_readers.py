"""Recorded files and imports: whatever is in one, it is read, or refused in a line. See also `test_fuzz.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import tomllib
from collections.abc import Callable
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save

from streamrl.cli.profile_check import _READERS, check_all
from streamrl.executor.environment.http_environments import read_answer
from streamrl.executor.environment.mcp_client import read_message
from streamrl.executor.environment.tool_calls import FORMATS, find_tool_calls
from streamrl.executor.expert_choices import decode_choices, encode_choices
from streamrl.executor.faults import FAULTS, read_struck
from streamrl.executor.prompt_probe import read_probe
from streamrl.executor.rollout.server_api import AnswerError, make_api, read_part
from streamrl.executor.subscribers.attach_requests import (
    ControlFiles,
    read_attached,
    with_attached,
    write_attached,
)
from streamrl.executor.subscribers.counting_trainer import COUNTS
from streamrl.executor.subscribers.counting_trainer import _read as _read_counts
from streamrl.executor.subscribers.stream_client import _read_event
from streamrl.executor.token_files import KeptTokens, read_records, write_record
from streamrl.executor.transfer.delta import WIDTHS, decode_delta, encode_delta
from streamrl.executor.transfer.shared_memory import tensors_of
from streamrl.hardware.calibration_file import Calibration, named_calibration, write_calibration
from streamrl.hardware.hugging_face import read_model_directory
from streamrl.hardware.measured_profile import read_measured, write_measured
from streamrl.hardware.profiles import PROFILES, read_profile
from streamrl.logs.agent_logs import assumed_tokens, read_agent_log, write_episodes
from streamrl.logs.framework_logs import read_measured_file
from streamrl.logs.measured_steps import parse_steps
from streamrl.logs.recorded_rollouts import read_rollouts, write_lengths
from streamrl.ranker.score_files import read_known
from streamrl.ranker.text_ranker import fit_text, read_ranker, write_ranker
from streamrl.record.evaluation import (
    EVALUATIONS,
    best_step,
    passes_hint,
    read_evaluations,
    scores_of,
)
from streamrl.record.run_directory import ATTACHED
from streamrl.report.against_report import read_comparison
from streamrl.report.evaluation_table import evaluations_table, say_change, sources_table
from streamrl.report.jobs_report import jobs_report
from streamrl.report.study_report import read_study
from streamrl.runfile.distribution_words import read_distribution
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.files import (
    decode_run,
    encode_run,
    load_run,
    make_run,
    read_recorded_run,
    write_run,
)
from streamrl.runfile.jobs_file import load_jobs
from streamrl.runfile.list_prices import PRICES, read_sheets
from streamrl.runfile.result_files import check_results, write_results
from streamrl.runfile.short_forms import read_offer
from streamrl.runfile.staleness_study import read_staleness_model
from streamrl.runfile.sweep import parse_axis
from streamrl.runfile.units import Bandwidth, Duration, Size
from streamrl.sim.fidelity.gate import read_partitions
from streamrl.sim.jobs.plan import plan_data, read_cluster_plan
from streamrl.sim.planner.plan import read_plan, write_plan
from streamrl.sim.studies.finished_jobs import FINISHED, FinishedJobs
from streamrl.workload.data_files import read_csv
from streamrl.workload.workload import SimulatedWorkload
from tests import made_logs
from tests.command_line import streamrl
from tests.fuzzing import EXAMPLES, altered, cpu_limit, fuzzed, mangled
from tests.measured_profile import SHAPE, make_profile, model_directory
from tests.report_directories import STUDY, write_study
from tests.runs import make_table, small_run
from tests.scripted import make_world
from tests.test_agent_logs import EVENTS, MESSAGES, STEPS, TIMED
from tests.test_calibration_file import FACTORS
from tests.test_execute import real_run
from tests.test_fuzz import as_json, as_table, fresh, refusing
from tests.test_job_schedule import made_plan
from tests.test_kept_tokens import record
from tests.test_plan import few, planned
from tests.test_staleness_study import RUNS
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


TURN_ROWS: list[list[dict[str, Any]]] = [
    [{"group": 1, "out_lens": [3, 4], "prompt_len": 5}, {"group": 1, "out_lens": [2]}],
    [{"input_lens": [3, 4], "output_lens": [5, 6], "errors": ["", "refused"]}],
    [{"input_length": 7, "output_length": 5, "hash_ids": [1, 2]}] * 2,
]


@fuzzed(SHARE)
@given(st.sampled_from(TURN_ROWS), st.data())
def test_rows_with_turns_or_requests_are_imported_and_read_back_or_refused(
    place: Path, rows: list[Any], data: st.DataObject
) -> None:
    path = fresh(place) / "rollouts.jsonl"
    text = b"\n".join(map(as_json, data.draw(altered(rows))))
    path.write_bytes(data.draw(mangled(text)) if data.draw(st.booleans()) else text)

    def check() -> None:
        found = read_rollouts(str(path))
        assert all(1 <= length < 1e9 for length in found.lengths)
        lengths = path.with_name("lengths.csv")
        lengths.write_text(write_lengths(found, str(path)), encoding="utf-8")
        cells = [row["output_tokens"] for row in read_csv(lengths)]
        assert [int(str(cell)) for cell in cells] == [*found.lengths]

    refusing(check)


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


RESULT = {
    "step": 2,
    "time": 1.0,
    "seconds": 1.0,
    "num_prompts": 2,
    "samples": 2,
    "confidence": 0.95,
    "scores": {
        "avg@2": {"value": 0.5, "low": 0.1, "high": 0.9},
        "pass@1": {"value": 0.5, "low": 0.1, "high": 0.9},
    },
    "sources": {"sums": {"num_prompts": 2, "scores": {}}},
    "mean_tokens": 3.0,
    "truncated_share": 0.0,
    "bounds": [0.0, 1.0],
    "rewards": {"0": [1.0, 0.0], "1": [0.0, 1.0]},
}
SECTION = {"prompts": "held-out.jsonl", "samples": 2, "k": [1, 2], "every": 2, "temperature": 0.5}
SECTION |= {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_tokens": 20, "scorer": "exact"}
SECTION |= {"passes_at": 0.5, "confidence": 0.9, "num_prompts": 2, "before": True, "beside": True}


@fuzzed(SHARE)
@given(altered(SECTION))
def test_an_evaluation_section_scores_finitely_or_is_refused(table: dict[str, Any]) -> None:
    def check() -> None:
        run = make_run({**make_table(), "evaluation": table})
        assert decode_run(encode_run(run)) == run and run.evaluation is not None
        assert {0, 7} >= {each for each in run.evaluation.versions(7) if each not in range(1, 7)}
        rewards = {0: [0.25] * run.evaluation.samples, 1: [1.0] * run.evaluation.samples}
        for score in scores_of(rewards, run.evaluation).values():
            assert all(map(isfinite, (score.value, score.low, score.high)))

    refusing(check)


@fuzzed(SHARE)
@given(st.lists(altered(RESULT), min_size=1, max_size=2))
def test_recorded_scores_are_shown_as_numbers_or_refused(place: Path, rows: list[Any]) -> None:
    directory = fresh(place)
    (directory / EVALUATIONS).write_bytes(b"".join(as_json(row) + b"\n" for row in rows))

    def check() -> None:
        results = read_evaluations(directory)
        if not results:
            return
        assert best_step(results) in {each.step for each in results}
        config = EvaluationConfig(prompts="held-out.jsonl", samples=2)
        shown = Console(file=StringIO(), width=200)
        shown.print(evaluations_table(results), sources_table(results[-1]))
        shown.print(say_change(results, config), passes_hint(results[-1], config))
        assert isinstance(shown.file, StringIO) and "nan" not in shown.file.getvalue()
        assert all(isfinite(value) for each in results for value in each.figures.values())

    refusing(check)


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


# Files beside a run, and files of profiles ----------------------------------------------------------

SMALL_FILES: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    ATTACHED: (
        b'{"followers":[{"name":"late","pool":"near"}],"away":["a"],"promoted":"","leads_from":2}',
        lambda path: with_attached(small_run(), path.parent),
    ),
    FAULTS: (
        b'{"fault":0,"kind":"disk-full","step":2,"leg":1,"time":1.5,"unix_time":1700000000.0}\n'
        * 2,
        lambda path: read_struck(path.parent),
    ),
    COUNTS: (b'{"version":3,"rollouts":9,"tokens":70}', lambda path: _read_counts(path.parent)),
    "staleness.json": (
        as_json({"task": "sums", "target_reward": 0.8, "runs": RUNS}),
        lambda path: read_staleness_model(str(path), "token-tis"),
    ),
    "errors.csv": (
        b"set,group,rows,median,p90,in_band,half_band\nsteps,dense,7,0.1,0.2,0.8,0.3\nsteps,moe,7,0.1,0.2,,\n",
        read_partitions,
    ),
    "known.csv": (
        b"prompt_id,output_tokens,text,family\na,5,one,sums\nb,7,two,\n",
        read_known,
    ),
    "steps.csv": (
        b"step,step_time,generation\n1,2.5,1.5\n2,2.25,\n",
        lambda path: parse_steps(str(path), read_csv(path)),
    ),
}


@fuzzed()
@given(st.data())
def test_small_files_beside_a_run_are_read_or_refused(place: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SMALL_FILES)))
    written, read = SMALL_FILES[name]
    path = fresh(place) / name
    path.write_bytes(written)
    read(path)
    if written[:1] == b"{" and data.draw(st.booleans()):
        path.write_bytes(as_json(data.draw(altered(json.loads(written.splitlines()[0])))))
    else:
        path.write_bytes(data.draw(mangled(written)))
    refusing(lambda: read(path))


REQUEST = {"type": "Notice", "replicas": [0, 1], "warning": 30.0, "replacement_time": 60.0}


@fuzzed(SHARE)
@given(altered(REQUEST).map(as_json) | mangled(as_json(REQUEST)))
def test_a_request_to_a_run_is_taken_once_or_refused(place: Path, data: bytes) -> None:
    control = ControlFiles(fresh(place))
    (control._path / "1-2.json").write_bytes(data)
    assert len([*control.take()]) == 1 and not [*control.take()]


EVENT = b'event: rollout\ndata: {"rollout":3,"text":"odd","reward":1.0}\n\n'


@fuzzed(SHARE)
@given(mangled(EVENT))
def test_an_event_of_a_stream_is_read_or_refused(data: bytes) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        while await _read_event(reader) is not None:
            pass

    refusing(
        lambda: asyncio.run(read()), errors=(ValueError, RuntimeError, asyncio.IncompleteReadError)
    )


PARTS: dict[str, Any] = {
    "sglang": {
        "meta_info": {
            "completion_tokens": 2,
            "output_token_logprobs": [[-0.5, 3], [-0.25, 4]],
            "finish_reason": {"type": "stop"},
            "weight_version": "7",
        }
    },
    "vllm": {
        "choices": [
            {
                "token_ids": [3, 4],
                "logprobs": {"token_logprobs": [-0.5, -0.25]},
                "finish_reason": "stop",
            }
        ]
    },
}


@fuzzed()
@given(st.sampled_from(sorted(PARTS)), st.data())
def test_an_event_of_an_external_server_has_tokens_or_is_refused(
    name: str, data: st.DataObject
) -> None:
    def check() -> None:
        part = read_part(make_api(name), data.draw(altered(PARTS[name])), 0, 32)
        assert all(type(token) is int and 0 <= token < 32 for token in part.tokens)
        assert len(part.tokens) == len(part.logprobs) and all(map(isfinite, part.logprobs))

    refusing(check, errors=(ValueError, RuntimeError, AnswerError))


@fuzzed(SHARE)
@given(st.binary(max_size=200), st.integers(0, 200), st.sampled_from(WIDTHS), st.data())
def test_a_delta_is_applied_or_refused(
    place: Path, old: bytes, at: int, width: int, data: st.DataObject
) -> None:
    base, new = (fresh(place) / "weights" for _ in range(2))
    base.write_bytes(old)
    new.write_bytes(old[:at] + bytes(len(old[at:])))
    delta = encode_delta(base, new, width)
    assert b"".join(decode_delta(base, delta)) == new.read_bytes()
    refusing(lambda: b"".join(decode_delta(base, data.draw(mangled(delta)))))
    refusing(lambda: decode_choices(data.draw(mangled(encode_choices(2, CHOICES)))))


CHOICES = np.arange(24, dtype=np.int16).reshape(3, 4, 2)
TENSORS = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)})


@fuzzed(SHARE)
@given(mangled(TENSORS[:200]).map(lambda head: head + TENSORS[200:]) | mangled(TENSORS))
def test_weight_files_are_read_or_refused(place: Path, data: bytes) -> None:
    path = fresh(place) / "model.safetensors"
    path.write_bytes(data)
    (path.parent / "config.json").write_text(json.dumps(SHAPE))
    refusing(lambda: [*tensors_of(path)], errors=(ValueError, SafetensorError))
    refusing(lambda: read_model_directory(path.parent))
    (path.parent / "model.safetensors.index.json").write_bytes(data)
    refusing(lambda: read_model_directory(path.parent))


OPTIONS: list[tuple[str, Callable[[str], object]]] = [
    ("2x16xH100@2.20/1 with 1600Gbps,8xH100@lambda,16xH800@owned", read_offer),
    ("rollout.replicas=1,2; trainer.data_parallel=[1,2],3", parse_axis),
    ("median 5.2 s, p99 81 s, max 2 min", lambda x: read_distribution("key", x, is_time=True)),
    ("mean 1k, p95 3k, max 8k", lambda x: read_distribution("key", x, is_time=False)),
    ("1.5 h", Duration.parse),
    ("400 GB/s", Bandwidth.parse),
    ("80 Gbps", Bandwidth.parse),
    ("12 GiB", Size.parse),
]


@fuzzed()
@given(st.sampled_from(OPTIONS), st.data())
def test_a_text_of_an_option_is_read_or_refused(
    option: tuple[str, Callable[[str], object]], data: st.DataObject
) -> None:
    text, read = option
    read(text)
    changed = data.draw(mangled(text.encode())).decode(errors="replace")
    refusing(lambda: read(data.draw(st.sampled_from([changed, f"{changed},{text}"]))))


def test_a_ranker_that_was_fitted_reads_back_equal_or_is_refused(place: Path) -> None:
    pytest.importorskip("sklearn", reason="the ranker is an extra")
    from tests.test_text_ranker import prompts, targets

    known = prompts(40)
    texts, wanted = targets(known)
    ranker, path = fit_text(texts, wanted), fresh(place) / "ranker.npz"
    write_ranker(path, ranker)
    assert read_ranker(path).score(texts).tolist() == ranker.score(texts).tolist()
    whole = path.read_bytes()

    @fuzzed(0.2)
    @given(mangled(whole[:2000]).map(lambda head: head + whole[2000:]) | mangled(whole))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        refusing(lambda: read_ranker(path).score(texts))
        assert read_probe(path) is None

    check()


SHIPPED = [
    path
    for pattern, _ in _READERS
    for path in sorted(PROFILES.glob(pattern))[:3]
    if path.stat().st_size < 100_000
]


@fuzzed()
@given(st.sampled_from(SHIPPED), st.data())
def test_a_profile_of_a_folder_is_read_or_refused(
    place: Path, shipped: Path, data: st.DataObject
) -> None:
    path = fresh(place) / shipped.relative_to(PROFILES)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = shipped.read_bytes()
    if shipped.suffix == ".toml" and data.draw(st.booleans()):
        try:
            written = tomli_w.dumps(data.draw(altered(as_table(shipped)))).encode()
        except (TypeError, ValueError):
            return
    else:
        written = data.draw(mangled(written))
    path.write_bytes(written)
    (verdict,) = check_all(place / path.relative_to(place).parts[0])
    assert verdict.is_good or all("\n" not in note for note in verdict.notes)


@fuzzed(SHARE)
@given(st.data())
def test_a_run_file_with_a_base_is_read_or_refused(place: Path, data: st.DataObject) -> None:
    directory, table = fresh(place), make_table()
    base = {"base": "base.toml", **{key: table.pop(key) for key in ("algorithm", "rollout")}}
    tables = {"run.toml": base, "base.toml": table}
    changed = data.draw(st.sampled_from(sorted(tables)))
    tables[changed] = data.draw(altered(tables[changed]))
    try:
        for name, each in tables.items():
            (directory / name).write_text(tomli_w.dumps(each), encoding="utf-8")
    except (TypeError, ValueError):
        return
    refusing(lambda: load_run(directory / "run.toml"))


# Commands on a run directory ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an executed run that was stopped and resumed once, with evaluations and checkpoints."""
    directory = tmp_path_factory.mktemp("executed")
    model_directory(directory)

    def execute(steps: int, *, resume: bool) -> None:
        run = real_run(
            directory,
            algorithm__steps=steps,
            execute__checkpoint_every=2,
            evaluation={"prompts": str(directory / "prompts.jsonl"), "every": 2},
        )

        async def go() -> None:
            world = make_world(run, {"slowest": 0.01}, resume)
            with contextlib.closing(world._directory):
                await world.run()

        asyncio.run(asyncio.wait_for(go(), timeout=60))

    execute(4, resume=False)
    execute(6, resume=True)
    write_run(read_recorded_run(directory / "run" / "run.json"), directory / "run.toml")
    return directory / "run"


READERS_OF_A_RUN: tuple[tuple[str, ...], ...] = (
    ("report", "RUN", "--json"),
    ("report", "RUN", "-o", "OUT/page.html"),
    ("compare", "RUN", "--json"),
    ("replay", "RUN"),
    ("samples", "RUN", "--json"),
    ("lengths", "RUN", "--json"),
    ("import", "RUN", "-o", "OUT/imported"),
    ("diff", "RUN", "WHOLE", "--json"),
    ("calibrate", "FILE", "RUN", "--json"),
    ("diagnose", "RUN", "--json"),
    ("checkpoint", "list", "RUN", "--json"),
    ("detach", "RUN", "late"),
    ("ranker", "fit", "RUN", "-o", "OUT/ranker"),
)


def not_a_number(text: str) -> Any:
    raise AssertionError(f"the JSON has {text}")


@fuzzed(SHARE)
@given(st.data())
def test_commands_read_or_refuse_a_damaged_run(
    place: Path, executed: Path, data: st.DataObject
) -> None:
    directory = fresh(place)
    shutil.copytree(executed, run := directory / "run")
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.suffix != ".log")
    path = data.draw(st.sampled_from(files))
    match data.draw(st.sampled_from(["gone", "mangled", "altered", "altered", "empty"])):
        case "gone":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "altered" if path.suffix in (".json", ".jsonl"):
            lines = path.read_bytes().splitlines()
            at = data.draw(st.integers(0, max(0, len(lines) - 1)))
            lines[at : at + 1] = [
                as_json(data.draw(altered(json.loads(line)))) for line in lines[at : at + 1]
            ]
            path.write_bytes(b"\n".join(lines) + b"\n")
        case _:
            path.write_bytes(data.draw(mangled(path.read_bytes())))
    words = data.draw(st.sampled_from(READERS_OF_A_RUN))
    places = {"RUN": run, "OUT": directory, "WHOLE": executed, "FILE": executed.parent / "run.toml"}
    done = streamrl(
        *(re.sub("RUN|OUT|WHOLE|FILE", lambda name: str(places[name[0]]), w) for w in words)
    )
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0 or done.stderr.strip() or done.stdout.strip()
    if done.returncode == 0 and words[-1] == "--json":
        json.loads(done.stdout, parse_constant=not_a_number)


def _write_toml(path: Path, table: dict[str, Any]) -> None:
    """Write a table; raise `ValueError` if it is no TOML."""
    try:
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
    except TypeError as error:
        raise ValueError(str(error)) from None


# What is read is written back -----------------------------------------------------------------------


@fuzzed(SHARE)
@given(st.data())
def test_what_is_accepted_reads_back_equal(place: Path, data: st.DataObject) -> None:
    """A run file, a calibration, a measured profile, counts of a run and a plan of several jobs."""
    directory = fresh(place)
    model = model_directory(directory / "model")

    def a_run() -> None:
        run = make_run(data.draw(altered(make_table())), directory)
        write_run(run, directory / "run.toml")
        assert load_run(directory / "run.toml") == run

    def a_calibration() -> None:
        path = directory / "calibration.toml"
        _write_toml(path, data.draw(altered(tomllib.loads(FACTORS))))
        text = write_calibration(read_profile(path, Calibration))
        path.write_text(text, encoding="utf-8")
        assert write_calibration(read_profile(path, Calibration)) == text

    def a_profile() -> None:
        path = directory / "profile.toml"
        write_measured(make_profile(model), path)
        _write_toml(path, data.draw(altered(as_table(path))))
        write_measured(read_measured(path), path)
        text = path.read_text()  # numbers have six digits
        write_measured(read_measured(path), path)
        assert path.read_text() == text

    def attached() -> None:
        table = data.draw(altered(json.loads(SMALL_FILES[ATTACHED][0])))
        (directory / ATTACHED).write_bytes(as_json(table))
        first = read_attached(directory)
        write_attached(directory, first)
        assert read_attached(directory) == first

    def jobs() -> None:
        path = directory / "cluster.json"
        path.write_bytes(as_json(data.draw(altered(json.loads(plan_data(made_plan()))))))
        first = read_cluster_plan(path)
        path.write_bytes(plan_data(first))
        assert read_cluster_plan(path) == first

    refusing(data.draw(st.sampled_from([a_run, a_calibration, a_profile, attached, jobs])))
