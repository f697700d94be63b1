"""Whatever is in a file: it is read, or refused in a line; never a traceback of something else.

`make fuzz` tries more of it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from streamrl.engine.trace import read_trace, replay
from streamrl.executor.checkpoints import Checkpoints, Position
from streamrl.executor.checksums import CHECKSUMS, write_checksums
from streamrl.executor.prompts import PromptWorkload
from streamrl.hardware.hugging_face import read_config_json
from streamrl.hardware.measured_profile import read_measured, write_measured
from streamrl.ranker.evaluation import evaluate_scores
from streamrl.ranker.score_files import lengths_by_prompt, read_table
from streamrl.record.chrome_trace import chrome_trace
from streamrl.record.evaluation import read_evaluations
from streamrl.record.metrics import measure
from streamrl.record.prompt_tokens import read_prompt_tokens
from streamrl.record.run_directory import read_metrics, read_rollouts
from streamrl.record.samples import read_completions
from streamrl.report.study_file import is_study, load_study
from streamrl.runfile.checks import check_run
from streamrl.runfile.files import decode_run, encode_run, load_offer, load_run, make_run
from streamrl.runfile.workload_config import SourceConfig
from streamrl.sim.costs.costs import Costs
from streamrl.sim.world import simulate
from streamrl.workload.prompt_records import read_source
from streamrl.workload.simulated_ranker import read_scores
from streamrl.workload.workload import SimulatedWorkload, load_source
from tests.command_line import streamrl
from tests.fuzzing import JUNK, altered, check_said, fuzzed, mangled
from tests.measured_profile import make_profile
from tests.runs import make_table, small_run
from tests.scripted import ScriptedTokenizer
from tests.test_execute import real_run

EXAMPLES = Path(__file__).parent.parent / "examples"
BENCHMARKS = EXAMPLES.parent / "benchmarks"
RUN_FILES = sorted([*EXAMPLES.glob("*.toml"), *BENCHMARKS.glob("*.toml")])
STUDIES = sorted((EXAMPLES / "studies").glob("*.toml"))
NUMBER = count()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for all that is written."""
    return tmp_path_factory.mktemp("fuzz")


def fresh(place: Path) -> Path:
    """Return a directory of its own in it."""
    path = place / f"{next(NUMBER)}"
    path.mkdir()
    return path


def refusing(
    *steps: Callable[[], Any], errors: tuple[type[Exception], ...] = (ValueError,)
) -> None:
    """Take steps until one is refused."""
    try:
        for step in steps:
            step()
    except errors as error:
        check_said(error)


def as_json(value: Any) -> bytes:
    """Write JSON as Python does, with NaN and halves of surrogate pairs."""
    return json.dumps(value).encode()


# Run files ----------------------------------------------------------------------------------------


