"""Runs that format 1 recorded are read, replayed, measured and resumed as today's are."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from streamrl.engine.messages import Abort, Drop, ExpectationsChanged, Generate, Step, Take
from streamrl.executor.execute import execute
from streamrl.record.metrics import measure
from streamrl.record.trace import FORMAT, read_trace, replay
from streamrl.runfile.reading import make_run
from streamrl.runfile.renamed import upgrade_run
from tests.runs import of
from tests.traces import check_every_rollout_is_accounted_for

DATA = Path(__file__).parent / "data" / "format-1"
TRACES = sorted(DATA.rglob("trace*.jsonl"))


def test_the_fixture_holds_simulated_and_real_runs() -> None:
    assert len(TRACES) == 4
    assert {json.loads(path.open().readline())["format"] for path in TRACES} == {1}


@pytest.mark.parametrize("path", TRACES, ids=lambda path: str(path.relative_to(DATA)))
def test_an_old_trace_is_decided_identically(path: Path) -> None:
    trace = read_trace(path)
    assert len(trace.entries) >= len(path.read_bytes().splitlines()) - 1
    assert replay(trace) is None
    check_every_rollout_is_accounted_for(trace)
    assert sum(measure(trace).busy.values()) > 0


@pytest.mark.parametrize("path", TRACES, ids=lambda path: str(path.relative_to(DATA)))
def test_what_old_commands_left_out_is_filled_in(path: Path) -> None:
    sent: dict[int, int] = {}
    taken: list[int] = []
    num_steps = 0
    for entry in read_trace(path).entries:
        for command in entry.commands:
            match command:
                case Generate():
                    sent[command.rollout] = command.replica
                case Abort():
                    assert sent[command.rollout] == command.replica
                case Take():
                    taken.append(command.group)
                case Drop():
                    taken = [group for group in taken if group != command.group]
                case Step():
                    assert command.groups == tuple(taken) and command.trainer == 0
                    taken, num_steps = [], num_steps + 1
                case _:
                    pass
    assert num_steps


def test_what_the_engine_learnt_from_siblings_became_events() -> None:
    entries = read_trace(DATA / "siblings" / "trace.jsonl").entries
    assert sum(isinstance(entry.event, ExpectationsChanged) for entry in entries) > 5
    assert not any(e.commands for e in entries if isinstance(e.event, ExpectationsChanged))


def test_an_old_trace_written_again_is_one_of_today(tmp_path: Path) -> None:
    trace = read_trace(DATA / "lossy" / "trace.jsonl")
    path = tmp_path / "trace.jsonl"
    path.write_bytes(trace.encode())
    assert json.loads(path.open().readline())["format"] == FORMAT
    assert read_trace(path).entries == trace.entries


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('[0.0,{"type":"Stepped"},[]]', "version"),
        (
            '[0.0,{"type":"RunStarted","version":0,"groups_done":0},[{"type":"Abort","rollout":7}]]',
            "7",
        ),
        ("[0.0,[],[]]", "not a trace entry"),
    ],
)
def test_what_is_no_old_trace_is_refused_in_a_line(tmp_path: Path, line: str, word: str) -> None:
    header = (DATA / "lossy" / "trace.jsonl").open().readline()
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{header}{line}\n")
    with pytest.raises(ValueError, match=word) as caught:
        read_trace(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_value_of_the_wrong_kind_in_an_old_command_is_refused_in_a_line(tmp_path: Path) -> None:
    header = (DATA / "lossy" / "trace.jsonl").open().readline()
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{header}[0.0,{{"type":"Woke","time":0}},[{{"type":"Take","group":[]}}]]\n')
    with pytest.raises(ValueError, match="unhashable") as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: str(path.relative_to(DATA)))
@pytest.mark.parametrize("kind", ["Generated", "PromptsDrawn", "Stepped"])
@pytest.mark.parametrize("copies", [0, 2], ids=["missing", "twice"])
def test_a_trace_whose_events_do_not_follow_is_measured_or_refused_in_a_line(
    tmp_path: Path, path: Path, kind: str, copies: int
) -> None:
    lines = path.read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if f'{{"type":"{kind}"' in line[:60])
    lines[at : at + 1] = [lines[at]] * copies
    damaged = tmp_path / "trace.jsonl"
    damaged.write_text("".join(lines))
    for look in (replay, measure):
        try:
            found = look(read_trace(damaged))
        except ValueError as error:
            assert "\n" not in str(error)
        else:
            assert found is not None


@pytest.mark.parametrize("run", [None, [], {"workload": None}, {"algorithm": []}])
def test_an_old_header_without_a_run_is_refused_in_a_line(tmp_path: Path, run: object) -> None:
    header = json.loads((DATA / "lossy" / "trace.jsonl").open().readline())
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({**header, "run": run}) + "\n")
    with pytest.raises(ValueError, match=":1: not a trace header"):
        read_trace(path)


def test_a_trace_of_no_known_format_is_refused(tmp_path: Path) -> None:
    header = json.loads((DATA / "lossy" / "trace.jsonl").open().readline())
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({**header, "format": 9}) + "\n")
    with pytest.raises(ValueError, match="trace format 9, this version reads 1 and 2"):
        read_trace(path)


def test_an_old_run_resumes_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DATA / "real", tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    table = upgrade_run(tomllib.loads(Path("run.toml").read_text()))
    table["algorithm"]["steps"] = 8
    trace = execute(make_run(table), resume=True)
    assert [c.version for e in trace.entries for c in of(Step, e.commands)] == [7, 8]
    assert replay(trace) is None
    again = read_trace(Path("run/trace.1.jsonl"))
    assert replay(again) is None
    assert Path("run/prompts.npz").exists()