def as_table(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


@fuzzed(4.0)
@given(st.sampled_from([as_table(path) for path in RUN_FILES] + [make_table()]).flatmap(altered))
def test_a_table_is_a_run_or_refused(table: dict[str, Any]) -> None:
    def check() -> None:
        run = make_run(table, EXAMPLES)
        assert decode_run(encode_run(run)) == run
        if run.model.path is None:
            Costs.load(run)
            SimulatedWorkload(run)

    refusing(check)


@fuzzed()
@given(st.sampled_from([as_table(path) for path in RUN_FILES] + [make_table()]).flatmap(altered))
def test_a_table_is_an_offer_or_refused(table: dict[str, Any]) -> None:
    def check() -> None:
        check_run(load_offer(table).run)

    refusing(check)


@fuzzed()
@given(st.sampled_from([path.read_bytes() for path in RUN_FILES]).flatmap(mangled))
def test_a_text_is_a_run_file_or_refused(place: Path, data: bytes) -> None:
    path = fresh(place) / "run.toml"
    path.write_bytes(data)
    refusing(lambda: load_run(path))


@fuzzed()
@given(st.text(max_size=30), st.text(max_size=30))
def test_a_change_is_made_or_refused(key: str, value: str) -> None:
    refusing(lambda: load_run(RUN_FILES[0], [f"{key}={value}", f"seed={value}", key]))


@fuzzed()
@given(altered(msgspec.json.decode(encode_run(small_run()))))
def test_a_recorded_run_is_read_or_refused(table: dict[str, Any]) -> None:
    refusing(lambda: decode_run(as_json(table)))


@fuzzed(0.3)
@given(altered(make_table()))
def test_the_doctor_says_something_of_every_run_file(place: Path, table: dict[str, Any]) -> None:
    path = fresh(place) / "run.toml"
    try:
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
    except (TypeError, ValueError):  # no TOML
        return
    done = streamrl("doctor", path, "--json")
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr
    assert done.returncode == 2 or json.loads(done.stdout)["findings"]


@fuzzed()
@given(st.sampled_from(STUDIES).flatmap(lambda path: altered(as_table(path))))
def test_a_study_file_is_read_or_refused(place: Path, table: dict[str, Any]) -> None:
    path = fresh(place) / "study.toml"
    try:
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
    except (TypeError, ValueError):
        return
    refusing(lambda: is_study(path), lambda: load_study(path))


# Prompts and lengths ------------------------------------------------------------------------------

RECORDS = [{"prompt": "a", "answer": "1"}, {"prompt": [{"role": "user", "content": "b"}]}]


@fuzzed(2.0)
@given(st.lists(st.sampled_from(RECORDS).flatmap(altered) | JUNK, min_size=1, max_size=3))
def test_prompts_are_read_or_refused(place: Path, records: list[Any]) -> None:
    path = fresh(place) / "prompts.jsonl"
    path.write_bytes(b"\n".join(map(as_json, records)))
    refusing(lambda: read_source(SourceConfig(prompts=str(path))))


class ChatTokenizer(ScriptedTokenizer):
    """Takes chat messages too, as templates do."""

    def apply_chat_template(self, prompt: list[Any], **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode("".join(each["content"] for each in prompt))}


@fuzzed()
@given(mangled(b"\n".join(map(as_json, RECORDS))))
def test_a_text_is_prompts_or_refused(place: Path, data: bytes) -> None:
    run = real_run(fresh(place))
    Path(str(run.workload.prompts)).write_bytes(data)
    refusing(lambda: PromptWorkload(run, ChatTokenizer()).draw(0, 4))


TABLES = {
    "histogram": b"start,end,density\n0,10,0.5\n10,30,0.25\n",
    "empirical": b"output_tokens\n5\n7\n100\n",
    "groups": b"prompt_id,output_tokens,score\na,5,0.1\na,6,0.2\nb,100,0.9\nb,90,0.8\n",
}
CELLS = st.sampled_from([b"nan", b"inf", b"-1", b"1e300", b"", b'"', b"0x1", b"9" * 400, b"1;2"])


@fuzzed(2.0)
@given(st.sampled_from(sorted(TABLES)), st.data())
def test_lengths_are_read_or_refused(place: Path, kind: str, data: st.DataObject) -> None:
    path = fresh(place) / "lengths.csv"
    table = TABLES[kind]
    if data.draw(st.booleans()):
        cells = table.replace(b"\n", b",\n").split(b",")
        cells[data.draw(st.integers(0, len(cells) - 1))] = data.draw(CELLS)
        table = b",".join(cells).replace(b",\n", b"\n")
    else:
        table = data.draw(mangled(table))
    path.write_bytes(table)
    changes = {"workload.lengths.source": str(path), "workload.lengths.kind": kind}

    def check() -> None:
        run = small_run(changes)
        assert run.workload.lengths is not None
        load_source(run.workload.lengths)
        SimulatedWorkload(run).draw(0, 3)

    refusing(check)
    refusing(lambda: read_scores(path))
    refusing(lambda: evaluate_scores(read_table(path), "score", None))
    refusing(lambda: lengths_by_prompt([read_table(path)]))


# Traces -------------------------------------------------------------------------------------------


@cache
def recorded() -> tuple[Any, ...]:
    """Return the header and entries of a simulated run in which replicas fail, as JSON gives them."""
    failing = {"failures.per_gpu_day": 3000.0, "policies.max_restarts": 50}
    lines = simulate(small_run(failing)).encode().splitlines()
    return tuple(json.loads(line) for line in lines)


@st.composite
def traces(draw: st.DrawFn) -> bytes:
    """Return a trace of which a few entries are others, gone, or somewhere else."""
    header, *entries = recorded()
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(entries) - 1))
        match draw(st.sampled_from(["ids", "entry", "gone", "twice", "swapped"])):
            case "ids":
                time, event, commands = draw(st.sampled_from(recorded()[1:]))
                keys = [key for key, value in event.items() if type(value) is int]
                if keys:
                    key = draw(st.sampled_from(keys))
                    changed = {**event, key: event[key] + draw(st.integers(-3, 1000))}
                    entries[index] = [time, changed, commands]
            case "entry":
                entries[index] = draw(altered(entries[index], most=1))
            case "gone":
                del entries[index]
            case "twice":
                entries.insert(index, entries[index])
            case _:
                other = draw(st.integers(0, len(entries) - 1))
                entries[index], entries[other] = entries[other], entries[index]
    if draw(st.integers(0, 4)) == 0:
        header = draw(altered(header, most=1))
    return b"\n".join(map(as_json, (header, *entries))) + b"\n"


@fuzzed(3.0)
@given(traces())
def test_a_trace_is_read_or_refused(place: Path, data: bytes) -> None:
    path = fresh(place) / "trace.jsonl"
    path.write_bytes(data)
    refusing(lambda: replay(read_trace(path)))
    refusing(lambda: measure(read_trace(path)), errors=(ValueError, RuntimeError))
    refusing(lambda: chrome_trace(read_trace(path)))


@fuzzed(0.5)
@given(traces())
def test_a_run_directory_is_reported_or_refused(place: Path, data: bytes) -> None:
    path = fresh(place)
    (path / "trace.jsonl").write_bytes(data)
    for command in (("report", path, "--json"), ("replay", path)):
        done = streamrl(*command)
        assert done.returncode in (0, 1, 2)
        assert done.returncode == 0 or len(done.stderr.splitlines()) + len(done.stdout) > 0
    trace = str(path / "trace.jsonl")
    changes = {"workload.lengths.kind": "trace", "workload.lengths.source": trace}
    refusing(lambda: SimulatedWorkload(small_run(changes)).draw(0, 4))


LINES = (
    *("metrics.jsonl", "rollouts.jsonl", "samples.jsonl", "evaluations.jsonl"),
    *("evaluation_rollouts.jsonl", "prompts.npz"),
)
EVALUATION = {
    "step": 2,
    "time": 1.0,
    "seconds": 1.0,
    "num_prompts": 2,
    "samples": 1,
    "confidence": 0.95,
    "scores": {"avg@1": {"value": 0.5, "low": 0.1, "high": 0.9}},
    "mean_tokens": 3.0,
    "truncated_share": 0.0,
}
TURNS = {
    "rollout": 1,
    "group": 0,
    "step": 1,
    "num_tokens": 5,
    "segments": [[3, True], [2, False]],
    "turns": [{"reward": 0.5, "tokens": 3}],
    "versions": [[0, 0]],
}


@fuzzed()
@given(
    st.binary(max_size=60)
    | mangled(b'{"step": 1}\n{"rolled_back_to": 0, "leg": 2}\n')
    | st.sampled_from([EVALUATION, TURNS]).flatmap(altered).map(as_json)
)
def test_lines_of_a_run_are_read_or_refused(place: Path, data: bytes) -> None:
    path = fresh(place)
    for name in LINES:
        (path / name).write_bytes(data)
    refusing(lambda: read_evaluations(path))
    refusing(lambda: read_prompt_tokens(path))
    refusing(lambda: read_metrics(path))
    refusing(lambda: read_rollouts(path))
    refusing(lambda: read_completions(path))


# Checkpoints, models and profiles -----------------------------------------------------------------

POSITION = {"version": 4, "groups_done": 12, "done_ahead": [14], "baseline": 0.5}
DAMAGED = st.one_of(
    altered(POSITION).map(as_json), mangled(as_json(POSITION)), st.binary(max_size=40)
)


@fuzzed(2.0)
@given(DAMAGED, st.sampled_from(["position.json", CHECKSUMS, "weights"]))
def test_a_checkpoint_is_whole_or_passed_over(place: Path, data: bytes, name: str) -> None:
    checkpoints = Checkpoints(fresh(place))
    for version in (2, 4):
        path = checkpoints.path_of(version)
        path.mkdir()
        (path / "weights").write_bytes(bytes(100))
        write_checksums(path)
        checkpoints.finish(Position(version=version, groups_done=3 * version))
    (checkpoints.path_of(4) / name).write_bytes(data)
    for found in (checkpoints.newest(), checkpoints.newest_whole()):
        assert found is not None and found.version in (2, 4)
    whole = checkpoints.newest_whole()
    assert whole is not None and (name, data != bytes(100), whole.version) != ("weights", True, 4)
    checkpoints.resume_from(checkpoints.newest_whole())


QWEN = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
MODELS = [
    QWEN,
    {**QWEN, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "head_dim": 16, "mlp_only_layers": [0]},
    {**QWEN, "model_type": "deepseek_v3", "kv_lora_rank": 8, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1},
]


@fuzzed(2.0)
@given(
    st.sampled_from(MODELS).flatmap(lambda m: altered(m).map(as_json) | mangled(as_json(m))),
)
def test_a_config_json_is_a_shape_or_refused(place: Path, data: bytes) -> None:
    path = fresh(place) / "config.json"
    path.write_bytes(data)

    def check() -> None:
        read_config_json(path)
        Costs.load(small_run({"model": {"path": str(path.parent)}}))

    refusing(check)


@fuzzed()
@given(st.data())
def test_a_measured_profile_is_read_or_refused(place: Path, data: st.DataObject) -> None:
    path = place / "model" / "profile.toml"
    path.parent.mkdir(exist_ok=True)
    (path.parent / "config.json").write_bytes(as_json(QWEN))
    write_measured(make_profile(path.parent), path)
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(mangled(path.read_bytes())))
    else:
        try:
            path.write_text(tomli_w.dumps(data.draw(altered(as_table(path)))), encoding="utf-8")
        except (TypeError, ValueError):
            return
    refusing(lambda: read_measured(path))
